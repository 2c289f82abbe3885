//! The doorbell of a device that is told by a system call to look at its send
//! queue.

use core::mem::offset_of;
use core::sync::atomic::AtomicU32;
use std::os::fd::RawFd;

use zerocopy::IntoBytes;

use crate::abi::write::{CmdHdr, PostSend, SendWr, cmd};
use crate::{ContextRef, Errno, QpHandle};

/// A command as write(2) takes it: header, then body.
#[repr(C)]
#[derive(Clone, Copy, Debug, zerocopy::IntoBytes, zerocopy::Immutable)]
struct PostSendCommand {
    header: CmdHdr,
    body: PostSend,
}

const _: () = {
    assert!(size_of::<PostSendCommand>() == 32);
    assert!(offset_of!(PostSendCommand, body) == 8);
};

/// Where the kernel says which request failed, though there is none: the
/// command demands a place. Nobody reads it.
static ANSWER: AtomicU32 = AtomicU32::new(0);

/// Rings a queue pair's doorbell: a post of no work requests, which makes rxe
/// look at the send queue that is mapped into this process.
///
/// The command is made once; ringing only sends it.
#[derive(Clone, Copy, Debug)]
pub struct PostSendDoorbell<C: ContextRef> {
    command: PostSendCommand,
    /// The context's, or -1 where that is not a real kernel's.
    fd: RawFd,
    context: C,
}

impl<C: ContextRef> PostSendDoorbell<C> {
    /// Prepares the doorbell of a queue pair.
    pub fn new(context: &C, qp: QpHandle) -> Self {
        Self {
            command: PostSendCommand {
                header: CmdHdr {
                    command: cmd::CMD_POST_SEND,
                    in_words: (size_of::<PostSendCommand>() / 4) as u16,
                    out_words: 1,
                },
                body: PostSend {
                    response: ANSWER.as_ptr().expose_provenance() as u64,
                    qp_handle: qp.0,
                    wr_count: 0,
                    sge_count: 0,
                    wqe_size: size_of::<SendWr>() as u32,
                },
            },
            fd: if context.kernel().is_real() {
                context.fd()
            } else {
                -1
            },
            context: context.clone(),
        }
    }

    /// Tells the kernel that the send queue has something: one write(2) of 32
    /// bytes. Stores to the queue before this are seen by the kernel.
    ///
    /// Any thread may ring, also several at once.
    ///
    /// # Errors
    /// EINVAL if the queue pair is not ready to send, EIO if the device is gone,
    /// EACCES after a change of credentials.
    #[inline]
    pub fn ring(&self) -> Result<(), Errno> {
        // SAFETY: the command is readable for its length, and the four bytes
        // that it has the kernel write are `ANSWER`.
        match unsafe { libc::write(self.fd, (&raw const self.command).cast(), LEN) } {
            WRITTEN => Ok(()),
            _ if self.fd < 0 => self.ring_otherwise(),
            short => Err(failure(short)),
        }
    }

    #[cold]
    fn ring_otherwise(&self) -> Result<(), Errno> {
        // SAFETY: as in `ring`.
        let written = unsafe {
            self.context
                .kernel()
                .write(self.context.fd(), self.command.as_bytes())?
        };
        match written as isize {
            WRITTEN => Ok(()),
            short => Err(failure(short)),
        }
    }
}

const LEN: usize = size_of::<PostSendCommand>();
const WRITTEN: isize = LEN as isize;

#[cold]
fn failure(written: isize) -> Errno {
    if written < 0 {
        Errno::last()
    } else {
        Errno::new(libc::EIO)
    }
}
