//! Reports to standard error, which belongs to the program: it may close the descriptor and use
//! the number for something else, and may have a pipe there that nobody reads.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::real;

const FD: RawFd = libc::STDERR_FILENO;
/// How long a report waits, in all, for room in a pipe that does not block.
const MAX_WAIT_MS: c_int = 200;
const ZERO: libc::timespec = libc::timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// The program has closed standard error, and not made it a duplicate of another file since.
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Called when the program closes a descriptor.
#[inline]
pub(crate) fn closing(fd: RawFd) {
    if fd == FD {
        IS_CLOSED.store(true, Ordering::Relaxed);
    }
}

/// Called when the program has made a descriptor a duplicate of another one.
#[inline]
pub(crate) fn duplicated(fd: RawFd) {
    if fd == FD {
        IS_CLOSED.store(false, Ordering::Relaxed);
    }
}

/// Returns whether the descriptor is that of a terminal, of /dev/null or of a log that is appended
/// to, rather than of the first file that the program has opened since it closed standard error.
fn is_for_messages() -> bool {
    let mut found = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the call writes to a variable of this function, for which zero is a value. The other
    // call is a query.
    let (mode, flags) = unsafe {
        let result = real::fstat(FD, found.as_mut_ptr());
        let mode = if result == 0 {
            found.assume_init().st_mode
        } else {
            0
        };
        (mode, real::fcntl(FD, libc::F_GETFL, 0))
    };
    mode & libc::S_IFMT == libc::S_IFCHR || flags >= 0 && flags & libc::O_APPEND != 0
}

/// Writes to standard error, not by `std::io::stderr`, whose lock a thread of the program may
/// hold. What cannot be written is lost.
pub(crate) fn write(text: &str) {
    if !IS_CLOSED.load(Ordering::Relaxed) || is_for_messages() {
        write_all(FD, text.as_bytes());
    }
}

/// Writes bytes, if possible in one call. No SIGPIPE ends the program if nobody reads them, and
/// what cannot be written is lost.
pub(crate) fn write_all(fd: RawFd, mut bytes: &[u8]) {
    let _quiet = PipeSignalBlock::new();
    let mut left = MAX_WAIT_MS;
    while !bytes.is_empty() {
        // SAFETY: the bytes are readable for their length.
        let count = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(count) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(_) => match real::errno() {
                libc::EINTR => {}
                libc::EAGAIN if left > 0 => {
                    const STEP: c_int = 10;
                    left -= STEP;
                    let mut entry = libc::pollfd {
                        fd,
                        events: libc::POLLOUT,
                        revents: 0,
                    };
                    // SAFETY: one entry.
                    unsafe { real::poll(&raw mut entry, 1, STEP) };
                }
                _ => return,
            },
        }
    }
}

/// While it exists, writes of this thread to pipes that nobody reads cause no SIGPIPE.
struct PipeSignalBlock {
    /// The signals that the program blocks.
    before: libc::sigset_t,
    /// One was pending before, which is the program's.
    was_pending: bool,
}

fn pipe_signal() -> libc::sigset_t {
    let mut set = MaybeUninit::zeroed();
    // SAFETY: a set of this function.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
        set.assume_init()
    }
}

impl PipeSignalBlock {
    fn new() -> Self {
        let set = pipe_signal();
        let (mut before, mut pending) = (MaybeUninit::zeroed(), MaybeUninit::zeroed());
        // SAFETY: sets of this function, for which zero is a value.
        unsafe {
            real::pthread_sigmask(libc::SIG_BLOCK, &raw const set, before.as_mut_ptr());
            libc::sigpending(pending.as_mut_ptr());
            Self {
                before: before.assume_init(),
                was_pending: libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1,
            }
        }
    }
}

impl Drop for PipeSignalBlock {
    fn drop(&mut self) {
        let (set, now) = (pipe_signal(), ZERO);
        // SAFETY: takes a pending signal of the set, if there is one, without waiting for it; the
        // set of before is initialized.
        unsafe {
            if !self.was_pending {
                libc::sigtimedwait(&raw const set, ptr::null_mut(), &raw const now);
            }
            real::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut());
        }
    }
}
