//! Connecting fabrics of several processes: a trunk carries frames over a datagram
//! socket.

use std::io;
use std::net::UdpSocket;
use std::os::unix::net::UnixDatagram;

use super::{Fabric, Port};
use crate::packet::{LinkKind, PACKET_CAPACITY, Packet, Pool};

/// A connected, non-blocking datagram socket.
pub trait DatagramSocket {
    /// Sends one datagram.
    ///
    /// # Errors
    /// The error of the socket; [`io::ErrorKind::WouldBlock`] if it is full.
    fn send(&self, datagram: &[u8]) -> io::Result<()>;

    /// Receives one datagram. Returns its length.
    ///
    /// # Errors
    /// The error of the socket; [`io::ErrorKind::WouldBlock`] if there is none.
    fn recv(&self, datagram: &mut [u8]) -> io::Result<usize>;
}

impl DatagramSocket for UnixDatagram {
    fn send(&self, datagram: &[u8]) -> io::Result<()> {
        Self::send(self, datagram).map(|_| ())
    }

    fn recv(&self, datagram: &mut [u8]) -> io::Result<usize> {
        Self::recv(self, datagram)
    }
}

impl DatagramSocket for UdpSocket {
    fn send(&self, datagram: &[u8]) -> io::Result<()> {
        Self::send(self, datagram).map(|_| ())
    }

    fn recv(&self, datagram: &mut [u8]) -> io::Result<usize> {
        Self::recv(self, datagram)
    }
}

/// Each datagram begins with the kind of its frame.
const IB: u8 = 0;
const ETHERNET: u8 = 1;
const IP: u8 = 2;

/// One end of a connection between two fabrics. Frames for no port of this fabric
/// go to the other one, and frames from there are delivered here. To connect more
/// than two fabrics, each pair needs its own trunk.
///
/// A full socket loses frames, as a network does.
pub struct Trunk<W> {
    port: Port,
    socket: W,
    pool: Pool,
    /// One byte longer than the largest frame, for the kind.
    buffer: Box<[u8]>,
}

impl<W: DatagramSocket> Trunk<W> {
    /// Adds an uplink to `fabric`. The socket must be non-blocking.
    #[must_use]
    pub fn new(fabric: &Fabric, pool: Pool, socket: W) -> Self {
        let buffer = vec![0; PACKET_CAPACITY + 1].into_boxed_slice();
        Self {
            port: fabric.uplink(),
            socket,
            pool,
            buffer,
        }
    }

    /// The socket, to poll for readiness.
    #[must_use]
    pub fn socket(&self) -> &W {
        &self.socket
    }

    /// The uplink port, for its waker, faults and counters.
    #[must_use]
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Moves up to `limit` frames each way. Returns whether there were any.
    ///
    /// # Errors
    /// Any error of the socket except [`io::ErrorKind::WouldBlock`].
    pub fn pump(&mut self, now: u64, limit: usize) -> io::Result<bool> {
        let mut active = false;
        for _ in 0..limit {
            let Some(packet) = self.port.recv(now) else {
                break;
            };
            active = true;
            let length = self.encode(&packet);
            match self.socket.send(&self.buffer[..length]) {
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                _ => {}
            }
        }
        for _ in 0..limit {
            let length = match self.socket.recv(&mut self.buffer) {
                Ok(length) => length,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            };
            active = true;
            // Discards datagrams that are empty, of unknown kind, or too long for a
            // frame.
            let Some((&kind, frame)) = self.buffer[..length].split_first() else {
                continue;
            };
            let kind = match kind {
                IB => LinkKind::Ib,
                ETHERNET => LinkKind::Ethernet,
                IP => LinkKind::Ip,
                _ => continue,
            };
            if let Some(packet) = self.pool.copy_of(kind, frame) {
                self.port.send(now, packet);
            }
        }
        Ok(active)
    }

    /// Encodes a frame into the buffer. Returns the length of the datagram.
    fn encode(&mut self, packet: &Packet) -> usize {
        let frame = packet.frame();
        self.buffer[0] = match packet.kind() {
            LinkKind::Ib => IB,
            LinkKind::Ethernet => ETHERNET,
            LinkKind::Ip => IP,
        };
        self.buffer[1..=frame.len()].copy_from_slice(frame);
        frame.len() + 1
    }
}
