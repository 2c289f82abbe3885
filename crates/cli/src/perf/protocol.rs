//! The protocol of both sides of a measurement over TCP: one JSON object per
//! line.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use ringverbs::Transport;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the protocol. Sides with different versions refuse each other.
pub const VERSION: u32 = 2;
/// Maximum bytes of a line. An endpoint has some 60, so [`MAX_QUEUE_PAIRS`] fit.
const LINE: u64 = 32768;
/// Maximum size of a measured message, in bytes.
pub const MAX_SIZE: u32 = 1 << 30;
/// Maximum of outstanding operations of a queue pair.
pub const MAX_DEPTH: u32 = 4096;
/// Maximum of queue pairs.
pub const MAX_QUEUE_PAIRS: u32 = 256;
/// Maximum of outstanding operations of all queue pairs.
pub const MAX_OUTSTANDING: u32 = 1 << 16;

/// The measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Measured {
    /// Sends, which the other side receives
    Send,
    /// RDMA writes to the other side's memory
    Write,
    /// RDMA reads of the other side's memory
    Read,
    /// Fetch-and-add to 8 bytes of the other side's memory
    Atomic,
}

impl Measured {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
            Self::Atomic => "atomic",
        }
    }
}

/// The transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Type {
    /// Reliable connection: all operations
    Rc,
    /// Unreliable connection: sends and writes
    Uc,
    /// Unreliable datagrams: sends of up to one packet
    Ud,
}

impl Type {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
        }
    }

    pub fn native(self) -> Transport {
        match self {
            Self::Rc => Transport::Reliable,
            Self::Uc => Transport::Unreliable,
            Self::Ud => Transport::Datagram,
        }
    }

    /// Returns whether messages may be lost.
    pub fn is_lossy(self) -> bool {
        self != Self::Rc
    }

    /// Returns whether it has an operation.
    pub fn has(self, operation: Measured) -> bool {
        match self {
            Self::Rc => true,
            Self::Uc => matches!(operation, Measured::Send | Measured::Write),
            Self::Ud => operation == Measured::Send,
        }
    }
}

/// What both sides must know to create their objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    pub operation: Measured,
    pub transport: Type,
    /// Bytes of the largest message.
    pub size: u32,
    /// Maximum of outstanding operations of a queue pair.
    pub depth: u32,
    pub queue_pairs: u32,
    /// Whether to sleep for completions.
    pub events: bool,
    /// Whether both sides post operations.
    pub bidirectional: bool,
}

impl Setup {
    /// Checks whether the numbers are in their ranges.
    pub fn check(&self) -> Result<(), ProtocolError> {
        let within = |value: u32, max: u32| (1..=max).contains(&value);
        let outstanding = self.depth.saturating_mul(self.queue_pairs);
        for (what, right) in [
            ("size", within(self.size, MAX_SIZE)),
            ("depth", within(self.depth, MAX_DEPTH)),
            (
                "number of queue pairs",
                within(self.queue_pairs, MAX_QUEUE_PAIRS),
            ),
            ("depth", within(outstanding, MAX_OUTSTANDING)),
            ("operation", self.transport.has(self.operation)),
        ] {
            if !right {
                return Err(ProtocolError::Value(what));
            }
        }
        Ok(())
    }

    /// Returns whether messages consume receives and are answered when latency is
    /// measured: sends, and unreliable writes, which carry immediate data, because
    /// their completions tell nothing of the other side.
    pub fn is_received(&self) -> bool {
        self.operation == Measured::Send || self.transport.is_lossy()
    }
}

/// The memory of a side for the other one's operations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    pub addr: u64,
    pub rkey: u32,
}

/// A side: its queue pairs and memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Address {
    pub endpoints: Vec<String>,
    pub memory: Memory,
}

/// The client's first message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub version: u32,
    pub setup: Setup,
    pub address: Address,
}

impl Hello {
    /// Reads it. A client of another version says only that.
    pub fn parse(value: serde_json::Value) -> Result<Self, ProtocolError> {
        if let Some(version) = value.get("version").and_then(serde_json::Value::as_u64) {
            if version != u64::from(VERSION) {
                return Err(ProtocolError::Version(version));
            }
        }
        let hello: Self = serde_json::from_value(value).map_err(ProtocolError::Malformed)?;
        hello.setup.check()?;
        Ok(hello)
    }
}

/// How long a phase lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Goal {
    Operations(u64),
    Milliseconds(u64),
}

