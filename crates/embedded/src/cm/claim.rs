//! Ownership of an event channel that processes share since a fork: it belongs to the first that
//! uses it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ftruncate, getpid};
use ring::Mapping;
use uverbs::Errno;

use crate::Result;

/// Value of a word that no process has taken.
const FREE: u64 = 0;

/// A process's view of a word that it shares with others.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    word: Arc<Mapping>,
    /// The value by which this process takes it.
    token: u64,
}

/// Returns a number that no other process uses. Random ones may repeat in the children of a
/// process, which have the same state of the generator.
fn token() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| now.tv_nsec() as u64);
    (getpid().as_raw() as u64) << 32 | (time & 0xffff_ffff).max(1)
}

impl Claim {
    /// Creates a free one.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM, EFBIG.
    pub(super) fn new() -> Result<Self> {
        let failed = |errno: nix::Error| Errno::new(errno as i32);
        let length = Mapping::page_size();
        let file = memfd_create(c"ringverbs-claim", MFdFlags::MFD_CLOEXEC).map_err(failed)?;
        ftruncate(&file, length as i64).map_err(failed)?;
        let mapping = Mapping::new(file.as_fd(), 0, length)
            .map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::ENOMEM)))?;
        Ok(Self {
            word: Arc::new(mapping),
            token: token(),
        })
    }

    /// Returns the view of a child of fork.
    pub(super) fn for_child(&self) -> Self {
        Self {
            word: Arc::clone(&self.word),
            token: token(),
        }
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: the mapping is aligned to a page, has at least one and lives as long as
        // `self`; all processes access the word by atomic operations.
        unsafe { AtomicU64::from_ptr(self.word.as_ptr().as_ptr().cast()) }
    }

    /// Takes it, unless another process has. Returns whether it is this process's.
    pub(super) fn take(&self) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let before = (self.word()).compare_exchange(FREE, self.token, success, failure);
        before.is_ok() || before == Err(self.token)
    }

    /// Returns whether no process has taken it.
    pub(super) fn is_free(&self) -> bool {
        self.word().load(Ordering::Acquire) == FREE
    }

    /// Returns whether another process has taken it.
    pub(super) fn is_lost(&self) -> bool {
        ![FREE, self.token].contains(&self.word().load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_takes_it() {
        let parent = Claim::new().unwrap();
        let children = [parent.for_child(), parent.for_child()];
        assert!(parent.is_free() && children.iter().all(|it| it.is_free() && !it.is_lost()));
        assert!(children[0].take() && children[0].take());
        assert!(!parent.take() && !children[1].take());
        assert!(!children[0].is_lost() && parent.is_lost() && children[1].is_lost());
    }
}
