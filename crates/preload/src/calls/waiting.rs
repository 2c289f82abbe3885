//! Functions that wait for descriptors.
//!
//! A thread that waits drives the devices: it takes turns until there is nothing to do, and
//! then waits for its own descriptors and those of the devices. So an event takes one
//! wake-up, as with a socket. The waits themselves are the C library's, and cancellation
//! points: nothing here but the devices' own turns must not be unwound.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::time::{Duration, Instant};

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};

use super::{export, failed};
use crate::internal;
use crate::process::{self, wake_devices};
use crate::real::{self, LibcFunction};

/// The functions that wait with the devices driven. Where another library has one of these
/// names, the call is passed on instead.
static POLL: LibcFunction = LibcFunction::new("poll\0");
static PPOLL: LibcFunction = LibcFunction::new("ppoll\0");
static EPOLL_WAIT: LibcFunction = LibcFunction::new("epoll_wait\0");
static EPOLL_PWAIT: LibcFunction = LibcFunction::new("epoll_pwait\0");
static EPOLL_PWAIT2: LibcFunction = LibcFunction::new("epoll_pwait2\0");

/// Maximum number of descriptors of a program's call that also waits for the devices.
const MAX_DESCRIPTORS: usize = 62;
/// Maximum number of the devices' descriptors.
const MAX_OWN: usize = 2;

