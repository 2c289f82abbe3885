//! Waiting for descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

fn entry(fd: &BorrowedFd<'_>) -> libc::pollfd {
    libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    }
}

/// Waits until a descriptor is readable or has failed. Returns false for both after the
/// deadline.
pub(super) fn readable(
    fds: [BorrowedFd<'_>; 2],
    deadline: Option<Instant>,
) -> io::Result<[bool; 2]> {
    let mut polled = [entry(&fds[0]), entry(&fds[1])];
    poll(&mut polled, deadline)?;
    Ok(polled.map(|entry| entry.revents != 0))
}

/// As [`readable`], of any number of descriptors.
pub(super) fn any_readable(
    fds: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> io::Result<Vec<bool>> {
    let mut polled: Vec<_> = fds.iter().map(entry).collect();
    poll(&mut polled, deadline)?;
    Ok(polled.iter().map(|entry| entry.revents != 0).collect())
}

fn poll(polled: &mut [libc::pollfd], deadline: Option<Instant>) -> io::Result<()> {
    loop {
        let millis = match deadline {
            None => -1,
            // Rounded up, so that it does not return before the deadline.
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
            }
        };
        let count = polled.len() as libc::nfds_t;
        // SAFETY: the pointer is valid for that many entries for the duration of the call.
        if unsafe { libc::poll(polled.as_mut_ptr(), count, millis) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
