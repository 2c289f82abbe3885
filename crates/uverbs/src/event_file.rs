//! The common part of completion channels and asynchronous event files.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::kernel::Descriptor;
use crate::{Command, ContextRef, Error};

/// An event file that the kernel created; closed when dropped.
#[derive(Debug)]
pub(crate) struct EventFile<C: ContextRef> {
    file: Descriptor<C>,
    /// Command that errors of a read name.
    read: Command,
}

impl<C: ContextRef> EventFile<C> {
    /// Takes ownership of a descriptor.
    ///
    /// # Safety
    /// `context`'s kernel must have just returned `fd`, and nothing else may
    /// own it.
    pub(crate) unsafe fn new(context: &C, fd: RawFd, read: Command) -> Self {
        Self {
            // SAFETY: guaranteed by the caller.
            file: unsafe { Descriptor::new(context.clone(), fd) },
            read,
        }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Error> {
        let result = self.file.set_nonblocking(nonblocking);
        result.map_err(|errno| self.refused(errno))
    }

    pub(crate) fn wait_readable(&self, timeout_ms: i32) -> Result<bool, Error> {
        let result = self.file.wait_readable(timeout_ms);
        result.map_err(|errno| self.refused(errno))
    }

    /// Reads exactly one event.
    pub(crate) fn read<E: FromBytes + IntoBytes + Immutable + Default>(&self) -> Result<E, Error> {
        let mut event = E::default();
        match self.file.read(event.as_mut_bytes()) {
            Ok(len) if len == size_of::<E>() => Ok(event),
            Ok(_) => Err(Error::BadAnswer {
                command: self.read,
                what: "an event of the wrong length",
            }),
            Err(errno) => Err(self.refused(errno)),
        }
    }

    fn refused(&self, errno: crate::Errno) -> Error {
        Error::refused(self.read, None, errno)
    }

    pub(crate) fn into_fd(self) -> RawFd {
        self.file.into_raw_fd()
    }
}
