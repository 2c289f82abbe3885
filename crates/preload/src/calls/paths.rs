//! Functions that take paths.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use embedded::sysfs::{MANAGER, UVERBS_MAJOR, UVERBS_MINOR};

use super::{export, result};
use crate::dynamic;
use crate::internal::mark_internal;
use crate::paths::{self, DevicePath, in_tree};
use crate::process::ProcessState;
use crate::real::{self, Optional};
use crate::table::{Lookup, ObjectKind, find};
use crate::tree;

/// Returns a path's bytes; `None` for a null pointer.
///
/// # Safety
/// A path must be NUL-terminated, and stay as it is for `'a`.
unsafe fn path<'a>(path: *const c_char) -> Option<&'a CStr> {
    // SAFETY: guaranteed by the caller.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) })
}

/// Classifies a path.
///
/// # Safety
/// As of [`path`].
unsafe fn device_path(at: *const c_char) -> Option<DevicePath> {
    // SAFETY: guaranteed by the caller.
    paths::device_path(unsafe { path(at) }?)
}

/// Returns the path in the tree that replaces a path.
///
/// # Safety
/// As of [`path`].
unsafe fn tree_path(at: *const c_char) -> Option<CString> {
    // SAFETY: guaranteed by the caller.
    let path = unsafe { path(at) }?;
    paths::device_path(path)?;
    in_tree(path.to_bytes())
}

/// Calls a function with the path, or with its replacement in the tree.
///
/// # Safety
/// As of [`path`].
unsafe fn with_tree_path<T>(at: *const c_char, call: impl FnOnce(*const c_char) -> T) -> T {
    // SAFETY: guaranteed by the caller.
    match unsafe { tree_path(at) } {
        Some(path) => call(path.as_ptr()),
        None => call(at),
    }
}

/// Opens a path of RDMA devices; `None` for other paths.
///
/// # Safety
/// As of [`path`].
unsafe fn open_device_path(at: *const c_char, flags: c_int) -> Option<c_int> {
    let cloexec = flags & libc::O_CLOEXEC != 0;
    let reads = flags & libc::O_ACCMODE == libc::O_RDONLY;
    // SAFETY: guaranteed by the caller.
    Some(match unsafe { device_path(at) }? {
        DevicePath::Device(number) => {
            let opened = ProcessState::current().open_device(number, cloexec);
            result(opened)
        }
        DevicePath::Manager => {
            let opened = ProcessState::current().open_manager(cloexec);
            if let (Ok(fd), true) = (&opened, flags & libc::O_NONBLOCK != 0) {
                // SAFETY: the descriptor is new.
                unsafe {
                    real::fcntl(
                        *fd,
                        libc::F_SETFL,
                        (libc::O_RDWR | libc::O_NONBLOCK) as usize,
                    )
                };
            }
            result(opened)
        }
        DevicePath::Dynamic(name) if reads && flags & libc::O_PATH == 0 => {
            result(dynamic::open(&name))
        }
        // SAFETY: the path is NUL-terminated.
        DevicePath::Dynamic(_) => unsafe { open_tree_file(tree_path(at)?, flags) },
        // SAFETY: the path is NUL-terminated.
        DevicePath::Tree(path) => unsafe { open_tree_file(path, flags) },
    })
}

unsafe fn open_tree_file(path: CString, flags: c_int) -> c_int {
    // The tree is read-only.
    let flags = flags & !(libc::O_CREAT | libc::O_TRUNC);
    // SAFETY: the path is NUL-terminated, and nothing is created.
    unsafe { real::open(path.as_ptr(), flags, 0) }
}

/// Fills in the properties of a character device.
///
/// # Safety
/// The structure must be writable.
unsafe fn character_device(found: *mut libc::stat, number: (u32, u32)) -> c_int {
    // SAFETY: all-zero bytes are a valid structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    stat.st_mode = libc::S_IFCHR | 0o666;
    stat.st_rdev = libc::makedev(number.0, number.1);
    stat.st_nlink = 1;
    stat.st_blksize = 4096;
    stat.st_ino = 1000 + u64::from(number.1);
    // SAFETY: guaranteed by the caller.
    unsafe { found.write(stat) };
    0
}

