//! perftest's protocol over TCP. Each message is written and read at once: first
//! by the client, then by the server.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use ringverbs::Gid;
use ringverbs::qp::Mtu;

/// perftest's default port (option `-p`).
const PORT: u16 = 18515;
/// How long the other side may take, even on an emulated processor.
const PATIENCE: Duration = Duration::from_secs(60);
/// The version of the protocol; it is the same from 5.70 to the current release.
const VERSION: &[u8] = b"6.06";
/// The size of the memory that perftest cycles its messages through by default: a
/// page.
pub const CYCLE: u32 = 4096;
/// Aligns each message to a cache line.
const CACHE_LINE: u32 = 64;
/// Length of a [`Destination`] as text: hexadecimal numbers, each followed by a
/// colon, and a NUL.
const KEYS: usize = 108;

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The queue pair and memory of a side.
#[derive(Clone, Copy, Debug, Default)]
pub struct Destination {
    pub lid: u16,
    /// Maximum of outstanding reads of the peer.
    pub out_reads: u32,
    pub qp_num: u32,
    pub psn: u32,
    pub rkey: u32,
    pub addr: u64,
    pub gid: Gid,
}

impl Destination {
    fn to_text(self) -> [u8; KEYS] {
        let Self {
            lid,
            out_reads,
            qp_num,
            psn,
            rkey,
            addr,
            gid,
        } = self;
        let mut text =
            format!("{lid:04x}:{out_reads:04x}:{qp_num:06x}:{psn:06x}:{rkey:08x}:{addr:016x}:");
        for byte in gid.0 {
            text += &format!("{byte:02x}:");
        }
        // No shared receive queue.
        text += "00000000:\0";
        let mut message = [0; KEYS];
        for (to, from) in message.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        message
    }

    fn parse(message: &[u8; KEYS]) -> io::Result<Self> {
        let text = std::str::from_utf8(message).map_err(|_| malformed("the keys are not text"))?;
        let mut numbers = text.split(':').map(|part| u64::from_str_radix(part, 16));
        let mut next = move |most: u64| match numbers.next() {
            Some(Ok(number)) if number <= most => Ok(number),
            _ => Err(malformed(
                "malformed keys; does the other side have the option -x with a GID?",
            )),
        };
        let mut there = Self {
            lid: next(0xffff)? as u16,
            out_reads: next(u32::MAX.into())? as u32,
            qp_num: next(0xff_ffff)? as u32,
            psn: next(0xff_ffff)? as u32,
            rkey: next(u32::MAX.into())? as u32,
            addr: next(u64::MAX)?,
            gid: Gid::default(),
        };
        for byte in &mut there.gid.0 {
            *byte = next(0xff)? as u8;
        }
        Ok(there)
    }
}

/// The results of the client's measurement.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    pub size: u64,
    pub iterations: u64,
    /// Bandwidth in MiB/s: peak and average.
    pub peak: f64,
    pub average: f64,
    /// Message rate in millions per second.
    pub rate: f64,
}

/// A connection to the other side.
pub struct Peer {
    stream: TcpStream,
    client: bool,
}

