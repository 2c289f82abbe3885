//! Waiting for descriptors.

use std::os::fd::BorrowedFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{Result, refuse};

/// Waits until a descriptor is readable.
pub(crate) fn wait(fd: BorrowedFd<'_>, timeout: PollTimeout) -> Result<bool> {
    match poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout) {
        Ok(ready) => Ok(ready > 0),
        Err(errno) => refuse(errno as i32),
    }
}
