//! Mappings and memory of another process, read-only.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use crate::error::Error;

/// The reason why a process's queues cannot be shown.
#[derive(Debug)]
pub enum TraceError {
    /// The process does not exist.
    NoProcess(u32),
    /// Permission was denied.
    Denied(u32),
    /// The process's files in /proc cannot be read.
    Proc {
        /// The process.
        pid: u32,
        /// The reason.
        source: io::Error,
    },
    /// The process has no queue of rxe.
    NoQueue {
        /// The process.
        pid: u32,
        /// Number of the process's mappings of RDMA devices.
        mappings: usize,
    },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoProcess(pid) => write!(f, "there is no process {pid}"),
            Self::Denied(pid) => write!(
                f,
                "no permission to read process {pid}; become its user or root, and see \
                 `sysctl kernel.yama.ptrace_scope` (0: own processes, 1 and more: root)"
            ),
            Self::Proc { pid, source } => write!(f, "reading /proc/{pid}: {source}"),
            Self::NoQueue { pid, mappings: 0 } => write!(
                f,
                "process {pid} has no queue mapped; it has created none, or has destroyed them"
            ),
            Self::NoQueue { pid, mappings } => write!(
                f,
                "of {mappings} mappings of RDMA devices in process {pid} none is a queue of rxe"
            ),
        }
    }
}

impl std::error::Error for TraceError {}

impl From<TraceError> for Error {
    fn from(error: TraceError) -> Self {
        Self::subcommand(error)
    }
}

/// A process whose memory can be read.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    memory: File,
}

/// A mapping of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Start address in the process.
    pub address: u64,
    /// Length in bytes.
    pub length: usize,
    /// Offset in the device, which identifies the queue.
    pub offset: u64,
    /// Name of the device node, such as `uverbs0`.
    pub node: String,
}

impl Process {
    /// Opens a process's memory for reading.
    pub fn open(pid: u32) -> Result<Self, TraceError> {
        match File::open(format!("/proc/{pid}/mem")) {
            Ok(memory) => Ok(Self { pid, memory }),
            Err(error) => Err(proc_error(pid, error)),
        }
    }

    /// Returns the readable mappings of RDMA devices, in the order in which their
    /// queues were created.
    pub fn mappings(&self) -> Result<Vec<Mapping>, TraceError> {
        let maps = fs::read(format!("/proc/{}/maps", self.pid));
        let maps = maps.map_err(|error| proc_error(self.pid, error))?;
        // File names in the table may contain any bytes.
        let maps = String::from_utf8_lossy(&maps);
        let mut mappings: Vec<Mapping> = maps.lines().filter_map(Mapping::parse).collect();
        mappings.sort_by(|a, b| (&a.node, a.offset).cmp(&(&b.node, b.offset)));
        Ok(mappings)
    }

    /// Copies part of a mapping; `None` if that part is beyond the mapping's end or is no
    /// longer mapped.
    pub fn copy(&self, mapping: &Mapping, offset: usize, length: usize) -> Option<Vec<u8>> {
        let end = offset.checked_add(length)?;
        if end > mapping.length {
            return None;
        }
        let mut bytes = vec![0; length];
        let address = mapping.address.checked_add(u64::try_from(offset).ok()?)?;
        self.memory.read_exact_at(&mut bytes, address).ok()?;
        Some(bytes)
    }
}

fn proc_error(pid: u32, source: io::Error) -> TraceError {
    match source.kind() {
        io::ErrorKind::NotFound => TraceError::NoProcess(pid),
        io::ErrorKind::PermissionDenied => TraceError::Denied(pid),
        _ => TraceError::Proc { pid, source },
    }
}

impl Mapping {
    /// Parses a line of /proc/PID/maps: `7f1c5e600000-7f1c5e610000 rw-s 00010000
    /// 00:06 355    /dev/infiniband/uverbs0`.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        let readable = words.next()?.starts_with('r');
        let offset = u64::from_str_radix(words.next()?, 16).ok()?;
        let path = words.nth(2)?;
        let node = path.rsplit_once("/infiniband/")?.1;
        let number = node.strip_prefix("uverbs")?;
        if !readable || number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let address = u64::from_str_radix(from, 16).ok()?;
        let end = u64::from_str_radix(to, 16).ok()?;
        Some(Self {
            address,
            length: end.checked_sub(address)?.try_into().ok()?,
            offset,
            node: node.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_parsed() {
        let line = "7f1c5e600000-7f1c5e610000 rw-s 00010000 00:06 355   /dev/infiniband/uverbs0";
        let mapping = Mapping {
            address: 0x7f1c_5e60_0000,
            length: 0x10000,
            offset: 0x10000,
            node: "uverbs0".into(),
        };
        assert_eq!(Mapping::parse(line).as_ref(), Some(&mapping));
        assert_eq!(Mapping::parse(&format!("{line} (deleted)")), Some(mapping));
        for other in [
            "",
            "7f1c5e600000-7f1c5e610000 rw-p 00000000 00:00 0",
            "7f1c5e600000-7f1c5e610000 rw-p 00000000 00:00 0 [heap]",
            "7f1c5e600000-7f1c5e610000 -w-s 00010000 00:06 355 /dev/infiniband/uverbs0",
            "7f1c5e610000-7f1c5e600000 rw-s 00010000 00:06 355 /dev/infiniband/uverbs0",
            "x-y rw-s 00010000 00:06 355 /dev/infiniband/uverbs0",
            "7f1c5e600000-7f1c5e610000 rw-s 00010000 00:06 355 /dev/infiniband/rdma_cm",
            "7f1c5e600000 rw-s",
            "7f1c5e600000-7f1c5e610000 rw-s 00010000 00:06 355 /tmp/infiniband/uverbs\x1b[2J",
            "7f1c5e600000-7f1c5e610000 rw-s 00010000 00:06 355 /tmp/infiniband/uverbs",
        ] {
            assert_eq!(Mapping::parse(other), None, "{other}");
        }
    }

    #[test]
    fn missing_process_is_reported() {
        // Process IDs end at 4194304 on Linux.
        let error = Process::open(u32::MAX).unwrap_err();
        assert!(
            matches!(error, TraceError::NoProcess(u32::MAX)),
            "{error:?}"
        );
    }

    #[test]
    fn only_mapped_memory_is_copied() {
        let text = *b"text to be read";
        let process = Process::open(std::process::id()).unwrap();
        let mapping = Mapping {
            address: text.as_ptr().addr() as u64,
            length: text.len(),
            offset: 0,
            node: "uverbs0".into(),
        };
        assert_eq!(process.copy(&mapping, 5, 2).as_deref(), Some(&b"to"[..]));
        assert_eq!(process.copy(&mapping, 5, 20), None);
        assert_eq!(process.copy(&mapping, usize::MAX, 2), None);
        let unmapped = Mapping {
            address: 0,
            ..mapping
        };
        assert_eq!(process.copy(&unmapped, 0, 1), None);
        assert!(process.mappings().unwrap().is_empty());
    }
}
