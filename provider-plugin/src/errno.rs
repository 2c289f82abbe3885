//! errno conventions of verbs.
//!
//! A verb that returns a pointer returns NULL and sets `errno`. A verb that
//! returns an int returns the positive errno value and, as libibverbs's own
//! commands do, also sets `errno`, which some applications print.

use core::ffi::c_int;
use core::ptr;

/// An errno value, positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub c_int);

impl Errno {
    /// No such object.
    pub const NOENT: Errno = Errno(libc::ENOENT);
    /// Out of memory.
    pub const NOMEM: Errno = Errno(libc::ENOMEM);
    /// Invalid argument.
    pub const INVAL: Errno = Errno(libc::EINVAL);
    /// Not supported by the device, the kernel or the release of libibverbs.
    pub const OPNOTSUPP: Errno = Errno(libc::EOPNOTSUPP);
    /// The object is in use.
    pub const BUSY: Errno = Errno(libc::EBUSY);
    /// The device is gone, or an internal error.
    pub const IO: Errno = Errno(libc::EIO);

    /// The calling thread's `errno`; EIO if a failure has not set it.
    pub fn last() -> Errno {
        // SAFETY: libc gives every thread a valid location for its errno.
        match unsafe { *libc::__errno_location() } {
            ..=0 => Errno::IO,
            errno => Errno(errno),
        }
    }

    /// Sets the calling thread's `errno`.
    pub fn set(self) {
        // SAFETY: libc gives every thread a valid location for its errno.
        unsafe { *libc::__errno_location() = self.0 }
    }
}

impl From<uverbs::Error> for Errno {
    fn from(error: uverbs::Error) -> Errno {
        match error.errno().raw() {
            // An error must not read as success.
            ..=0 => Errno::IO,
            errno => Errno(errno),
        }
    }
}

/// Ends an int-returning verb: 0, or the errno value, which is also set.
pub fn int_result(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            errno.0
        }
    }
}

/// Ends a pointer-returning verb: the object, or NULL with `errno` set.
pub fn ptr_result<T>(result: Result<*mut T, Errno>) -> *mut T {
    match result {
        Ok(object) => object,
        Err(errno) => {
            errno.set();
            ptr::null_mut()
        }
    }
}

impl From<mlx5::CreateError> for Errno {
    fn from(error: mlx5::CreateError) -> Errno {
        tracing::debug!(%error, "refused");
        match error.errno() {
            // An error must not read as success.
            ..=0 => Errno::IO,
            errno => Errno(errno),
        }
    }
}

impl From<rxe::CreateError> for Errno {
    fn from(error: rxe::CreateError) -> Errno {
        tracing::debug!(%error, "refused");
        match error.errno() {
            // An error must not read as success.
            ..=0 => Errno::IO,
            errno => Errno(errno),
        }
    }
}
