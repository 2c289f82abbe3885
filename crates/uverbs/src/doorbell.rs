//! The doorbell of a device that is told by a system call to look at its send
//! queue.

use core::mem::offset_of;

use zerocopy::IntoBytes;

use crate::abi::write::{CmdHdr, PostSend, SendWr, cmd};
use crate::{ContextRef, Errno, QpHandle};

/// A command as write(2) takes it: header, then body.
#[repr(C)]
#[derive(Clone, Copy, zerocopy::IntoBytes, zerocopy::Immutable)]
struct PostSendCommand {
    header: CmdHdr,
    body: PostSend,
}

const _: () = {
    assert!(size_of::<PostSendCommand>() == 32);
    assert!(offset_of!(PostSendCommand, body) == 8);
};

/// Rings a queue pair's doorbell: a post of no work requests, which makes rxe
/// look at the send queue that is mapped into this process.
#[derive(Clone, Copy, Debug)]
pub struct PostSendDoorbell<C: ContextRef> {
    context: C,
    qp: QpHandle,
    real: bool,
}

impl<C: ContextRef> PostSendDoorbell<C> {
    /// Prepares the doorbell of a queue pair.
    pub fn new(context: &C, qp: QpHandle) -> Self {
        Self {
            context: context.clone(),
            qp,
            real: context.kernel().is_real(),
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
        // The kernel insists on somewhere to say which request failed, though
        // there is none.
        let mut answer = 0u32;
        let command = PostSendCommand {
            header: CmdHdr {
                command: cmd::CMD_POST_SEND,
                in_words: (size_of::<PostSendCommand>() / 4) as u16,
                out_words: 1,
            },
            body: PostSend {
                response: (&raw mut answer).expose_provenance() as u64,
                qp_handle: self.qp.0,
                wr_count: 0,
                sge_count: 0,
                wqe_size: size_of::<SendWr>() as u32,
            },
        };
        const LEN: usize = size_of::<PostSendCommand>();
        if self.real {
            // SAFETY: the command is readable for its length, and the four
            // bytes that it has the kernel write are `answer`, alive here.
            let written =
                unsafe { libc::write(self.context.fd(), (&raw const command).cast(), LEN) };
            if written == LEN as isize {
                Ok(())
            } else {
                Err(failure(written))
            }
        } else {
            // SAFETY: as above.
            let written = unsafe {
                self.context
                    .kernel()
                    .write(self.context.fd(), command.as_bytes())
            }?;
            if written == LEN {
                Ok(())
            } else {
                Err(Errno::new(libc::EIO))
            }
        }
    }
}

#[cold]
fn failure(written: isize) -> Errno {
    if written < 0 {
        Errno::last()
    } else {
        Errno::new(libc::EIO)
    }
}
