//! Descriptors, each with the kernel that issued it.

use core::ffi::{CStr, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use super::Kernel;
use crate::Errno;

/// A [`Descriptor`]'s reference to the kernel that issued it.
///
/// # Safety
/// [`kernel`](Self::kernel) must return the same kernel on every call: a
/// descriptor has no meaning, or a different one, for another kernel.
pub unsafe trait KernelRef {
    /// Returns the kernel.
    fn kernel(&self) -> &dyn Kernel;
}

// SAFETY: the content of a box is replaced only through `&mut`, and a
// descriptor gives none out.
unsafe impl KernelRef for Box<dyn Kernel> {
    fn kernel(&self) -> &dyn Kernel {
        &**self
    }
}

// SAFETY: a shared reference always refers to the same kernel.
unsafe impl KernelRef for &dyn Kernel {
    fn kernel(&self) -> &dyn Kernel {
        *self
    }
}

/// An open descriptor of a kernel. Closed exactly once, when dropped, unless it
/// is [`borrowed`](Self::borrowed).
#[derive(Debug)]
pub struct Descriptor<K: KernelRef> {
    kernel: K,
    fd: RawFd,
    owned: bool,
}

impl<K: KernelRef> Descriptor<K> {
    /// Takes ownership of a descriptor.
    ///
    /// # Safety
    /// `fd` must have been issued by this kernel and be open, and nothing else
    /// may close it.
    pub unsafe fn new(kernel: K, fd: RawFd) -> Self {
        Self {
            kernel,
            fd,
            owned: true,
        }
    }

    /// Uses a descriptor without closing it.
    ///
    /// # Safety
    /// `fd` must belong to this kernel, and must stay open and refer to the
    /// same file while the `Descriptor` exists.
    pub unsafe fn borrowed(kernel: K, fd: RawFd) -> Self {
        Self {
            kernel,
            fd,
            owned: false,
        }
    }

    /// Calls [`Kernel::open`].
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open(kernel: K, path: &CStr, flags: c_int) -> Result<Self, Errno> {
        let fd = kernel.kernel().open(path, flags)?;
        // SAFETY: the kernel has just returned the descriptor; this is its only
        // owner.
        Ok(unsafe { Self::new(kernel, fd) })
    }

    /// Returns the kernel that issued it.
    pub fn kernel(&self) -> &dyn Kernel {
        self.kernel.kernel()
    }

    /// Calls [`Kernel::ioctl`].
    ///
    /// # Errors
    /// Those of ioctl(2).
    ///
    /// # Safety
    /// As [`Kernel::ioctl`], for the argument.
    pub unsafe fn ioctl(
        &self,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno> {
        // SAFETY: the descriptor is open while `self` exists; the caller
        // vouches for the argument.
        unsafe { self.kernel().ioctl(self.fd, request, argument) }
    }

    /// Calls [`Kernel::read`].
    ///
    /// # Errors
    /// Those of read(2).
    pub fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        // SAFETY: the descriptor is open while `self` exists.
        unsafe { self.kernel().read(self.fd, buffer) }
    }

    /// Calls [`Kernel::write`].
    ///
    /// # Errors
    /// Those of write(2).
    ///
    /// # Safety
    /// As [`Kernel::write`], for the bytes.
    pub unsafe fn write(&self, buffer: &[u8]) -> Result<usize, Errno> {
        // SAFETY: the descriptor is open while `self` exists; the caller
        // vouches for the bytes.
        unsafe { self.kernel().write(self.fd, buffer) }
    }

    /// Calls [`Kernel::wait_readable`].
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn wait_readable(&self, timeout_ms: c_int) -> Result<bool, Errno> {
        // SAFETY: the descriptor is open while `self` exists.
        unsafe { self.kernel().wait_readable(self.fd, timeout_ms) }
    }

    /// Calls [`Kernel::set_nonblocking`].
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Errno> {
        // SAFETY: the descriptor is open while `self` exists.
        unsafe { self.kernel().set_nonblocking(self.fd, nonblocking) }
    }

    /// Releases the descriptor without closing it.
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
        // SAFETY: the descriptor is owned, therefore open, and not used
        // afterwards.
        if let Err(errno) = unsafe { self.kernel().close(self.fd) } {
            tracing::error!(%errno, fd = self.fd, "closing a descriptor failed");
        }
    }
}

impl<K: KernelRef> AsFd for Descriptor<K> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open while `self` exists, so it is not -1.
        // A fake's descriptor is no file of the process and cannot be mistaken
        // for one.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl<K: KernelRef> AsRawFd for Descriptor<K> {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}
