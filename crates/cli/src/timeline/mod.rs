//! `ringverbs timeline` and `run --timeline`: a page with a sequence diagram of packets, verbs
//! calls and explanations.
//!
//! ```text
//! captures ── packet ──┐
//!                      ├─► diagram: order, arrows ──► page: what has room ──► OUT.html
//! records ─── record ──┘
//! ```
//!
//! All text comes from programs and peers. The page has it as JSON without `<`, and its script
//! puts it on the screen as text, never as HTML.

mod diagram;
mod packet;
mod page;
mod record;
#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::capture::merge::is_same;
use crate::capture::reader::{MAGIC, ReadError};
use crate::error::Error;
use crate::out;
use crate::temporary::TemporaryFolder;
use diagram::Diagram;
use page::Totals;

/// The version of records and explanations.
const VERSION: u32 = 1;
/// Longest line of a record.
const MAX_LINE: u64 = 1 << 20;

/// Arguments of `timeline`.
#[derive(clap::Args)]
#[command(after_help = "Example: ringverbs timeline all.html frames-*.pcapng why.json")]
pub struct Args {
    /// The page to write
    #[arg(value_name = "OUT.html")]
    output: PathBuf,
    /// Captures (run --capture), records (run --record), and explanations (run --explain=FILE
    /// --explain-format json)
    #[arg(value_name = "IN", required = true)]
    inputs: Vec<PathBuf>,
}

/// The reason why a page was not written.
#[derive(Debug)]
pub enum TimelineError {
    /// A capture cannot be read.
    Capture(ReadError),
    /// A file cannot be read or written.
    File(PathBuf, io::Error),
    /// The file is neither a capture nor lines of JSON.
    Unknown(PathBuf),
    /// The record or explanation is of this version, which is not known.
    Version(PathBuf, String),
    /// The output is one of the inputs.
    Output(PathBuf),
}

impl fmt::Display for TimelineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capture(error) => error.fmt(f),
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Unknown(path) => write!(
                f,
                "{}: this is neither a capture nor a record or explanation in JSON",
                path.display()
            ),
            Self::Version(path, version) => write!(
                f,
                "{}: lines of version {version}; this command reads {VERSION}",
                path.display()
            ),
            Self::Output(path) => write!(
                f,
                "{}: the page is one of its inputs; name another file",
                path.display()
            ),
        }
    }
}

impl std::error::Error for TimelineError {}

impl From<TimelineError> for Error {
    fn from(error: TimelineError) -> Self {
        Self::subcommand(error)
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let Args { output, inputs } = args;
    if inputs.iter().any(|input| is_same(input, output)) {
        return Err(TimelineError::Output(output.clone()).into());
    }
    write(output, inputs)?;
    Ok(ExitCode::SUCCESS)
}

/// Creates the page's file, or empties it. A FIFO that nobody reads is an error.
fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.custom_flags(libc::O_NONBLOCK);
    let file = options.write(true).create(true).truncate(true).open(path)?;
    fcntl(&file, FcntlArg::F_SETFL(OFlag::empty()))?;
    Ok(file)
}

/// Writes the page of inputs, and says what it shows.
fn write(output: &Path, inputs: &[PathBuf]) -> Result<(), TimelineError> {
    let mut diagram = Diagram::default();
    for input in inputs {
        read(&mut diagram, input)?;
    }
    diagram.join();
    let (page, totals) = page::render(&diagram);
    let failed = |error| TimelineError::File(output.to_owned(), error);
    let mut file = create(output).map_err(failed)?;
    file.write_all(page.as_bytes()).map_err(failed)?;
    out::print_note(&summary(output, totals));
    Ok(())
}

fn summary(output: &Path, totals: Totals) -> String {
    let Totals {
        entries,
        shown,
        errors,
        warnings,
        queues,
    } = totals;
    let mut text = format!(
        "{}: {entries} events of {queues} queue pairs, {errors} errors, {warnings} warnings",
        output.display()
    );
    if shown < entries {
        text.push_str(&format!("; {} are left out", entries - shown));
    }
    text
}

/// Reads an input.
fn read(diagram: &mut Diagram, path: &Path) -> Result<(), TimelineError> {
    let failed = |error| TimelineError::File(path.to_owned(), error);
    let mut file = BufReader::new(File::open(path).map_err(failed)?);
    let start = file.fill_buf().map_err(failed)?;
    if start.is_empty() {
        return Ok(()); // a killed process has written nothing
    }
    if start.starts_with(&MAGIC) {
        return diagram.read_capture(path).map_err(TimelineError::Capture);
    }
    if start.first() != Some(&b'{') {
        return Err(TimelineError::Unknown(path.to_owned()));
    }
    let mut process = None;
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut limited = file.by_ref().take(MAX_LINE);
        if limited.read_until(b'\n', &mut line).map_err(failed)? == 0 {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim();
        if !text.is_empty() {
            if let Some(version) = diagram.read_line(text, &mut process) {
                return Err(TimelineError::Version(path.to_owned(), version));
            }
        }
    }
}

/// The files of a run of which a page is made at its end.
pub struct Files {
    output: PathBuf,
    folder: TemporaryFolder,
    /// The reader of a FIFO waits for the page.
    _file: File,
}

impl Files {
    /// Creates the page's file, and a directory for captures.
    pub fn create(output: &Path) -> Result<Self, TimelineError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| TimelineError::File(path, error)
        };
        let output = std::path::absolute(output).map_err(failed(output))?;
        let file = create(&output).map_err(failed(&output))?;
        let folder = TemporaryFolder::new("timeline");
        let folder = folder.map_err(|(path, error)| TimelineError::File(path, error))?;
        Ok(Self {
            output,
            folder,
            _file: file,
        })
    }

    /// Where the program's processes capture.
    pub fn capture(&self) -> PathBuf {
        self.folder.path().join("frames.pcapng")
    }

    /// Where they record verbs calls.
    pub fn record(&self) -> PathBuf {
        self.folder.path().join("calls.jsonl")
    }

    /// Where they explain.
    pub fn explanations(&self) -> PathBuf {
        self.folder.path().join("why.json")
    }

    /// Writes the page.
    pub fn finish(self) -> Result<(), TimelineError> {
        let failed = |error| TimelineError::File(self.folder.path().to_owned(), error);
        let entries = fs::read_dir(self.folder.path()).map_err(failed)?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let is_input = |path: &PathBuf| {
            let extension = path.extension().and_then(OsStr::to_str);
            extension.is_some_and(|it| ["pcapng", "json", "jsonl"].contains(&it))
        };
        let mut inputs: Vec<PathBuf> = paths.filter(is_input).collect();
        inputs.sort();
        write(&self.output, &inputs)
    }
}
