//! `ringverbs fault`: injects faults into running programs, and shows how often they have
//! happened.

use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use embedded::softhca::fault::{Faults, ParseError};
use embedded::{FaultAnswer, FaultState};

use crate::error::Error;
use crate::run::faults::{read, times};
use crate::{out, running};

/// Arguments of `fault`.
#[derive(clap::Args)]
#[command(after_help = "\
The faults replace those that were set before, also for programs that start later. Their form: \
docs/faults.md. Without faults and options, shows which are set, and how often they have happened.
Examples: ringverbs fault /tmp/net 'lose opcode=send nth=3' 'link-down 1s'
          ringverbs fault 4711 'qp-error qp=#1'
          ringverbs fault /tmp/net --end")]
pub struct Args {
    /// Directory of the devices' network (--directory of ringverbs run), number of a process, or
    /// roce: the processes that reach other hosts
    #[arg(value_name = "DIRECTORY|PID|roce")]
    target: PathBuf,
    /// Faults, one in each argument
    #[arg(value_name = "FAULT")]
    faults: Vec<String>,
    /// A file of faults
    #[arg(long, value_name = "FILE", conflicts_with = "faults")]
    file: Option<PathBuf>,
    /// End the faults, and show how often they have happened
    #[arg(long, conflicts_with_all = ["faults", "file"])]
    end: bool,
}

/// Why faults were not set.
#[derive(Debug)]
enum FaultError {
    /// A fault of the arguments, or of a file, cannot be understood.
    Text(Option<PathBuf>, ParseError),
    /// The file cannot be read.
    File(PathBuf, std::io::Error),
    /// So many processes have not answered.
    Silent(usize),
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(Some(path), error) => write!(f, "{}:{error}", path.display()),
            Self::Text(None, error) => {
                let (number, column, reason) = (error.line, error.column, &error.reason);
                write!(f, "fault {number}, column {column}: {reason}")
            }
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Silent(count) => f.write_str(&running::silent(*count)),
        }
    }
}

impl std::error::Error for FaultError {}

/// Returns the text of the arguments, if there is one.
fn text(args: &Args) -> Result<Option<String>, FaultError> {
    let (text, path) = match &args.file {
        Some(path) => {
            let text = read(path).map_err(|error| FaultError::File(path.clone(), error))?;
            (text, Some(path.clone()))
        }
        None if args.faults.is_empty() => return Ok(None),
        None => {
            // Each is a line, whatever it contains.
            let lines = args.faults.iter().map(|it| it.replace('\n', " "));
            (lines.collect::<Vec<_>>().join("\n"), None)
        }
    };
    Faults::parse(&text).map_err(|error| FaultError::Text(path, error))?;
    Ok(Some(text))
}

/// Sets faults, or shows those that are set.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let text = text(args).map_err(Error::subcommand)?;
    let processes = running::find(&args.target)?;
    if args.end {
        let (text, answers) = processes.end_faults().map_err(Error::subcommand)?;
        print(&text, &answers)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(text) = text else {
        let set = processes.faults().unwrap_or_default();
        print(&set, &processes.fault_answers(&set))?;
        return Ok(ExitCode::SUCCESS);
    };
    let expected = processes.set_faults(Some(&text));
    let expected = expected.map_err(Error::subcommand)?;
    let found = processes.wait_for_fault_answers(&text, expected);
    print(&text, &found)?;
    match expected.saturating_sub(found.len()) {
        0 => Ok(ExitCode::SUCCESS),
        silent => Err(Error::subcommand(FaultError::Silent(silent))),
    }
}

/// Prints what each process does with each fault.
fn print(text: &str, answers: &[FaultAnswer]) -> Result<(), Error> {
    let mut out = out::stdout();
    // Another version may have written it.
    let faults = Faults::parse(text).unwrap_or_default();
    for answer in answers {
        writeln!(out, "process {}:", answer.process)?;
        if !answer.is_accepted() {
            writeln!(out, "  refused: it is of another version of ringverbs")?;
        }
        for (position, fault) in faults.list().iter().enumerate() {
            let said = match answer.of(position) {
                Some((FaultState::Applied, count)) => times(count),
                Some((FaultState::Refused, _)) => {
                    "refused: there is no such device or queue pair".to_owned()
                }
                Some((FaultState::OtherProgram, _)) => "for another program".to_owned(),
                _ => continue,
            };
            writeln!(out, "  {fault}: {said}")?;
        }
    }
    if answers.is_empty() {
        writeln!(out, "no process has faults of this directory")?;
    }
    Ok(())
}
