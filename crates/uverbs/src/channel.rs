//! Completion channels.

use std::os::fd::{AsFd, BorrowedFd, RawFd};

use crate::abi::write::{CompEventDesc, CreateCompChannel, CreateCompChannelResp, cmd};
use crate::command::Ioctl;
use crate::event_file::EventFile;
use crate::{Command, ContextRef, Error};

/// A completion channel: a file from which completion events are read. Closed
/// when dropped; the kernel keeps its side while queues use it.
#[derive(Debug)]
pub struct CompletionChannel<C: ContextRef>(EventFile<C>);

impl<C: ContextRef> CompletionChannel<C> {
    /// Creates a channel.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn create(context: &C) -> Result<Self, Error> {
        let mut resp = CreateCompChannelResp::default();
        let command = Command::CreateCompChannel;
        Ioctl::write(
            command,
            cmd::CMD_CREATE_COMP_CHANNEL,
            &CreateCompChannel::default(),
            &mut resp,
        )
        .run(context)?;
        let fd = RawFd::try_from(resp.fd).map_err(|_| Error::BadAnswer {
            command,
            what: "a descriptor out of range",
        })?;
        // SAFETY: the kernel has just returned the descriptor; this is its only
        // owner.
        Ok(Self(unsafe {
            EventFile::new(context, fd, Command::ReadCompEvent)
        }))
    }

    /// Returns the descriptor, for `poll` and for
    /// [`CqInit::channel`](crate::CqInit::channel).
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

    /// Reads one event and returns the user handle of its completion queue. The
    /// event is included in
    /// [`CqEvents::completion`](crate::CqEvents::completion).
    ///
    /// # Errors
    /// EAGAIN if there is none and the channel is non-blocking, EINTR on a
    /// signal, EIO if the device was removed.
    pub fn read_event(&self) -> Result<u64, Error> {
        Ok(self.0.read::<CompEventDesc>()?.cq_handle)
    }

    /// Releases the descriptor without closing it.
    pub fn into_fd(self) -> RawFd {
        self.0.into_fd()
    }
}

impl<C: ContextRef> AsFd for CompletionChannel<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
