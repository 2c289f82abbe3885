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

/// The system calls that this crate makes.
///
/// Descriptors are plain numbers, since a fake has no real ones and a provider
/// under libibverbs does not own its command descriptor. What takes one is
/// unsafe; [`Descriptor`] is how safe code holds and uses one.
///
/// ```compile_fail,E0133
/// use ringverbs_uverbs::kernel::{Kernel, RealKernel};
///
/// // It may be any file of the process.
/// let _ = RealKernel.close(0);
/// ```
///
/// # Safety
/// Safe code believes a kernel where its descriptors are closed, lent out,
/// written to and mapped:
/// - A descriptor that [`open`](Self::open) or the answer to a command gives
///   is new: it is the caller's alone until it goes to [`close`](Self::close).
///   It is a file of this process, or a number that no file of this process
///   has (a fake's).
/// - Only such kernels are [real](Self::is_real) whose descriptors are files of
///   this process that write(2) may be called on directly.
/// - What the answers say can be mapped of a device's descriptor stays there
///   while it is mapped: touching pages of a file that was truncated is fatal.
/// - Carrying out a command touches no other memory than the command names.
pub unsafe trait Kernel: Send + Sync + fmt::Debug {
    /// `open(path, flags | O_CLOEXEC)`.
    fn open(&self, path: &CStr, flags: c_int) -> Result<RawFd, Errno>;

    /// `close(fd)`. The descriptor is gone whatever the result.
    ///
    /// # Safety
    /// `fd` was given by this kernel, is open, and the caller owns it: nobody
    /// uses it after this.
    unsafe fn close(&self, fd: RawFd) -> Result<(), Errno>;

    /// `ioctl(fd, request, argument)`, without retries.
    ///
    /// # Safety
    /// `fd` is this kernel's, and open; so is every descriptor that the
    /// argument names. `argument` and all addresses in it must be valid for
    /// what `request` has the kernel do with them, during the call and after it
    /// if the request is one that pins memory.
    unsafe fn ioctl(
        &self,
        fd: RawFd,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno>;

    /// `read(fd, buffer)`.
    ///
    /// # Safety
    /// `fd` is this kernel's, and open.
    unsafe fn read(&self, fd: RawFd, buffer: &mut [u8]) -> Result<usize, Errno>;

    /// `write(fd, buffer)`.
    ///
    /// # Safety
    /// `fd` is this kernel's, and open. If it is a uverbs device, the addresses in the command must be valid
    /// for what it has the kernel do with them.
    unsafe fn write(&self, fd: RawFd, buffer: &[u8]) -> Result<usize, Errno>;

    /// Waits until `fd` is readable, at most `timeout_ms` milliseconds
    /// (negative: for ever). False on timeout.
    ///
    /// # Safety
    /// `fd` is this kernel's, and open.
    unsafe fn wait_readable(&self, fd: RawFd, timeout_ms: c_int) -> Result<bool, Errno>;

    /// Sets or clears `O_NONBLOCK`.
    ///
    /// # Safety
    /// `fd` is this kernel's, and open.
    unsafe fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<(), Errno>;

    /// The device number that the character device at `path` has (`st_rdev`).
    fn device_number(&self, path: &CStr) -> Result<libc::dev_t, Errno>;

    /// Names in a directory, without `.` and `..`, in any order.
    fn list_directory(&self, path: &CStr) -> Result<Vec<String>, Errno>;

    /// Sends one request to RDMA netlink and gives each datagram of the answer
    /// to `receive`, until that returns true.
    fn netlink(&self, request: &[u8], receive: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), Errno>;

    /// Where sysfs is: `SYSFS_PATH` of the environment if it counts
    /// ([`environment`](crate::environment)), else `/sys`; without trailing slashes.
    fn sysfs_path(&self) -> String;

    /// Whether libc may be called directly instead of this object; the
    /// doorbell does so.
    fn is_real(&self) -> bool {
        false
    }
}
