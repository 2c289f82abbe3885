//! Descriptors that are readable while a queue of events is not empty.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use uverbs::Errno;

use crate::Result;

/// A descriptor that is readable while it is raised. As the kernel's event files, it is never
/// writable, and each event wakes the threads that wait for it, also edge-triggered ones
/// (EPOLLET).
#[derive(Debug)]
pub(crate) struct Readiness {
    /// Contains only the signal; its descriptor is the one that programs see. Unlike that of
    /// an eventfd it is never writable and cannot be read.
    epoll: Epoll,
    signal: EventFd,
}

impl Readiness {
    pub(crate) fn new() -> Result<Self> {
        let failed = |errno: nix::Error| Errno::new(errno as i32);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let signal = EventFd::from_value_and_flags(0, flags).map_err(failed)?;
        let readable = EpollEvent::new(EpollFlags::EPOLLIN, 0);
        epoll.add(&signal, readable).map_err(failed)?;
        Ok(Self { epoll, signal })
    }

    /// Returns one with duplicates of the descriptors of another process
    /// ([`descriptors`](Self::descriptors)), of which this process is a child.
    ///
    /// # Errors
    /// EBADF, EMFILE.
    pub(crate) fn inherited(descriptors: [BorrowedFd<'_>; 2]) -> Result<Self> {
        let duplicate = |fd: BorrowedFd<'_>| {
            let owned = fd.try_clone_to_owned();
            owned.map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EBADF)))
        };
        let [epoll, signal]: [BorrowedFd<'_>; 2] = descriptors;
        let (epoll, signal): (OwnedFd, OwnedFd) = (duplicate(epoll)?, duplicate(signal)?);
        Ok(Self {
            epoll: Epoll(epoll),
            // SAFETY: the descriptor of an eventfd, owned by nothing else.
            signal: unsafe { EventFd::from_owned_fd(signal) },
        })
    }

    /// Returns all descriptors.
    pub(crate) fn descriptors(&self) -> [RawFd; 2] {
        [self.fd(), self.signal.as_raw_fd()]
    }

    /// Returns the descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.epoll.0.as_raw_fd()
    }

    /// Makes the descriptor readable, and wakes the threads that wait for it. Called for each
    /// event.
    pub(crate) fn raise(&self) {
        // Fails only if the counter is full, which also makes it readable.
        let _ = self.signal.write(1);
    }

    /// Makes the descriptor unreadable.
    pub(crate) fn clear(&self) {
        let _ = self.signal.read();
    }
}
