//! Waiting for one of two descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

/// Waits until a descriptor is readable or has failed. Returns false for both after the
/// deadline.
pub(super) fn readable(
    fds: [BorrowedFd<'_>; 2],
    deadline: Option<Instant>,
) -> io::Result<[bool; 2]> {
    loop {
        let millis = match deadline {
            None => -1,
            // Rounded up, so that it does not return before the deadline.
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
            }
        };
        let mut polled = fds.map(|fd| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: the pointer is valid for two entries for the duration of the
        // call.
        let count = unsafe { libc::poll(polled.as_mut_ptr(), 2, millis) };
        if count >= 0 {
            return Ok(polled.map(|entry| entry.revents != 0));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
