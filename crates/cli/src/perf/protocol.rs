//! The protocol between the two sides of a measurement, over TCP: one JSON object per
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

use crate::side::{is_timeout, set_options};

/// Version of the protocol. Sides with different versions refuse each other.
pub const VERSION: u32 = 2;
/// Maximum length of a line. An endpoint has about 60 bytes, so [`MAX_QUEUE_PAIRS`] fit.
const MAX_LINE: u64 = 32768;
/// Maximum size of a measured message, in bytes.
pub const MAX_SIZE: u32 = 1 << 30;
/// Maximum number of outstanding operations of a queue pair.
pub const MAX_DEPTH: u32 = 4096;
/// Maximum number of queue pairs.
pub const MAX_QUEUE_PAIRS: u32 = 256;
/// Maximum number of outstanding operations of all queue pairs.
pub const MAX_OUTSTANDING: u32 = 1 << 16;

/// The measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PerfOperation {
    /// Sends, which the other side receives
    Send,
    /// RDMA writes to the other side's memory
    Write,
    /// RDMA reads of the other side's memory
    Read,
    /// Fetch-and-add to 8 bytes of the other side's memory
    Atomic,
}

impl PerfOperation {
    /// Returns the name.
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
pub enum PerfTransport {
    /// Reliable connection: all operations
    Rc,
    /// Unreliable connection: sends and writes
    Uc,
    /// Unreliable datagrams: sends of up to one packet
    Ud,
}

impl PerfTransport {
    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
        }
    }

    pub fn qp_transport(self) -> Transport {
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

    /// Returns whether the transport supports an operation.
    pub fn supports(self, operation: PerfOperation) -> bool {
        match self {
            Self::Rc => true,
            Self::Uc => matches!(operation, PerfOperation::Send | PerfOperation::Write),
            Self::Ud => operation == PerfOperation::Send,
        }
    }
}

/// The options that both sides need to create their objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    pub operation: PerfOperation,
    pub transport: PerfTransport,
    /// Largest message size in bytes.
    pub size: u32,
    /// Maximum number of outstanding operations of a queue pair.
    pub depth: u32,
    pub queue_pairs: u32,
    /// Whether to wait for completion events.
    pub events: bool,
    /// Whether both sides post operations.
    pub bidirectional: bool,
}

impl Setup {
    /// Checks the ranges of the numbers.
    pub fn check(&self) -> Result<(), ProtocolError> {
        let is_valid = |value: u32, max: u32| (1..=max).contains(&value);
        let outstanding = self.depth.saturating_mul(self.queue_pairs);
        for (field, valid) in [
            ("size", is_valid(self.size, MAX_SIZE)),
            ("depth", is_valid(self.depth, MAX_DEPTH)),
            (
                "number of queue pairs",
                is_valid(self.queue_pairs, MAX_QUEUE_PAIRS),
            ),
            ("depth", is_valid(outstanding, MAX_OUTSTANDING)),
            ("operation", self.transport.supports(self.operation)),
        ] {
            if !valid {
                return Err(ProtocolError::Value(field));
            }
        }
        Ok(())
    }

    /// Returns whether messages consume receives, and latency is that of a round trip. That
    /// holds for sends, and for unreliable writes: their completions do not show that the
    /// data arrived, so they carry immediate data.
    pub fn consumes_receives(&self) -> bool {
        self.operation == PerfOperation::Send || self.transport.is_lossy()
    }
}

/// A side's memory for the operations of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    pub addr: u64,
    pub rkey: u32,
}

/// The addresses of a side's queue pairs and memory.
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
    /// Parses the message. Of a client of another version only the version is read.
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

/// Begins a phase. The server responds with [`PhaseReady`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// The number of the phase, which the immediate data of lossy messages contains.
    pub number: u8,
    /// Message size in bytes.
    pub size: u32,
    /// Whether each message is sent back.
    pub echo: bool,
    /// Operations that the server posts, if any.
    pub goal: Option<Goal>,
}

/// The response to [`Phase`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseReady {
    pub ready: bool,
}

/// The client's operations have completed. The server responds with [`PhaseResult`] when
/// its own operations have completed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseEnd {
    /// Number of the client's operations.
    pub operations: u64,
}

