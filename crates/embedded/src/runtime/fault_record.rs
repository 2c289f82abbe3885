//! A file of the faults that have happened in this process, which make the same happen again.
//!
//! Each time that one happens, a line is appended. The file is replaced by one with a line for
//! each action and thing when it would have more lines than a text of faults may have, and at
//! the end. So it can be read at any time, also if the process is killed, and no descriptor is
//! open that the program could close. Whoever writes has the device's lock: replacing takes a
//! millisecond on ext4, appending some microseconds.

use std::fmt::{self, Display};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use softhca::fault::{Decision, FaultLog, MAX_FAULTS, MAX_TEXT, OnDecision};

use crate::capture::process_path;
use crate::file_size::file_size_limit;
use crate::program_name;
use crate::runtime::network::Network;

/// Called with the file and the reason why no more is recorded.
pub type FaultRecordEnd = Box<dyn Fn(&Path, &dyn Display) + Send + Sync>;

/// Linux writes page by page, and may stop between them when a process is killed.
const PAGE: usize = 4096;

/// The record of a process ([`Network::record_faults`]).
#[derive(Clone)]
pub struct FaultRecord(Arc<Inner>);

impl fmt::Debug for FaultRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.0.file.path;
        f.debug_tuple("FaultRecord").field(path).finish()
    }
}

struct Inner {
    file: RecordFile,
    /// The program, as a fault names it; `None` if none can.
    program: Option<String>,
    /// `None` once it has ended.
    state: Mutex<Option<State>>,
    on_end: FaultRecordEnd,
}

struct RecordFile {
    path: PathBuf,
    /// Its name until it is whole.
    new: PathBuf,
    header: String,
    /// The process whose it is, not a child.
    process: u32,
}

struct State {
    log: FaultLog,
    /// Length of the file, and its number of faults.
    length: usize,
    lines: usize,
}

impl RecordFile {
    fn new(path: &Path, program: &str) -> Self {
        let path = process_path(path);
        let process = process::id();
        let shown: String = program.chars().filter(|it| !it.is_control()).collect();
        Self {
            new: path.with_extension(format!("{process}-new")),
            path,
            header: format!("# Faults that have happened in process {process} ({shown}).\n"),
            process,
        }
    }

    /// Replaces the file, and returns its length. If that fails, the former one stays.
    fn replace(&self, text: &str) -> io::Result<usize> {
        let content = self.header.clone() + text;
        check_size(content.len())?;
        let create = || {
            let mut options = File::options();
            // Left by an earlier process of this number that was killed.
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.custom_flags(libc::O_NOFOLLOW).open(&self.new)?;
            file.write_all(content.as_bytes())
        };
        let replaced = create().and_then(|()| fs::rename(&self.new, &self.path));
        if replaced.is_err() {
            let _ = fs::remove_file(&self.new);
        }
        replaced.map(|()| content.len())
    }

    /// Appends a line to a file of `length` bytes, and returns its length. Returns `None` if the
    /// file is another one now.
    fn append(&self, line: &str, length: usize) -> io::Result<Option<usize>> {
        let end = length + line.len();
        let fits = length / PAGE == (end - 1) / PAGE;
        // Empty lines up to the next page, in which the whole line is.
        let padding = if fits { 0 } else { PAGE - length % PAGE };
        let text = "\n".repeat(padding) + line;
        check_size(length + text.len())?;
        let mut options = File::options();
        // A FIFO that nobody reads is an error.
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let mut file = match options.append(true).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if file.metadata()?.len() != length as u64 {
            return Ok(None);
        }
        let written = file.write_all(text.as_bytes());
        if written.is_err() {
            let _ = file.set_len(length as u64);
        }
        written.map(|()| Some(length + text.len()))
    }
}

fn check_size(length: usize) -> io::Result<()> {
    match length as u64 > file_size_limit() {
        true => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        false => Ok(()),
    }
}

impl State {
    fn replace(&mut self, file: &RecordFile) -> io::Result<()> {
        self.length = file.replace(&self.log.to_string())?;
        self.lines = self.log.len();
        Ok(())
    }

    /// Adds a decision that the log has, as a line.
    fn write(&mut self, file: &RecordFile, line: &str) -> io::Result<()> {
        let most = MAX_TEXT - PAGE;
        if self.lines < MAX_FAULTS && self.length + line.len() <= most {
            if let Some(length) = file.append(line, self.length)? {
                self.length = length;
                self.lines += 1;
                return Ok(());
            }
        }
        self.replace(file)
    }
}

