//! Functions that change mappings.

use std::ffi::{c_int, c_void};
use std::ops::Range;

use super::export;
use crate::real::{self, set_errno};
use crate::table::{Lookup, ObjectKind, find};

/// Called before the pages of a range are unmapped, replaced, moved or discarded by the
/// program, in any thread, also in signal handlers and inside allocators: allocates nothing.
fn before_unmapping(_range: Range<usize>) {}

/// Called before the protection of a range changes; as [`before_unmapping`].
fn before_protecting(_range: Range<usize>, _protection: c_int) {}

fn range(address: *mut c_void, length: usize) -> Range<usize> {
    let start = address as usize;
    start..start.saturating_add(length)
}

export! {
    mmap = mmap64 (
        address: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int,
        offset: i64
    ) -> *mut c_void {
        let offset = match find(if flags & libc::MAP_ANONYMOUS != 0 { -1 } else { fd }) {
            Lookup::Other | Lookup::Netlink => Ok(offset),
            Lookup::Open(object) if matches!(object.kind, ObjectKind::Device(_)) => {
                let shared = flags & libc::MAP_SHARED != 0;
                let allowed = shared && protection & libc::PROT_EXEC == 0;
                let offset = embedded::Embedded::mapping_offset(offset, length);
                offset.filter(|_| allowed).ok_or(libc::EINVAL)
            }
            Lookup::Open(_) => Err(libc::ENODEV),
            Lookup::Stale | Lookup::Foreign => Err(libc::EIO),
        };
        match offset {
            Ok(offset) => {
                if flags & libc::MAP_FIXED != 0 {
                    before_unmapping(range(address, length));
                }
                // SAFETY: guaranteed by the caller; an offset of registers is within
                // their file.
                unsafe { real::mmap(address, length, protection, flags, fd, offset) }
            }
            Err(errno) => {
                set_errno(errno);
                libc::MAP_FAILED
            }
        }
    }

    munmap(address: *mut c_void, length: usize) -> c_int {
        before_unmapping(range(address, length));
        // SAFETY: guaranteed by the caller.
        unsafe { real::munmap(address, length) }
    }

    mremap(
        address: *mut c_void, old: usize, new: usize, flags: c_int, target: *mut c_void
    ) -> *mut c_void {
        if flags & libc::MREMAP_FIXED != 0 {
            before_unmapping(range(target, new));
        }
        before_unmapping(range(address, old));
        // SAFETY: guaranteed by the caller.
        unsafe { real::mremap(address, old, new, flags, target) }
    }

    mprotect(address: *mut c_void, length: usize, protection: c_int) -> c_int {
        before_protecting(range(address, length), protection);
        // SAFETY: guaranteed by the caller.
        unsafe { real::mprotect(address, length, protection) }
    }

    madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
        if matches!(advice, libc::MADV_DONTNEED | libc::MADV_REMOVE) {
            before_unmapping(range(address, length));
        }
        // SAFETY: guaranteed by the caller.
        unsafe { real::madvise(address, length, advice) }
    }
}
