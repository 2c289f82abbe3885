//! What completion channels and asynchronous event files have in common.

use std::os::fd::RawFd;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{Command, ContextRef, Error};

/// A file of events that the kernel made; closed when dropped.
#[derive(Debug)]
pub(crate) struct EventFile<C: ContextRef> {
    context: C,
    fd: RawFd,
    /// What reading it is called in errors.
    read: Command,
}

impl<C: ContextRef> EventFile<C> {
    /// Takes over a descriptor that `context`'s kernel has just given.
    pub(crate) fn new(context: &C, fd: RawFd, read: Command) -> Self {
        Self {
            context: context.clone(),
            fd,
            read,
        }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    pub(crate) fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Error> {
        let result = self.context.kernel().set_nonblocking(self.fd, nonblocking);
        result.map_err(|errno| self.refused(errno))
    }

    /// Reads one event, whole.
    pub(crate) fn read<E: FromBytes + IntoBytes + Immutable + Default>(&self) -> Result<E, Error> {
        let mut event = E::default();
        match self.context.kernel().read(self.fd, event.as_mut_bytes()) {
            Ok(len) if len == size_of::<E>() => Ok(event),
            Ok(_) => Err(Error::BadAnswer {
                command: self.read,
                what: "an event of the wrong length",
            }),
            Err(errno) => Err(self.refused(errno)),
        }
    }

    fn refused(&self, errno: crate::Errno) -> Error {
        Error::Refused {
            command: self.read,
            handle: None,
            errno,
        }
    }

    pub(crate) fn into_fd(mut self) -> RawFd {
        std::mem::replace(&mut self.fd, -1)
    }
}

impl<C: ContextRef> Drop for EventFile<C> {
    fn drop(&mut self) {
        if self.fd >= 0
            && let Err(errno) = self.context.kernel().close(self.fd)
        {
            tracing::error!(%errno, fd = self.fd, read = ?self.read, "closing an event file failed");
        }
    }
}
