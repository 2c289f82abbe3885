//! Functions that take paths.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use embedded::sysfs::{MANAGER, UVERBS_MAJOR, UVERBS_MINOR};

use super::{export, result};
use crate::dynamic;
use crate::internal::mark_internal;
use crate::paths::{self, DevicePath, in_tree};
use crate::process::ProcessState;
use crate::real::{self, Optional, set_errno};
use crate::relative::{entered_tree, may_be_in_tree, meant};
use crate::status;
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

/// A path, and the directory that a relative one is relative to.
type At = (c_int, *const c_char);

/// Returns a path of a function without a directory.
fn here(path: *const c_char) -> At {
    (libc::AT_FDCWD, path)
}

/// Classifies a path.
///
/// # Safety
/// As of [`path`].
unsafe fn device_path((directory, at): At) -> Option<DevicePath> {
    // SAFETY: guaranteed by the caller.
    let path = unsafe { path(at) }?;
    paths::device_path(&meant(directory, path))
}

/// Returns the path that replaces a path: one in the tree, or the host's for one that is
/// relative to a directory of the tree and leads out of it.
///
/// # Safety
/// As of [`path`].
unsafe fn replacement((directory, at): At) -> Option<CString> {
    // SAFETY: guaranteed by the caller.
    let path = meant(directory, unsafe { path(at) }?);
    match (paths::device_path(&path), path) {
        (None | Some(DevicePath::Status(_)), Cow::Owned(path)) => Some(path),
        (None | Some(DevicePath::Status(_)), Cow::Borrowed(_)) => None,
        (Some(_), path) => in_tree(path.to_bytes()),
    }
}

/// Calls a function with the path, or with its replacement.
///
/// # Safety
/// As of [`path`].
unsafe fn with_tree_path<T>(at: At, call: impl FnOnce(*const c_char) -> T) -> T {
    // SAFETY: guaranteed by the caller.
    match unsafe { replacement(at) } {
        Some(path) => call(path.as_ptr()),
        None => call(at.1),
    }
}

/// Opens a path of RDMA devices, or one that is relative to a directory of the tree; `None` for
/// other paths.
///
/// # Safety
/// As of [`path`].
unsafe fn open_device_path(at: At, flags: c_int, mode: Optional) -> Option<c_int> {
    let cloexec = flags & libc::O_CLOEXEC != 0;
    let reads = flags & libc::O_ACCMODE == libc::O_RDONLY;
    // SAFETY: guaranteed by the caller.
    let found = unsafe { device_path(at) };
    let gets_content = reads && flags & libc::O_PATH == 0;
    let found = found.filter(|it| gets_content || !matches!(it, DevicePath::Status(_)));
    let Some(found) = found else {
        // SAFETY: guaranteed by the caller.
        let outside = unsafe { replacement(at) }?;
        // SAFETY: the path is NUL-terminated.
        return Some(unsafe { real::open(outside.as_ptr(), flags, mode) });
    };
    Some(match found {
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
        DevicePath::Status(path) => result(status::open(&path)),
        DevicePath::Dynamic(name) if gets_content => result(dynamic::open(&name)),
        // SAFETY: the path is NUL-terminated.
        DevicePath::Dynamic(_) => unsafe { open_tree_file(replacement(at)?, flags) },
        // SAFETY: the path is NUL-terminated.
        DevicePath::Tree(path) => unsafe { open_tree_file(path, flags) },
    })
}

unsafe fn open_tree_file(path: CString, flags: c_int) -> c_int {
    // The tree is read-only.
    let flags = flags & !(libc::O_CREAT | libc::O_TRUNC);
    // SAFETY: the path is NUL-terminated, and nothing is created.
    let fd = unsafe { real::open(path.as_ptr(), flags, 0) };
    if fd >= 0 && is_directory(fd) {
        entered_tree();
    }
    fd
}

