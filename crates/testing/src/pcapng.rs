//! Captures (pcapng) of embedded devices, as written by `ringverbs run --capture`.

use std::fs;
use std::path::Path;

/// A frame of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Name of its interface.
    pub interface: String,
    /// Time in nanoseconds since 1970.
    pub time: u64,
    /// Its length when it was captured.
    pub length: u32,
    /// The bytes that were kept.
    pub bytes: Vec<u8>,
    /// Its comment.
    pub comment: String,
    /// It was sent, not received.
    pub is_outbound: bool,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Returns the value of an option.
fn option(mut options: &[u8], wanted: u16) -> Option<Vec<u8>> {
    while options.len() >= 4 {
        let (code, length) = (u16_at(options, 0), usize::from(u16_at(options, 2)));
        if code == wanted {
            return Some(options[4..4 + length].to_vec());
        }
        options = &options[4 + length.next_multiple_of(4)..];
    }
    None
}

/// Decodes a file, which must end with a whole block.
///
/// # Panics
/// If the file is malformed, or has other blocks and options than ours.
pub fn frames(path: &Path) -> Vec<Frame> {
    decode(&fs::read(path).unwrap())
}

/// As [`frames`], of a process that was killed: the last block may be incomplete.
///
/// # Panics
/// As `frames`.
pub fn frames_before_kill(path: &Path) -> Vec<Frame> {
    let file = fs::read(path).unwrap();
    let mut end = 0;
    while file.len() - end >= 8 {
        let length = u32_at(&file[end..], 4) as usize;
        if file.len() - end < length {
            break;
        }
        end += length;
    }
    decode(&file[..end])
}

fn decode(file: &[u8]) -> Vec<Frame> {
    let (mut rest, mut names, mut frames) = (file, Vec::new(), Vec::new());
    while !rest.is_empty() {
        let (kind, length) = (u32_at(rest, 0), u32_at(rest, 4) as usize);
        assert_eq!(u32_at(rest, length - 4) as usize, length);
        let text = |bytes: Option<Vec<u8>>| String::from_utf8(bytes.unwrap()).unwrap();
        let block = &rest[..length - 4];
        match kind {
            0x0a0d_0d0a => names.clear(),
            1 => names.push(text(option(&block[16..], 2))),
            6 => {
                let captured = u32_at(block, 20) as usize;
                let options = &block[28 + captured.next_multiple_of(4)..];
                let flags = option(options, 2).unwrap();
                frames.push(Frame {
                    interface: names[u32_at(block, 8) as usize].clone(),
                    time: u64::from(u32_at(block, 12)) << 32 | u64::from(u32_at(block, 16)),
                    length: u32_at(block, 24),
                    bytes: block[28..28 + captured].to_vec(),
                    comment: text(option(options, 1)),
                    is_outbound: match u32_at(&flags, 0) & 3 {
                        1 => false,
                        2 => true,
                        other => panic!("direction {other}"),
                    },
                });
            }
            other => panic!("block {other:#x}"),
        }
        rest = &rest[length..];
    }
    frames
}
