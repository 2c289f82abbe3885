//! Completion channels.

use std::os::fd::RawFd;

use zerocopy::IntoBytes;

use crate::abi::write::{CompEventDesc, CreateCompChannel, CreateCompChannelResp, cmd};
use crate::command::Ioctl;
use crate::{Command, ContextRef, Error};

/// A completion channel: a file that completion events are read from. Closed
/// when dropped; queues that still use it keep the kernel's side alive.
#[derive(Debug)]
pub struct CompletionChannel<C: ContextRef> {
    context: C,
    fd: RawFd,
}

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
        Ok(Self {
            context: context.clone(),
            fd,
        })
    }

    /// The file, for `poll` and for [`CqInit::channel`](crate::CqInit::channel).
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// Whether reading waits for an event or fails with EAGAIN.
    ///
    /// # Errors
    /// EBADF if somebody closed the descriptor.
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Error> {
        let result = self.context.kernel().set_nonblocking(self.fd, nonblocking);
        result.map_err(|errno| Error::Refused {
            command: Command::ReadCompEvent,
            handle: None,
            errno,
        })
    }

    /// Reads one event: the user handle of the queue that it is of. The event
    /// is then counted in [`CqEvents::completion`](crate::CqEvents::completion).
    ///
    /// # Errors
    /// EAGAIN if there is none and the file does not wait, EINTR on a signal,
    /// EIO if the device is gone.
    pub fn read_event(&self) -> Result<u64, Error> {
        let mut event = CompEventDesc::default();
        let command = Command::ReadCompEvent;
        let len = self.context.kernel().read(self.fd, event.as_mut_bytes());
        match len {
            Ok(len) if len == size_of::<CompEventDesc>() => Ok(event.cq_handle),
            Ok(_) => Err(Error::BadAnswer {
                command,
                what: "an event of the wrong length",
            }),
            Err(errno) => Err(Error::Refused {
                command,
                handle: None,
                errno,
            }),
        }
    }

    /// Gives the descriptor up without closing it.
    pub fn into_fd(self) -> RawFd {
        let fd = self.fd;
        let mut this = self;
        this.fd = -1;
        fd
    }
}

impl<C: ContextRef> Drop for CompletionChannel<C> {
    fn drop(&mut self) {
        if self.fd >= 0
            && let Err(errno) = self.context.kernel().close(self.fd)
        {
            tracing::error!(%errno, fd = self.fd, "closing a completion channel failed");
        }
    }
}
