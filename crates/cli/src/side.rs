//! The TCP connection by which both ends of `pingpong` and `perf` exchange addresses, and their
//! queue pairs with the paths to the peer.

use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use ringverbs::qp::QueuePairBuilder;
use ringverbs::{
    AddressHandle, Context, LocalAddress, QueuePair, Result, Source, Transport, WorkRequest,
};

/// Length of the global route header (GRH) before a received datagram.
pub const GRH: usize = 40;
/// The Q_Key of datagrams, that of ibv_ud_pingpong.
const QKEY: u32 = 0x1111_1111;
/// Time in which each address of a host must accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Listens on IPv6 and IPv4; without IPv6, on IPv4.
pub fn listen(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))
}

/// Connects to the first address of a host that accepts.
pub fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns the address of a port, with the GID of an index or the default one.
pub fn local_address(context: &Context, port: u8, gid_index: Option<u8>) -> Result<LocalAddress> {
    match gid_index {
        Some(index) => context.local_address_with(port, index),
        None => context.local_address(port),
    }
}

/// A queue pair and, for datagrams, its destination.
pub struct AddressedQp {
    pub qp: QueuePair,
    destination: Option<(AddressHandle, u32)>,
}

impl AddressedQp {
    /// Creates a queue pair in state INIT, or RTS for datagrams: receives can be posted.
    pub fn new(builder: QueuePairBuilder, local: &LocalAddress) -> Result<Self> {
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
