//! The limit on the size of files (`ulimit -f`).
//!
//! It holds for files in memory too: the kernel ends a process that makes one longer
//! (SIGXFSZ).

use nix::sys::resource::{Resource, getrlimit};

/// Returns the limit in bytes. If it is unknown, the system's error says what is wrong.
pub fn file_size_limit() -> u64 {
    getrlimit(Resource::RLIMIT_FSIZE).map_or(u64::MAX, |(limit, _)| limit)
}
