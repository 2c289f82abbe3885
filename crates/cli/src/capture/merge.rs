//! Joining captures by time.
//!
//! The frames of a capture ascend in time, so that one of each is in memory. Inputs are
//! untrusted: a file that a killed process has left may end within a block.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use embedded::roce::pcap;

use crate::error::Error;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
/// Longest block, far above that of a frame with its comment.
const MAX_BLOCK: u32 = 1 << 20;
/// Type and length at the beginning of a block, and the length at its end.
const HEADER: usize = 8;
const TRAILER: usize = 4;
/// Offsets in a block: of a frame the interface and the time, of an interface the options.
const FRAME_INTERFACE: usize = 8;
const FRAME_TIME: usize = 12;
const INTERFACE_OPTIONS: usize = 16;
/// The option of an interface with the resolution of its times, and that of nanoseconds.
const TIME_RESOLUTION: u16 = 9;
const NANOSECONDS: [u8; 1] = [9];

/// The reason why captures are not joined.
#[derive(Debug)]
pub enum MergeError {
    /// A file cannot be read or written.
    File(PathBuf, io::Error),
    /// A file is no capture of nanoseconds in little-endian pcapng.
    NoCapture(PathBuf),
    /// A block at an offset is malformed.
    Malformed(PathBuf, u64),
    /// The output is one of the inputs.
    Output(PathBuf),
}

impl fmt::Display for MergeError {
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
            Self::Output(path) => write!(
                f,
                "{}: OUT is one of the captures to join; name another file",
                path.display()
            ),
        }
    }
}

impl std::error::Error for MergeError {}

impl From<MergeError> for Error {
    fn from(error: MergeError) -> Self {
        Self::subcommand(error)
    }
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    let bytes = block.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// An interface of an input.
struct Interface {
    block: Vec<u8>,
    /// Its number in the output, once it has a frame there.
    number: Option<u32>,
}

/// A capture that is read.
struct Input<'a> {
    path: &'a Path,
    file: BufReader<File>,
    /// Offset of the next block.
    offset: u64,
    /// Interfaces of the current section.
    interfaces: Vec<Interface>,
    /// The next frame.
    frame: Vec<u8>,
}

impl<'a> Input<'a> {
    fn open(path: &'a Path) -> Result<Self, MergeError> {
        let file = File::open(path).map_err(|error| MergeError::File(path.to_owned(), error))?;
        Ok(Self {
            path,
            file: BufReader::new(file),
            offset: 0,
            interfaces: Vec::new(),
            frame: Vec::new(),
        })
    }

    /// Reads a block; `None` at the end of the file, also within a block.
    fn read_block(&mut self) -> Result<Option<Vec<u8>>, MergeError> {
        let mut block = vec![0; HEADER];
        if !self.fill(&mut block)? {
            return Ok(None);
        }
        let (kind, length) = (u32_at(&block, 0), u32_at(&block, 4));
        if self.offset == 0 && kind != SECTION_HEADER {
            return Err(MergeError::NoCapture(self.path.to_owned()));
        }
        let is_valid = length % 4 == 0 && length as usize >= HEADER + TRAILER;
        if !is_valid || length > MAX_BLOCK {
            // The length of a block of the other byte order is not valid, either.
            return Err(match self.offset {
                0 => MergeError::NoCapture(self.path.to_owned()),
                at => MergeError::Malformed(self.path.to_owned(), at),
            });
        }
        block.resize(length as usize, 0);
        if !self.fill(&mut block[HEADER..])? {
            return Ok(None);
        }
        if u32_at(&block, length as usize - TRAILER) != length {
            return Err(MergeError::Malformed(self.path.to_owned(), self.offset));
        }
        self.offset += u64::from(length);
        Ok(Some(block))
    }

