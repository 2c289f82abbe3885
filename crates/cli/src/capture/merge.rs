//! Joining captures by time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use embedded::roce::pcap;

use super::reader::{FRAME_INTERFACE, ReadError, Reader, u32_at};
use crate::error::Error;

/// The reason why captures are not joined.
#[derive(Debug)]
pub enum MergeError {
    /// An input cannot be read.
    Input(ReadError),
    /// The output cannot be written.
    File(PathBuf, io::Error),
    /// The output is one of the inputs.
    Output(PathBuf),
}

impl fmt::Display for MergeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(error) => error.fmt(f),
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Output(path) => write!(
                f,
                "{}: OUT is one of the captures to join; name another file",
                path.display()
            ),
        }
    }
}

impl std::error::Error for MergeError {}

impl From<ReadError> for MergeError {
    fn from(error: ReadError) -> Self {
        Self::Input(error)
    }
}

impl From<MergeError> for Error {
    fn from(error: MergeError) -> Self {
        Self::subcommand(error)
    }
}

/// Writes the frame of an input, after its interface if that is new there.
fn write_frame(
    input: &mut Reader<'_>,
    output: &mut impl Write,
    interfaces: &mut u32,
) -> io::Result<()> {
    let index = u32_at(&input.frame, FRAME_INTERFACE) as usize;
    let Some(interface) = input.interfaces.get_mut(index) else {
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
    input.frame[FRAME_INTERFACE..FRAME_INTERFACE + 4].copy_from_slice(&number.to_le_bytes());
    output.write_all(&input.frame)
}

/// Returns whether two paths lead to one file.
pub fn is_same(a: &Path, b: &Path) -> bool {
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
        let mut input = Reader::open(path)?;
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
        write_frame(input, &mut out, &mut interfaces).map_err(failed)?;
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
    use crate::temporary::TemporaryFolder;

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

    /// Returns the times of the frames, and the names of their interfaces in comments.
    fn read(path: &Path) -> Vec<(u64, u32)> {
        let mut input = Reader::open(path).unwrap();
        let mut found = Vec::new();
        while let Some(time) = input.advance().unwrap() {
            found.push((time, u32_at(&input.frame, FRAME_INTERFACE)));
        }
        found
    }

    #[test]
    fn captures_are_joined_by_time() {
        let folder = TemporaryFolder::new("order").unwrap();
        let late = 1 << 40;
        let a = folder.file("a", &capture("a", &[1, 4, late]));
        let b = folder.file("b", &capture("b", &[2, 3, late + 1]));
        let empty = folder.file("empty", &capture("empty", &[]));
        let nothing = folder.file("nothing", b"");
        let out = folder.path().join("out");
        merge(&out, &[b, empty, nothing, a]).unwrap();
        let expected = [(1, 0), (2, 1), (3, 1), (4, 0), (late, 0), (late + 1, 1)];
        assert_eq!(read(&out), expected);
        // The result is an input, too.
        let again = folder.path().join("again");
        merge(&again, std::slice::from_ref(&out)).unwrap();
        assert_eq!(fs::read(&again).unwrap(), fs::read(&out).unwrap());
    }

    #[test]
    fn a_capture_may_end_anywhere() {
        let folder = TemporaryFolder::new("cut").unwrap();
        let whole = capture("a", &[1, 2, 3]);
        let out = folder.path().join("out");
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
        let folder = TemporaryFolder::new("refused").unwrap();
        let out = folder.path().join("out");
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
        assert!(merge(&out, &[folder.path().join("absent")]).is_err());
    }
}