/// The response to [`PhaseEnd`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseResult {
    /// Messages received from the client.
    pub received: u64,
    /// Number of the server's operations.
    pub operations: u64,
    /// Time from the first of them to the last completion.
    pub nanoseconds: u64,
}

/// A response: the requested value, or the reason for a refusal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Response<T> {
    #[serde(rename = "yes")]
    Accepted(T),
    #[serde(rename = "no")]
    Refused(String),
}

/// The reason why the exchange of messages failed.
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
    /// The other side has this version of the protocol.
    Version(u64),
    /// The value of this field is out of range.
    Value(&'static str),
    /// The other side has refused, for this reason.
    Refused(String),
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) if is_timeout(error) => {
                f.write_str("the other side did not respond in time; is it `ringverbs perf`?")
            }
            Self::Io(error) => write!(f, "connection to the other side: {error}"),
            Self::Closed => f.write_str("the other side has closed the connection"),
            Self::TooLong => write!(
                f,
                "the other side sent a line of more than {MAX_LINE} bytes; is it `ringverbs perf`?"
            ),
            Self::Malformed(error) => write!(
                f,
                "the other side sent a malformed message ({error}); is it `ringverbs perf`?"
            ),
            Self::Version(version) => write!(
                f,
                "the other side has protocol version {version}, this one {VERSION}; \
                 use the same release of ringverbs"
            ),
            Self::Value(field) => write!(f, "the other side's {field} is out of range"),
            Self::Refused(reason) => write!(f, "the other side refuses: {reason}"),
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
    /// Wraps a connection. Reads time out after a minute, writes after ten seconds.
    pub fn from_stream(stream: TcpStream) -> Result<Self, ProtocolError> {
        set_options(&stream, Duration::from_secs(60))?;
        Ok(Self::new(stream))
    }

    /// Lets reads block without a timeout, since phases may be long. TCP keepalive detects
    /// within half a minute that the other host is gone.
    pub fn disable_read_timeout(&self) -> Result<(), ProtocolError> {
        let stream = self.stream.get_ref();
        stream.set_read_timeout(None)?;
        let set = setsockopt(stream, sockopt::KeepAlive, &true)
            .and_then(|()| setsockopt(stream, sockopt::TcpKeepIdle, &10))
            .and_then(|()| setsockopt(stream, sockopt::TcpKeepInterval, &5))
            .and_then(|()| setsockopt(stream, sockopt::TcpKeepCount, &3));
        Ok(set.map_err(io::Error::from)?)
    }

    /// Returns whether data, or the end of the connection, can be read without blocking.
    pub fn is_readable(&self) -> Result<bool, ProtocolError> {
        Ok(!self.stream.buffer().is_empty() || self.poll(PollFlags::POLLIN)?)
    }

    /// Fails with [`ProtocolError::Closed`] if the other side has closed the connection,
    /// whether or not it has sent data before.
    pub fn check_open(&self) -> Result<(), ProtocolError> {
        match self.poll(PollFlags::from_bits_retain(libc::POLLRDHUP))? {
            true => Err(ProtocolError::Closed),
            false => Ok(()),
        }
    }

    fn poll(&self, flags: PollFlags) -> Result<bool, ProtocolError> {
        let mut descriptors = [PollFd::new(self.stream.get_ref().as_fd(), flags)];
        match poll(&mut descriptors, PollTimeout::ZERO) {
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
    pub fn send(&mut self, message: &impl Serialize) -> Result<(), ProtocolError> {
        let mut line = serde_json::to_vec(message).map_err(ProtocolError::Malformed)?;
        line.push(b'\n');
        Ok(self.stream.get_mut().write_all(&line)?)
    }

    /// Receives a message. The end of the connection is
    /// [`ProtocolError::Closed`].
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<T, ProtocolError> {
        let mut line = Vec::new();
        let read = (&mut self.stream)
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)?;
        match line.last() {
            None => Err(ProtocolError::Closed),
            Some(b'\n') => serde_json::from_slice(&line).map_err(ProtocolError::Malformed),
            Some(_) if read as u64 == MAX_LINE => Err(ProtocolError::TooLong),
            Some(_) => Err(ProtocolError::Closed),
        }
    }

    /// Sends a message and receives the response.
    pub fn request<T: DeserializeOwned>(
        &mut self,
        message: &impl Serialize,
    ) -> Result<T, ProtocolError> {
        self.send(message)?;
        self.response()
    }

    /// Receives the response to a message.
    pub fn response<T: DeserializeOwned>(&mut self) -> Result<T, ProtocolError> {
        match self.receive()? {
            Response::Accepted(value) => Ok(value),
            Response::Refused(reason) => Err(ProtocolError::Refused(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ProtocolError> {
        PeerConnection::new(Cursor::new(bytes.to_vec())).receive()
    }

    fn hello() -> Hello {
        Hello {
            version: VERSION,
            setup: Setup {
                operation: PerfOperation::Write,
                transport: PerfTransport::Rc,
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
    fn receive_returns_what_was_sent() {
        let mut sender = PeerConnection::new(Cursor::new(Vec::new()));
        sender.send(&hello()).unwrap();
        sender
            .send(&Response::Accepted(PhaseReady { ready: true }))
            .unwrap();
        let mut receiver =
            PeerConnection::new(Cursor::new(sender.stream.into_inner().into_inner()));
        assert_eq!(receiver.receive::<Hello>().unwrap(), hello());
        assert_eq!(
            receiver.receive::<Response<PhaseReady>>().unwrap(),
            Response::Accepted(PhaseReady { ready: true })
        );
        assert!(matches!(
            receiver.receive::<PhaseReady>(),
            Err(ProtocolError::Closed)
        ));
    }

    #[test]
    fn malformed_messages_are_refused() {
        assert!(matches!(parse::<Hello>(b""), Err(ProtocolError::Closed)));
        assert!(matches!(
            parse::<Hello>(b"{\"version\":1"),
            Err(ProtocolError::Closed)
        ));
        assert!(matches!(
            parse::<Hello>(b"GET / HTTP/1.1\r\n"),
            Err(ProtocolError::Malformed(_))
        ));
        assert!(matches!(
            parse::<Hello>(&[b'x'; 40_000]),
            Err(ProtocolError::TooLong)
        ));
        assert!(matches!(
            parse::<PhaseReady>(b"{\"ready\":7}\n"),
            Err(ProtocolError::Malformed(_))
        ));
    }

    #[test]
    fn silence_is_reported_as_such() {
        let (ours, _silent) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1)))
            .unwrap();
        let error = PeerConnection::new(ours).receive::<Hello>().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("did not respond in time"), "{text}");
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let check = |change: fn(&mut Hello)| {
            let mut hello = hello();
            change(&mut hello);
            Hello::parse(serde_json::to_value(hello).unwrap()).map(|_| ())
        };
        let refused = |change, expected: &str| match check(change) {
            Err(ProtocolError::Value(field)) => assert_eq!(field, expected),
            other => panic!("{expected}: {other:?}"),
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
        refused(
            |hello| hello.setup.transport = PerfTransport::Ud,
            "operation",
        );
    }

    #[test]
    fn other_version_is_reported() {
        let version_1 = r#"{"version":1,"operation":"write","size":8,"depth":1}"#;
        let parsed = Hello::parse(serde_json::from_str(version_1).unwrap());
        assert!(
            matches!(parsed, Err(ProtocolError::Version(1))),
            "{parsed:?}"
        );
        let no_version = Hello::parse(serde_json::from_str("{}").unwrap());
        assert!(
            matches!(no_version, Err(ProtocolError::Malformed(_))),
            "{no_version:?}"
        );
    }

    #[test]
    fn endpoints_of_all_queue_pairs_fit_in_a_line() {
        let mut hello = hello();
        let endpoint = "ffffff:ffffff:ffff:5:ffffffffffffffffffffffffffffffff";
        hello.address.endpoints = vec![endpoint.into(); MAX_QUEUE_PAIRS as usize];
        let line = serde_json::to_vec(&hello).unwrap();
        assert!((line.len() as u64) < MAX_LINE, "{}", line.len());
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse::<Hello>(&bytes);
            let _ = parse::<Response<Address>>(&bytes);
        }
    }
}