/// The next phase. The server answers with [`Start`] when it is ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// The number of the phase, which lossy messages carry.
    pub number: u8,
    /// Bytes of a message.
    pub size: u32,
    /// Whether each message is sent back.
    pub echo: bool,
    /// Operations of the server, if it posts any.
    pub goal: Option<Goal>,
}

/// The server is ready for the phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    pub ready: bool,
}

/// The client's operations have completed. The server answers with [`Done`] when
/// its own have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Number of the client's operations.
    pub operations: u64,
}

/// The end of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Messages received from the client.
    pub received: u64,
    /// Number of the server's operations.
    pub operations: u64,
    /// Their time.
    pub nanoseconds: u64,
}

/// An answer: the requested value, or the reason of a refusal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer<T> {
    Yes(T),
    No(String),
}

/// The reason why the communication failed.
#[derive(Debug)]
pub enum ProtocolError {
    /// The connection failed.
    Io(io::Error),
    /// The other side has closed the connection.
    Closed,
    /// A line is too long.
    TooLong,
    /// A line is malformed.
    Malformed(serde_json::Error),
    /// The other side has another version.
    Version(u64),
    /// A number is out of range.
    Value(&'static str),
    /// The other side has refused.
    Refused(String),
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "the connection to the other side: {error}"),
            Self::Closed => f.write_str("the other side has closed the connection"),
            Self::TooLong => write!(
                f,
                "the other side sent a line of more than {LINE} bytes; is it `ringverbs perf`?"
            ),
            Self::Malformed(error) => write!(
                f,
                "the other side sent a malformed message ({error}); is it `ringverbs perf`?"
            ),
            Self::Version(version) => write!(
                f,
                "the other side speaks version {version}, this one {VERSION}; use the same ringverbs"
            ),
            Self::Value(what) => write!(f, "the other side's {what} is out of range"),
            Self::Refused(why) => write!(f, "the other side refuses: {why}"),
        }
    }
}

impl std::error::Error for ProtocolError {}

impl From<io::Error> for ProtocolError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A connection to the other side.
#[derive(Debug)]
pub struct PeerConnection<S> {
    stream: BufReader<S>,
}

impl PeerConnection<TcpStream> {
    /// Uses a connection. Its first answer must come within a minute.
    pub fn over(stream: TcpStream) -> Result<Self, ProtocolError> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.set_write_timeout(Some(Duration::from_secs(10)))?;
        Ok(Self::new(stream))
    }

    /// From now on an answer may take as long as a phase does. If the other host is
    /// gone, TCP notices within half a minute.
    pub fn be_patient(&self) -> Result<(), ProtocolError> {
        let stream = self.stream.get_ref();
        stream.set_read_timeout(None)?;
        let set = setsockopt(stream, sockopt::KeepAlive, &true)
            .and_then(|()| setsockopt(stream, sockopt::TcpKeepIdle, &10))
            .and_then(|()| setsockopt(stream, sockopt::TcpKeepInterval, &5))
            .and_then(|()| setsockopt(stream, sockopt::TcpKeepCount, &3));
        Ok(set.map_err(io::Error::from)?)
    }

    /// Returns whether [`receive`](Self::receive) has something to read, be it the
    /// end.
    pub fn has_arrived(&self) -> Result<bool, ProtocolError> {
        if !self.stream.buffer().is_empty() {
            return Ok(true);
        }
        let mut files = [PollFd::new(
            self.stream.get_ref().as_fd(),
            PollFlags::POLLIN,
        )];
        match poll(&mut files, PollTimeout::ZERO) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::EINTR) => Ok(false),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }
}

impl<S: Read + Write> PeerConnection<S> {
    fn new(stream: S) -> Self {
        Self {
            stream: BufReader::new(stream),
        }
    }

    /// Sends a message.
    pub fn send(&mut self, what: &impl Serialize) -> Result<(), ProtocolError> {
        let mut line = serde_json::to_vec(what).map_err(ProtocolError::Malformed)?;
        line.push(b'\n');
        Ok(self.stream.get_mut().write_all(&line)?)
    }

    /// Receives a message. The end of the connection is
    /// [`ProtocolError::Closed`].
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<T, ProtocolError> {
        let mut line = Vec::new();
        let read = (&mut self.stream).take(LINE).read_until(b'\n', &mut line)?;
        match line.last() {
            None => Err(ProtocolError::Closed),
            Some(b'\n') => serde_json::from_slice(&line).map_err(ProtocolError::Malformed),
            Some(_) if read as u64 == LINE => Err(ProtocolError::TooLong),
            Some(_) => Err(ProtocolError::Closed),
        }
    }