/// Returns the number of the character device at a path.
///
/// # Safety
/// As of [`path`].
unsafe fn number_at(at: *const c_char) -> Option<(u32, u32)> {
    // SAFETY: guaranteed by the caller.
    match unsafe { device_path(at) }? {
        DevicePath::Device(number) => number_of(ObjectKind::Device(number)),
        DevicePath::Manager => number_of(ObjectKind::Manager),
        _ => None,
    }
}

/// Returns the number of the character device that a descriptor refers to.
fn number_of_fd(fd: c_int) -> Option<(u32, u32)> {
    match find(fd) {
        Lookup::Open(object) => number_of(object.kind),
        _ => None,
    }
}

fn number_of(kind: ObjectKind) -> Option<(u32, u32)> {
    match kind {
        ObjectKind::Device(number) => Some((UVERBS_MAJOR, UVERBS_MINOR + number as u32)),
        ObjectKind::Manager => Some(MANAGER),
        ObjectKind::Events => None,
    }
}

/// Removes the root of the tree from an absolute path, so that programs see `/sys`.
///
/// # Safety
/// The path must be NUL-terminated and writable.
unsafe fn strip_root(resolved: *mut c_char) {
    if resolved.is_null() {
        return;
    }
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe { CStr::from_ptr(resolved) }.to_bytes();
    let Some(rest) = tree::strip_root(bytes) else {
        return;
    };
    let rest = rest.to_vec();
    // SAFETY: a shorter path fits where the longer one was.
    unsafe {
        ptr::copy_nonoverlapping(rest.as_ptr().cast(), resolved, rest.len());
        resolved.add(rest.len()).write(0);
    }
}

