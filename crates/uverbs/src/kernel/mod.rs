//! System calls, behind one trait.

use core::ffi::{CStr, c_int, c_void};
use core::fmt;
use std::os::fd::RawFd;

use crate::Errno;

#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod real;

pub use real::RealKernel;

/// The system calls that this crate makes.
///
/// Descriptors are plain numbers, since a fake has no real ones and a provider
/// under libibverbs does not own its command descriptor.
pub trait Kernel: Send + Sync + fmt::Debug {
    /// `open(path, flags | O_CLOEXEC)`.
    fn open(&self, path: &CStr, flags: c_int) -> Result<RawFd, Errno>;

    /// `close(fd)`. The descriptor is gone whatever the result.
    fn close(&self, fd: RawFd) -> Result<(), Errno>;

    /// `ioctl(fd, request, argument)`, without retries.
    ///
    /// # Safety
    /// `argument` and all addresses in it must be valid for what `request` has
    /// the kernel do with them, during the call and after it if the request is
    /// one that pins memory.
    unsafe fn ioctl(
        &self,
        fd: RawFd,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno>;

    /// `read(fd, buffer)`.
    fn read(&self, fd: RawFd, buffer: &mut [u8]) -> Result<usize, Errno>;

    /// `write(fd, buffer)`.
    ///
    /// # Safety
    /// If `fd` is a uverbs device, the addresses in the command must be valid
    /// for what it has the kernel do with them.
    unsafe fn write(&self, fd: RawFd, buffer: &[u8]) -> Result<usize, Errno>;

    /// Waits until `fd` is readable, at most `timeout_ms` milliseconds
    /// (negative: for ever). False on timeout.
    fn wait_readable(&self, fd: RawFd, timeout_ms: c_int) -> Result<bool, Errno>;

    /// Sets or clears `O_NONBLOCK`.
    fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<(), Errno>;

    /// The device number that the character device at `path` has (`st_rdev`).
    fn device_number(&self, path: &CStr) -> Result<libc::dev_t, Errno>;

    /// Names in a directory, without `.` and `..`, in any order.
    fn list_directory(&self, path: &CStr) -> Result<Vec<String>, Errno>;

    /// Sends one request to RDMA netlink and gives each datagram of the answer
    /// to `receive`, until that returns true.
    fn netlink(&self, request: &[u8], receive: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), Errno>;

    /// Where sysfs is: `SYSFS_PATH` of the environment if the process is not
    /// set-uid, else `/sys`; without trailing slashes.
    fn sysfs_path(&self) -> String;

    /// Whether libc may be called directly instead of this object; the
    /// doorbell does so.
    fn is_real(&self) -> bool {
        false
    }
}
