//! Descriptors, each with the kernel that gave it.

use core::ffi::{CStr, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use super::Kernel;
use crate::{Context, ContextRef, Errno};

/// How a [`Descriptor`] refers to the kernel that gave it.
///
/// # Safety
/// [`kernel`](Self::kernel) gives the same kernel whenever it is called: a
/// descriptor means nothing, or something else, to another one.
pub unsafe trait KernelRef {
    /// The kernel.
    fn kernel(&self) -> &dyn Kernel;
}

// SAFETY: a box keeps what is in it.
unsafe impl KernelRef for Box<dyn Kernel> {
    fn kernel(&self) -> &dyn Kernel {
        &**self
    }
}

// SAFETY: a reference keeps where it leads to.
unsafe impl KernelRef for &dyn Kernel {
    fn kernel(&self) -> &dyn Kernel {
        *self
    }
}

// SAFETY: it leads to the same context always, by its contract, and a context
// keeps its kernel.
unsafe impl<C: ContextRef> KernelRef for C {
    fn kernel(&self) -> &dyn Kernel {
        Context::kernel(self)
    }
}

/// An open descriptor of a kernel. Closed once, when dropped, unless it is
/// [`borrowed`](Self::borrowed).
#[derive(Debug)]
pub struct Descriptor<K: KernelRef> {
    kernel: K,
    fd: RawFd,
    owned: bool,
}

impl<K: KernelRef> Descriptor<K> {
    /// Takes over a descriptor.
    ///
    /// # Safety
    /// `fd` was given by this kernel, is open, and nobody else closes it.
    pub unsafe fn new(kernel: K, fd: RawFd) -> Self {
        Self {
            kernel,
            fd,
            owned: true,
        }
    }

    /// Uses a descriptor that somebody else closes.
    ///
    /// # Safety
    /// `fd` is this kernel's, and stays open, and the same file, while this lives.
    pub unsafe fn borrowed(kernel: K, fd: RawFd) -> Self {
        Self {
            kernel,
            fd,
            owned: false,
        }
    }

    /// [`Kernel::open`].
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open(kernel: K, path: &CStr, flags: c_int) -> Result<Self, Errno> {
        let fd = kernel.kernel().open(path, flags)?;
        // SAFETY: the kernel has just given it.
        Ok(unsafe { Self::new(kernel, fd) })
    }

    /// The kernel that it is of.
    pub fn kernel(&self) -> &dyn Kernel {
        self.kernel.kernel()
    }

    /// [`Kernel::ioctl`].
    ///
    /// # Errors
    /// Those of ioctl(2).
    ///
    /// # Safety
    /// As there, of the argument.
    pub unsafe fn ioctl(
        &self,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno> {
        // SAFETY: open while this lives; the caller answers for the argument.
        unsafe { self.kernel().ioctl(self.fd, request, argument) }
    }

    /// [`Kernel::read`].
    ///
    /// # Errors
    /// Those of read(2).
    pub fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        // SAFETY: open while this lives.
        unsafe { self.kernel().read(self.fd, buffer) }
    }

    /// [`Kernel::write`].
    ///
    /// # Errors
    /// Those of write(2).
    ///
    /// # Safety
    /// As there, of the bytes.
    pub unsafe fn write(&self, buffer: &[u8]) -> Result<usize, Errno> {
        // SAFETY: open while this lives; the caller answers for the bytes.
        unsafe { self.kernel().write(self.fd, buffer) }
    }

    /// [`Kernel::wait_readable`].
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn wait_readable(&self, timeout_ms: c_int) -> Result<bool, Errno> {
        // SAFETY: open while this lives.
        unsafe { self.kernel().wait_readable(self.fd, timeout_ms) }
    }

    /// [`Kernel::set_nonblocking`].
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Errno> {
        // SAFETY: open while this lives.
        unsafe { self.kernel().set_nonblocking(self.fd, nonblocking) }
    }

    /// Gives the descriptor up without closing it.
    pub fn into_raw_fd(mut self) -> RawFd {
        self.owned = false;
        self.fd
    }
}

impl<K: KernelRef> Drop for Descriptor<K> {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // SAFETY: it is owned, so open, and not used after this.
        if let Err(errno) = unsafe { self.kernel().close(self.fd) } {
            tracing::error!(%errno, fd = self.fd, "closing a descriptor failed");
        }
    }
}

impl<K: KernelRef> AsFd for Descriptor<K> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open while this lives, so not -1. A fake's is no file of the
        // process: there is nothing that it could be mistaken for.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl<K: KernelRef> AsRawFd for Descriptor<K> {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}