    /// Fills a buffer; returns false at the end of the file.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<bool, MergeError> {
        match self.file.read_exact(buffer) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(MergeError::File(self.path.to_owned(), error)),
        }
    }

    /// Reads the next frame. Returns its time; `None` after the last one.
    fn advance(&mut self) -> Result<Option<u64>, MergeError> {
        loop {
            let at = self.offset;
            let Some(block) = self.read_block()? else {
                return Ok(None);
            };
            match u32_at(&block, 0) {
                SECTION_HEADER => {
                    if u32_at(&block, HEADER) != BYTE_ORDER {
                        return Err(MergeError::NoCapture(self.path.to_owned()));
                    }
                    self.interfaces.clear();
                }
                INTERFACE => {
                    if !has_nanoseconds(&block) {
                        return Err(MergeError::NoCapture(self.path.to_owned()));
                    }
                    let number = None;
                    self.interfaces.push(Interface { block, number });
                }
                ENHANCED_PACKET => {
                    let interface = u32_at(&block, FRAME_INTERFACE) as usize;
                    if interface >= self.interfaces.len() || block.len() < FRAME_TIME + 8 + TRAILER
                    {
                        return Err(MergeError::Malformed(self.path.to_owned(), at));
                    }
                    let [high, low] = [0, 4].map(|half| u32_at(&block, FRAME_TIME + half));
                    self.frame = block;
                    return Ok(Some(u64::from(high) << 32 | u64::from(low)));
                }
                _ => {}
            }
        }
    }

    /// Writes the frame, after its interface if that is new there.
    fn write(&mut self, output: &mut impl Write, interfaces: &mut u32) -> io::Result<()> {
        let index = u32_at(&self.frame, FRAME_INTERFACE) as usize;
        let Some(interface) = self.interfaces.get_mut(index) else {
            return Ok(()); // `advance` has checked it
        };
        let number = match interface.number {
            Some(number) => number,
            None => {
                output.write_all(&interface.block)?;
                *interfaces += 1;
                *interface.number.insert(*interfaces - 1)
            }
        };
        self.frame[FRAME_INTERFACE..FRAME_INTERFACE + 4].copy_from_slice(&number.to_le_bytes());
        output.write_all(&self.frame)
    }
}

/// Returns whether the times of an interface are nanoseconds.
fn has_nanoseconds(block: &[u8]) -> bool {
    let mut at = INTERFACE_OPTIONS;
    while let Some([a, b, c, d]) = block.get(at..).and_then(|rest| rest.first_chunk::<4>()) {
        let (code, length) = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
        let value = at + 4..at + 4 + usize::from(length);
        if code == TIME_RESOLUTION {
            return block.get(value) == Some(&NANOSECONDS);
        }
        if code == 0 {
            return false;
        }
        at = value.end.next_multiple_of(4);
    }
    false
}

/// Returns whether two paths lead to one file.
fn is_same(a: &Path, b: &Path) -> bool {
    let id = |path| fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    id(a).is_some() && id(a) == id(b)
}

/// Joins captures.
pub fn merge(output: &Path, inputs: &[PathBuf]) -> Result<(), MergeError> {
    if inputs.iter().any(|input| is_same(input, output)) {
        return Err(MergeError::Output(output.to_owned()));
    }
    let mut readers = Vec::new();
    let mut next = BinaryHeap::new();
    for path in inputs {
        let mut input = Input::open(path)?;
        if let Some(time) = input.advance()? {
            next.push(Reverse((time, readers.len())));
        }
        readers.push(input);
    }
    let failed = |error| MergeError::File(output.to_owned(), error);
    let mut out = BufWriter::new(File::create(output).map_err(failed)?);
    let mut header = Vec::new();
    pcap::section(
        &mut header,
        concat!("ringverbs ", env!("CARGO_PKG_VERSION")),
    );
    out.write_all(&header).map_err(failed)?;
    let mut interfaces = 0;
    while let Some(Reverse((_, index))) = next.pop() {
        let input = &mut readers[index];
        input.write(&mut out, &mut interfaces).map_err(failed)?;
        if let Some(time) = input.advance()? {
            next.push(Reverse((time, index)));
        }
    }
    out.flush().map_err(failed)
}

#[cfg(test)]
mod tests {
    use embedded::roce::packet::LinkKind;
    use embedded::roce::pcap::Record;