fn to_timespec(time: Duration) -> timespec {
    timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// Converts a time-out in milliseconds; `None` is endless.
fn milliseconds(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

/// As ppoll(2), with the devices driven. `None` if there are none, too many descriptors, or
/// another library has the function.
///
/// # Safety
/// As for ppoll(2).
unsafe fn poll_driving(
    function: &LibcFunction,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Option<c_int> {
    let length = usize::try_from(count)
        .ok()
        .filter(|it| *it <= MAX_DESCRIPTORS)?;
    if fds.is_null() && length != 0 {
        return None;
    }
    let waits = timeout != Some(Duration::ZERO);
    let device = process::waiting_device(waits).filter(|_| !function.is_hooked())?;
    let empty = pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    };
    let mut entries = [empty; MAX_DESCRIPTORS + MAX_OWN];
    if length != 0 {
        // SAFETY: the caller passes that many entries.
        unsafe { ptr::copy_nonoverlapping(fds, entries.as_mut_ptr(), length) };
    }
    let began = timeout.map(|_| Instant::now());
    let mut result = Ok(0);
    let scope = internal::enter();
    device.wait_for(&mut |own, limit| {
        // Signal handlers of the program run during the call.
        let _program = internal::suspend();
        let rest = timeout
            .zip(began)
            .map(|(time, began)| time.saturating_sub(began.elapsed()));
        let longest = [rest, limit].into_iter().flatten().min();
        for (entry, own) in entries[length..].iter_mut().zip(own) {
            *entry = pollfd {
                fd: own.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
        }
        let all = (length + own.len().min(MAX_OWN)) as nfds_t;
        let time = longest.map(to_timespec);
        let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: initialized entries; the mask is the caller's.
        let polled = unsafe { real::ppoll(entries.as_mut_ptr(), all, time, mask) };
        let ready = entries[..length]
            .iter()
            .filter(|it| it.revents != 0)
            .count();
        result = match polled < 0 {
            true => Err(real::errno()),
            false => Ok(ready as c_int),
        };
        result != Ok(0) || rest.is_some_and(|rest| rest.is_zero())
    });
    drop(scope);
    match result {
        // More than the program's limit of descriptors, with the devices' own.
        Err(libc::EINVAL) => None,
        Ok(ready) => {
            for (index, entry) in entries[..length].iter().enumerate() {
                // SAFETY: the caller passes that many entries.
                unsafe { (*fds.add(index)).revents = entry.revents };
            }
            Some(ready)
        }
        Err(errno) => Some(failed(errno)),
    }
}

/// Called before a wait. A child of fork whose parent has event channels waits for the end of
/// that process, too, since no thread drives what it leaves until this process takes it. Returns
/// the time left; an error, with `errno` set, if a signal arrives.
///
/// # Safety
/// As for ppoll(2).
#[inline]
unsafe fn before_wait(
    fds: *const pollfd,
    count: nfds_t,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<Option<Duration>, ()> {
    if !process::has_inherited_channels() {
        return Ok(timeout);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { wait_as_heir(fds, count, timeout, mask) }
}

#[cold]
unsafe fn wait_as_heir(
    fds: *const pollfd,
    count: nfds_t,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<Option<Duration>, ()> {
    let began = Instant::now();
    loop {
        let rest = timeout.map(|time| time.saturating_sub(began.elapsed()));
        let owner = process::take_orphaned_channels(false);
        let length = usize::try_from(count).unwrap_or(usize::MAX);
        let is_bad = length > MAX_DESCRIPTORS || fds.is_null() && length != 0;
        let Some(owner) = owner.filter(|_| !is_bad && rest != Some(Duration::ZERO)) else {
            return Ok(rest);
        };
        let end = pollfd {
            fd: owner,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut entries = [end; MAX_DESCRIPTORS + 1];
        if length != 0 {
            // SAFETY: the caller passes that many entries.
            unsafe { ptr::copy_nonoverlapping(fds, entries.as_mut_ptr(), length) };
        }
        let time = rest.map(to_timespec);
        let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: initialized entries; the mask is the caller's.
        let polled = unsafe { real::ppoll(entries.as_mut_ptr(), count + 1, time, mask) };
        if polled < 0 {
            return Err(());
        }
        if entries[length].revents == 0 || polled > 1 {
            return Ok(timeout.map(|time| time.saturating_sub(began.elapsed())));
        }
    }
}

/// As [`before_wait`], for select(2) and pselect(2).
///
/// # Safety
/// As for pselect(2).
#[inline]
unsafe fn before_select(
    count: c_int,
    sets: [*const fd_set; 3],
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<Option<Duration>, ()> {
    if !process::has_inherited_channels() {
        return Ok(timeout);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { select_as_heir(count, sets, timeout, mask) }
}

#[cold]
unsafe fn select_as_heir(
    count: c_int,
    sets: [*const fd_set; 3],
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<Option<Duration>, ()> {
    const BITS: usize = libc::c_ulong::BITS as usize;
    let wanted = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
    let empty = pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    };
    let (mut entries, mut length) = ([empty; MAX_DESCRIPTORS], 0);
    for fd in 0..usize::try_from(count).unwrap_or(0) {
        let mut events = 0;
        for (set, event) in sets.iter().zip(wanted).filter(|(set, _)| !set.is_null()) {
            // SAFETY: the caller's sets have `count` bits, in words of this type.
            let word = unsafe { *set.cast::<libc::c_ulong>().add(fd / BITS) };
            if word >> (fd % BITS) & 1 != 0 {
                events |= event;
            }
        }
        if events != 0 {
            let fd = fd as c_int;
            if let Some(entry) = entries.get_mut(length) {
                *entry = pollfd {
                    fd,
                    events,
                    ..empty
                };
            }
            length += 1;
        }
    }
    // SAFETY: initialized entries, or more than it reads; the mask is the caller's.
    unsafe { wait_as_heir(entries.as_ptr(), length as nfds_t, timeout, mask) }
}

/// Waits until a descriptor is readable, with the devices driven. Returns false, with `errno`
/// set, if a signal arrives.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>) -> bool {
    let mut entry = pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry.
    let polled = unsafe { poll_driving(&PPOLL, &raw mut entry, 1, None, ptr::null()) };
    // SAFETY: as above.
    polled.unwrap_or_else(|| unsafe { real::poll(&raw mut entry, 1, -1) }) >= 0
}

/// As epoll_pwait(2), with the devices driven.
///
/// # Safety
/// As for epoll_pwait(2).
unsafe fn epoll_driving(
    function: &LibcFunction,
    fd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Option<c_int> {
    if fd < 0 || max <= 0 {
        return None;
    }
    let own = pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry; the mask is the caller's.
    let Ok(timeout) = (unsafe { before_wait(&raw const own, 1, timeout, mask) }) else {
        return Some(-1);
    };
    let waits = timeout != Some(Duration::ZERO);
    process::waiting_device(waits).filter(|_| waits && !function.is_hooked())?;
    let began = timeout.map(|_| Instant::now());
    loop {
        let rest = timeout
            .zip(began)
            .map(|(time, began)| time.saturating_sub(began.elapsed()));
        let mut entry = pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry; the mask is the caller's.
        let polled = unsafe { poll_driving(&PPOLL, &raw mut entry, 1, rest, mask) }?;
        if polled < 0 {
            return Some(polled);
        }
        // SAFETY: guaranteed by the caller.
        let found = unsafe { real::epoll_pwait(fd, events, max, 0, mask) };
        // Another thread may have been first.
        if found != 0 || rest.is_some_and(|rest| rest.is_zero()) {
            return Some(found);
        }
    }
}

/// Returns the time of a structure; `None` if it is invalid, and `Some(None)` for no limit.
///
/// # Safety
/// The structure must be readable, or the pointer null.
unsafe fn read_timespec(time: *const timespec) -> Option<Option<Duration>> {
    // SAFETY: guaranteed by the caller.
    let Some(time) = (unsafe { time.as_ref() }) else {
        return Some(None);
    };
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let nanoseconds = u32::try_from(time.tv_nsec)
        .ok()
        .filter(|it| *it < 1_000_000_000)?;
    Some(Some(Duration::new(seconds, nanoseconds)))
}

export! {
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
        let time = milliseconds(timeout);
        // SAFETY: guaranteed by the caller.
        let Ok(time) = (unsafe { before_wait(fds, count, time, ptr::null()) }) else {
            return -1;
        };
        // SAFETY: as above.
        let polled = unsafe { poll_driving(&POLL, fds, count, time, ptr::null()) };
        polled.unwrap_or_else(|| {
            wake_devices();
            // SAFETY: guaranteed by the caller.
            unsafe { real::poll(fds, count, timeout) }
        })
    }

    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, _size: usize) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { poll(fds, count, timeout) }
    }

    ppoll(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        let mut polled = None;
        // SAFETY: as above.
        if let Some(time) = unsafe { read_timespec(timeout) } {
            // SAFETY: as above.
            let Ok(time) = (unsafe { before_wait(fds, count, time, mask) }) else {
                return -1;
            };
            // SAFETY: as above.
            polled = unsafe { poll_driving(&PPOLL, fds, count, time, mask) };
        }
        polled.unwrap_or_else(|| {
            wake_devices();
            // SAFETY: guaranteed by the caller.
            unsafe { real::ppoll(fds, count, timeout, mask) }
        })
    }

    __ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
        _size: usize
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { ppoll(fds, count, timeout, mask) }
    }

    select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *mut timeval
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        let time = unsafe { timeout.as_ref() }.map(|time| {
            let seconds = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0));
            seconds + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
        });
        let sets = [read.cast_const(), write, except];
        // SAFETY: as above.
        let Ok(rest) = (unsafe { before_select(count, sets, time, ptr::null()) }) else {
            return -1;
        };
        if let Some(rest) = rest.filter(|rest| Some(*rest) != time) {
            // SAFETY: as above, and not null. The system changes it, too.
            let timeout = unsafe { &mut *timeout };
            timeout.tv_sec = rest.as_secs() as libc::time_t;
            timeout.tv_usec = rest.subsec_micros().into();
        }
        wake_devices();
        // SAFETY: as above.
        unsafe { real::select(count, read, write, except, timeout) }
    }

    pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *const timespec, mask: *const sigset_t
    ) -> c_int {
        let mut timeout = timeout;
        let left;
        // SAFETY: guaranteed by the caller.
        if let Some(time) = unsafe { read_timespec(timeout) } {
            let sets = [read.cast_const(), write, except];
            // SAFETY: as above.
            let Ok(rest) = (unsafe { before_select(count, sets, time, mask) }) else {
                return -1;
            };
            if let Some(rest) = rest.filter(|rest| Some(*rest) != time) {
                left = to_timespec(rest);
                timeout = &raw const left;
            }
        }
        wake_devices();
        // SAFETY: as above.
        unsafe { real::pselect(count, read, write, except, timeout, mask) }
    }

    epoll_wait(fd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int {
        let (time, mask) = (milliseconds(timeout), ptr::null());
        // SAFETY: guaranteed by the caller.
        let found = unsafe { epoll_driving(&EPOLL_WAIT, fd, events, max, time, mask) };
        found.unwrap_or_else(|| {
            wake_devices();
            // SAFETY: guaranteed by the caller.
            unsafe { real::epoll_wait(fd, events, max, timeout) }
        })
    }

    epoll_pwait(
        fd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t
    ) -> c_int {
        let time = milliseconds(timeout);
        // SAFETY: guaranteed by the caller.
        let found = unsafe { epoll_driving(&EPOLL_PWAIT, fd, events, max, time, mask) };
        found.unwrap_or_else(|| {
            wake_devices();
            // SAFETY: guaranteed by the caller.
            unsafe { real::epoll_pwait(fd, events, max, timeout, mask) }
        })
    }

    epoll_pwait2(
        fd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec,
        mask: *const sigset_t
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        let Some(time) = (unsafe { read_timespec(timeout) }) else {
            return failed(libc::EINVAL);
        };
        // SAFETY: guaranteed by the caller.
        let found = unsafe { epoll_driving(&EPOLL_PWAIT2, fd, events, max, time, mask) };
        found.unwrap_or_else(|| {
            wake_devices();
            // SAFETY: guaranteed by the caller.
            unsafe { real::epoll_pwait2(fd, events, max, timeout, mask) }
        })
    }
}
