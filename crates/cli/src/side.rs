//! The TCP connection by which both ends of `pingpong` and `perf` exchange addresses, and their
//! queue pairs with the paths to the peer.

use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;
use std::{fmt, io};

use ringverbs::qp::QueuePairBuilder;
use ringverbs::{
    AddressHandle, Context, LocalAddress, ProtectionDomain, QueuePair, Source, Transport,
    WorkRequest,
};

use crate::error::Error;

/// Length of the global route header (GRH) before a received datagram.
pub const GRH: usize = 40;
/// The Q_Key of datagrams, that of ibv_ud_pingpong.
const QKEY: u32 = 0x1111_1111;
/// Time in which each address of a host must accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which the other side must make room for a message.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why a side could not be created, or the other one not be reached.
#[derive(Debug)]
pub enum SideError {
    /// The server could not be reached.
    Connect {
        /// Host and port of the server.
        to: String,
        /// The reason.
        source: io::Error,
    },
    /// The port cannot be listened on.
    Listen {
        /// The port.
        port: u16,
        /// The reason.
        source: io::Error,
    },
    /// A client's connection could not be accepted.
    Accept(io::Error),
    /// A message does not fit into a datagram.
    MessageTooLong {
        /// The port's MTU.
        mtu: u32,
    },
}

impl fmt::Display for SideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect { to, source } => write!(
                f,
                "connecting to {to}: {source}; is a server running there?"
            ),
            Self::Listen { port, source } => write!(
                f,
                "listening on TCP port {port}: {source}; choose another port with --port"
            ),
            Self::Accept(source) => write!(f, "accepting the client's connection: {source}"),
            Self::MessageTooLong { mtu } => write!(
                f,
                "a datagram carries at most the port's MTU, {mtu} bytes; choose smaller messages"
            ),
        }
    }
}

impl std::error::Error for SideError {}

impl From<SideError> for Error {
    fn from(error: SideError) -> Self {
        Self::subcommand(error)
    }
}

/// Listens on IPv6 and IPv4; without IPv6, on IPv4.
pub fn listen(port: u16) -> Result<TcpListener, SideError> {
    TcpListener::bind(("::", port))
        .or_else(|_| TcpListener::bind(("0.0.0.0", port)))
        .map_err(|source| SideError::Listen { port, source })
}

/// Accepts one client.
pub fn accept(listener: &TcpListener) -> Result<TcpStream, SideError> {
    let accepted = listener.accept().map_err(SideError::Accept);
    accepted.map(|(stream, _)| stream)
}

/// Connects to the first address of a host that accepts.
pub fn connect(host: &str, port: u16) -> Result<TcpStream, SideError> {
    let connect = || {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in (host, port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    connect().map_err(|source| SideError::Connect {
        to: format!("{host} port {port}"),
        source,
    })
}

/// Lets messages leave at once, and reads and writes time out.
pub fn set_options(stream: &TcpStream, read_timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(read_timeout))?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))
}

/// Returns whether the other side did not respond in time.
pub fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// A port, and the protection domain of what a side creates on it.
pub struct SidePort {
    pub address: LocalAddress,
    pub domain: ProtectionDomain,
}

impl SidePort {
    /// Prepares a port, with the GID of an index or the default one, for messages of up to
    /// `size` bytes.
    pub fn new(
        context: &Context,
        (port, gid_index): (u8, Option<u8>),
        transport: Transport,
        size: u32,
    ) -> Result<Self, Error> {
        let address = match gid_index {
            Some(index) => context.local_address_with(port, index),
            None => context.local_address(port),
        };
        let address = address.map_err(Error::verb("the port's address"))?;
        let mtu = address.mtu.bytes();
        if transport == Transport::Datagram && size > mtu {
            return Err(SideError::MessageTooLong { mtu }.into());
        }
        let domain = context.alloc_pd();
        Ok(Self {
            address,
            domain: domain.map_err(Error::verb("protection domain"))?,
        })
    }
}

/// A queue pair and, for datagrams, its destination.
pub struct AddressedQp {
    pub qp: QueuePair,
    destination: Option<(AddressHandle, u32)>,
}

impl AddressedQp {
    /// Creates a queue pair in state INIT, or RTS for datagrams: receives can be posted.
    pub fn new(builder: QueuePairBuilder, local: &LocalAddress) -> ringverbs::Result<Self> {
        let mut qp = builder.build()?;
        match qp.transport() {
            Transport::Datagram => qp.activate(local, QKEY)?,
            _ => qp.initialize(local)?,
        }
        Ok(Self {
            qp,
            destination: None,
        })
    }

    /// Sets the destination of datagrams.
    pub fn set_destination(&mut self, path: AddressHandle, qp_num: u32) {
        self.destination = Some((path, qp_num));
    }

    /// Returns a send, to the destination if there is one.
    pub fn send<D: Source>(&self, data: D) -> WorkRequest<D> {
        let request = WorkRequest::send(data);
        match &self.destination {
            Some((path, qp_num)) => request.to(path, *qp_num, QKEY),
            None => request,
        }
    }
}
