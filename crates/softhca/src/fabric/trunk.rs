//! A fabric that spans processes: frames between two of them over a datagram
//! socket.

use std::io;
use std::net::UdpSocket;
use std::os::unix::net::UnixDatagram;

use super::{Fabric, Port};
use crate::packet::{CAPACITY, LinkKind, Packet, Pool};

/// A connected, non-blocking datagram socket.
pub trait Wire {
    /// Sends one datagram.
    ///
    /// # Errors
    /// As the socket says; [`io::ErrorKind::WouldBlock`] if it is full.
    fn send(&self, datagram: &[u8]) -> io::Result<()>;

    /// Receives one datagram; its length.
    ///
    /// # Errors
    /// As the socket says; [`io::ErrorKind::WouldBlock`] if there is none.
    fn recv(&self, datagram: &mut [u8]) -> io::Result<usize>;
}

impl Wire for UnixDatagram {
    fn send(&self, datagram: &[u8]) -> io::Result<()> {
        Self::send(self, datagram).map(|_| ())
    }

    fn recv(&self, datagram: &mut [u8]) -> io::Result<usize> {
        Self::recv(self, datagram)
    }
}

impl Wire for UdpSocket {
    fn send(&self, datagram: &[u8]) -> io::Result<()> {
        Self::send(self, datagram).map(|_| ())
    }

    fn recv(&self, datagram: &mut [u8]) -> io::Result<usize> {
        Self::recv(self, datagram)
    }
}

/// The kind of frame, before the frame in each datagram.
const IB: u8 = 0;
const ETHERNET: u8 = 1;

/// One end of a connection between two fabrics. What is for nobody in this fabric
/// goes to the other, and what comes from there is delivered here; between more
/// than two fabrics each pair needs its own.
///
/// A socket that is full loses frames, as a network does.
pub struct Trunk<W> {
    port: Port,
    wire: W,
    pool: Pool,
    /// A byte more than the largest frame, for the kind.
    buffer: Box<[u8]>,
}

impl<W: Wire> Trunk<W> {
    /// Adds an uplink to `fabric`. The socket is to be non-blocking.
    #[must_use]
    pub fn new(fabric: &Fabric, pool: Pool, wire: W) -> Self {
        let buffer = vec![0; CAPACITY + 1].into_boxed_slice();
        Self {
            port: fabric.uplink(),
            wire,
            pool,
            buffer,
        }
    }

    /// The socket, to wait for.
    #[must_use]
    pub fn wire(&self) -> &W {
        &self.wire
    }

    /// The uplink: for its waker, faults and counters.
    #[must_use]
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Moves up to `limit` frames each way; whether any was there.
    ///
    /// # Errors
    /// What the socket says, unless it only has nothing or no room.
    pub fn pump(&mut self, now: u64, limit: usize) -> io::Result<bool> {
        let mut active = false;
        for _ in 0..limit {
            let Some(packet) = self.port.recv(now) else {
                break;
            };
            active = true;
            let length = self.datagram(&packet);
            match self.wire.send(&self.buffer[..length]) {
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                _ => {}
            }
        }
        for _ in 0..limit {
            let length = match self.wire.recv(&mut self.buffer) {
                Ok(length) => length,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            };
            active = true;
            // What is longer than a frame was cut and is none; nor is what has no kind.
            let Some((&kind, frame)) = self.buffer[..length].split_first() else {
                continue;
            };
            let kind = match kind {
                IB => LinkKind::Ib,
                ETHERNET => LinkKind::Ethernet,
                _ => continue,
            };
            if let Some(packet) = self.pool.copy_of(kind, frame) {
                self.port.send(now, packet);
            }
        }
        Ok(active)
    }

    /// Puts a frame into the buffer; the datagram's length.
    fn datagram(&mut self, packet: &Packet) -> usize {
        let frame = packet.frame();
        self.buffer[0] = match packet.kind() {
            LinkKind::Ib => IB,
            LinkKind::Ethernet => ETHERNET,
        };
        self.buffer[1..=frame.len()].copy_from_slice(frame);
        frame.len() + 1
    }
}
