//! Errors of the program that no device reports, as far as embedded devices see them.
//!
//! [`Device::check`](crate::Device::check) tells them, a test on a fabric of `ringverbs-testkit`
//! fails with them, and with the environment variable `RINGVERBS_CHECK` they are reported of the
//! devices that [`Device::embedded`](crate::Device::embedded) and its kin make: on standard error
//! (`1`), or appended to a file. So a program that is statically linked is checked, too.
//!
//! ```text
//! $ RINGVERBS_DEVICE=embedded RINGVERBS_CHECK=1 ./program
//! ringverbs: embedded: error completion-queue-too-small: queue pair 0x9c5e4f: its completion queue 0x1 has 4 entries in the device, and 5 completions are unread or will come of work requests that are posted
//! ringverbs: check of process 25875: errors: 1
//! ```
//!
//! Two rules are left to check that safe programs can break:
//! [`CheckRule::CompletionQueueTooSmall`] and [`CheckRule::OverlappingAccess`] of RDMA writes of
//! up to 64 KiB. `docs/check.md` in the repository explains them, and why safe programs cannot
//! break the others. `RINGVERBS_CHECK_SUPPRESSIONS` names a file of errors that are known.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use embedded::Suppressions;
pub use embedded::{CheckRule, ProgramError};
use uverbs::environment;

use crate::{Error, Result};

/// The reports of this process.
static REPORTS: OnceLock<Reports> = OnceLock::new();

/// The reports that the environment asks for.
#[derive(Debug)]
pub(crate) struct Reports {
    /// Standard error if there is no file.
    file: Option<File>,
    suppressions: Suppressions,
    /// Gets a byte for each error: of `ringverbs check`.
    errors_file: Option<File>,
    errors: AtomicU64,
    suppressed: AtomicU64,
    /// The process whose they are, not a child.
    process: u32,
}

fn variable(name: &str) -> Option<OsString> {
    environment::variable(name).filter(|value| !value.is_empty())
}

fn refused(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::System {
        what,
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    }
}

impl Reports {
    /// Returns the reports that the environment asks for.
    ///
    /// # Errors
    /// They cannot be written, or the suppressions cannot be read.
    pub(crate) fn of_environment() -> Result<Option<&'static Self>> {
        if let Some(reports) = REPORTS.get() {
            return Ok(Some(reports));
        }
        let Some(target) = variable("RINGVERBS_CHECK") else {
            return Ok(None);
        };
        let file = match target == "1" {
            true => None,
            false => {
                let mut options = OpenOptions::new();
                // A FIFO that nobody reads is an error.
                options.custom_flags(libc::O_NONBLOCK);
                let file = options.append(true).create(true).open(target);
                Some(file.map_err(refused("the file of RINGVERBS_CHECK"))?)
            }
        };
        let suppressions = match variable("RINGVERBS_CHECK_SUPPRESSIONS") {
            Some(path) => {
                let text = fs::read_to_string(path);
                let text = text.map_err(refused("the file of RINGVERBS_CHECK_SUPPRESSIONS"))?;
                // Rules that other checkers have are none of this one.
                Suppressions::parse(&text, |_| true).unwrap_or_default()
            }
            None => Suppressions::default(),
        };
        let errors_file = variable("RINGVERBS_CHECK_ERRORS").map(|path| {
            let file = OpenOptions::new().append(true).open(path);
            file.map_err(refused("the file of RINGVERBS_CHECK_ERRORS"))
        });
        let reports = Self {
            file,
            suppressions,
            errors_file: errors_file.transpose()?,
            errors: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
            process: process::id(),
        };
        let reports = REPORTS.get_or_init(|| {
            // Without it the last line is missing.
            // SAFETY: the function may be called at any time, and exists until the process ends.
            let _ = unsafe { libc::atexit(summarise) };
            reports
        });
        Ok(Some(reports))
    }

    /// Writes text in one call, so that it does not mix with that of other processes. What cannot
    /// be written is lost.
    fn write(&self, text: &str) {
        let _ = match &self.file {
            Some(file) => (&mut &*file).write_all(text.as_bytes()),
            None => io::stderr().write_all(text.as_bytes()),
        };
    }

    /// Reports an error of the program, unless it is known.
    pub(crate) fn report(&self, device: &str, error: &ProgramError) {
        let text = format!("ringverbs: {device}: error {error}\n");
        if self.suppressions.contain(error.rule.name(), &text) {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.errors.fetch_add(1, Ordering::Relaxed);
        if let Some(mut file) = self.errors_file.as_ref() {
            // The exit status then is the program's.
            let _ = file.write_all(b"E");
        }
        self.write(&text);
    }
}

/// Writes the last line, at the end of the process.
extern "C" fn summarise() {
    let process = process::id();
    let Some(reports) = REPORTS.get().filter(|it| it.process == process) else {
        return;
    };
    let errors = reports.errors.load(Ordering::Relaxed);
    let mut text = format!("ringverbs: check of process {process}: errors: {errors}");
    match reports.suppressed.load(Ordering::Relaxed) {
        0 => {}
        suppressed => text += &format!(", suppressed: {suppressed}"),
    }
    reports.write(&(text + "\n"));
}
