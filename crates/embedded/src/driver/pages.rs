//! System calls on pages, for code that runs inside the program's calls: they allocate
//! nothing and pass by interposed functions.

use std::ffi::c_int;

use mmap_rs::MmapOptions;

const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

pub(crate) fn page_size() -> usize {
    MmapOptions::page_size()
}

/// Returns the result of a system call unless it failed.
fn checked(result: libc::c_long) -> Option<usize> {
    (result != -1).then_some(result as usize)
}

/// Maps new pages of zeros, for an access of this kind.
fn map(length: usize, protection: c_int) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    checked(unsafe { libc::syscall(libc::SYS_mmap, 0, length, protection, flags, -1, 0) })
}

/// Maps new pages of zeros.
pub(crate) fn map_zeros(length: usize) -> Option<usize> {
    map(length, READ_WRITE)
}

/// Reserves addresses.
pub(crate) fn reserve(length: usize) -> Option<usize> {
    map(length, libc::PROT_NONE)
}

/// Sets pages to be readable and, where their file permits it, writable.
///
/// # Safety
/// The pages must be the caller's.
pub(crate) unsafe fn allow_access(address: usize, length: usize) {
    // SAFETY: guaranteed by the caller. A failure leaves the pages readable, as they were.
    unsafe { libc::syscall(libc::SYS_mprotect, address, length, READ_WRITE) };
}

/// Unmaps pages.
///
/// # Safety
/// The pages must be the caller's, and no longer in use.
pub(crate) unsafe fn unmap(address: usize, length: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { libc::syscall(libc::SYS_munmap, address, length) };
}

/// How pages come to another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// They are moved, and the old mapping is left without pages.
    Move,
    /// They are mapped there as well; possible for shared mappings.
    Share,
    /// Their bytes are copied.
    Copy,
}

/// Transfers pages over reserved ones, and calls `each` with the offset and length of what
/// was transferred. Parts that belong to different mappings are transferred one by one.
///
/// # Safety
/// Both ranges must consist of whole pages; those at `to` must be the caller's; and the
/// program must be about to discard those at `from`, if they are moved.
pub(crate) unsafe fn transfer(
    how: Transfer,
    from: usize,
    to: usize,
    length: usize,
    each: &mut dyn FnMut(usize, usize),
) {
    let done = match how {
        Transfer::Copy => copy(from, to, length),
        Transfer::Move | Transfer::Share => {
            let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let (old, flags) = match how {
                Transfer::Move => (length, fixed | libc::MREMAP_DONTUNMAP),
                _ => (0, fixed),
            };
            // SAFETY: guaranteed by the caller.
            checked(unsafe { libc::syscall(libc::SYS_mremap, from, old, length, flags, to) })
                .is_some()
        }
    };
    if done {
        return each(to, length);
    }
    // A failed call may have unmapped its target.
    let fixed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: guaranteed by the caller.
    unsafe { libc::syscall(libc::SYS_mmap, to, length, libc::PROT_NONE, fixed, -1, 0) };
    let page = page_size();
    if length > page {
        let half = length / page / 2 * page;
        // SAFETY: guaranteed by the caller.
        unsafe {
            transfer(how, from, to, half, each);
            transfer(how, from + half, to + half, length - half, each);
        }
    }
}

/// Copies bytes whatever the protection of their pages.
fn copy(from: usize, to: usize, length: usize) -> bool {
    // SAFETY: pages of the caller, which this makes accessible.
    unsafe { allow_access(to, length) };
    let Some(memory) = OwnMemory::open() else {
        return false;
    };
    memory.transfer(libc::SYS_pread64, to, from, length)
}

/// The memory of this process as a file, which ignores the protection of private pages.
struct OwnMemory(c_int);

impl OwnMemory {
    fn open() -> Option<Self> {
        let path = c"/proc/thread-self/mem".as_ptr();
        let flags = libc::O_RDWR | libc::O_CLOEXEC;
        // SAFETY: the path is NUL-terminated.
        let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags, 0) };
        checked(fd).map(|fd| Self(fd as c_int))
    }

    /// Transfers all bytes between an accessible buffer and an address.
    fn transfer(&self, call: libc::c_long, buffer: usize, at: usize, length: usize) -> bool {
        let mut done = 0;
        while done < length {
            // SAFETY: the callers pass buffers that are accessible, and addresses that the
            // device may access, or that an error is returned for.
            let count =
                unsafe { libc::syscall(call, self.0, buffer + done, length - done, at + done) };
            match checked(count) {
                None | Some(0) => return false,
                Some(count) => done += count,
            }
        }
        true
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this value's.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

/// Reads memory whatever the protection of its pages. Returns whether all was read.
pub(crate) fn read_protected(at: usize, out: &mut [u8]) -> bool {
    let buffer = out.as_mut_ptr().expose_provenance();
    OwnMemory::open().is_some_and(|it| it.transfer(libc::SYS_pread64, buffer, at, out.len()))
}

/// Writes memory whatever the protection of its pages. Returns whether all was written.
///
/// # Safety
/// The device must have the right to write to the memory.
pub(crate) unsafe fn write_protected(at: usize, data: &[u8]) -> bool {
    let buffer = data.as_ptr().expose_provenance();
    OwnMemory::open().is_some_and(|it| it.transfer(libc::SYS_pwrite64, buffer, at, data.len()))
}
