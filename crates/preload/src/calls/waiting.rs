//! Functions that wait for descriptors. The C library can wait for descriptors of devices,
//! but the devices may have to be woken before.

use std::ffi::c_int;

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};

use super::export;
use crate::process::wake_devices;
use crate::real;

export! {
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
        wake_devices();
        // SAFETY: guaranteed by the caller.
        unsafe { real::poll(fds, count, timeout) }
    }

    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, _size: usize) -> c_int {
        wake_devices();
        // SAFETY: guaranteed by the caller.
        unsafe { real::poll(fds, count, timeout) }
    }

    ppoll(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t
    ) -> c_int {
        wake_devices();
        // SAFETY: guaranteed by the caller.
        unsafe { real::ppoll(fds, count, timeout, mask) }
    }

    __ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
        _size: usize
    ) -> c_int {
        wake_devices();
        // SAFETY: guaranteed by the caller.
        unsafe { real::ppoll(fds, count, timeout, mask) }
    }

    select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *mut timeval
    ) -> c_int {
        wake_devices();
        // SAFETY: guaranteed by the caller.
        unsafe { real::select(count, read, write, except, timeout) }
    }

    epoll_wait(fd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int {
        wake_devices();
        // SAFETY: guaranteed by the caller.
        unsafe { real::epoll_wait(fd, events, max, timeout) }
    }

    epoll_pwait(
        fd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t
    ) -> c_int {
        wake_devices();
        // SAFETY: guaranteed by the caller.
        unsafe { real::epoll_pwait(fd, events, max, timeout, mask) }
    }
}
