//! perftest's protocol over TCP. Both sides send each message, first the client, then the
//! server.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use ringverbs::Gid;
use ringverbs::qp::Mtu;

/// perftest's default port (option `-p`).
const PORT: u16 = 18515;
/// Read timeout, which also suffices for an emulated processor.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The version of the protocol, the same from release 5.70 to the current one.
const VERSION: &[u8] = b"6.06";
/// Default size of the memory through which perftest cycles its messages: a page.
pub const CYCLE_SIZE: u32 = 4096;
/// Alignment of messages.
const CACHE_LINE: u32 = 64;
/// Length of a [`Destination`] as text: hexadecimal numbers, each followed by a
/// colon, and a NUL.
const KEYS_LEN: usize = 108;

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The queue pair and memory of a side.
#[derive(Clone, Copy, Debug, Default)]
pub struct Destination {
    pub lid: u16,
    /// Maximum number of the peer's outstanding reads.
    pub out_reads: u32,
    pub qp_num: u32,
    pub psn: u32,
    pub rkey: u32,
    pub addr: u64,
    pub gid: Gid,
}

impl Destination {
    fn to_text(self) -> [u8; KEYS_LEN] {
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
        // The number of the shared receive queue: none.
        text += "00000000:\0";
        let mut message = [0; KEYS_LEN];
        for (to, from) in message.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        message
    }

    fn parse(message: &[u8; KEYS_LEN]) -> io::Result<Self> {
        let text = std::str::from_utf8(message).map_err(|_| malformed("the keys are not text"))?;
        let mut numbers = text.split(':').map(|part| u64::from_str_radix(part, 16));
        let mut next = move |max: u64| match numbers.next() {
            Some(Ok(number)) if number <= max => Ok(number),
            _ => Err(malformed(
                "malformed keys; does the other side have the option -x with a GID?",
            )),
        };
        let mut destination = Self {
            lid: next(0xffff)? as u16,
            out_reads: next(u32::MAX.into())? as u32,
            qp_num: next(0xff_ffff)? as u32,
            psn: next(0xff_ffff)? as u32,
            rkey: next(u32::MAX.into())? as u32,
            addr: next(u64::MAX)?,
            gid: Gid::default(),
        };
        for byte in &mut destination.gid.0 {
            *byte = next(0xff)? as u8;
        }
        Ok(destination)
    }
}

/// The results of the client's measurement.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    pub size: u64,
    pub iterations: u64,
    /// Peak bandwidth in MiB/s.
    pub peak: f64,
    /// Average bandwidth in MiB/s.
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
    /// Connects to the server on `host`, or waits for a client.
    pub fn connect(host: Option<&str>) -> io::Result<Self> {
        let stream = match host {
            Some(host) => TcpStream::connect((host, PORT))?,
            None => TcpListener::bind(("0.0.0.0", PORT))?.accept()?.0,
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let client = host.is_some();
        Ok(Self { stream, client })
    }

    /// Exchanges messages of equal length.
    fn exchange<const N: usize>(&mut self, ours: [u8; N]) -> io::Result<[u8; N]> {
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
    pub fn exchange_parameters(&mut self, mtu: Mtu) -> io::Result<Mtu> {
        let mut version = [0; 16];
        for (to, from) in version.iter_mut().zip(VERSION) {
            *to = *from;
        }
        let theirs = self.exchange(version)?;
        println!(
            "the other side is perftest {}",
            String::from_utf8_lossy(&theirs).trim_end_matches('\0')
        );
        let cycle = self.exchange(CYCLE_SIZE.to_be_bytes())?;
        if u32::from_be_bytes(cycle) > CYCLE_SIZE {
            return Err(malformed("the page sizes differ"));
        }
        self.exchange(CACHE_LINE.to_be_bytes())?;
        // A digit and a NUL.
        let [digit, end] = self.exchange([b'0' + mtu.code(), 0])?;
        match Mtu::from_code(digit.wrapping_sub(b'0')) {
            Some(theirs) if end == 0 => Ok(mtu.min(theirs)),
            _ => Err(malformed("an invalid MTU")),
        }
    }

    /// Exchanges queue pair and memory: at the start, and again as a barrier.
    pub fn exchange_keys(&mut self, ours: Destination) -> io::Result<Destination> {
        Destination::parse(&self.exchange(ours.to_text())?)
    }

    /// Exchanges the results.
    pub fn exchange_reports(&mut self, ours: Report) -> io::Result<Report> {
        let mut number = |ours: u64| self.exchange(ours.to_be_bytes()).map(u64::from_be_bytes);
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

    /// Exchanges the last message and closes the connection after reading to its end,
    /// because older releases send more data.
    pub fn close(mut self, ours: Destination) -> io::Result<()> {
        self.exchange_keys(ours)?;
        let _ = self.stream.shutdown(Shutdown::Write);
        let _ = io::copy(&mut self.stream, &mut io::sink());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destination() -> Destination {
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
    fn keys_have_perftests_format() {
        let text = destination().to_text();
        assert_eq!(
            std::str::from_utf8(&text).unwrap(),
            "0000:0010:000011:abcdef:00001234:00007f0000001000:\
             00:00:00:00:00:00:00:00:00:00:ff:ff:c0:00:02:01:00000000:\0"
        );
        let read = Destination::parse(&text).unwrap();
        assert_eq!(read.to_text(), text);
        assert_eq!(
            (read.addr, read.gid),
            (destination().addr, destination().gid)
        );
    }

    #[test]
    fn malformed_keys_are_refused() {
        for (at, wrong) in [(0, b'g'), (4, b' '), (51, b'1'), (106, 0xff)] {
            let mut text = destination().to_text();
            text[at] = wrong;
            assert_eq!(Destination::parse(&text).is_err(), at != 51, "{at}");
        }
        assert!(Destination::parse(&[0; KEYS_LEN]).is_err());
        // The keys without the option -x: shorter, and without a GID.
        let mut text = [0; KEYS_LEN];
        text[..58].copy_from_slice(b"0000:0010:000011:abcdef:00001234:00007f0000001000:00000000");
        assert!(Destination::parse(&text).is_err());
    }

    #[test]
    fn two_sides_exchange_all_messages() {
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
            assert_eq!(
                peer.exchange_parameters(Mtu::Bytes4096).unwrap(),
                Mtu::Bytes1024
            );
            assert_eq!(peer.exchange_keys(destination()).unwrap().qp_num, 0x22);
            peer.exchange_reports(report).unwrap();
            peer.close(destination()).unwrap();
        });
        let mut peer = side(listener.accept().unwrap().0, false);
        assert_eq!(
            peer.exchange_parameters(Mtu::Bytes1024).unwrap(),
            Mtu::Bytes1024
        );
        let ours = Destination {
            qp_num: 0x22,
            ..destination()
        };
        assert_eq!(peer.exchange_keys(ours).unwrap().qp_num, 0x11);
        let theirs = peer.exchange_reports(Report::default()).unwrap();
        assert_eq!((theirs.iterations, theirs.average), (7, 1.25));
        peer.close(ours).unwrap();
        client.join().unwrap();
    }
}
