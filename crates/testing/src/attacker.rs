//! A host that requests connections and never answers: a UDP socket.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

/// UDP port of RoCE v2.
const PORT: u16 = 4791;
/// BTH and DETH, before the management datagram.
const MAD: usize = 20;
const TRANSACTION: usize = MAD + 8;
const COMMUNICATION_ID: usize = MAD + 24;
const SERVICE_PORT: usize = MAD + 24 + 8 + 6;
const IP_HEADER: usize = MAD + 24 + 140;
const SOURCE_ADDRESS: usize = IP_HEADER + 4 + 12;
const DESTINATION_ADDRESS: usize = IP_HEADER + 20 + 12;

/// A connection request, which can be repeated as a new one from any address.
#[derive(Clone, Debug)]
pub struct ForgedRequest {
    datagram: Vec<u8>,
    number: u32,
}

impl ForgedRequest {
    /// Receives the request that `connect` sends to `here`.
    ///
    /// # Errors
    /// Errors of the socket, or none in 10 seconds.
    pub fn capture(here: Ipv4Addr, connect: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let socket = UdpSocket::bind((here, PORT))?;
        socket.set_read_timeout(Some(Duration::from_secs(10)))?;
        // Ends by a time-out, if not before.
        std::thread::spawn(connect);
        let mut datagram = vec![0; 4096];
        let (length, _) = socket.recv_from(&mut datagram)?;
        datagram.truncate(length);
        let number = 0x1000_0000;
        Ok(Self { datagram, number })
    }

    /// Sends a new request from an address of this host to a listening port.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn send(&mut self, from: Ipv4Addr, (to, port): (Ipv4Addr, u16)) -> io::Result<()> {
        let socket = UdpSocket::bind((from, 0))?;
        self.send_on(&socket, from, (to, port))
    }

    /// As [`send`](Self::send), by a socket that is bound to `from`.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn send_on(
        &mut self,
        socket: &UdpSocket,
        from: Ipv4Addr,
        (to, port): (Ipv4Addr, u16),
    ) -> io::Result<()> {
        self.number += 1;
        let number = self.number.to_be_bytes();
        for (at, bytes) in [
            (TRANSACTION, &number[..]),
            (COMMUNICATION_ID, &number[..]),
            (SERVICE_PORT, &port.to_be_bytes()[..]),
            (SOURCE_ADDRESS, &from.octets()[..]),
            (DESTINATION_ADDRESS, &to.octets()[..]),
        ] {
            self.datagram[at..at + bytes.len()].copy_from_slice(bytes);
        }
        let own = socket.local_addr()?.port();
        let end = self.datagram.len() - 4;
        let crc = invariant_crc((from, own), to, &self.datagram[..end]);
        self.datagram[end..].copy_from_slice(&crc.to_le_bytes());
        socket.send_to(&self.datagram, (to, PORT)).map(drop)
    }
}

/// Returns the ICRC of a datagram over IPv4 without its last four bytes.
fn invariant_crc((from, port): (Ipv4Addr, u16), to: Ipv4Addr, datagram: &[u8]) -> u32 {
    let length = datagram.len() as u16 + 4 + 8;
    let mut bytes = vec![0xff; 8];
    // Fields that change on the way are ones.
    bytes.extend([0x45, 0xff]);
    bytes.extend((length + 20).to_be_bytes());
    // No identification; not to be fragmented.
    bytes.extend([0, 0, 0x40, 0, 0xff, 17, 0xff, 0xff]);
    bytes.extend(from.octets());
    bytes.extend(to.octets());
    bytes.extend(port.to_be_bytes());
    bytes.extend(PORT.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes.extend([0xff, 0xff]);
    let bth = bytes.len();
    bytes.extend(datagram);
    bytes[bth + 4] = 0xff;
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 * (crc & 1));
        }
    }
    !crc
}