/// Returns whether a descriptor is that of a directory.
fn is_directory(fd: c_int) -> bool {
    // SAFETY: all-zero bytes are a valid structure.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is writable.
    let result = unsafe { real::fstat(fd, &raw mut found) };
    result == 0 && found.st_mode & libc::S_IFMT == libc::S_IFDIR
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
unsafe fn number_at(at: At) -> Option<(u32, u32)> {
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
            open_device_path(here(at), flags, mode)
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
            open_device_path((directory, at), flags, mode)
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
            match number_at(here(at)) {
                Some(number) => character_device(found, number),
                None => with_tree_path(here(at), |at| real::stat(at, found)),
            }
        }
    }

    lstat = lstat64 (at: *const c_char, found: *mut libc::stat) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_at(here(at)) {
                Some(number) => character_device(found, number),
                None => with_tree_path(here(at), |at| real::lstat(at, found)),
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
            let number = if empty { number_of_fd(directory) } else { number_at((directory, at)) };
            match number {
                Some(number) => character_device(found, number),
                None => with_tree_path((directory, at), |at| {
                    real::fstatat(directory, at, found, flags)
                }),
            }
        }
    }

    __xstat = __xstat64 (
        version: c_int, at: *const c_char, found: *mut libc::stat
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_at(here(at)) {
                Some(number) => character_device(found, number),
                None => with_tree_path(here(at), |at| real::__xstat(version, at, found)),
            }
        }
    }

    __lxstat = __lxstat64 (
        version: c_int, at: *const c_char, found: *mut libc::stat
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match number_at(here(at)) {
                Some(number) => character_device(found, number),
                None => with_tree_path(here(at), |at| real::__lxstat(version, at, found)),
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
            match number_at((directory, at)) {
                Some(number) => character_device(found, number),
                None => with_tree_path((directory, at), |at| {
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
            let number = if empty { number_of_fd(directory) } else { number_at((directory, at)) };
            let Some((major, minor)) = number else {
                return with_tree_path((directory, at), |at| {
                    real::statx(directory, at, flags, mask, found)
                });
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
        unsafe { with_tree_path(here(at), |at| real::access(at, mode)) }
    }

    euidaccess = eaccess (at: *const c_char, mode: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(here(at), |at| real::euidaccess(at, mode)) }
    }

    faccessat(directory: c_int, at: *const c_char, mode: c_int, flags: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path((directory, at), |at| real::faccessat(directory, at, mode, flags)) }
    }

    readlink(at: *const c_char, buffer: *mut c_char, size: usize) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(here(at), |at| real::readlink(at, buffer, size)) }
    }

    readlinkat(
        directory: c_int, at: *const c_char, buffer: *mut c_char, size: usize
    ) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe {
            with_tree_path((directory, at), |at| real::readlinkat(directory, at, buffer, size))
        }
    }

    getxattr(
        at: *const c_char, name: *const c_char, value: *mut c_void, size: usize
    ) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(here(at), |at| real::getxattr(at, name, value, size)) }
    }

    lgetxattr(
        at: *const c_char, name: *const c_char, value: *mut c_void, size: usize
    ) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(here(at), |at| real::lgetxattr(at, name, value, size)) }
    }

    listxattr(at: *const c_char, names: *mut c_char, size: usize) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(here(at), |at| real::listxattr(at, names, size)) }
    }

    llistxattr(at: *const c_char, names: *mut c_char, size: usize) -> isize {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(here(at), |at| real::llistxattr(at, names, size)) }
    }

    realpath(at: *const c_char, resolved: *mut c_char) -> *mut c_char {
        // SAFETY: guaranteed by the caller; what the C library returns is
        // NUL-terminated.
        unsafe {
            let Some(path) = replacement(here(at)) else {
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
        unsafe {
            let Some(path) = replacement(here(at)) else {
                return real::opendir(at);
            };
            // Its descriptor may be what paths are relative to.
            entered_tree();
            real::opendir(path.as_ptr())
        }
    }

    chdir(at: *const c_char) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let Some(path) = replacement(here(at)) else {
                return real::chdir(at);
            };
            entered_tree();
            real::chdir(path.as_ptr())
        }
    }

    getcwd(buffer: *mut c_char, size: usize) -> *mut c_char {
        if !may_be_in_tree() {
            // SAFETY: guaranteed by the caller.
            return unsafe { real::getcwd(buffer, size) };
        }
        // SAFETY: the C library allocates what it returns, which is NUL-terminated.
        let own = unsafe { real::getcwd(ptr::null_mut(), 0) };
        // SAFETY: NUL-terminated and writable, or null.
        unsafe { strip_root(own) };
        if own.is_null() || (buffer.is_null() && size == 0) {
            return own;
        }
        // SAFETY: as above.
        let length = unsafe { CStr::from_ptr(own) }.count_bytes() + 1;
        let mut result = ptr::null_mut();
        if length > size {
            set_errno(if size == 0 { libc::EINVAL } else { libc::ERANGE });
        } else {
            result = buffer;
            if buffer.is_null() {
                // SAFETY: any size may be asked for.
                result = unsafe { libc::malloc(size) }.cast();
            }
            if !result.is_null() {
                // SAFETY: the path fits.
                unsafe { ptr::copy_nonoverlapping(own, result, length) };
            }
        }
        // SAFETY: allocated by the C library, and not used below.
        unsafe { libc::free(own.cast()) };
        result
    }

    __getcwd_chk(buffer: *mut c_char, size: usize, _room: usize) -> *mut c_char {
        // SAFETY: guaranteed by the caller.
        unsafe { getcwd(buffer, size) }
    }

    getwd(buffer: *mut c_char) -> *mut c_char {
        // SAFETY: guaranteed by the caller.
        unsafe { getcwd(buffer, libc::PATH_MAX as usize) }
    }

    get_current_dir_name() -> *mut c_char {
        // SAFETY: no memory is passed.
        unsafe {
            match may_be_in_tree() {
                true => getcwd(ptr::null_mut(), 0),
                false => real::get_current_dir_name(),
            }
        }
    }

    scandir = scandir64 (
        at: *const c_char, list: *mut c_void, filter: *mut c_void, compare: *mut c_void
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { with_tree_path(here(at), |at| real::scandir(at, list, filter, compare)) }
    }

    fopen = fopen64 (at: *const c_char, mode: *const c_char) -> *mut c_void {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let fd = match device_path(here(at)) {
                Some(DevicePath::Dynamic(name)) => result(dynamic::open(&name)),
                Some(DevicePath::Status(path)) => result(status::open(&path)),
                _ => return with_tree_path(here(at), |at| real::fopen(at, mode)),
            };
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
