//! The files of a capture: one, or a ring of them. Each has whole blocks, unless the process was
//! killed while it wrote: Linux then stops between two pages.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::options::CaptureRing;
use crate::file_size::file_size_limit;

/// The files of a capture.
#[derive(Debug)]
pub(super) struct Files {
    /// The path that the options name.
    base: PathBuf,
    ring: Option<CaptureRing>,
    /// Number of the current file.
    number: u64,
    path: PathBuf,
    file: File,
    written: u64,
}

/// Returns the path of this process's file, with its number in a ring.
pub(super) fn path_of(base: &Path, number: Option<u64>) -> PathBuf {
    let mut name = base.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{}", std::process::id()));
    if let Some(number) = number {
        name.push(format!("-{number}"));
    }
    if let Some(extension) = base.extension() {
        name.push(".");
        name.push(extension);
    }
    base.with_file_name(name)
}

/// Creates a file, or empties it.
pub(super) fn create(path: &Path) -> io::Result<File> {
    // Readable for this user only, as the traffic is. A FIFO that nobody reads is an error.
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags(libc::O_NONBLOCK);
    options.write(true).create(true).truncate(true).open(path)
}

impl Files {
    /// Creates the first file.
    pub(super) fn create(base: &Path, ring: Option<CaptureRing>) -> io::Result<Self> {
        let number = 1;
        let path = path_of(base, ring.map(|_| number));
        Ok(Self {
            base: base.to_owned(),
            ring,
            number,
            file: create(&path)?,
            path,
            written: 0,
        })
    }

    /// Returns the path of the current file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the next file follows once `pending` bytes are written.
    pub(super) fn is_full(&self, pending: usize) -> bool {
        let size = self.written + pending as u64;
        self.ring.is_some_and(|ring| size >= ring.size)
    }

    /// Appends blocks. If that fails, the file ends with the block before them.
    pub(super) fn write(&mut self, blocks: &[u8]) -> io::Result<()> {
        let length = blocks.len() as u64;
        let result = match self.written + length > file_size_limit() {
            true => Err(io::Error::from_raw_os_error(libc::EFBIG)),
            false => self.file.write_all(blocks),
        };
        match result {
            Ok(()) => self.written += length,
            // This fails for pipes. In a file that stays longer, the last block is incomplete,
            // which readers find.
            Err(_) => _ = self.file.set_len(self.written),
        }
        result
    }

    /// Begins the next file of the ring, and removes the oldest.
    pub(super) fn next(&mut self) -> io::Result<()> {
        let Some(ring) = self.ring else { return Ok(()) };
        // Before the next one is made, so that a full disk has room.
        let oldest = (self.number + 1).checked_sub(ring.files.into());
        if let Some(oldest) = oldest.filter(|oldest| *oldest != 0) {
            let _ = fs::remove_file(path_of(&self.base, Some(oldest)));
        }
        let path = path_of(&self.base, Some(self.number + 1));
        self.file = create(&path)?;
        self.path = path;
        self.number += 1;
        self.written = 0;
        Ok(())
    }
}
