//! System calls of the library itself, by functions that it does not export, or that it exports
//! for the program alone. Other preloaded libraries may interpose these, and hold a lock while they
//! call this one. build.rs has the linker replace `NAME` by `__wrap_NAME` in all code of the
//! library, the standard library's included.

use std::ffi::{c_char, c_int, c_long, c_void};

use libc::{mmsghdr, mode_t, off64_t, sockaddr, socklen_t, timespec};

use crate::real::{LibcFunction, Origin, set_errno};

unsafe extern "C" {
    /// The C library's function, for this crate, in which `libc::syscall` is what it exports.
    #[link_name = "__wrap_syscall"]
    pub(crate) fn syscall(number: c_long, ...) -> c_long;
}

macro_rules! own_functions {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        const _: () = {
            #[unsafe(export_name = concat!("__wrap_", stringify!($name)))]
            unsafe extern "C" fn function($($argument: $type),*) -> $result {
                static FUNCTION: LibcFunction =
                    LibcFunction::new(concat!(stringify!($name), "\0"));
                let address = FUNCTION.address(Origin::Own);
                if address.is_null() {
                    set_errno(libc::ENOSYS);
                    return -1;
                }
                // SAFETY: the C library's function of this name has this type. Arguments of
                // functions with `...` are passed like others on x86-64 and aarch64.
                let function = unsafe {
                    std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn($($type),*) -> $result,
                    >(address)
                };
                // SAFETY: guaranteed by the caller.
                unsafe { function($($argument),*) }
            }
        };
    )*};
}

own_functions! {
    bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    setsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t
    ) -> c_int;
    getsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t
    ) -> c_int;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: u32, flags: c_int) -> c_int;
    recvmmsg(
        fd: c_int, messages: *mut mmsghdr, count: u32, flags: c_int, timeout: *mut timespec
    ) -> c_int;
    epoll_ctl(fd: c_int, operation: c_int, of: c_int, event: *mut c_void) -> c_int;
    timerfd_settime(fd: c_int, flags: c_int, new: *const c_void, old: *mut c_void) -> c_int;
    flock(fd: c_int, operation: c_int) -> c_int;
    ftruncate(fd: c_int, length: off64_t) -> c_int;
    ftruncate64(fd: c_int, length: off64_t) -> c_int;
    lseek64(fd: c_int, offset: off64_t, from: c_int) -> off64_t;
    pwrite(fd: c_int, buffer: *const c_void, count: usize, offset: off64_t) -> isize;
    writev(fd: c_int, parts: *const c_void, count: c_int) -> isize;
    fchmod(fd: c_int, mode: mode_t) -> c_int;
    fstatfs(fd: c_int, found: *mut c_void) -> c_int;
    chmod(path: *const c_char, mode: mode_t) -> c_int;
    mkdir(path: *const c_char, mode: mode_t) -> c_int;
    rename(from: *const c_char, to: *const c_char) -> c_int;
    symlink(target: *const c_char, path: *const c_char) -> c_int;
    unlink(path: *const c_char) -> c_int;
    unlinkat(at: c_int, path: *const c_char, flags: c_int) -> c_int;
    msync(address: *mut c_void, length: usize, flags: c_int) -> c_int;
    getrandom(buffer: *mut c_void, length: usize, flags: u32) -> isize;
    sigpending(set: *mut c_void) -> c_int;
    sigtimedwait(set: *const c_void, info: *mut c_void, timeout: *const timespec) -> c_int;
    getrlimit(resource: c_int, limit: *mut c_void) -> c_int;
    getrusage(who: c_int, usage: *mut c_void) -> c_int;
    clock_gettime(clock: c_int, time: *mut timespec) -> c_int;
    clock_nanosleep(
        clock: c_int, flags: c_int, request: *const timespec, left: *mut timespec
    ) -> c_int;
    syscall(
        number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize
    ) -> c_long;
}
