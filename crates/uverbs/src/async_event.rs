//! Asynchronous events.

use std::os::fd::{AsFd, BorrowedFd, RawFd};

use crate::abi::ids;
use crate::abi::write::AsyncEventDesc;
use crate::command::Ioctl;
use crate::event_file::EventFile;
use crate::open_enum;
use crate::{Command, ContextRef, Error};

open_enum! {
    /// What has happened.
    AsyncEventType(u32) {
        /// A completion queue is in error (overrun).
        CQ_ERR = 0,
        /// A queue pair is in error.
        QP_FATAL = 1,
        /// A request of the peer broke the protocol.
        QP_REQ_ERR = 2,
        /// A peer accessed what it may not.
        QP_ACCESS_ERR = 3,
        /// Communication established: a message came before the RTU.
        COMM_EST = 4,
        /// The send queue has drained.
        SQ_DRAINED = 5,
        /// The path has migrated.
        PATH_MIG = 6,
        /// The path could not migrate.
        PATH_MIG_ERR = 7,
        /// The device is in error or gone; the last event of the file.
        DEVICE_FATAL = 8,
        /// A port has become active.
        PORT_ACTIVE = 9,
        /// A port has become unavailable.
        PORT_ERR = 10,
        /// The LID of a port has changed.
        LID_CHANGE = 11,
        /// The partition key table of a port has changed.
        PKEY_CHANGE = 12,
        /// The subnet manager has changed.
        SM_CHANGE = 13,
        /// A shared receive queue is in error.
        SRQ_ERR = 14,
        /// A shared receive queue has fewer receives than its limit.
        SRQ_LIMIT_REACHED = 15,
        /// The last receive of a shared receive queue was consumed by a queue pair in error.
        QP_LAST_WQE_REACHED = 16,
        /// The subnet manager wants clients to register again.
        CLIENT_REREGISTER = 17,
        /// The GID table of a port has changed.
        GID_CHANGE = 18,
        /// A work queue is in error.
        WQ_FATAL = 19,
    }
}

/// One asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// User handle of the queue that it is about, or the port's number, or
    /// zero for the device; which, the type says.
    pub element: u64,
    /// What has happened.
    pub event: AsyncEventType,
}

/// A file that asynchronous events are read from. The first one made in a
/// context takes the events of all objects made without naming one, and the
/// device's. Closed when dropped.
#[derive(Debug)]
pub struct AsyncEventFile<C: ContextRef>(EventFile<C>);

impl<C: ContextRef> AsyncEventFile<C> {
    /// Makes an event file. The context must have been made.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn alloc(context: &C) -> Result<Self, Error> {
        let mut ioctl = Ioctl::new(
            Command::AllocAsyncEventFile,
            ids::OBJECT_ASYNC_EVENT,
            ids::METHOD_ASYNC_EVENT_ALLOC,
        );
        let object = ioctl.new_object(ids::ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE);
        let fd = ioctl.run(context)?.fd(object)?;
        // SAFETY: the kernel has just given it.
        Ok(Self(unsafe {
            EventFile::new(context, fd, Command::ReadAsyncEvent)
        }))
    }

    /// The file, for `poll` and for the `async_fd` of queues.
    pub fn fd(&self) -> RawFd {
        self.0.fd()
    }

    /// Whether reading waits for an event or fails with EAGAIN.
    ///
    /// # Errors
    /// EBADF if somebody closed the descriptor.
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Error> {
        self.0.set_nonblocking(nonblocking)
    }

    /// Waits until there is an event to read, at most `timeout_ms` milliseconds
    /// (negative: for ever). False on timeout.
    ///
    /// # Errors
    /// EINTR on a signal.
    pub fn wait_readable(&self, timeout_ms: i32) -> Result<bool, Error> {
        self.0.wait_readable(timeout_ms)
    }

    /// Reads one event. If it is of a queue, it is then counted in what
    /// destroying the queue gives.
    ///
    /// # Errors
    /// EAGAIN if there is none and the file does not wait, EINTR on a signal,
    /// EIO after [`AsyncEventType::DEVICE_FATAL`].
    pub fn read_event(&self) -> Result<AsyncEvent, Error> {
        let event: AsyncEventDesc = self.0.read()?;
        Ok(AsyncEvent {
            element: event.element,
            event: AsyncEventType(event.event_type),
        })
    }

    /// Gives the descriptor up without closing it.
    pub fn into_fd(self) -> RawFd {
        self.0.into_fd()
    }
}

impl<C: ContextRef> AsFd for AsyncEventFile<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