    use super::*;

    /// Returns a capture with a frame for each time, on an interface of that name.
    fn capture(name: &str, times: &[u64]) -> Vec<u8> {
        let mut out = Vec::new();
        pcap::section(&mut out, "test");
        pcap::interface(&mut out, LinkKind::Ethernet, name);
        for time in times {
            Record {
                interface: 0,
                time: *time,
                kind: LinkKind::Ethernet,
                frame: &time.to_be_bytes(),
                snap: usize::MAX,
                shown: usize::MAX,
                direction: None,
                comment: name,
            }
            .append(&mut out);
        }
        out
    }

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let id = std::process::id();
            let path = std::env::temp_dir().join(format!("ringverbs-merge-{id}-{name}"));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self, name: &str, content: &[u8]) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, content).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Returns the times of the frames, and the names of their interfaces in comments.
    fn read(path: &Path) -> Vec<(u64, u32)> {
        let mut input = Input::open(path).unwrap();
        let mut found = Vec::new();
        while let Some(time) = input.advance().unwrap() {
            found.push((time, u32_at(&input.frame, FRAME_INTERFACE)));
        }
        found
    }

    #[test]
    fn captures_are_joined_by_time() {
        let folder = Folder::new("order");
        let late = 1 << 40;
        let a = folder.file("a", &capture("a", &[1, 4, late]));
        let b = folder.file("b", &capture("b", &[2, 3, late + 1]));
        let empty = folder.file("empty", &capture("empty", &[]));
        let nothing = folder.file("nothing", b"");
        let out = folder.0.join("out");
        merge(&out, &[b, empty, nothing, a]).unwrap();
        let expected = [(1, 0), (2, 1), (3, 1), (4, 0), (late, 0), (late + 1, 1)];
        assert_eq!(read(&out), expected);
        // The result is an input, too.
        let again = folder.0.join("again");
        merge(&again, std::slice::from_ref(&out)).unwrap();
        assert_eq!(fs::read(&again).unwrap(), fs::read(&out).unwrap());
    }

    #[test]
    fn a_capture_may_end_anywhere() {
        let folder = Folder::new("cut");
        let whole = capture("a", &[1, 2, 3]);
        let out = folder.0.join("out");
        let mut counts = Vec::new();
        for end in 0..=whole.len() {
            let cut = folder.file("cut", &whole[..end]);
            merge(&out, &[cut]).unwrap();
            counts.push(read(&out).len());
        }
        assert!(counts.is_sorted());
        assert_eq!(
            (counts[0], counts[whole.len() - 1], counts[whole.len()]),
            (0, 2, 3)
        );
    }

    #[test]
    fn what_is_no_capture_is_refused() {
        let folder = Folder::new("refused");
        let out = folder.0.join("out");
        let whole = capture("a", &[1, 2]);
        let refused = |name: &str, content: &[u8]| {
            merge(&out, &[folder.file(name, content)])
                .unwrap_err()
                .to_string()
        };
        assert!(refused("text", b"no capture at all").contains("no capture of ringverbs"));
        let mut swapped = whole.clone();
        swapped[8..12].reverse();
        assert!(refused("swapped", &swapped).contains("no capture of ringverbs"));
        let mut micro = whole.clone();
        let resolution = micro.windows(4).position(|it| it == [9, 0, 1, 0]).unwrap();
        micro[resolution + 4] = 6;
        assert!(refused("micro", &micro).contains("no capture of ringverbs"));
        // Any byte may be wrong: an error or another capture, but no panic.
        for at in 0..whole.len() {
            let mut wrong = whole.clone();
            wrong[at] ^= 0xff;
            let _ = merge(&out, &[folder.file("wrong", &wrong)]);
        }
        let own = folder.file("own", &whole);
        assert!(
            merge(&own, std::slice::from_ref(&own))
                .unwrap_err()
                .to_string()
                .contains("OUT is one")
        );
        assert_eq!(fs::read(&own).unwrap(), whole);
        assert!(merge(&out, &[folder.0.join("absent")]).is_err());
    }
}
