//! Reading captures: pcapng files with times in nanoseconds, as `run --capture` writes them.
//!
//! The frames of a file ascend in time, so that one of each file is in memory. Files are
//! untrusted: one that a killed process has left may end within a block.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use embedded::roce::packet::LinkKind;
use embedded::roce::pcap::{self, Direction};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
/// The first bytes of each capture.
pub const MAGIC: [u8; 4] = SECTION_HEADER.to_le_bytes();
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
/// Longest block, far above that of a frame with its comment.
const MAX_BLOCK: u32 = 1 << 20;
/// Type and length at the beginning of a block, and the length at its end.
const HEADER: usize = 8;
const TRAILER: usize = 4;
/// Offsets in a block: of a frame the interface, the time, the captured and the original length and
/// the data; of an interface the options.
pub(super) const FRAME_INTERFACE: usize = 8;
const FRAME_TIME: usize = 12;
const FRAME_LENGTHS: usize = 20;
const FRAME_DATA: usize = 28;
const INTERFACE_OPTIONS: usize = 16;
/// Longest frame: far above the largest MTU.
const MAX_FRAME: usize = 1 << 16;
/// The option of an interface with the resolution of its times, and that of nanoseconds.
const TIME_RESOLUTION: u16 = 9;
const NANOSECONDS: [u8; 1] = [9];

/// The reason why a capture is not read.
#[derive(Debug)]
pub enum ReadError {
    /// The file cannot be read.
    File(PathBuf, io::Error),
    /// The file is no capture of nanoseconds in little-endian pcapng.
    NoCapture(PathBuf),
    /// A block at an offset is malformed.
    Malformed(PathBuf, u64),
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
            Self::NoCapture(path) => write!(
                f,
                "{}: this is no capture of ringverbs; mergecap of Wireshark joins others",
                path.display()
            ),
            Self::Malformed(path, at) => {
                write!(f, "{}: the block at byte {at} is malformed", path.display())
            }
        }
    }
}

impl std::error::Error for ReadError {}

pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    let bytes = block.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// An interface of an input.
pub(super) struct Interface {
    pub(super) block: Vec<u8>,
    /// Its number in the output, once it has a frame there.
    pub(super) number: Option<u32>,
}

/// A capture that is read.
pub struct Reader<'a> {
    path: &'a Path,
    file: BufReader<File>,
    /// Offset of the next block.
    offset: u64,
    /// Interfaces of the current section.
    pub(super) interfaces: Vec<Interface>,
    /// The block of the next frame.
    pub(super) frame: Vec<u8>,
}

impl<'a> Reader<'a> {
    /// Opens a file.
    pub fn open(path: &'a Path) -> Result<Self, ReadError> {
        let file = File::open(path).map_err(|error| ReadError::File(path.to_owned(), error))?;
        Ok(Self {
            path,
            file: BufReader::new(file),
            offset: 0,
            interfaces: Vec::new(),
            frame: Vec::new(),
        })
    }

    /// Reads a block; `None` at the end of the file, also within a block.
    fn read_block(&mut self) -> Result<Option<Vec<u8>>, ReadError> {
        let mut block = vec![0; HEADER];
        if !self.fill(&mut block)? {
            return Ok(None);
        }
        let (kind, length) = (u32_at(&block, 0), u32_at(&block, 4));
        if self.offset == 0 && kind != SECTION_HEADER {
            return Err(ReadError::NoCapture(self.path.to_owned()));
        }
        let is_valid = length % 4 == 0 && length as usize >= HEADER + TRAILER;
        if !is_valid || length > MAX_BLOCK {
            // The length of a block of the other byte order is not valid, either.
            return Err(match self.offset {
                0 => ReadError::NoCapture(self.path.to_owned()),
                at => ReadError::Malformed(self.path.to_owned(), at),
            });
        }
        block.resize(length as usize, 0);
        if !self.fill(&mut block[HEADER..])? {
            return Ok(None);
        }
        if u32_at(&block, length as usize - TRAILER) != length {
            return Err(ReadError::Malformed(self.path.to_owned(), self.offset));
        }
        self.offset += u64::from(length);
        Ok(Some(block))
    }

