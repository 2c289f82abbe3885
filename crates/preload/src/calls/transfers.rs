//! Functions that move data between files or sockets and memory of the program, beside those of
//! [`super::descriptors`] and [`super::sockets`]: guarded pages are made accessible before, where
//! the kernel would find them protected.

use std::ffi::{c_int, c_uint, c_void};

use libc::{iovec, mmsghdr};

use super::{export, require_room};
use crate::{check, real};

/// Returns the length of items; what does not fit into memory is refused by the C library.
fn length(size: usize, items: usize) -> usize {
    size.saturating_mul(items)
}

/// Called when a function of the C library has read items.
fn after_items(memory: *mut c_void, size: usize, items: usize) {
    check::after_call(memory, length(size, items) as isize);
}

export! {
    pread = pread64 (fd: c_int, buffer: *mut c_void, length: usize, offset: i64) -> isize {
        check::before_call(buffer, length);
        // SAFETY: guaranteed by the caller.
        let count = unsafe { real::pread(fd, buffer, length, offset) };
        check::after_call(buffer, count);
        count
    }

    __pread_chk = __pread64_chk (
        fd: c_int, buffer: *mut c_void, length: usize, offset: i64, room: usize
    ) -> isize {
        require_room(length, room);
        // SAFETY: guaranteed by the caller.
        unsafe { pread(fd, buffer, length, offset) }
    }

    pwrite(fd: c_int, buffer: *const c_void, length: usize, offset: i64) -> isize {
        check::before_call(buffer.cast_mut(), length);
        // SAFETY: guaranteed by the caller.
        unsafe { real::pwrite(fd, buffer, length, offset) }
    }

    // No alias: the linker binds calls of `pwrite` to the C library's (`own.rs`).
    pwrite64(fd: c_int, buffer: *const c_void, length: usize, offset: i64) -> isize {
        check::before_call(buffer.cast_mut(), length);
        // SAFETY: guaranteed by the caller.
        unsafe { real::pwrite(fd, buffer, length, offset) }
    }

    readv(fd: c_int, parts: *const iovec, count: c_int) -> isize {
        check::before_parts(parts, count);
        // SAFETY: guaranteed by the caller.
        let returned = unsafe { real::readv(fd, parts, count) };
        check::after_parts(parts, count, returned);
        returned
    }

    writev(fd: c_int, parts: *const iovec, count: c_int) -> isize {
        check::before_parts(parts, count);
        // SAFETY: guaranteed by the caller.
        unsafe { real::writev(fd, parts, count) }
    }

    preadv = preadv64 (fd: c_int, parts: *const iovec, count: c_int, offset: i64) -> isize {
        check::before_parts(parts, count);
        // SAFETY: guaranteed by the caller.
        let returned = unsafe { real::preadv(fd, parts, count, offset) };
        check::after_parts(parts, count, returned);
        returned
    }

    pwritev = pwritev64 (fd: c_int, parts: *const iovec, count: c_int, offset: i64) -> isize {
        check::before_parts(parts, count);
        // SAFETY: guaranteed by the caller.
        unsafe { real::pwritev(fd, parts, count, offset) }
    }

    preadv2 = preadv64v2 (
        fd: c_int, parts: *const iovec, count: c_int, offset: i64, flags: c_int
    ) -> isize {
        check::before_parts(parts, count);
        // SAFETY: guaranteed by the caller.
        let returned = unsafe { real::preadv2(fd, parts, count, offset, flags) };
        check::after_parts(parts, count, returned);
        returned
    }

    pwritev2 = pwritev64v2 (
        fd: c_int, parts: *const iovec, count: c_int, offset: i64, flags: c_int
    ) -> isize {
        check::before_parts(parts, count);
        // SAFETY: guaranteed by the caller.
        unsafe { real::pwritev2(fd, parts, count, offset, flags) }
    }

    recvmmsg(
        fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int,
        timeout: *mut libc::timespec
    ) -> c_int {
        check::before_messages(messages, count);
        // SAFETY: guaranteed by the caller.
        unsafe { real::recvmmsg(fd, messages, count, flags, timeout) }
    }

    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
        check::before_messages(messages, count);
        // SAFETY: guaranteed by the caller.
        unsafe { real::sendmmsg(fd, messages, count, flags) }
    }

    fread(memory: *mut c_void, size: usize, items: usize, file: *mut c_void) -> usize {
        check::before_call(memory, length(size, items));
        // SAFETY: guaranteed by the caller.
        let count = unsafe { real::fread(memory, size, items, file) };
        after_items(memory, size, count);
        count
    }

    fread_unlocked(memory: *mut c_void, size: usize, items: usize, file: *mut c_void) -> usize {
        check::before_call(memory, length(size, items));
        // SAFETY: guaranteed by the caller.
        let count = unsafe { real::fread_unlocked(memory, size, items, file) };
        after_items(memory, size, count);
        count
    }

    __fread_chk(
        memory: *mut c_void, room: usize, size: usize, items: usize, file: *mut c_void
    ) -> usize {
        require_room(length(size, items), room);
        // SAFETY: guaranteed by the caller.
        unsafe { fread(memory, size, items, file) }
    }

    __fread_unlocked_chk(
        memory: *mut c_void, room: usize, size: usize, items: usize, file: *mut c_void
    ) -> usize {
        require_room(length(size, items), room);
        // SAFETY: guaranteed by the caller.
        unsafe { fread_unlocked(memory, size, items, file) }
    }

    fwrite(memory: *const c_void, size: usize, items: usize, file: *mut c_void) -> usize {
        check::before_call(memory.cast_mut(), length(size, items));
        // SAFETY: guaranteed by the caller.
        unsafe { real::fwrite(memory, size, items, file) }
    }

    fwrite_unlocked(memory: *const c_void, size: usize, items: usize, file: *mut c_void) -> usize {
        check::before_call(memory.cast_mut(), length(size, items));
        // SAFETY: guaranteed by the caller.
        unsafe { real::fwrite_unlocked(memory, size, items, file) }
    }
}
