//! The exported functions.

mod descriptors;
mod exit;
mod loading;
mod memory;
mod mutexes;
mod paths;
mod signals;
mod sockets;
mod transfers;
mod waiting;

use std::ffi::c_int;

use uverbs::Errno;

pub(crate) use memory::find_data_start;

use crate::real::set_errno;

/// Sets `errno`, and returns the value of a C function that failed.
fn failed(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

/// Converts a result to the return value of a C function.
fn result(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|errno| failed(errno.raw()))
}

/// As above, for a number of bytes.
fn count(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(count) => count as isize,
        Err(errno) => failed(errno.raw()) as isize,
    }
}

/// Ends the program, as fortified builds require, if it asks for more bytes than its buffer has
/// room for.
fn require_room(length: usize, room: usize) {
    if length > room {
        // SAFETY: ends the process.
        unsafe { libc::abort() };
    }
}

/// Exports functions, with aliases of `_LARGEFILE64_SOURCE` after `=`.
macro_rules! export {
    (@function $name:ident ($($argument:ident: $type:ty),*) -> $result:ty $body:block) => {
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $result $body
    };
    (@alias $name:ident ($($argument:ident: $type:ty),*) -> $result:ty) => {};
    (@alias $alias:ident $name:ident ($($argument:ident: $type:ty),*) -> $result:ty) => {
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $alias($($argument: $type),*) -> $result {
            // SAFETY: the same function by another name.
            unsafe { $name($($argument),*) }
        }
    };
    ($($name:ident $(= $alias:ident)? ($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => {$(
        export!(@function $name ($($argument: $type),*) -> $result $body);
        export!(@alias $($alias)? $name ($($argument: $type),*) -> $result);
    )*};
}
use export;
