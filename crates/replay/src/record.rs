//! Lines of a record.

use std::fmt;
use std::io::{self, BufRead};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// Maximum length of a line in bytes; lines of the recorder are shorter.
const MAX_LINE: u64 = 1 << 20;
/// The version of records that is read.
const VERSION: u32 = 1;

/// Named values, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arguments(Vec<(String, Value)>);

impl Arguments {
    /// Returns a value.
    pub fn get(&self, name: &str) -> Option<&Value> {
        let found = self.0.iter().find(|(of, _)| of == name);
        found.map(|(_, value)| value)
    }

    /// Returns a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.as_u64()
    }

    /// Returns a text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.as_str()
    }

    /// Returns the values with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }
}

impl<'de> Deserialize<'de> for Arguments {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Arguments;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Arguments, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Arguments(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// A call of libibverbs that is a command to the device.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
pub struct Call {
    /// When it began, in nanoseconds since 1970.
    pub time: u64,
    /// How long it took, in nanoseconds.
    pub took: u64,
    /// The thread that has called it.
    #[serde(default)]
    pub thread: u32,
    /// The name of the function, without `ibv_`.
    pub call: String,
    /// The name of the device.
    #[serde(default)]
    pub device: String,
    /// The program's descriptor of the context.
    #[serde(default)]
    pub context: u32,
    /// The object that it is about: type and number.
    pub object: Option<String>,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Arguments,
    /// What it has returned.
    #[serde(default)]
    pub result: Arguments,
    /// The error number; 0 if it has succeeded.
    pub errno: i32,
}

/// An element of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Sge {
    /// Address.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Local key.
    pub lkey: u32,
}

/// Memory of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Remote {
    /// Address.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Datagram {
    /// The number of the queue pair.
    pub qp: u32,
    /// Its Q_Key.
    pub qkey: u32,
}

/// A posted work request.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Post {
    /// When it was posted, in nanoseconds since 1970.
    pub time: u64,
    /// The thread that has posted it.
    #[serde(default)]
    pub thread: u32,
    /// The program's descriptor of the context.
    #[serde(default)]
    pub context: u32,
    /// The number of the queue pair, or the handle of the shared receive queue.
    pub qp: Option<u32>,
    /// As above.
    pub srq: Option<u32>,
    /// A send, not a receive.
    pub send: bool,
    /// The identifier that its completion has.
    pub wr_id: u64,
    /// The operation of a send.
    pub opcode: Option<String>,
    /// Length of the data in bytes.
    pub bytes: u64,
    /// It has a completion also if it succeeds.
    #[serde(default)]
    pub signaled: bool,
    /// Its data was copied when it was posted.
    #[serde(default)]
    pub inline: bool,
    /// The send flags.
    #[serde(default)]
    pub flags: u32,
    /// The memory.
    #[serde(default)]
    pub sges: Vec<Sge>,
    /// The memory of the peer, of RDMA operations and atomics.
    pub remote: Option<Remote>,
    /// The destination, of datagrams.
    pub datagram: Option<Datagram>,
    /// The key that it invalidates.
    pub key: Option<u32>,
    /// The error number; 0 if it was accepted.
    pub errno: i32,
}

/// A completion that the program has polled.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Completion {
    /// When it was polled, in nanoseconds since 1970.
    pub time: u64,
    /// The thread that has polled it.
    #[serde(default)]
    pub thread: u32,
    /// The program's descriptor of the context.
    #[serde(default)]
    pub context: u32,
    /// The handle of the completion queue.
    pub cq: u32,
    /// The number of the queue pair.
    pub qp: Option<u32>,
    /// That of the work request.
    pub wr_id: u64,
    /// The operation, of a successful one.
    pub opcode: Option<String>,
    /// The status, as `ibv_wc_status_str` names it.
    pub status: String,
    /// Length in bytes, of a successful one.
    pub bytes: Option<u32>,
}

