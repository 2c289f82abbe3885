//! Control of running processes by the files of their directory ([`control_file`]): faults,
//! captures, and questions about their state.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use uverbs::{Command, Errno, Error};

use crate::capture::Recorder;
use crate::directory::{Directory, Sharing};
use crate::runtime::capture_control::CaptureControl;
use crate::runtime::device::Device;
use crate::runtime::faults::FaultControl;
use crate::runtime::status::StatusControl;
use crate::wires::segment::MAX_MEMBERS;
use crate::wires::{control_file, udp};

/// A process's place among those that the files of a directory control.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) directory: Arc<Directory>,
    /// Its number in the network.
    pub(crate) number: u16,
}

/// What the files control in this process.
pub(crate) struct Controlled<'a> {
    pub(crate) devices: &'a [Arc<Device>],
    /// Ends the process, if a fault says so.
    pub(crate) on_die: Option<fn()>,
    /// Returns what records frames.
    pub(crate) recorder: &'a dyn Fn() -> Option<Arc<Recorder>>,
    /// Replaces it.
    pub(crate) record: &'a dyn Fn(Option<Arc<Recorder>>),
    /// The names of the devices, as far as they have been set.
    pub(crate) names: &'a [String],
}

impl Controlled<'_> {
    /// Returns the name of a device by its number in this process.
    pub(crate) fn name(&self, index: usize) -> String {
        let given = self.names.get(index).cloned();
        given.unwrap_or_else(|| format!("mlx5_{index}"))
    }
}

/// The files that control this process.
pub(crate) struct Control {
    faults: FaultControl,
    captures: CaptureControl,
    status: StatusControl,
    names: OnceLock<Vec<String>>,
}

impl Control {
    pub(crate) fn new(place: Place) -> Self {
        Self {
            faults: FaultControl::new(place.clone()),
            captures: CaptureControl::new(place.clone()),
            status: StatusControl::new(place),
            names: OnceLock::new(),
        }
    }

    /// Sets the names of the devices, if they are not set.
    pub(crate) fn set_names(&self, names: &[String]) {
        self.names.get_or_init(|| names.to_vec());
    }

    pub(crate) fn names(&self) -> &[String] {
        self.names.get().map_or(&[], |names| names)
    }

    /// Does what the files say, as far as they have changed; with `again` also what concerns a
    /// device that is new. Returns whether anything was done.
    pub(crate) fn read(&self, controlled: &Controlled<'_>, again: bool) -> bool {
        let devices = controlled.devices;
        let faults = self.faults.read(devices, controlled.on_die, again);
        let captures = self.captures.read(controlled);
        self.status
            .read(controlled, self.captures.state().as_deref());
        faults | captures
    }
}

/// Running processes that a command looks at or controls: those of a directory, or one of them.
#[derive(Debug)]
pub struct RunningProcesses {
    pub(crate) directory: Directory,
    pub(crate) only: Option<u32>,
}

/// The variables that say which network a process has joined.
const DIRECTORY: &[u8] = b"RINGVERBS_DIRECTORY=";
const DEVICES: &[u8] = b"RINGVERBS_EMBEDDED=";
const RUNTIME_DIRECTORY: &[u8] = b"XDG_RUNTIME_DIR=";
const NO_PROCESS: &str = "there is no such directory: no process has joined a network there";
/// The beginning of the devices on a network of hosts.
const HOST: &[u8] = b"roce:";

impl RunningProcesses {
    /// Opens the directory of a network, as [`Network::joined`](crate::Network::joined) does.
    ///
    /// # Errors
    /// Those of [`Network::joined`](crate::Network::joined) that concern the directory, and
    /// [`Error::Invalid`] if it does not exist.
    pub fn in_directory(directory: &Path) -> Result<Self, Error> {
        Self::open(directory, None)
    }