    /// Fills a buffer; returns false at the end of the file.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<bool, ReadError> {
        match self.file.read_exact(buffer) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(ReadError::File(self.path.to_owned(), error)),
        }
    }

    /// Reads the next frame. Returns its time; `None` after the last one.
    pub fn advance(&mut self) -> Result<Option<u64>, ReadError> {
        loop {
            let at = self.offset;
            let Some(block) = self.read_block()? else {
                return Ok(None);
            };
            match u32_at(&block, 0) {
                SECTION_HEADER => {
                    if u32_at(&block, HEADER) != BYTE_ORDER {
                        return Err(ReadError::NoCapture(self.path.to_owned()));
                    }
                    self.interfaces.clear();
                }
                INTERFACE => {
                    if !has_nanoseconds(&block) {
                        return Err(ReadError::NoCapture(self.path.to_owned()));
                    }
                    let number = None;
                    self.interfaces.push(Interface { block, number });
                }
                ENHANCED_PACKET => {
                    let interface = u32_at(&block, FRAME_INTERFACE) as usize;
                    if interface >= self.interfaces.len() || block.len() < FRAME_TIME + 8 + TRAILER
                    {
                        return Err(ReadError::Malformed(self.path.to_owned(), at));
                    }
                    let [high, low] = [0, 4].map(|half| u32_at(&block, FRAME_TIME + half));
                    self.frame = block;
                    return Ok(Some(u64::from(high) << 32 | u64::from(low)));
                }
                _ => {}
            }
        }
    }
}

/// The options of a block: code and value.
fn options(block: &[u8], from: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let mut at = from;
    std::iter::from_fn(move || {
        let [a, b, c, d] = *block.get(at..)?.first_chunk()?;
        let (code, length) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        let value = at + 4..at + 4 + usize::from(length);
        at = value.end.next_multiple_of(4);
        let value = block.get(value)?;
        (code != 0).then_some((code, value))
    })
}

/// Returns whether the times of an interface are nanoseconds.
fn has_nanoseconds(block: &[u8]) -> bool {
    let resolution = options(block, INTERFACE_OPTIONS).find(|(code, _)| *code == TIME_RESOLUTION);
    resolution.is_some_and(|(_, value)| value == NANOSECONDS)
}

/// A frame of a capture.
pub struct Frame {
    /// The link that it is for.
    pub link: LinkKind,
    /// The name of the interface: the device.
    pub device: String,
    /// The frame, with zeros in the place of what was not captured.
    pub bytes: Vec<u8>,
    /// `None` if it is unknown.
    pub direction: Option<Direction>,
    /// Process, queue pair and causes; empty if there is none.
    pub comment: String,
}

impl Reader<'_> {
    /// Returns the frame to which the capture was advanced; `None` if its link is unknown or its
    /// lengths are impossible.
    pub fn frame(&self) -> Option<Frame> {
        let block = &self.frame[..];
        let interface = &self
            .interfaces
            .get(u32_at(block, FRAME_INTERFACE) as usize)?
            .block;
        let captured = u32_at(block, FRAME_LENGTHS) as usize;
        let original = u32_at(block, FRAME_LENGTHS + 4) as usize;
        let end = FRAME_DATA.checked_add(captured)?;
        let mut bytes = block.get(FRAME_DATA..end)?;
        let (link, before, after) = match u16::try_from(u32_at(interface, HEADER) & 0xffff).ok()? {
            pcap::LINKTYPE_ETHERNET => (LinkKind::Ethernet, 0, 0),
            pcap::LINKTYPE_RAW => (LinkKind::Ip, 0, 0),
            pcap::LINKTYPE_ERF => (LinkKind::Ib, pcap::ERF_HEADER, pcap::VCRC),
            _ => return None,
        };
        bytes = bytes.get(before..)?;
        let length = original.checked_sub(before + after)?;
        if length > MAX_FRAME {
            return None;
        }
        let mut bytes = bytes[..bytes.len().min(length)].to_vec();
        bytes.resize(length, 0);
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let name = options(interface, INTERFACE_OPTIONS).find(|it| it.0 == pcap::INTERFACE_NAME);
        let mut frame = Frame {
            link,
            device: name.map(|(_, value)| text(value)).unwrap_or_default(),
            bytes,
            direction: None,
            comment: String::new(),
        };
        for (code, value) in options(block, end.next_multiple_of(4)) {
            match (code, value) {
                (pcap::COMMENT, text_of) => frame.comment = text(text_of),
                (pcap::FLAGS, [flags, ..]) => {
                    frame.direction = match flags & 3 {
                        1 => Some(Direction::Inbound),
                        2 => Some(Direction::Outbound),
                        _ => None,
                    }
                }
                _ => {}
            }
        }
        Some(frame)
    }
}