/// A work request that no function of libibverbs has posted, as the device has seen it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct DevicePost {
    /// When the device has seen it, in nanoseconds since 1970.
    pub time: u64,
    /// The name of the device.
    #[serde(default)]
    pub device: String,
    /// The number of the queue pair.
    pub qp: u32,
    /// A send, not a receive.
    pub send: bool,
    /// Its number in the queue; it wraps, of a receive after 16 bits.
    pub number: Option<u32>,
    /// The operation of a send, if it is one of libibverbs.
    pub opcode: Option<String>,
    /// Length of the data in bytes.
    pub bytes: u64,
    /// It has a completion also if it succeeds.
    #[serde(default)]
    pub signaled: bool,
    /// It contains data.
    #[serde(default)]
    pub inline: bool,
    /// The memory: the first four elements.
    #[serde(default)]
    pub sges: Vec<Sge>,
    /// The memory of the peer, of RDMA operations and atomics.
    pub remote: Option<Remote>,
}

/// The end of a [`DevicePost`] that has a completion.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct DeviceCompletion {
    /// When it has ended, in nanoseconds since 1970.
    pub time: u64,
    /// The name of the device.
    #[serde(default)]
    pub device: String,
    /// The number of the queue pair.
    pub qp: u32,
    /// Of a send, not of a receive.
    pub send: bool,
    /// That of the work request; none of a shared receive queue.
    pub number: Option<u32>,
    /// The status, as `ibv_wc_status_str` names it.
    pub status: String,
    /// Length in bytes, of a successful one.
    pub bytes: Option<u32>,
}

/// A line of a record.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Event {
    /// The first line.
    Record {
        /// The version of the format.
        version: u32,
        /// The number of the process.
        process: u32,
        /// The name of its program.
        program: String,
        /// The name of its host.
        #[serde(default)]
        host: String,
        /// When the record began, in nanoseconds since 1970.
        start: u64,
    },
    /// A call.
    Call(Call),
    /// A post.
    Post(Post),
    /// A completion.
    Completion(Completion),
    /// A post that only the device has seen.
    #[serde(rename = "device_post")]
    DevicePost(DevicePost),
    /// A completion of one.
    #[serde(rename = "device_completion")]
    DeviceCompletion(DeviceCompletion),
    /// Number of posts and completions in signal handlers, which are not in the record.
    Missed {
        /// The number.
        count: u64,
    },
    /// A line of a later version.
    #[serde(other)]
    Unknown,
}

impl Event {
    /// Parses a line.
    ///
    /// # Errors
    /// [`RecordError::Line`], with the number 0.
    pub fn parse(line: &str) -> Result<Self, RecordError> {
        serde_json::from_str(line).map_err(|error| RecordError::Line(0, error.to_string()))
    }

    /// Returns the time in nanoseconds since 1970, if the line has one.
    pub fn time(&self) -> Option<u64> {
        match self {
            Self::Record { start, .. } => Some(*start),
            Self::Call(call) => Some(call.time),
            Self::Post(post) => Some(post.time),
            Self::Completion(completion) => Some(completion.time),
            Self::DevicePost(post) => Some(post.time),
            Self::DeviceCompletion(completion) => Some(completion.time),
            Self::Missed { .. } | Self::Unknown => None,
        }
    }
}

/// The record of a process.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The number of the process.
    pub process: u32,
    /// The name of its program.
    pub program: String,
    /// Calls, posts and completions in order of time.
    pub events: Vec<Event>,
    /// Number of posts and completions that are missing.
    pub missed: u64,
    /// The last line is incomplete: the process was killed while it was written.
    pub is_cut: bool,
}

/// The reason why a record cannot be read.
#[derive(Debug)]
#[non_exhaustive]
pub enum RecordError {
    /// It cannot be read.
    Read(io::Error),
    /// A line is malformed, with its number and the reason.
    Line(usize, String),
    /// The first line is none of a record.
    NoRecord,
    /// It has another version.
    Version(u32),
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(error) => write!(f, "{error}"),
            Self::Line(number, reason) => write!(f, "line {number}: {reason}"),
            Self::NoRecord => f.write_str("this is no record of `ringverbs run --record`"),
            Self::Version(version) => {
                write!(
                    f,
                    "a record of version {version}; this command reads {VERSION}"
                )
            }
        }
    }
}

