//! Descriptors of programs that use a device through system calls.

use std::fmt;
use std::os::fd::RawFd;

use uverbs::Errno;

/// Translates between the descriptors of a device and those of a program, which it may
/// duplicate and close in any order. Called under the device's lock: must not call the
/// device.
pub trait Descriptors: Send + Sync + fmt::Debug {
    /// Returns the device's descriptor for one of the program. Other numbers are returned
    /// unchanged.
    fn device(&self, program: RawFd) -> RawFd;

    /// Creates and returns a descriptor of the program for a new event file. The device's
    /// descriptor must be passed to [`Kernel::close`](uverbs::kernel::Kernel::close) when the
    /// program's last one is closed.
    ///
    /// # Errors
    /// EMFILE, ENOMEM: the event file is not created.
    fn publish(&self, device: RawFd) -> std::result::Result<RawFd, Errno>;

    /// Called when the program has created a completion queue, with the user handle of the
    /// command: in libibverbs the queue's address.
    fn queue_created(&self, _user_handle: u64) {}
}
