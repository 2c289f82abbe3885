//! The protocol of both sides of a measurement over TCP: one JSON object per
//! line.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the protocol. Sides with different versions refuse each other.
pub const VERSION: u32 = 1;
/// Maximum bytes of a line.
const LINE: u64 = 4096;
/// Maximum size of a measured message, in bytes.
pub const MAX_SIZE: u32 = 1 << 30;
/// Maximum of outstanding operations.
pub const MAX_DEPTH: u32 = 4096;

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

/// The client's first message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub version: u32,
    pub operation: Measured,
    /// Bytes of the largest message.
    pub size: u32,
    /// Maximum of outstanding operations.
    pub depth: u32,
    /// Whether to sleep for completions.
    pub events: bool,
    /// The client's queue pair.
    pub endpoint: String,
}

impl Hello {
    /// Checks whether the server supports it.
    pub fn check(&self) -> Result<(), ProtocolError> {
        if self.version != VERSION {
            return Err(ProtocolError::Version(self.version));
        }
        if self.size == 0 || self.size > MAX_SIZE {
            return Err(ProtocolError::Value("size"));
        }
        if self.depth == 0 || self.depth > MAX_DEPTH {
            return Err(ProtocolError::Value("depth"));
        }
        Ok(())
    }
}

/// The server's answer to a hello.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// The server's queue pair.
    pub endpoint: String,
    /// The address of its memory.
    pub addr: u64,
    /// The rkey of its memory.
    pub rkey: u32,
}

/// The next phase. The server answers with [`Start`] when it is ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Bytes of a message.
    pub size: u32,
    /// Messages that the client sends.
    pub messages: u64,
    /// Whether each is sent back.
    pub echo: bool,
}

/// The server is ready for the phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    pub ready: bool,
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
    Version(u32),
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
    /// Uses a connection. The other side may take a minute to answer, which is
    /// more than a phase should last.
    pub fn over(stream: TcpStream) -> Result<Self, ProtocolError> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.set_write_timeout(Some(Duration::from_secs(10)))?;
        Ok(Self::new(stream))
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
            operation: Measured::Write,
            size: 4096,
            depth: 64,
            events: false,
            endpoint: "000011:000022:0000:3:00".into(),
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
            reads::<Hello>(&[b'x'; 10_000]),
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
            hello.check()
        };
        assert!(check(|_| ()).is_ok());
        assert!(matches!(
            check(|h| h.version = 2),
            Err(ProtocolError::Version(2))
        ));
        assert!(matches!(
            check(|h| h.size = 0),
            Err(ProtocolError::Value("size"))
        ));
        assert!(matches!(
            check(|h| h.size = u32::MAX),
            Err(ProtocolError::Value("size"))
        ));
        assert!(matches!(
            check(|h| h.depth = 0),
            Err(ProtocolError::Value("depth"))
        ));
        assert!(matches!(
            check(|h| h.depth = 5000),
            Err(ProtocolError::Value("depth"))
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = reads::<Hello>(&bytes);
            let _ = reads::<Answer<Welcome>>(&bytes);
        }
    }
}
