//! Captures for Wireshark: pcapng with interfaces of the [`LinkKind`]s, and timestamps in
//! nanoseconds.

use std::io::{self, Write};

use crate::packet::{BTH_BYTES, LinkKind, NetworkHeaders, Packet, View};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
/// Link type of Ethernet.
pub const LINKTYPE_ETHERNET: u16 = 1;
/// Link type of packets that start at the IPv4 or IPv6 header.
pub const LINKTYPE_RAW: u16 = 101;
/// Link type of the extensible record format: a header of 16 bytes, then LRH to variant CRC.
/// Wireshark does not support the link type of InfiniBand itself (247).
pub const LINKTYPE_ERF: u16 = 197;
const ERF_INFINIBAND: u8 = 21;
/// Flag: records vary in length.
const ERF_FLAGS: u8 = 4;
/// Length of the header before the LRH.
pub const ERF_HEADER: usize = 16;
/// Length of the variant CRC.
pub const VCRC: usize = 2;

/// Options of all blocks, and of each kind of block.
const END_OF_OPTIONS: u16 = 0;
/// The comment of a frame.
pub const COMMENT: u16 = 1;
const APPLICATION: u16 = 4;
/// The name of an interface.
pub const INTERFACE_NAME: u16 = 2;
const TIME_RESOLUTION: u16 = 9;
/// The flags of a frame: in the lower two bits its direction, 1 for received, 2 for sent.
pub const FLAGS: u16 = 2;
/// Longest text of an option.
const MAX_TEXT: usize = 1024;

/// The direction of a frame, as seen by the device that captures it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The device has received it.
    Inbound,
    /// The device has sent it.
    Outbound,
}

/// Appends a section header block, with which a file begins.
pub fn section(out: &mut Vec<u8>, application: &str) {
    let start = begin(out, SECTION_HEADER);
    put32(out, BYTE_ORDER);
    put32(out, 1); // version 1.0
    out.extend_from_slice(&u64::MAX.to_le_bytes()); // length unknown
    if !application.is_empty() {
        option(out, APPLICATION, application.as_bytes());
        option(out, END_OF_OPTIONS, &[]);
    }
    end(out, start);
}

/// Appends the block of an interface. Interfaces are numbered in order, from 0 in each section.
pub fn interface(out: &mut Vec<u8>, kind: LinkKind, name: &str) {
    let start = begin(out, INTERFACE);
    put32(
        out,
        u32::from(match kind {
            LinkKind::Ethernet => LINKTYPE_ETHERNET,
            LinkKind::Ib => LINKTYPE_ERF,
            LinkKind::Ip => LINKTYPE_RAW,
        }),
    );
    put32(out, 0); // no snap length limit
    if !name.is_empty() {
        option(out, INTERFACE_NAME, name.as_bytes());
    }
    option(out, TIME_RESOLUTION, &[9]); // 10^-9
    option(out, END_OF_OPTIONS, &[]);
    end(out, start);
}

/// A frame in a capture.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Number of the interface, which must be of the frame's kind.
    pub interface: u32,
    /// Time in nanoseconds.
    pub time: u64,
    /// The link that the frame is for.
    pub kind: LinkKind,
    /// The frame, with its ICRC.
    pub frame: &'a [u8],
    /// Maximum number of its bytes to keep. Wireshark takes a packet for malformed that lacks a
    /// part of its payload.
    pub snap: usize,
    /// Number of bytes after which zeros take the place of the frame's own.
    pub shown: usize,
    /// `None` if it is unknown.
    pub direction: Option<Direction>,
    /// A comment; empty for none.
    pub comment: &'a str,
}

impl Record<'_> {
    /// Appends the block of the frame.
    pub fn append(&self, out: &mut Vec<u8>) {
        let Self { time, frame, .. } = *self;
        let is_ib = self.kind == LinkKind::Ib;
        let (before, after) = if is_ib { (ERF_HEADER, VCRC) } else { (0, 0) };
        let kept = frame.len().min(self.snap);
        let wire = frame.len() + after;
        let is_whole = kept == frame.len();
        let captured = before + kept + if is_whole { after } else { 0 };
        let start = begin(out, ENHANCED_PACKET);
        put32(out, self.interface);
        put32(out, (time >> 32) as u32);
        put32(out, time as u32);
        put32(out, captured as u32);
        put32(out, (before + wire) as u32);
        if is_ib {
            // ERF timestamp: seconds in the upper half, a binary fraction in the
            // lower.
            let fraction = ((time % 1_000_000_000) << 32) / 1_000_000_000;
            let stamp = (time / 1_000_000_000) << 32 | fraction;
            out.extend_from_slice(&stamp.to_le_bytes());
            out.extend_from_slice(&[ERF_INFINIBAND, ERF_FLAGS]);
            for field in [captured, 0, wire] {
                out.extend_from_slice(&(field as u16).to_be_bytes());
            }
        }
        let at = out.len();
        out.extend_from_slice(&frame[..kept.min(self.shown)]);
        out.resize(at + kept, 0);
        if is_ib && is_whole {
            let crc = vcrc(&out[at..]);
            out.extend_from_slice(&crc.to_le_bytes());
        }
        pad(out);
        if !self.comment.is_empty() {
            option(out, COMMENT, self.comment.as_bytes());
        }
        if let Some(direction) = self.direction {
            let flags: u32 = match direction {
                Direction::Inbound => 1,
                Direction::Outbound => 2,
            };
            option(out, FLAGS, &flags.to_le_bytes());
        }
        if !self.comment.is_empty() || self.direction.is_some() {
            option(out, END_OF_OPTIONS, &[]);
        }
        end(out, start);
    }
}