impl Peer {
    /// Connects to that host as its client, or waits for a client.
    pub fn meet(host: Option<&str>) -> io::Result<Self> {
        let stream = match host {
            Some(host) => TcpStream::connect((host, PORT))?,
            None => TcpListener::bind(("0.0.0.0", PORT))?.accept()?.0,
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let client = host.is_some();
        Ok(Self { stream, client })
    }

    /// Exchanges messages of one length.
    fn swap<const N: usize>(&mut self, ours: [u8; N]) -> io::Result<[u8; N]> {
        let mut theirs = [0; N];
        if self.client {
            self.stream.write_all(&ours)?;
        }
        self.stream.read_exact(&mut theirs)?;
        if !self.client {
            self.stream.write_all(&ours)?;
        }
        Ok(theirs)
    }

    /// Exchanges the parameters, and returns the MTU that both sides support.
    pub fn agree(&mut self, mtu: Mtu) -> io::Result<Mtu> {
        let mut version = [0; 16];
        for (to, from) in version.iter_mut().zip(VERSION) {
            *to = *from;
        }
        let theirs = self.swap(version)?;
        println!(
            "the other side is perftest {}",
            String::from_utf8_lossy(&theirs).trim_end_matches('\0')
        );
        let cycle = self.swap(CYCLE.to_be_bytes())?;
        if u32::from_be_bytes(cycle) > CYCLE {
            return Err(malformed("the page sizes differ"));
        }
        self.swap(CACHE_LINE.to_be_bytes())?;
        // A digit and a NUL.
        let [digit, end] = self.swap([b'0' + mtu.code(), 0])?;
        match Mtu::from_code(digit.wrapping_sub(b'0')) {
            Some(theirs) if end == 0 => Ok(mtu.min(theirs)),
            _ => Err(malformed("an invalid MTU")),
        }
    }

    /// Exchanges keys: at the start, and again whenever both sides have to be
    /// ready.
    pub fn shake(&mut self, ours: Destination) -> io::Result<Destination> {
        Destination::parse(&self.swap(ours.to_text())?)
    }

    /// Exchanges results.
    pub fn report(&mut self, ours: Report) -> io::Result<Report> {
        let mut number = |ours: u64| self.swap(ours.to_be_bytes()).map(u64::from_be_bytes);
        let (size, iterations) = (number(ours.size)?, number(ours.iterations)?);
        let mut float = |ours: f64| number(ours.to_bits()).map(f64::from_bits);
        Ok(Report {
            size,
            iterations,
            peak: float(ours.peak)?,
            average: float(ours.average)?,
            rate: float(ours.rate)?,
        })
    }

    /// Exchanges the last message and closes the connection. Older releases send
    /// more data afterwards, which must not be cut off by closing first.
    pub fn part(mut self, ours: Destination) -> io::Result<()> {
        self.shake(ours)?;
        let _ = self.stream.shutdown(Shutdown::Write);
        let _ = io::copy(&mut self.stream, &mut io::sink());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there() -> Destination {
        Destination {
            lid: 0,
            out_reads: 16,
            qp_num: 0x11,
            psn: 0xab_cdef,
            rkey: 0x1234,
            addr: 0x7f00_0000_1000,
            gid: "::ffff:192.0.2.1".parse().unwrap(),
        }
    }

    #[test]
    fn keys_are_written_as_perftest_reads_them() {
        let text = there().to_text();
        assert_eq!(
            std::str::from_utf8(&text).unwrap(),
            "0000:0010:000011:abcdef:00001234:00007f0000001000:\
             00:00:00:00:00:00:00:00:00:00:ff:ff:c0:00:02:01:00000000:\0"
        );
        let read = Destination::parse(&text).unwrap();
        assert_eq!(read.to_text(), text);
        assert_eq!((read.addr, read.gid), (there().addr, there().gid));
    }

    #[test]
    fn malformed_keys_are_refused() {
        for (at, wrong) in [(0, b'g'), (4, b' '), (51, b'1'), (106, 0xff)] {
            let mut text = there().to_text();
            text[at] = wrong;
            assert_eq!(Destination::parse(&text).is_err(), at != 51, "{at}");
        }
        assert!(Destination::parse(&[0; KEYS]).is_err());
        // As without -x: shorter, and without a GID.
        let mut text = [0; KEYS];
        text[..58].copy_from_slice(b"0000:0010:000011:abcdef:00001234:00007f0000001000:00000000");
        assert!(Destination::parse(&text).is_err());
    }

    #[test]
    fn two_sides_agree() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let side = |stream, client| Peer { stream, client };
        let report = Report {
            size: 4096,
            iterations: 7,
            peak: 2.5,
            average: 1.25,
            rate: 0.5,
        };
        let client = std::thread::spawn(move || {
            let mut peer = side(TcpStream::connect(address).unwrap(), true);
            assert_eq!(peer.agree(Mtu::Bytes4096).unwrap(), Mtu::Bytes1024);
            assert_eq!(peer.shake(there()).unwrap().qp_num, 0x22);
            peer.report(report).unwrap();
            peer.part(there()).unwrap();
        });
        let mut peer = side(listener.accept().unwrap().0, false);
        assert_eq!(peer.agree(Mtu::Bytes1024).unwrap(), Mtu::Bytes1024);
        let ours = Destination {
            qp_num: 0x22,
            ..there()
        };
        assert_eq!(peer.shake(ours).unwrap().qp_num, 0x11);
        let theirs = peer.report(Report::default()).unwrap();
        assert_eq!((theirs.iterations, theirs.average), (7, 1.25));
        peer.part(ours).unwrap();
        client.join().unwrap();
    }
}
