//! `--faults`: the file of faults, and a report of how often each has happened.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use embedded::FaultCounts;
use embedded::softhca::fault::{Faults, MAX_TEXT};

use super::RunError;
use crate::error::Error;
use crate::out;

/// A file of faults that is well-formed.
#[derive(Clone, Debug)]
pub(super) struct FaultFile {
    path: PathBuf,
    faults: Faults,
}

impl FaultFile {
    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Self, RunError> {
        let refused = |reason: String| RunError::Faults(path.to_owned(), reason);
        let text = read(path).map_err(|error| refused(format!(" {error}")))?;
        let faults = Faults::parse(&text).map_err(|error| refused(error.to_string()))?;
        Ok(Self {
            path: path.to_owned(),
            faults,
        })
    }

    /// Returns its path, which does not depend on the working directory.
    pub(super) fn absolute(&self) -> io::Result<OsString> {
        std::path::absolute(&self.path).map(OsString::from)
    }

    /// Creates the file in which the processes of the program count faults.
    pub(super) fn count(self, directory: &Path) -> Result<FaultReport, Error> {
        let path = directory.join(format!("fault-counts-{}", std::process::id()));
        // Left by an earlier process of this number that was killed.
        let _ = fs::remove_file(&path);
        let counts = FaultCounts::create(&path)?;
        Ok(FaultReport {
            file: self,
            counts,
            path,
        })
    }
}

/// Reads a text that is not longer than one may be.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let limit = MAX_TEXT as u64 + 1;
    io::Read::read_to_string(&mut io::Read::take(fs::File::open(path)?, limit), &mut text)?;
    Ok(text)
}

/// Counts of faults; the file is removed when it is dropped.
pub(super) struct FaultReport {
    file: FaultFile,
    counts: FaultCounts,
    path: PathBuf,
}

impl FaultReport {
    /// Returns the file with the counts.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Prints how often each fault has happened.
    pub(super) fn print(&self) {
        for (position, fault) in self.file.faults.list().iter().enumerate() {
            let name = self.file.path.display();
            let count = self.counts.of(position);
            let line = format!("{name}:{}: {fault}: {}", fault.line, times(count));
            match count {
                0 => out::print_warning(&line),
                _ => out::print_note(&line),
            }
        }
    }
}

impl Drop for FaultReport {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Says how often something has happened.
pub(crate) fn times(count: u64) -> String {
    match count {
        0 => "never happened".to_owned(),
        1 => "happened once".to_owned(),
        count => format!("happened {count} times"),
    }
}
