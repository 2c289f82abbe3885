//! Words in a file that several processes map.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use ring::Mapping;

/// Length of such a file.
pub(crate) const LENGTH: usize = 4096;
/// Number of its words.
pub(crate) const WORDS: usize = LENGTH / size_of::<u64>();

/// The words of a file.
#[derive(Debug)]
pub(crate) struct SharedWords(Mapping);

impl SharedWords {
    /// Maps a file.
    ///
    /// # Errors
    /// Those of opening and mapping it; EINVAL if it is no file of [`LENGTH`] bytes.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path)?;
        let found = file.metadata()?;
        if !found.is_file() || found.len() != LENGTH as u64 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Mapping::new(file.as_fd(), 0, LENGTH).map(Self)
    }

    /// Returns a word.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        let at = (at % WORDS) * size_of::<u64>();
        // SAFETY: the mapping is aligned to a page, has LENGTH bytes and lives as long as
        // `self`; all processes access the words by atomic operations.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().as_ptr().add(at).cast()) }
    }
}
