//! Captures for Wireshark: pcapng with an interface for each [`LinkKind`], and timestamps in
//! nanoseconds.

use std::io::{self, Write};

use crate::packet::{LinkKind, Packet};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const LINKTYPE_ETHERNET: u16 = 1;
/// Packets start at the IPv4 or IPv6 header.
const LINKTYPE_RAW: u16 = 101;
/// Extensible record format: a header of 16 bytes, then LRH to variant CRC.
/// Wireshark does not support the link type of InfiniBand itself (247).
const LINKTYPE_ERF: u16 = 197;
const ERF_INFINIBAND: u8 = 21;
/// Flag: records vary in length.
const ERF_FLAGS: u8 = 4;
const ERF_HEADER: usize = 16;

/// A capture. It ends with the first write that fails.
pub struct Capture {
    out: Option<Box<dyn Write + Send>>,
    block: Vec<u8>,
}

impl Capture {
    /// Begins a capture and writes the file header. `out` should be buffered;
    /// [`Capture::flush`] and dropping the capture flush it.
    ///
    /// # Errors
    /// Writing failed.
    pub fn new(out: impl Write + Send + 'static) -> io::Result<Self> {
        let mut capture = Self {
            out: None,
            block: Vec::with_capacity(8192),
        };
        let mut out: Box<dyn Write + Send> = Box::new(out);
        capture.begin(SECTION_HEADER);
        capture.put32(BYTE_ORDER);
        capture.put32(1); // version 1.0
        capture.block.extend_from_slice(&u64::MAX.to_le_bytes()); // length unknown
        capture.end(&mut out)?;
        for link in [LINKTYPE_ETHERNET, LINKTYPE_ERF, LINKTYPE_RAW] {
            capture.begin(INTERFACE);
            capture.put32(u32::from(link));
            capture.put32(0); // no snap length limit
            // Option if_tsresol: 10^-9; then the end of options.
            capture
                .block
                .extend_from_slice(&[9, 0, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
            capture.end(&mut out)?;
        }
        capture.out = Some(out);
        Ok(capture)
    }

    /// Writes a frame that was sent at `now`, in nanoseconds.
    pub fn write(&mut self, now: u64, packet: &Packet) {
        let Some(mut out) = self.out.take() else {
            return;
        };
        let frame = packet.frame();
        let ib = packet.kind() == LinkKind::Ib;
        let wire = frame.len() + if ib { 2 } else { 0 };
        let length = wire + if ib { ERF_HEADER } else { 0 };
        self.begin(ENHANCED_PACKET);
        self.put32(match packet.kind() {
            LinkKind::Ethernet => 0,
            LinkKind::Ib => 1,
            LinkKind::Ip => 2,
        });
        self.put32((now >> 32) as u32);
        self.put32(now as u32);
        self.put32(length as u32);
        self.put32(length as u32);
        if ib {
            // ERF timestamp: seconds in the upper half, a binary fraction in the
            // lower.
            let fraction = ((now % 1_000_000_000) << 32) / 1_000_000_000;
            let stamp = (now / 1_000_000_000) << 32 | fraction;
            self.block.extend_from_slice(&stamp.to_le_bytes());
            self.block.extend_from_slice(&[ERF_INFINIBAND, ERF_FLAGS]);
            for field in [length, 0, wire] {
                self.block.extend_from_slice(&(field as u16).to_be_bytes());
            }
        }
        self.block.extend_from_slice(frame);
        if ib {
            self.block.extend_from_slice(&vcrc(frame).to_le_bytes());
        }
        if self.end(&mut out).is_ok() {
            self.out = Some(out);
        }
    }

    /// Flushes the output.
    ///
    /// # Errors
    /// Flushing failed, or an earlier write did.
    pub fn flush(&mut self) -> io::Result<()> {
        match &mut self.out {
            Some(out) => out.flush(),
            None => Err(io::Error::other("an earlier write of the capture failed")),
        }
    }

    fn put32(&mut self, value: u32) {
        self.block.extend_from_slice(&value.to_le_bytes());
    }

    fn begin(&mut self, kind: u32) {
        self.block.clear();
        self.put32(kind);
        self.put32(0);
    }

    fn end(&mut self, out: &mut Box<dyn Write + Send>) -> io::Result<()> {
        self.block.resize(self.block.len().next_multiple_of(4), 0);
        let length = (self.block.len() + 4) as u32;
        self.put32(length);
        self.block[4..8].copy_from_slice(&length.to_le_bytes());
        out.write_all(&self.block)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if let Some(out) = &mut self.out {
            let _ = out.flush();
        }
    }
}

/// The variant CRC of an InfiniBand frame: x^16 + x^12 + x^3 + x + 1.
fn vcrc(frame: &[u8]) -> u16 {
    let mut crc = 0xffff;
    for byte in frame {
        crc ^= u16::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ (0xd008 * (crc & 1));
        }
    }
    !crc
}