impl Inner {
    fn add(&self, device: usize, decision: &Decision) {
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(state) = guard.as_mut() else { return };
        let program = self.program.as_deref();
        let mut line = FaultLog::default();
        let added = line.add(device, program, decision);
        let added = added.and_then(|()| state.log.add(device, program, decision));
        let reason: Box<dyn Display> = match added {
            Ok(()) => match state.write(&self.file, &line.to_string()) {
                Ok(()) => return,
                Err(error) => Box::new(error),
            },
            Err(full) => {
                let text = format!("{}# The record ends here: {full}.\n", state.log);
                // Else the file ends without this line.
                let _ = self.file.replace(&text);
                Box::new(full)
            }
        };
        *guard = None;
        drop(guard);
        (self.on_end)(&self.file.path, &*reason);
    }
}

impl FaultRecord {
    /// Joins the lines of the file, at the end of the process. In a child of fork, and while
    /// another thread writes, this does nothing.
    pub fn finish(&self) {
        let Inner { file, state, .. } = &*self.0;
        if process::id() != file.process {
            return;
        }
        let Ok(mut guard) = state.try_lock() else {
            return;
        };
        if let Some(state) = guard.as_mut().filter(|it| it.lines != it.log.len()) {
            // Else the file stays as it is, which says the same.
            let _ = state.replace(file);
        }
    }
}

impl Network {
    /// Records which faults happen from now on, also those that are set later, as faults that make
    /// the same happen again: in a file whose name has this process's number
    /// ([`process_path`](crate::process_path)). `on_end` is told if that ends before the process.
    ///
    /// # Errors
    /// Those of writing the file.
    pub fn record_faults(&self, path: &Path, on_end: FaultRecordEnd) -> io::Result<FaultRecord> {
        let name = program_name();
        let file = RecordFile::new(path, &name);
        let length = file.replace("")?;
        let is_word =
            |it: char| !it.is_whitespace() && it != '/' && it != char::REPLACEMENT_CHARACTER;
        let state = State {
            log: FaultLog::default(),
            length,
            lines: 0,
        };
        let inner = Arc::new(Inner {
            file,
            program: Some(name).filter(|it| !it.is_empty() && it.chars().all(is_word)),
            state: Mutex::new(Some(state)),
            on_end,
        });
        for (index, device) in self.devices().iter().enumerate() {
            let inner = Arc::clone(&inner);
            let on_decision: OnDecision =
                Arc::new(move |decision: &Decision| inner.add(index, decision));
            device.lock().hca.record_faults(on_decision);
        }
        Ok(FaultRecord(inner))
    }
}

#[cfg(test)]
mod tests {
    use softhca::fault::{Action, Faults, PacketKind, QpName, Way, When};

    use super::*;
    use crate::{Drive, Network};

    fn lost(nth: u64) -> Decision {
        Decision {
            action: Action::Lose,
            qp: Some(QpName::Order(1)),
            opcode: Some(PacketKind::Send),
            way: Some(Way::Out),
            when: When::Nth(nth),
        }
    }

    /// The positions in the file, which is a text of faults at any time.
    fn positions(path: &Path, most: u64) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap();
        let faults = Faults::parse(&text).unwrap();
        let is_in = |nth: &u64| {
            let mut all = faults.list().iter();
            all.any(|it| it.matcher.nth.contains(*nth))
        };
        (1..=most).filter(is_in).collect()
    }

    #[test]
    fn the_file_has_all_faults_at_any_time() {
        let name = format!("fault-record-{}", process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        let base = folder.join("seen.faults");
        let network = Network::new(Drive::Caller).unwrap();
        let record = network.record_faults(&base, Box::new(|_, reason| panic!("{reason}")));
        let record = record.unwrap();
        let path = process_path(&base);
        assert!(positions(&path, 9).is_empty());
        for at in 1..=400 {
            record.0.add(0, &lost(2 * at));
            let expected: Vec<u64> = (1..=at).map(|at| 2 * at).collect();
            assert_eq!(positions(&path, 1000), expected);
            if at == 200 {
                fs::remove_file(&path).unwrap();
            }
        }
        let lines = || fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines() > 2);
        record.finish();
        assert_eq!(lines(), 2);
        assert_eq!(positions(&path, 1000).len(), 400);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(&folder).unwrap();
    }
}
