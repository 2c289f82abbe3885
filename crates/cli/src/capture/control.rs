//! Starting and stopping captures of running programs.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use embedded::{CaptureAnswer, CaptureRing, CaptureSnap, CaptureState};

use crate::error::Error;
use crate::{out, running};

/// Options of a capture that starts.
#[derive(clap::Args)]
pub struct Start {
    /// Directory of the devices' network (--directory of ringverbs run), number of a process, or
    /// roce
    #[arg(value_name = "DIRECTORY|PID|roce")]
    target: PathBuf,
    /// The file; each process inserts its number before the extension
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// How much of each frame is written: headers, all, or a number of bytes
    #[arg(long, value_name = "PART", default_value = "headers", value_parser = snap)]
    snap: String,
    /// Number and size of files that take each other's place, such as 4x16MiB
    #[arg(long, value_name = "FILES", value_parser = ring)]
    ring: Option<String>,
}

/// Options of a capture that ends.
#[derive(clap::Args)]
pub struct Stop {
    /// As that of start
    #[arg(value_name = "DIRECTORY|PID|roce")]
    target: PathBuf,
}

fn snap(text: &str) -> Result<String, String> {
    let parsed = text.parse::<CaptureSnap>();
    parsed.map_or_else(|error| Err(error.to_string()), |_| Ok(text.to_owned()))
}

fn ring(text: &str) -> Result<String, String> {
    let parsed = text.parse::<CaptureRing>();
    parsed.map_or_else(|error| Err(error.to_string()), |_| Ok(text.to_owned()))
}

/// Why a capture was not started or stopped.
#[derive(Debug)]
enum CaptureError {
    /// The path cannot be told to the processes.
    Path(PathBuf),
    /// There is no capture to stop.
    None,
    /// Processes do not capture, or have not until the end.
    Failed,
    /// So many processes have not answered.
    Silent(usize),
}

impl fmt::Display for CaptureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(
                f,
                "{:?}: the path must be one line of UTF-8",
                path.display().to_string()
            ),
            Self::None => f.write_str("no capture was started"),
            Self::Failed => f.write_str("not every process has written its capture"),
            Self::Silent(count) => f.write_str(&running::silent(*count)),
        }
    }
}

impl std::error::Error for CaptureError {}

/// Starts a capture.
pub fn start(args: &Start) -> Result<ExitCode, Error> {
    let processes = running::find(&args.target)?;
    let path = std::path::absolute(&args.file)?;
    let is_line = path.to_str().is_some_and(|it| !it.contains(['\n', '\r']));
    if !is_line {
        return Err(Error::subcommand(CaptureError::Path(path)));
    }
    let started = processes.start_capture(&path, &args.snap, args.ring.as_deref());
    let (answers, silent) = started.map_err(Error::subcommand)?;
    print(&answers, silent)
}

/// Ends a capture.
pub fn stop(args: &Stop) -> Result<ExitCode, Error> {
    let processes = running::find(&args.target)?;
    match processes.stop_capture().map_err(Error::subcommand)? {
        Some((answers, silent)) => print(&answers, silent),
        None => Err(Error::subcommand(CaptureError::None)),
    }
}

fn frames(count: u64) -> String {
    match count {
        1 => "1 frame".to_owned(),
        count => format!("{count} frames"),
    }
}

/// Prints the answers. Fails if a process has not answered, or does not capture.
fn print(answers: &[CaptureAnswer], silent: usize) -> Result<ExitCode, Error> {
    let mut out = out::stdout();
    let mut all_well = true;
    for answer in answers {
        let name = |path: &Path| path.display().to_string();
        let said = match &answer.state {
            CaptureState::Started(path) => name(path),
            CaptureState::Stopped(path) => format!("{}: {}", name(path), frames(answer.frames)),
            CaptureState::Refused(reason) => format!("refused: {reason}"),
            CaptureState::Failed(path, reason) => {
                let frames = frames(answer.frames);
                format!("{}: {frames}, then it ended: {reason}", name(path))
            }
            _ => continue,
        };
        all_well &= matches!(
            answer.state,
            CaptureState::Started(_) | CaptureState::Stopped(_)
        );
        writeln!(out, "process {}: {said}", answer.process)?;
    }
    if answers.is_empty() && silent == 0 {
        writeln!(out, "no process is running")?;
    }
    out.flush()?;
    match (silent, all_well) {
        (0, true) => Ok(ExitCode::SUCCESS),
        (0, false) => Err(Error::subcommand(CaptureError::Failed)),
        (silent, _) => Err(Error::subcommand(CaptureError::Silent(silent))),
    }
}