    /// Sends a message and receives the answer.
    pub fn request<T: DeserializeOwned>(
        &mut self,
        what: &impl Serialize,
    ) -> Result<T, ProtocolError> {
        self.send(what)?;
        self.answer()
    }

    /// Receives the answer to a message.
    pub fn answer<T: DeserializeOwned>(&mut self) -> Result<T, ProtocolError> {
        match self.receive()? {
            Answer::Yes(answer) => Ok(answer),
            Answer::No(why) => Err(ProtocolError::Refused(why)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    fn reads<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ProtocolError> {
        PeerConnection::new(Cursor::new(bytes.to_vec())).receive()
    }

    fn hello() -> Hello {
        Hello {
            version: VERSION,
            setup: Setup {
                operation: Measured::Write,
                transport: Type::Rc,
                size: 4096,
                depth: 64,
                queue_pairs: 1,
                events: false,
                bidirectional: false,
            },
            address: Address {
                endpoints: vec!["000011:000022:0000:3:00".into()],
                memory: Memory { addr: 1, rkey: 2 },
            },
        }
    }

    #[test]
    fn messages_are_read_as_written() {
        let mut line = PeerConnection::new(Cursor::new(Vec::new()));
        line.send(&hello()).unwrap();
        line.send(&Answer::Yes(Start { ready: true })).unwrap();
        let mut line = PeerConnection::new(Cursor::new(line.stream.into_inner().into_inner()));
        assert_eq!(line.receive::<Hello>().unwrap(), hello());
        assert_eq!(
            line.receive::<Answer<Start>>().unwrap(),
            Answer::Yes(Start { ready: true })
        );
        assert!(matches!(
            line.receive::<Start>(),
            Err(ProtocolError::Closed)
        ));
    }

    #[test]
    fn malformed_messages_are_refused() {
        assert!(matches!(reads::<Hello>(b""), Err(ProtocolError::Closed)));
        assert!(matches!(
            reads::<Hello>(b"{\"version\":1"),
            Err(ProtocolError::Closed)
        ));
        assert!(matches!(
            reads::<Hello>(b"GET / HTTP/1.1\r\n"),
            Err(ProtocolError::Malformed(_))
        ));
        assert!(matches!(
            reads::<Hello>(&[b'x'; 40_000]),
            Err(ProtocolError::TooLong)
        ));
        assert!(matches!(
            reads::<Start>(b"{\"ready\":7}\n"),
            Err(ProtocolError::Malformed(_))
        ));
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let check = |change: fn(&mut Hello)| {
            let mut hello = hello();
            change(&mut hello);
            Hello::parse(serde_json::to_value(hello).unwrap()).map(|_| ())
        };
        let refused = |change, expect: &str| match check(change) {
            Err(ProtocolError::Value(what)) => assert_eq!(what, expect),
            other => panic!("{expect}: {other:?}"),
        };
        assert!(check(|_| ()).is_ok());
        refused(|hello| hello.setup.size = 0, "size");
        refused(|hello| hello.setup.size = u32::MAX, "size");
        refused(|hello| hello.setup.depth = 0, "depth");
        refused(|hello| hello.setup.depth = 5000, "depth");
        refused(|hello| hello.setup.queue_pairs = 0, "number of queue pairs");
        refused(
            |hello| (hello.setup.depth, hello.setup.queue_pairs) = (4096, 256),
            "depth",
        );
        refused(|hello| hello.setup.transport = Type::Ud, "operation");
    }

    #[test]
    fn another_version_is_named() {
        let first = r#"{"version":1,"operation":"write","size":8,"depth":1}"#;
        let parsed = Hello::parse(serde_json::from_str(first).unwrap());
        assert!(
            matches!(parsed, Err(ProtocolError::Version(1))),
            "{parsed:?}"
        );
        let none = Hello::parse(serde_json::from_str("{}").unwrap());
        assert!(matches!(none, Err(ProtocolError::Malformed(_))), "{none:?}");
    }

    #[test]
    fn endpoints_of_all_queue_pairs_fit_in_a_line() {
        let mut hello = hello();
        let endpoint = "ffffff:ffffff:ffff:5:ffffffffffffffffffffffffffffffff";
        hello.address.endpoints = vec![endpoint.into(); MAX_QUEUE_PAIRS as usize];
        let line = serde_json::to_vec(&hello).unwrap();
        assert!((line.len() as u64) < LINE, "{}", line.len());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = reads::<Hello>(&bytes);
            let _ = reads::<Answer<Address>>(&bytes);
        }
    }
}