export! {
    open = open64 (at: *const c_char, flags: c_int, mode: Optional) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            open_device_path(at, flags)
                .unwrap_or_else(|| mark_internal(real::open(at, flags, mode)))
        }
    }

    __open_2 = __open64_2 (at: *const c_char, flags: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { open(at, flags, 0) }
    }

    openat = openat64 (
        directory: c_int, at: *const c_char, flags: c_int, mode: Optional
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            open_device_path(at, flags)
                .unwrap_or_else(|| mark_internal(real::openat(directory, at, flags, mode)))
        }
    }

    __openat_2 = __openat64_2 (directory: c_int, at: *const c_char, flags: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { openat(directory, at, flags, 0) }
    }

    stat = stat64 (at: *const c_char, found: *mut libc::stat) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_at(at) {
                Some(number) => character_device(found, number),
                None => with_tree_path(at, |at| real::stat(at, found)),
            }
        }
    }

    lstat = lstat64 (at: *const c_char, found: *mut libc::stat) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_at(at) {
                Some(number) => character_device(found, number),
                None => with_tree_path(at, |at| real::lstat(at, found)),
            }
        }
    }

    fstat = fstat64 (fd: c_int, found: *mut libc::stat) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_of_fd(fd) {
                Some(number) => character_device(found, number),
                None => real::fstat(fd, found),
            }
        }
    }

    fstatat = fstatat64 (
        directory: c_int, at: *const c_char, found: *mut libc::stat, flags: c_int
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let empty = flags & libc::AT_EMPTY_PATH != 0
                && path(at).is_none_or(CStr::is_empty);
            let number = if empty { number_of_fd(directory) } else { number_at(at) };
            match number {
                Some(number) => character_device(found, number),
                None => with_tree_path(at, |at| real::fstatat(directory, at, found, flags)),
            }
        }
    }

    __xstat = __xstat64 (
        version: c_int, at: *const c_char, found: *mut libc::stat
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_at(at) {
                Some(number) => character_device(found, number),
                None => with_tree_path(at, |at| real::__xstat(version, at, found)),
            }
        }
    }

    __lxstat = __lxstat64 (
        version: c_int, at: *const c_char, found: *mut libc::stat
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_at(at) {
                Some(number) => character_device(found, number),
                None => with_tree_path(at, |at| real::__lxstat(version, at, found)),
            }
        }
    }

    __fxstat = __fxstat64 (version: c_int, fd: c_int, found: *mut libc::stat) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_of_fd(fd) {
                Some(number) => character_device(found, number),
                None => real::__fxstat(version, fd, found),
            }
        }
    }

    __fxstatat = __fxstatat64 (
        version: c_int, directory: c_int, at: *const c_char, found: *mut libc::stat,
        flags: c_int
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_at(at) {
                Some(number) => character_device(found, number),
                None => with_tree_path(at, |at| {
                    real::__fxstatat(version, directory, at, found, flags)
                }),
            }
        }
    }

    statx(
        directory: c_int, at: *const c_char, flags: c_int, mask: c_uint,
        found: *mut libc::statx
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let empty = flags & libc::AT_EMPTY_PATH != 0
                && path(at).is_none_or(CStr::is_empty);
            let number = if empty { number_of_fd(directory) } else { number_at(at) };
            let Some((major, minor)) = number else {
                return with_tree_path(at, |at| real::statx(directory, at, flags, mask, found));
            };
            let mut stat: libc::statx = std::mem::zeroed();
            stat.stx_mask = libc::STATX_BASIC_STATS;
            stat.stx_mode = (libc::S_IFCHR | 0o666) as u16;
            stat.stx_rdev_major = major;
            stat.stx_rdev_minor = minor;
            stat.stx_nlink = 1;
            stat.stx_blksize = 4096;
            found.write(stat);
            0
        }
    }

    access(at: *const c_char, mode: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::access(at, mode)) }
    }

    euidaccess = eaccess (at: *const c_char, mode: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::euidaccess(at, mode)) }
    }

    faccessat(directory: c_int, at: *const c_char, mode: c_int, flags: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::faccessat(directory, at, mode, flags)) }
    }

    readlink(at: *const c_char, buffer: *mut c_char, size: usize) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::readlink(at, buffer, size)) }
    }

    readlinkat(
        directory: c_int, at: *const c_char, buffer: *mut c_char, size: usize
    ) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::readlinkat(directory, at, buffer, size)) }
    }

    getxattr(
        at: *const c_char, name: *const c_char, value: *mut c_void, size: usize
    ) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::getxattr(at, name, value, size)) }
    }

    lgetxattr(
        at: *const c_char, name: *const c_char, value: *mut c_void, size: usize
    ) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::lgetxattr(at, name, value, size)) }
    }

    listxattr(at: *const c_char, names: *mut c_char, size: usize) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::listxattr(at, names, size)) }
    }

    llistxattr(at: *const c_char, names: *mut c_char, size: usize) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::llistxattr(at, names, size)) }
    }

    realpath(at: *const c_char, resolved: *mut c_char) -> *mut c_char {
        // SAFETY: guaranteed by the caller; what the C library returns is
        // NUL-terminated.
        unsafe {
            let Some(path) = tree_path(at) else {
                return real::realpath(at, resolved);
            };
            // Before the root is removed, the path may be longer than the caller's buffer.
            let own = real::realpath(path.as_ptr(), ptr::null_mut());
            strip_root(own);
            if own.is_null() || resolved.is_null() {
                return own;
            }
            libc::strcpy(resolved, own);
            libc::free(own.cast());
            resolved
        }
    }

    __realpath_chk(at: *const c_char, resolved: *mut c_char, _size: usize) -> *mut c_char {
        // SAFETY: guaranteed by the caller.
        unsafe { realpath(at, resolved) }
    }

    canonicalize_file_name(at: *const c_char) -> *mut c_char {
        // SAFETY: guaranteed by the caller.
        unsafe { realpath(at, ptr::null_mut()) }
    }

    opendir(at: *const c_char) -> *mut c_void {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::opendir(at)) }
    }

    scandir = scandir64 (
        at: *const c_char, list: *mut c_void, filter: *mut c_void, compare: *mut c_void
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(at, |at| real::scandir(at, list, filter, compare)) }
    }

    fopen = fopen64 (at: *const c_char, mode: *const c_char) -> *mut c_void {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let Some(DevicePath::Dynamic(name)) = device_path(at) else {
                return with_tree_path(at, |at| real::fopen(at, mode));
            };
            let fd = result(dynamic::open(&name));
            if fd < 0 {
                return ptr::null_mut();
            }
            let file = real::fdopen(fd, mode);
            if file.is_null() {
                real::close(fd);
            }
            file
        }
    }
}
