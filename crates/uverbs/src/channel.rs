//! Completion channels.

use std::os::fd::{AsFd, BorrowedFd, RawFd};

use crate::abi::write::{CompEventDesc, CreateCompChannel, CreateCompChannelResp, cmd};
use crate::command::Ioctl;
use crate::event_file::EventFile;
use crate::{Command, ContextRef, Error};

/// A completion channel: a file that completion events are read from. Closed
/// when dropped; queues that still use it keep the kernel's side alive.
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
        // SAFETY: the kernel has just given it.
        Ok(Self(unsafe {
            EventFile::new(context, fd, Command::ReadCompEvent)
        }))
    }

    /// The file, for `poll` and for [`CqInit::channel`](crate::CqInit::channel).
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

    /// Reads one event: the user handle of the queue that it is of. The event
    /// is then counted in [`CqEvents::completion`](crate::CqEvents::completion).
    ///
    /// # Errors
    /// EAGAIN if there is none and the file does not wait, EINTR on a signal,
    /// EIO if the device is gone.
    pub fn read_event(&self) -> Result<u64, Error> {
        Ok(self.0.read::<CompEventDesc>()?.cq_handle)
    }

    /// Gives the descriptor up without closing it.
    pub fn into_fd(self) -> RawFd {
        self.0.into_fd()
    }
}

impl<C: ContextRef> AsFd for CompletionChannel<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
