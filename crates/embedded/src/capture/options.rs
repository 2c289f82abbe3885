//! The options of a capture: the part of each frame that is written, and the files.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use softhca::units::parse_size;

use super::files::{create, path_of};

/// How much of each frame a capture takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CaptureSnap {
    /// Headers, with zeros for the payload and the ICRC that covers it.
    #[default]
    Headers,
    /// The first bytes of the frame. Wireshark takes packets that lack a part of their payload
    /// for malformed.
    Bytes(usize),
    /// The whole frame.
    All,
}

/// A number of files in place of one: the oldest is removed for the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureRing {
    /// Number of files, at least two.
    pub files: u32,
    /// Size in bytes from which a file is followed by the next one, at least 64 KiB.
    pub size: u64,
}

/// The reason why an option of a capture is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureOptionError(&'static str);

impl fmt::Display for CaptureOptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for CaptureOptionError {}

impl FromStr for CaptureSnap {
    type Err = CaptureOptionError;

    /// Parses `headers`, `all` or a number of bytes.
    fn from_str(text: &str) -> Result<Self, CaptureOptionError> {
        match text {
            "headers" => Ok(Self::Headers),
            "all" => Ok(Self::All),
            bytes => match parse_size(bytes).map(usize::try_from) {
                Some(Ok(bytes)) => Ok(Self::Bytes(bytes)),
                _ => Err(CaptureOptionError(
                    "use headers, all or a number of bytes, such as 128",
                )),
            },
        }
    }
}

impl CaptureRing {
    /// The least size of a file in bytes.
    pub const MIN_SIZE: u64 = 64 << 10;
    const FILES: std::ops::RangeInclusive<u32> = 2..=1000;
}

impl FromStr for CaptureRing {
    type Err = CaptureOptionError;

    /// Parses a number of files and their size, such as `4x16MiB`.
    fn from_str(text: &str) -> Result<Self, CaptureOptionError> {
        let parsed = text.split_once('x').and_then(|(files, size)| {
            let ring = Self {
                files: files.parse().ok()?,
                size: parse_size(size)?,
            };
            let is_valid = Self::FILES.contains(&ring.files) && ring.size >= Self::MIN_SIZE;
            is_valid.then_some(ring)
        });
        parsed.ok_or(CaptureOptionError(
            "use 2 to 1000 files of at least 64KiB, such as 4x16MiB",
        ))
    }
}

/// Options of a capture ([`Network::capture`](crate::Network::capture)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureOptions {
    pub(super) path: PathBuf,
    pub(super) snap: CaptureSnap,
    pub(super) ring: Option<CaptureRing>,
    pub(super) names: Vec<String>,
}

impl CaptureOptions {
    /// Captures the headers of frames in a file. The number of the process is inserted into the
    /// file's name before the extension, `FILE-PROCESS.pcapng`, since several processes may have
    /// the same options.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
            snap: CaptureSnap::default(),
            ring: None,
            names: Vec::new(),
        }
    }

    /// Sets how much of each frame is captured.
    #[must_use]
    pub fn with_snap(mut self, snap: CaptureSnap) -> Self {
        self.snap = snap;
        self
    }

    /// Captures in several files, which are numbered: `FILE-PROCESS-NUMBER.pcapng`.
    #[must_use]
    pub fn with_ring(mut self, ring: CaptureRing) -> Self {
        self.ring = Some(ring);
        self
    }

    /// Sets the names of the devices, in the order in which they were added to the network;
    /// `mlx5_0`, `mlx5_1` and so on without this.
    #[must_use]
    pub fn with_names(mut self, names: &[String]) -> Self {
        self.names = names.to_vec();
        self
    }
}

impl CaptureOptions {
    /// Checks that a capture can be written, before the program starts that is captured: creates
    /// a file beside those of captures, and removes it.
    ///
    /// # Errors
    /// Those of creating the file and writing to it.
    pub fn check(&self) -> io::Result<()> {
        // Files of captures are numbered from 1 on.
        let path = path_of(&self.path, Some(0));
        let written = create(&path).and_then(|mut file| file.write_all(&[0; 4096]));
        // Another process may have removed it.
        let _ = fs::remove_file(&path);
        written
    }
}

impl fmt::Display for CaptureOptions {
    /// Names the first file of this process.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.ring.map(|_| 1);
        path_of(&self.path, number).display().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed() {
        assert_eq!("headers".parse(), Ok(CaptureSnap::Headers));
        assert_eq!("all".parse(), Ok(CaptureSnap::All));
        assert_eq!("2KiB".parse(), Ok(CaptureSnap::Bytes(2048)));
        for wrong in ["", "0", "-1", "x", "2 KiB", "99999999999999999999"] {
            assert!(wrong.parse::<CaptureSnap>().is_err(), "{wrong}");
        }
        let ring = CaptureRing {
            files: 4,
            size: 16 << 20,
        };
        assert_eq!("4x16MiB".parse(), Ok(ring));
        for wrong in [
            "",
            "4",
            "x",
            "1x16MiB",
            "1001x1MiB",
            "4x",
            "4x1KiB",
            "x1MiB",
        ] {
            assert!(wrong.parse::<CaptureRing>().is_err(), "{wrong}");
        }
    }
}