impl std::error::Error for RecordError {}

/// Reads a line; `None` at the end.
fn read_line(input: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    io::Read::take(input, MAX_LINE).read_until(b'\n', &mut line)?;
    Ok(Some(line).filter(|line| !line.is_empty()))
}

impl Record {
    /// Reads a record.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn read(mut input: impl BufRead) -> Result<Self, RecordError> {
        let first = read_line(&mut input).map_err(RecordError::Read)?;
        let first = first.ok_or(RecordError::NoRecord)?;
        let first = serde_json::from_slice(&first).map_err(|_| RecordError::NoRecord)?;
        let Event::Record {
            version,
            process,
            program,
            ..
        } = first
        else {
            return Err(RecordError::NoRecord);
        };
        if version != VERSION {
            return Err(RecordError::Version(version));
        }
        let mut record = Self {
            process,
            program,
            events: Vec::new(),
            missed: 0,
            is_cut: false,
        };
        for number in 2.. {
            let Some(line) = read_line(&mut input).map_err(RecordError::Read)? else {
                break;
            };
            match serde_json::from_slice(&line) {
                Ok(Event::Missed { count }) => {
                    record.missed = record.missed.saturating_add(count);
                }
                Ok(Event::Record { .. } | Event::Unknown) => {}
                Ok(event) => record.events.push(event),
                Err(_) if line.last() != Some(&b'\n') => record.is_cut = true,
                Err(error) => return Err(RecordError::Line(number, error.to_string())),
            }
        }
        // Threads write independently.
        record.events.sort_by_key(Event::time);
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = r#"{"type":"record","version":1,"process":7,"program":"a","start":1}"#;

    fn read(lines: &[&str]) -> Result<Record, RecordError> {
        Record::read(lines.join("\n").as_bytes())
    }

    #[test]
    fn events_are_in_order_of_time() {
        let late = r#"{"type":"call","time":3,"took":1,"call":"alloc_pd","errno":0}"#;
        let early = r#"{"type":"post","time":2,"qp":5,"send":true,"wr_id":18446744073709551615,
            "bytes":0,"errno":0,"new":[]}"#
            .replace('\n', "");
        let record = read(&[FIRST, late, &early, r#"{"type":"missed","count":2}"#, ""]).unwrap();
        assert_eq!((record.process, record.missed), (7, 2));
        let times: Vec<_> = record.events.iter().map(Event::time).collect();
        assert_eq!(times, [Some(2), Some(3)]);
        let Event::Post(post) = &record.events[0] else {
            panic!("{record:?}");
        };
        assert_eq!(post.wr_id, u64::MAX);
    }

    #[test]
    fn arguments_keep_their_order() {
        let line = r#"{"type":"call","time":3,"took":1,"call":"x","errno":0,
            "arguments":{"z":1,"a":"b"}}"#;
        let Event::Call(call) = Event::parse(line).unwrap() else {
            panic!("{line}");
        };
        let names: Vec<&str> = call.arguments.iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["z", "a"]);
        assert_eq!(call.arguments.number("z"), Some(1));
        assert_eq!(call.arguments.text("z"), None);
    }

    #[test]
    fn other_files_are_refused() {
        assert!(matches!(read(&[]), Err(RecordError::NoRecord)));
        assert!(matches!(read(&["{}"]), Err(RecordError::NoRecord)));
        let other = FIRST.replace("\"version\":1", "\"version\":2");
        assert!(matches!(read(&[&other]), Err(RecordError::Version(2))));
        let malformed = read(&[FIRST, "{", ""]);
        assert!(matches!(malformed, Err(RecordError::Line(2, _))));
    }

    #[test]
    fn a_count_has_a_limit() {
        let missed = format!(r#"{{"type":"missed","count":{}}}"#, u64::MAX);
        let record = read(&[FIRST, &missed, &missed]).unwrap();
        assert_eq!(record.missed, u64::MAX);
    }

    #[test]
    fn a_killed_process_leaves_a_part_of_a_line() {
        let record = read(&[FIRST, r#"{"type":"ca"#]).unwrap();
        assert!(record.is_cut && record.events.is_empty());
    }
}
