//! The functions of the C library: for calls of the program found by RTLD_NEXT, so that other
//! preloaded libraries see them; for calls of the library itself in the C library.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::internal;

/// The caller of a function.
#[derive(Clone, Copy)]
pub(crate) enum Origin {
    Program,
    /// The library itself.
    Own,
}

/// A function of the C library, looked up when it is first called.
pub(crate) struct LibcFunction {
    /// NUL-terminated.
    name: &'static str,
    /// The addresses for calls of the program, and of the library itself.
    addresses: [AtomicPtr<c_void>; 2],
}

impl LibcFunction {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            addresses: [const { AtomicPtr::new(ptr::null_mut()) }; 2],
        }
    }

    /// Returns the address; null if the C library has no such function.
    #[inline]
    pub(crate) fn address(&self, origin: Origin) -> *mut c_void {
        let known = &self.addresses[origin as usize];
        let address = known.load(Ordering::Relaxed);
        if !address.is_null() {
            return address;
        }
        let address = find(self.name, origin);
        known.store(address, Ordering::Relaxed);
        address
    }

    /// Returns whether the program's calls go to another preloaded library, whose descriptors
    /// may be unknown to the kernel.
    #[inline]
    pub(crate) fn is_hooked(&self) -> bool {
        self.address(Origin::Program) != self.address(Origin::Own)
    }
}

#[cold]
fn find(name: &'static str, origin: Origin) -> *mut c_void {
    static LIBRARY: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else {
        return ptr::null_mut();
    };
    if let Origin::Own = origin {
        let mut library = LIBRARY.load(Ordering::Relaxed);
        if library.is_null() {
            library = open_loaded(c"libc.so.6");
            LIBRARY.store(library, Ordering::Relaxed);
        }
        if !library.is_null() {
            // SAFETY: the name is NUL-terminated, and the library stays loaded.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            if !found.is_null() {
                return found;
            }
        }
    }
    // SAFETY: the name is NUL-terminated.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Opens a library that is loaded already; returns null if it is not. `dlopen` is called by its
/// address, since by its name it would be the function that this library exports.
fn open_loaded(name: &CStr) -> *mut c_void {
    const LOADED: c_int = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: the name is NUL-terminated.
    let dlopen = unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr()) };
    if dlopen.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: the C library's function of this name has this type.
    let dlopen = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void>(
            dlopen,
        )
    };
    // SAFETY: opening a library that is already loaded runs no code of it.
    unsafe { dlopen(name.as_ptr(), LOADED) }
}

/// Sets `errno`.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: the address is the thread's own `errno`.
    unsafe { *libc::__errno_location() = errno };
}

/// Returns `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: the address is the thread's own `errno`.
    unsafe { *libc::__errno_location() }
}

macro_rules! libc_functions {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $failed:expr;)*) => {$(
        /// The C library's function of this name.
        ///
        /// # Safety
        /// As of that function.
        pub(crate) unsafe fn $name($($argument: $type),*) -> $result {
            static FUNCTION: LibcFunction = LibcFunction::new(concat!(stringify!($name), "\0"));
            let address = FUNCTION.address(match internal::is_internal() {
                true => Origin::Own,
                false => Origin::Program,
            });
            if address.is_null() {
                set_errno(libc::ENOSYS);
                return $failed;
            }
            // SAFETY: the C library's function of this name has this type. Arguments
            // of functions with `...` are passed like others on x86-64 and aarch64.
            let function = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> $result>(
                    address,
                )
            };
            // SAFETY: guaranteed by the caller.
            unsafe { function($($argument),*) }
        }
    )*};
}

/// The variable argument of `open`, `openat` and `fcntl`.
pub(crate) type Optional = usize;

