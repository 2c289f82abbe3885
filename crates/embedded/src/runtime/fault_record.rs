//! A file of the faults that have happened in this process, which make the same happen again.
//!
//! It is replaced by rename each time that one happens: it is whole when the process is killed,
//! and no descriptor is open that the program could close.

use std::fmt::Display;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use softhca::fault::{Decision, FaultLog, OnDecision};

use crate::capture::process_path;
use crate::file_size::file_size_limit;
use crate::program_name;
use crate::runtime::network::Network;

/// Called with the file and the reason why no more is recorded.
pub type FaultRecordEnd = Box<dyn Fn(&Path, &dyn Display) + Send + Sync>;

struct FaultRecord {
    path: PathBuf,
    /// Its name until it is whole.
    new: PathBuf,
    /// The program, as a fault names it; `None` if none can.
    program: Option<String>,
    header: String,
    /// `None` once it has ended.
    log: Mutex<Option<FaultLog>>,
    on_end: FaultRecordEnd,
}

impl FaultRecord {
    fn create(path: &Path, on_end: FaultRecordEnd) -> io::Result<Self> {
        let path = process_path(path);
        let name = program_name();
        let shown: String = name.chars().filter(|it| !it.is_control()).collect();
        let id = process::id();
        let is_word =
            |it: char| !it.is_whitespace() && it != '/' && it != char::REPLACEMENT_CHARACTER;
        let record = Self {
            new: path.with_extension(format!("{id}-new")),
            path,
            header: format!("# Faults that have happened in process {id} ({shown}).\n"),
            program: Some(name).filter(|it| !it.is_empty() && it.chars().all(is_word)),
            log: Mutex::new(Some(FaultLog::default())),
            on_end,
        };
        record.write("")?;
        Ok(record)
    }

    fn write(&self, text: &str) -> io::Result<()> {
        let content = self.header.clone() + text;
        if content.len() as u64 > file_size_limit() {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let written = self.replace(content.as_bytes());
        if written.is_err() {
            let _ = fs::remove_file(&self.new);
        }
        written
    }

    fn replace(&self, content: &[u8]) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        // Left by an earlier process of this number that was killed.
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.custom_flags(libc::O_NOFOLLOW).open(&self.new)?;
        file.write_all(content)?;
        fs::rename(&self.new, &self.path)
    }

    fn add(&self, device: usize, decision: &Decision) {
        let mut guard = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(log) = guard.as_mut() else { return };
        let added = log.add(device, self.program.as_deref(), decision);
        let reason: Box<dyn Display> = match added {
            Ok(()) => match self.write(&log.to_string()) {
                Ok(()) => return,
                Err(error) => Box::new(error),
            },
            Err(full) => {
                let text = format!("{log}# The record ends here: {full}.\n");
                // Else the file ends without this line.
                let _ = self.write(&text);
                Box::new(full)
            }
        };
        *guard = None;
        drop(guard);
        (self.on_end)(&self.path, &*reason);
    }
}

impl Network {
    /// Records which faults happen from now on, also those that are set later, as faults that make
    /// the same happen again: in a file whose name has this process's number
    /// ([`process_path`](crate::process_path)). `on_end` is told if that ends before the process.
    ///
    /// # Errors
    /// Those of writing the file.
    pub fn record_faults(&self, path: &Path, on_end: FaultRecordEnd) -> io::Result<()> {
        let record = Arc::new(FaultRecord::create(path, on_end)?);
        for (index, device) in self.devices().iter().enumerate() {
            let record = Arc::clone(&record);
            let on_decision: OnDecision =
                Arc::new(move |decision: &Decision| record.add(index, decision));
            device.lock().hca.record_faults(on_decision);
        }
        Ok(())
    }
}
