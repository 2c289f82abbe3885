//! Running programs on embedded devices, as arguments name them.

use std::fmt;
use std::path::Path;

use embedded::RunningProcesses;
use uverbs::Errno;

use crate::error::Error;

/// The name of those that reach other hosts.
const HOSTS: &str = "roce";

/// Returns the processes that an argument names: a directory, a process, or `roce`.
pub fn find(target: &Path) -> Result<RunningProcesses, Error> {
    let name = target.to_str().unwrap_or_default();
    let found = match name.parse::<u32>() {
        Ok(process) => RunningProcesses::with_number(process),
        Err(_) if name == HOSTS => RunningProcesses::on_hosts(),
        Err(_) => RunningProcesses::in_directory(target),
    };
    found.map_err(|error| match name.parse() {
        Ok(process) if error.errno().raw() != libc::EINVAL => {
            Error::subcommand(Unreadable(process, error.errno()))
        }
        _ => Error::subcommand(error),
    })
}

/// The environment of a process cannot be read: it has ended, or is another user's.
#[derive(Debug)]
struct Unreadable(u32, Errno);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(process, errno) = self;
        write!(f, "process {process}: {errno}")
    }
}

impl std::error::Error for Unreadable {}

/// Says that processes have not answered.
pub fn silent(count: usize) -> String {
    let processes = match count {
        1 => "a process has".to_owned(),
        count => format!("{count} processes have"),
    };
    format!("{processes} not answered: stopped, or of another version of ringverbs")
}