libc_functions! {
    sigaction(
        number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction
    ) -> c_int, -1;
    signal(number: c_int, handler: usize) -> usize, libc::SIG_ERR;
    __sysv_signal(number: c_int, handler: usize) -> usize, libc::SIG_ERR;
    sigset(number: c_int, handler: usize) -> usize, libc::SIG_ERR;
    sighold(number: c_int) -> c_int, -1;
    sigignore(number: c_int) -> c_int, -1;
    sigblock(mask: c_int) -> c_int, -1;
    sigsetmask(mask: c_int) -> c_int, -1;
    pthread_attr_setsigmask_np(
        attributes: *mut c_void, mask: *const libc::sigset_t
    ) -> c_int, libc::ENOSYS;
    pthread_mutex_init(mutex: *mut c_void, attributes: *const c_void) -> c_int, libc::ENOSYS;
    daemon(keeps_folder: c_int, keeps_files: c_int) -> c_int, -1;
    // These do not return.
    _exit(status: c_int) -> c_int, -1;
    longjmp(environment: *mut c_void, value: c_int) -> c_int, -1;
    _longjmp(environment: *mut c_void, value: c_int) -> c_int, -1;
    siglongjmp(environment: *mut c_void, value: c_int) -> c_int, -1;
    __longjmp_chk(environment: *mut c_void, value: c_int) -> c_int, -1;
    pthread_sigmask(
        how: c_int, set: *const libc::sigset_t, before: *mut libc::sigset_t
    ) -> c_int, libc::ENOSYS;
    open(path: *const c_char, flags: c_int, mode: Optional) -> c_int, -1;
    openat(at: c_int, path: *const c_char, flags: c_int, mode: Optional) -> c_int, -1;
    close(fd: c_int) -> c_int, -1;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, -1;
    syscall(
        number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize
    ) -> c_long, -1;
    dup(fd: c_int) -> c_int, -1;
    dup2(from: c_int, to: c_int) -> c_int, -1;
    dup3(from: c_int, to: c_int, flags: c_int) -> c_int, -1;
    fcntl(fd: c_int, command: c_int, argument: Optional) -> c_int, -1;
    ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int, -1;
    read(fd: c_int, buffer: *mut c_void, count: usize) -> isize, -1;
    write(fd: c_int, buffer: *const c_void, count: usize) -> isize, -1;
    pread(fd: c_int, buffer: *mut c_void, length: usize, offset: i64) -> isize, -1;
    pwrite(fd: c_int, buffer: *const c_void, length: usize, offset: i64) -> isize, -1;
    readv(fd: c_int, parts: *const libc::iovec, count: c_int) -> isize, -1;
    writev(fd: c_int, parts: *const libc::iovec, count: c_int) -> isize, -1;
    preadv(fd: c_int, parts: *const libc::iovec, count: c_int, offset: i64) -> isize, -1;
    pwritev(fd: c_int, parts: *const libc::iovec, count: c_int, offset: i64) -> isize, -1;
    preadv2(
        fd: c_int, parts: *const libc::iovec, count: c_int, offset: i64, flags: c_int
    ) -> isize, -1;
    pwritev2(
        fd: c_int, parts: *const libc::iovec, count: c_int, offset: i64, flags: c_int
    ) -> isize, -1;
    recvmmsg(
        fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int,
        timeout: *mut libc::timespec
    ) -> c_int, -1;
    sendmmsg(
        fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int
    ) -> c_int, -1;
    fread(memory: *mut c_void, size: usize, items: usize, file: *mut c_void) -> usize, 0;
    fread_unlocked(
        memory: *mut c_void, size: usize, items: usize, file: *mut c_void
    ) -> usize, 0;
    fwrite(memory: *const c_void, size: usize, items: usize, file: *mut c_void) -> usize, 0;
    fwrite_unlocked(
        memory: *const c_void, size: usize, items: usize, file: *mut c_void
    ) -> usize, 0;
    mmap(
        address: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int,
        offset: i64
    ) -> *mut c_void, libc::MAP_FAILED;
    munmap(address: *mut c_void, length: usize) -> c_int, -1;
    mremap(
        address: *mut c_void, old: usize, new: usize, flags: c_int, target: *mut c_void
    ) -> *mut c_void, libc::MAP_FAILED;
    mprotect(address: *mut c_void, length: usize, protection: c_int) -> c_int, -1;
    pkey_mprotect(
        address: *mut c_void, length: usize, protection: c_int, key: c_int
    ) -> c_int, -1;
    brk(end: *mut c_void) -> c_int, -1;
    sbrk(increment: isize) -> *mut c_void, libc::MAP_FAILED;
    madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int, -1;
    accept4(
        fd: c_int, address: *mut libc::sockaddr, length: *mut libc::socklen_t, flags: c_int
    ) -> c_int, -1;
    epoll_create1(flags: c_int) -> c_int, -1;
    pipe2(fds: *mut c_int, flags: c_int) -> c_int, -1;
    eventfd(value: c_uint, flags: c_int) -> c_int, -1;
    memfd_create(name: *const c_char, flags: c_uint) -> c_int, -1;
    timerfd_create(clock: c_int, flags: c_int) -> c_int, -1;
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int, -1;
    socketpair(domain: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int, -1;
    send(fd: c_int, buffer: *const c_void, length: usize, flags: c_int) -> isize, -1;
    sendto(
        fd: c_int, buffer: *const c_void, length: usize, flags: c_int,
        address: *const libc::sockaddr, address_length: libc::socklen_t
    ) -> isize, -1;
    sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize, -1;
    recv(fd: c_int, buffer: *mut c_void, length: usize, flags: c_int) -> isize, -1;
    recvfrom(
        fd: c_int, buffer: *mut c_void, length: usize, flags: c_int,
        address: *mut libc::sockaddr, address_length: *mut libc::socklen_t
    ) -> isize, -1;
    recvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> isize, -1;
    stat(path: *const c_char, found: *mut libc::stat) -> c_int, -1;
    lstat(path: *const c_char, found: *mut libc::stat) -> c_int, -1;
    fstat(fd: c_int, found: *mut libc::stat) -> c_int, -1;
    fstatat(at: c_int, path: *const c_char, found: *mut libc::stat, flags: c_int) -> c_int, -1;
    __xstat(version: c_int, path: *const c_char, found: *mut libc::stat) -> c_int, -1;
    __lxstat(version: c_int, path: *const c_char, found: *mut libc::stat) -> c_int, -1;
    __fxstat(version: c_int, fd: c_int, found: *mut libc::stat) -> c_int, -1;
    __fxstatat(
        version: c_int, at: c_int, path: *const c_char, found: *mut libc::stat, flags: c_int
    ) -> c_int, -1;
    statx(
        at: c_int, path: *const c_char, flags: c_int, mask: c_uint, found: *mut libc::statx
    ) -> c_int, -1;
    access(path: *const c_char, mode: c_int) -> c_int, -1;
    euidaccess(path: *const c_char, mode: c_int) -> c_int, -1;
    faccessat(at: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int, -1;
    readlink(path: *const c_char, buffer: *mut c_char, size: usize) -> isize, -1;
    readlinkat(at: c_int, path: *const c_char, buffer: *mut c_char, size: usize) -> isize, -1;
    getxattr(
        path: *const c_char, name: *const c_char, value: *mut c_void, size: usize
    ) -> isize, -1;
    lgetxattr(
        path: *const c_char, name: *const c_char, value: *mut c_void, size: usize
    ) -> isize, -1;
    listxattr(path: *const c_char, names: *mut c_char, size: usize) -> isize, -1;
    llistxattr(path: *const c_char, names: *mut c_char, size: usize) -> isize, -1;
    realpath(path: *const c_char, resolved: *mut c_char) -> *mut c_char, ptr::null_mut();
    chdir(path: *const c_char) -> c_int, -1;
    getcwd(buffer: *mut c_char, size: usize) -> *mut c_char, ptr::null_mut();
    get_current_dir_name() -> *mut c_char, ptr::null_mut();
    opendir(path: *const c_char) -> *mut c_void, ptr::null_mut();
    scandir(
        path: *const c_char, list: *mut c_void, filter: *mut c_void, compare: *mut c_void
    ) -> c_int, -1;
    fopen(path: *const c_char, mode: *const c_char) -> *mut c_void, ptr::null_mut();
    fdopen(fd: c_int, mode: *const c_char) -> *mut c_void, ptr::null_mut();
    poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int, -1;
    ppoll(
        fds: *mut libc::pollfd, count: libc::nfds_t, timeout: *const libc::timespec,
        mask: *const libc::sigset_t
    ) -> c_int, -1;
    select(
        count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set,
        except: *mut libc::fd_set, timeout: *mut libc::timeval
    ) -> c_int, -1;
    pselect(
        count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set,
        except: *mut libc::fd_set, timeout: *const libc::timespec, mask: *const libc::sigset_t
    ) -> c_int, -1;
    epoll_wait(
        fd: c_int, events: *mut libc::epoll_event, max: c_int, timeout: c_int
    ) -> c_int, -1;
    epoll_pwait2(
        fd: c_int, events: *mut libc::epoll_event, max: c_int,
        timeout: *const libc::timespec, mask: *const libc::sigset_t
    ) -> c_int, -1;
    epoll_pwait(
        fd: c_int, events: *mut libc::epoll_event, max: c_int, timeout: c_int,
        mask: *const libc::sigset_t
    ) -> c_int, -1;
}