    /// Those of this user in this network namespace that reach other hosts
    /// ([`Network::roce`](crate::Network::roce)).
    ///
    /// # Errors
    /// Those of opening their directory.
    pub fn on_hosts() -> Result<Self, Error> {
        let namespace = Path::new("/proc/thread-self/ns/net");
        let path = udp::group_directory(&Directory::default_path(), namespace);
        Self::open(&path, None)
    }

    /// One process: its network is that of its environment, or the default one.
    ///
    /// # Errors
    /// Those of reading the environment, as of another user's process; then those of
    /// [`in_directory`](Self::in_directory).
    pub fn with_number(process: u32) -> Result<Self, Error> {
        let refused = |error: std::io::Error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            Error::refused(Command::Open, None, Errno::new(errno))
        };
        let environment = fs::read(format!("/proc/{process}/environ")).map_err(refused)?;
        let value = |name: &[u8]| {
            let mut variables = environment.split(|byte| *byte == 0);
            variables.find_map(|it| it.strip_prefix(name))
        };
        let path = |value: &[u8]| PathBuf::from(OsStr::from_bytes(value));
        let default = || match value(RUNTIME_DIRECTORY).filter(|it| !it.is_empty()) {
            Some(parent) => path(parent).join("ringverbs"),
            None => Directory::default_path(),
        };
        let directory = match (value(DEVICES), value(DIRECTORY)) {
            (Some(devices), _) if devices.starts_with(HOST) => {
                let namespace = PathBuf::from(format!("/proc/{process}/ns/net"));
                udp::group_directory(&default(), &namespace)
            }
            (_, Some(directory)) => path(directory),
            _ => default(),
        };
        Self::open(&directory, Some(process))
    }

    fn open(path: &Path, only: Option<u32>) -> Result<Self, Error> {
        // It would be made.
        if path.symlink_metadata().is_err() {
            return Err(Error::Invalid {
                command: Command::Open,
                what: NO_PROCESS,
            });
        }
        let directory = Directory::open(path, Sharing::Own)?;
        Ok(Self { directory, only })
    }

    /// Returns the process, if it is one alone.
    pub fn only(&self) -> Option<u32> {
        self.only
    }

    /// Returns whether a process is meant.
    pub(crate) fn contains(&self, process: u32) -> bool {
        self.only.is_none_or(|only| only == process)
    }

    /// Returns how many of so many processes that were told are to answer.
    pub(crate) fn expected(&self, told: usize) -> usize {
        self.only.map_or(told, |_| told.min(1))
    }

    /// Waits for the answers of so many processes that were told, by files of this name, but not
    /// longer than `max_wait`. `parse` returns the number of the process as well; `None` if its
    /// answer is to something else. Returns the answers, by process, and how many are missing.
    pub(crate) fn answers<T>(
        &self,
        name: &str,
        told: usize,
        max_wait: Duration,
        parse: impl Fn(&str) -> Option<(u32, T)>,
    ) -> (Vec<T>, usize) {
        let expected = self.expected(told);
        let read = || {
            let texts = (0..MAX_MEMBERS)
                .filter_map(|number| control_file::answer_of(&self.directory, name, number));
            let answers = texts.filter_map(|text| parse(&text));
            Vec::from_iter(answers.filter(|(process, _)| self.contains(*process)))
        };
        let mut answers = wait_for_answers(expected, max_wait, read);
        answers.sort_unstable_by_key(|(process, _)| *process);
        let silent = expected.saturating_sub(answers.len());
        (answers.into_iter().map(|it| it.1).collect(), silent)
    }
}

/// Reads answers until there are so many, but not longer than `max_wait`.
pub(crate) fn wait_for_answers<T>(
    expected: usize,
    max_wait: Duration,
    read: impl Fn() -> Vec<T>,
) -> Vec<T> {
    let end = Instant::now() + max_wait;
    loop {
        let answers = read();
        if answers.len() >= expected || Instant::now() >= end {
            return answers;
        }
        thread::sleep(Duration::from_millis(2));
    }
}
