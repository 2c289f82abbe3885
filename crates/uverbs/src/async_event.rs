//! Asynchronous events.

use std::os::fd::{AsFd, BorrowedFd, RawFd};

use crate::abi::ids;
use crate::abi::write::AsyncEventDesc;
use crate::command::Ioctl;
use crate::event_file::EventFile;
use crate::open_enum;
use crate::{Command, ContextRef, Error};

open_enum! {
    /// Type of an asynchronous event.
    AsyncEventType(u32) {
        /// A completion queue is in error (overrun).
        CQ_ERR = 0,
        /// A queue pair is in error.
        QP_FATAL = 1,
        /// A request from the peer violated the protocol.
        QP_REQ_ERR = 2,
        /// A peer attempted an access without the right to it.
        QP_ACCESS_ERR = 3,
        /// Communication established: a message arrived before the RTU.
        COMM_EST = 4,
        /// The send queue has drained.
        SQ_DRAINED = 5,
        /// The path has migrated.
        PATH_MIG = 6,
        /// The path migration failed.
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
        /// A shared receive queue holds fewer receives than its limit.
        SRQ_LIMIT_REACHED = 15,
        /// A queue pair in error consumed its last receive from a shared
        /// receive queue.
        QP_LAST_WQE_REACHED = 16,
        /// The subnet manager asks clients to register again.
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
    /// User handle of the queue concerned, the port number, or zero for the
    /// device, depending on `event`.
    pub element: u64,
    /// Type of the event.
    pub event: AsyncEventType,
}

/// A file from which asynchronous events are read. The first one allocated in a
/// context receives the events of the device and of all objects created without
/// naming an event file. Closed when dropped.
#[derive(Debug)]
pub struct AsyncEventFile<C: ContextRef>(EventFile<C>);

impl<C: ContextRef> AsyncEventFile<C> {
    /// Allocates an event file. The context must have been created
    /// ([`get_context`](crate::Context::get_context)).
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
        // SAFETY: the kernel has just returned the descriptor; this is its only
        // owner.
        Ok(Self(unsafe {
            EventFile::new(context, fd, Command::ReadAsyncEvent)
        }))
    }

    /// Returns the descriptor, for `poll` and for the `async_fd` of queues.
    pub fn fd(&self) -> RawFd {
        self.0.fd()
    }

    /// Selects whether a read without an event fails with EAGAIN (true) or
    /// blocks.
    ///
    /// # Errors
    /// EBADF if the descriptor was closed by someone else.
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Error> {
        self.0.set_nonblocking(nonblocking)
    }

    /// Waits for an event to read, at most `timeout_ms` milliseconds (negative:
    /// without limit). Returns false on timeout.
    ///
    /// # Errors
    /// EINTR on a signal.
    pub fn wait_readable(&self, timeout_ms: i32) -> Result<bool, Error> {
        self.0.wait_readable(timeout_ms)
    }

    /// Reads one event. An event of a queue is included in the count that
    /// destroying the queue returns.
    ///
    /// # Errors
    /// EAGAIN if there is none and the file is non-blocking, EINTR on a signal,
    /// EIO after [`AsyncEventType::DEVICE_FATAL`].
    pub fn read_event(&self) -> Result<AsyncEvent, Error> {
        let event: AsyncEventDesc = self.0.read()?;
        Ok(AsyncEvent {
            element: event.element,
            event: AsyncEventType(event.event_type),
        })
    }

    /// Releases the descriptor without closing it.
    pub fn into_fd(self) -> RawFd {
        self.0.into_fd()
    }
}

impl<C: ContextRef> AsFd for AsyncEventFile<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
