//! Doorbell of a device whose send queue is processed on a system call.

use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::os::fd::RawFd;

use zerocopy::IntoBytes;

use crate::abi::write::{CmdHdr, PostSend, SendWr, cmd};
use crate::{ContextRef, Errno, QpHandle};

/// A command in the form of write(2): header, then body.
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

/// Default response buffer: the command requires one for the index of the failed work request.
/// Never read, since the doorbell posts no work requests.
static RESPONSE: AtomicU32 = AtomicU32::new(0);

/// The doorbell of a queue pair: a post of no work requests, which makes rxe
/// process the send queue that is mapped into this process.
#[derive(Clone, Copy, Debug)]
pub struct PostSendDoorbell<C: ContextRef> {
    direct: DirectDoorbell,
    context: C,
}

/// A doorbell of the real kernel: one write(2), without a check of the kind of kernel.
///
/// The command is built once; ringing only writes it.
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
                        response: RESPONSE.as_ptr().expose_provenance() as u64,
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

    /// Returns a doorbell that does not check the kind of kernel; `None` for a kernel other
    /// than the real one.
    ///
    /// # Safety
    /// It must not be rung after the context's descriptor has been closed: the
    /// number may then belong to another file.
    pub unsafe fn direct(&self) -> Option<DirectDoorbell> {
        self.context.kernel().is_real().then_some(self.direct)
    }

    /// As [`DirectDoorbell::ring`], for any kernel.
    ///
    /// # Errors
    /// As [`DirectDoorbell::ring`].
    pub fn ring(&self) -> Result<(), Errno> {
        if self.context.kernel().is_real() {
            return self.direct.ring().map_err(DoorbellError::errno);
        }
        // SAFETY: the command is complete, and the four bytes that it makes the
        // kernel write are `RESPONSE`.
        let written = unsafe { self.context.file().write(self.direct.command.as_bytes())? };
        match written as isize {
            WRITTEN => Ok(()),
            short => Err(errno_of(short)),
        }
    }
}

impl DirectDoorbell {
    /// Sets the response buffer of the command, which is never read. By default all doorbells
    /// share one buffer; doorbells that several processors ring concurrently should not share
    /// a cache line.
    ///
    /// # Safety
    /// `response` must be valid for writes, by the kernel and at any time, as long
    /// as the doorbell is rung.
    pub unsafe fn set_response(&mut self, response: NonNull<u32>) {
        self.command.body.response = response.as_ptr().expose_provenance() as u64;
    }

    /// Makes the kernel process the send queue: one write(2) of 32 bytes. The
    /// kernel sees all stores to the queue that precede the call.
    ///
    /// Any thread may ring, also several at once.
    ///
    /// # Errors
    /// EINVAL if the queue pair is not ready to send, EIO if the device is
    /// gone, EACCES after a change of credentials.
    #[inline]
    pub fn ring(&self) -> Result<(), DoorbellError> {
        // SAFETY: the command is readable for its length. The four bytes that
        // it makes the kernel write are `RESPONSE`, or those that the caller of
        // `set_response` vouched for.
        match unsafe { libc::write(self.fd, (&raw const self.command).cast(), LEN) } {
            WRITTEN => Ok(()),
            short => Err(DoorbellError(short)),
        }
    }
}

/// A failed doorbell.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct DoorbellError(isize);

impl DoorbellError {
    /// Returns the errno. Reads the thread's `errno`: call it before another libc function.
    pub fn errno(self) -> Errno {
        errno_of(self.0)
    }
}

const LEN: usize = size_of::<PostSendCommand>();
const WRITTEN: isize = LEN as isize;

#[cold]
fn errno_of(written: isize) -> Errno {
    if written < 0 {
        Errno::last()
    } else {
        Errno::new(libc::EIO)
    }
}
