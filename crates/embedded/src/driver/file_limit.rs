//! Whether the limit on the size of files has room for those of a device.

use std::fmt;

use crate::driver::files::ContextFile;
use crate::file_size::file_size_limit;

/// The limit of this process on the size of files leaves no room for those of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileSizeLimit {
    /// The limit, in bytes.
    pub limit: u64,
    /// Length of the longest file, in bytes.
    pub needed: u64,
}

impl FileSizeLimit {
    /// Returns the length of the longest file, in bytes.
    pub fn needed() -> u64 {
        ContextFile::all() as u64
    }

    /// Returns the limit if it is too low.
    pub fn exceeded() -> Option<Self> {
        let (limit, needed) = (file_size_limit(), Self::needed());
        (limit < needed).then_some(Self { limit, needed })
    }
}

impl fmt::Display for FileSizeLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (limit, needed) = (self.limit / 1024, self.needed.div_ceil(1024));
        write!(
            f,
            "files may have {limit} KiB here (ulimit -f), and devices need {needed}: raise the \
             limit for this program"
        )
    }
}
