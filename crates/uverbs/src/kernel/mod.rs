//! System calls, behind one trait.

use core::ffi::{CStr, c_int, c_void};
use core::fmt;
use std::os::fd::RawFd;

use crate::Errno;

mod descriptor;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod real;

pub use descriptor::{Descriptor, KernelRef};
pub use real::RealKernel;

/// The system calls of this crate.
///
/// Descriptors are plain numbers, since a fake has no real ones and a provider
/// under libibverbs does not own its command descriptor. Functions that take
/// one are unsafe; safe code uses a [`Descriptor`].
///
/// ```compile_fail,E0133
/// use ringverbs_uverbs::kernel::{Kernel, RealKernel};
///
/// // It may be any file of the process.
/// let _ = RealKernel.close(0);
/// ```
///
/// ```compile_fail,E0133
/// # use ringverbs_uverbs::kernel::{Kernel, RealKernel};
/// let _ = RealKernel.read(0, &mut [0; 8]);
/// ```
///
/// ```compile_fail,E0133
/// # use ringverbs_uverbs::kernel::{Kernel, RealKernel};
/// let _ = RealKernel.set_nonblocking(0, true);
/// ```
///
/// # Safety
/// Safe code relies on the implementation when it closes, lends out, writes to
/// and maps descriptors:
/// - A descriptor returned by [`open`](Self::open) or by a command is new: it
///   belongs to the caller alone until it is passed to [`close`](Self::close).
///   It is a file of this process, or a number that no file of this process has
///   (a fake's).
/// - Only kernels whose descriptors are files of this process, on which
///   write(2) may be called directly, are [real](Self::is_real).
/// - What a device's answers declare mappable through its descriptor stays
///   present while it is mapped: accessing pages of a truncated file is fatal.
/// - Executing a command accesses no memory but what the command names.
pub unsafe trait Kernel: Send + Sync + fmt::Debug {
    /// `open(path, flags | O_CLOEXEC)`.
    fn open(&self, path: &CStr, flags: c_int) -> Result<RawFd, Errno>;

    /// `close(fd)`. The descriptor is released whatever the result.
    ///
    /// # Safety
    /// `fd` must have been issued by this kernel and be open, and the caller
    /// must own it: nothing uses it afterwards.
    unsafe fn close(&self, fd: RawFd) -> Result<(), Errno>;

    /// `ioctl(fd, request, argument)`, without retries.
    ///
    /// # Safety
    /// `fd` must belong to this kernel and be open, as must every descriptor
    /// that the argument names. `argument` and all addresses in it must be
    /// valid for what `request` makes the kernel do with them, during the call,
    /// and afterwards if the request pins memory.
    unsafe fn ioctl(
        &self,
        fd: RawFd,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno>;

    /// `read(fd, buffer)`.
    ///
    /// # Safety
    /// `fd` must belong to this kernel and be open.
    unsafe fn read(&self, fd: RawFd, buffer: &mut [u8]) -> Result<usize, Errno>;

    /// `write(fd, buffer)`.
    ///
    /// # Safety
    /// `fd` must belong to this kernel and be open. If it is a uverbs device,
    /// the addresses in the command must be valid for what the command makes
    /// the kernel do with them.
    unsafe fn write(&self, fd: RawFd, buffer: &[u8]) -> Result<usize, Errno>;

    /// Waits until `fd` is readable, at most `timeout_ms` milliseconds
    /// (negative: without limit). Returns false on timeout.
    ///
    /// # Safety
    /// `fd` must belong to this kernel and be open.
    unsafe fn wait_readable(&self, fd: RawFd, timeout_ms: c_int) -> Result<bool, Errno>;

    /// Sets or clears `O_NONBLOCK`.
    ///
    /// # Safety
    /// `fd` must belong to this kernel and be open.
    unsafe fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<(), Errno>;

    /// Returns the device number of the character device at `path` (`st_rdev`).
    fn device_number(&self, path: &CStr) -> Result<libc::dev_t, Errno>;

    /// Returns the names in a directory, without `.` and `..`, in any order.
    fn list_directory(&self, path: &CStr) -> Result<Vec<String>, Errno>;

    /// Sends one request to RDMA netlink and passes each datagram of the answer
    /// to `receive`, until that returns true.
    fn netlink(&self, request: &[u8], receive: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), Errno>;

    /// Returns the path of sysfs: the environment variable `SYSFS_PATH` if it
    /// is trusted ([`environment`](crate::environment)), otherwise `/sys`;
    /// without trailing slashes.
    fn sysfs_path(&self) -> String;

    /// Returns why the last command that the calling thread gave was refused, in words: the
    /// parameter, its value and the rule that it breaks. `None` if the kernel does not say.
    fn refusal(&self) -> Option<String> {
        None
    }

    /// Returns whether libc may be called directly instead of this object, as
    /// the doorbell does.
    fn is_real(&self) -> bool {
        false
    }
}
