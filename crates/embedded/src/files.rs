//! The descriptors of a device: contexts, and files of events.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use uverbs::Errno;

use crate::Result;
use crate::event::EventFile;

/// Bytes of a UAR, the unit of registers.
const UAR: usize = 4096;
/// UARs of a context.
const UARS: u32 = 8;
/// Registers of a UAR that queue pairs get.
pub(crate) const PER_UAR: u32 = 2;
/// Registers of a UAR as their numbers count them.
const NUMBERED_PER_UAR: u32 = 4;
/// Registers of a context.
pub(crate) const REGISTERS: u32 = UARS * PER_UAR;
/// The last of them are for one queue pair each.
const EXCLUSIVE: u32 = 4;

/// What a descriptor is.
#[derive(Debug)]
pub(crate) enum File {
    /// An open device.
    Context(Box<ContextFile>),
    /// A completion channel, or a file of asynchronous events.
    Events(Arc<EventFile>),
}

/// An open device.
#[derive(Debug)]
pub(crate) struct ContextFile {
    /// A file in memory, to be mapped as the registers. What is written to
    /// them is not looked at: the doorbell records say all.
    #[allow(dead_code, reason = "held to be open")]
    registers: OwnedFd,
    /// No other open device has had this number, as it may have had the
    /// descriptor's.
    pub(crate) id: u64,
    /// GET_CONTEXT was given.
    pub(crate) made: bool,
    /// The first file of asynchronous events, which gets those of all.
    pub(crate) events: Option<Arc<EventFile>>,
    /// Registers that a queue pair has for itself, as bits.
    exclusive: u32,
    /// The shared register that was given last.
    shared: u32,
}

impl File {
    /// Where asynchronous events go for which no file was named.
    pub(crate) fn default_events(&self) -> Option<&Arc<EventFile>> {
        match self {
            Self::Context(context) => context.events.as_ref(),
            Self::Events(_) => None,
        }
    }
}

/// How many devices were opened.
static OPENED: AtomicU64 = AtomicU64::new(0);

impl ContextFile {
    /// An open device, and its descriptor, which it keeps.
    pub(crate) fn new() -> Result<(Self, RawFd)> {
        let failed = |errno: nix::Error| Errno::new(errno as i32);
        let registers =
            memfd_create(c"ringverbs-registers", MFdFlags::MFD_CLOEXEC).map_err(failed)?;
        let page = mmap_rs::MmapOptions::page_size();
        let size = (UARS as usize * UAR).next_multiple_of(page);
        ftruncate(&registers, size as i64).map_err(failed)?;
        let fd = registers.as_raw_fd();
        let file = Self {
            registers,
            id: OPENED.fetch_add(1, Ordering::Relaxed),
            made: false,
            events: None,
            exclusive: 0,
            shared: 0,
        };
        Ok((file, fd))
    }

    /// How many UARs are in a page of the process.
    pub(crate) fn uars_per_page() -> u32 {
        (mmap_rs::MmapOptions::page_size() / UAR).clamp(1, UARS as usize) as u32
    }

    /// A register for a queue pair, by its number: one of its own if there is
    /// one.
    pub(crate) fn take_register(&mut self) -> u32 {
        let free = self.exclusive.trailing_ones();
        let index = if free < EXCLUSIVE {
            self.exclusive |= 1 << free;
            REGISTERS - EXCLUSIVE + free
        } else {
            self.shared = (self.shared + 1) % (REGISTERS - EXCLUSIVE);
            self.shared
        };
        index / PER_UAR * NUMBERED_PER_UAR + index % PER_UAR
    }

    /// Gives a register back.
    pub(crate) fn give_back_register(&mut self, number: u32) {
        let index = number / NUMBERED_PER_UAR * PER_UAR + number % NUMBERED_PER_UAR;
        if let Some(own) = index.checked_sub(REGISTERS - EXCLUSIVE) {
            self.exclusive &= !(1 << own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_register_of_ones_own_is_nobody_elses() {
        let (mut file, _) = ContextFile::new().unwrap();
        let own: Vec<_> = (0..4).map(|_| file.take_register()).collect();
        assert_eq!(own, [24, 25, 28, 29]);
        let shared: Vec<_> = (0..12).map(|_| file.take_register()).collect();
        assert_eq!(shared[..3], [1, 4, 5]);
        assert_eq!(shared[11], 0);
        file.give_back_register(25);
        file.give_back_register(4);
        assert_eq!((file.take_register(), file.take_register()), (25, 1));
    }
}