fn put32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn pad(out: &mut Vec<u8>) {
    // Blocks begin at multiples of four bytes.
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Appends an option. Texts are cut at [`MAX_TEXT`] bytes.
fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(MAX_TEXT)];
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out);
}

/// Begins a block. Returns its offset.
fn begin(out: &mut Vec<u8>, kind: u32) -> usize {
    let start = out.len();
    put32(out, kind);
    put32(out, 0);
    start
}

/// Ends a block, and fills in its length.
fn end(out: &mut Vec<u8>, start: usize) {
    pad(out);
    let length = (out.len() - start + 4) as u32;
    put32(out, length);
    out[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
}

/// A capture of the frames of a fabric. It ends with the first write that fails.
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
        let mut out: Box<dyn Write + Send> = Box::new(out);
        let mut block = Vec::with_capacity(8192);
        section(&mut block, "");
        for kind in [LinkKind::Ethernet, LinkKind::Ib, LinkKind::Ip] {
            interface(&mut block, kind, "");
        }
        out.write_all(&block)?;
        Ok(Self {
            out: Some(out),
            block,
        })
    }

    /// Writes a frame that was sent at `now`, in nanoseconds.
    pub fn write(&mut self, now: u64, packet: &Packet) {
        let Some(mut out) = self.out.take() else {
            return;
        };
        let record = Record {
            interface: match packet.kind() {
                LinkKind::Ethernet => 0,
                LinkKind::Ib => 1,
                LinkKind::Ip => 2,
            },
            time: now,
            kind: packet.kind(),
            frame: packet.frame(),
            snap: usize::MAX,
            shown: usize::MAX,
            direction: None,
            comment: "",
        };
        self.block.clear();
        record.append(&mut self.block);
        if out.write_all(&self.block).is_ok() {
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
}

impl Drop for Capture {
    fn drop(&mut self) {
        if let Some(out) = &mut self.out {
            let _ = out.flush();
        }
    }
}

/// Returns the length of the headers of a frame, which payload follows; of a packet without
/// payload its whole length.
#[must_use]
pub fn headers_length(kind: LinkKind, frame: &[u8]) -> usize {
    let length = match View::read_unchecked(kind, frame) {
        Ok(view) if view.payload.is_empty() => frame.len(),
        Ok(view) => view.payload_at(),
        Err(_) => match NetworkHeaders::read(kind, frame) {
            // Malformed behind the BTH.
            Ok(network) => network.bth_at + BTH_BYTES,
            Err(_) => other_headers(kind, frame),
        },
    };
    length.min(frame.len())
}

/// As [`headers_length`], of a frame that is not RDMA: up to those of UDP, TCP and ICMP.
fn other_headers(kind: LinkKind, frame: &[u8]) -> usize {
    const ETHERNET: usize = 14;
    const TAG: usize = 4;
    let type_at = |at: usize| Some([*frame.get(at)?, *frame.get(at + 1)?]);
    let (at, protocol) = match kind {
        LinkKind::Ip => (0, None),
        LinkKind::Ib => return 8,
        LinkKind::Ethernet => match type_at(ETHERNET - 2) {
            Some([0x81, 0]) => (ETHERNET + TAG, type_at(ETHERNET + TAG - 2)),
            found => (ETHERNET, found),
        },
    };
    let version = frame.get(at).map(|byte| byte >> 4);
    let (length, next) = match (protocol, version) {
        // ARP has no payload.
        (Some([0x08, 0x06]), _) => return frame.len(),
        (None | Some([0x08, 0x00]), Some(4)) => {
            (usize::from(frame[at] & 15) * 4, frame.get(at + 9))
        }
        (None | Some([0x86, 0xdd]), Some(6)) => (40, frame.get(at + 6)),
        _ => return at,
    };
    at + length
        + match next {
            Some(1 | 17 | 58) => 8,
            Some(6) => 20,
            _ => 0,
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
