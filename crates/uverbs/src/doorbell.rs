//! The doorbell of a device that is told by a system call to look at its send
//! queue.

use core::mem::offset_of;
use core::ptr::NonNull;
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
#[derive(Clone, Copy, Debug)]
pub struct PostSendDoorbell<C: ContextRef> {
    direct: DirectDoorbell,
    context: C,
}

/// A doorbell of the real kernel: one write(2), and nothing to ask before it.
///
/// The command is made once; ringing only sends it.
#[derive(Clone, Copy, Debug)]
pub struct DirectDoorbell {
    command: PostSendCommand,
    fd: RawFd,
}

impl<C: ContextRef> PostSendDoorbell<C> {
    /// Prepares the doorbell of a queue pair.
    pub fn new(context: &C, qp: QpHandle) -> Self {
        Self {
            direct: DirectDoorbell {
                command: PostSendCommand {
                    header: CmdHdr {
                        command: cmd::CMD_POST_SEND,
                        in_words: (LEN / 4) as u16,
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
                fd: context.fd(),
            },
            context: context.clone(),
        }
    }

    /// The doorbell without the question which kernel it rings; none if that
    /// is not the real one.
    ///
    /// # Safety
    /// It is not rung after the context's descriptor has been closed, which
    /// may be another file's by then.
    pub unsafe fn direct(&self) -> Option<DirectDoorbell> {
        self.context.kernel().is_real().then_some(self.direct)
    }

    /// As [`DirectDoorbell::ring`], of any kernel.
    ///
    /// # Errors
    /// As there.
    pub fn ring(&self) -> Result<(), Errno> {
        if self.context.kernel().is_real() {
            return self.direct.ring().map_err(Refused::errno);
        }
        // SAFETY: the command is whole, and the four bytes that it has the
        // kernel write are `ANSWER`.
        let written = unsafe { self.context.file().write(self.direct.command.as_bytes())? };
        match written as isize {
            WRITTEN => Ok(()),
            short => Err(failure(short)),
        }
    }
}

impl DirectDoorbell {
    /// Has the kernel write its answer to `place`, which nobody reads. Doorbells
    /// that processors ring at once had better not share a cache line for it,
    /// as they do until this is called.
    ///
    /// # Safety
    /// `place` is valid for writes, by the kernel and at any time, for as long
    /// as the doorbell is rung.
    pub unsafe fn answer_to(&mut self, place: NonNull<u32>) {
        self.command.body.response = place.as_ptr().expose_provenance() as u64;
    }

    /// Tells the kernel that the send queue has something: one write(2) of 32
    /// bytes. Stores to the queue before this are seen by the kernel.
    ///
    /// Any thread may ring, also several at once.
    ///
    /// # Errors
    /// EINVAL if the queue pair is not ready to send, EIO if the device is gone,
    /// EACCES after a change of credentials.
    #[inline(always)]
    pub fn ring(&self) -> Result<(), Refused> {
        // SAFETY: the command is readable for its length, and the four bytes
        // that it has the kernel write are `ANSWER` or what was promised to
        // `answer_to`.
        match unsafe { libc::write(self.fd, (&raw const self.command).cast(), LEN) } {
            WRITTEN => Ok(()),
            short => Err(Refused(short)),
        }
    }
}

/// A doorbell that the kernel would not hear.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Refused(isize);

impl Refused {
    /// Why: the thread's `errno`, so to be asked before that changes.
    pub fn errno(self) -> Errno {
        failure(self.0)
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
