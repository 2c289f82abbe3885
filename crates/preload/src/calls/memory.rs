//! Functions that change mappings.

use std::ffi::{c_int, c_void};
use std::fs;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use embedded::{Embedded, Loss};

use super::export;
use crate::fault::page_size;
use crate::real::{self, set_errno};
use crate::table::{Lookup, ObjectKind, find_for_use};
use crate::{check, doorbells, internal, own, process};

const MREMAP_DONTUNMAP: c_int = 4;
const MADV_DONTNEED_LOCKED: c_int = 24;

/// The lowest end of the data segment that the system accepts; without devices none.
static DATA_START: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Finds the start of the data segment. Called when the devices start.
pub(crate) fn find_data_start() {
    // If it cannot be read, what a shrinking segment loses is not kept.
    let stat = fs::read("/proc/self/stat").unwrap_or_default();
    if let Some(start) = data_start(&String::from_utf8_lossy(&stat)) {
        DATA_START.store(start, Ordering::Relaxed);
    }
}

/// Returns `start_brk` of the contents of /proc/self/stat.
fn data_start(stat: &str) -> Option<usize> {
    // The second field is a name in parentheses, which may contain any character.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split_ascii_whitespace().nth(47 - 3)?.parse().ok()
}

/// Returns the pages of a range; empty for arguments that the system refuses.
fn pages(address: usize, length: usize) -> Range<usize> {
    let page = page_size();
    let end = address
        .checked_add(length)
        .and_then(|end| end.checked_next_multiple_of(page));
    match end {
        Some(end) if address % page == 0 => address..end,
        _ => 0..0,
    }
}

/// Called before the program gives up the pages of a range, in any thread, also in signal
/// handlers and inside allocators: allocates nothing. Pages that are registered are kept for
/// the devices.
fn before_unmapping(range: Range<usize>, loss: Loss) {
    check::lift(&range);
    if let Some(devices) = process::devices_of_memory(&range) {
        let _scope = internal::enter();
        // SAFETY: the callers give up all pages of the range next.
        unsafe { embedded::keep_registered(devices, range, loss) };
    }
}

/// Returns whether the call would replace a mapping, since it succeeds elsewhere.
fn maps(length: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> bool {
    let flags = flags & !(libc::MAP_FIXED | libc::MAP_POPULATE | libc::MAP_LOCKED);
    // SAFETY: a new mapping, which nothing else uses, is made and unmapped.
    unsafe {
        let mapped = own::syscall(libc::SYS_mmap, 0, length, protection, flags, fd, offset);
        mapped != -1 && own::syscall(libc::SYS_munmap, mapped, length) == 0
    }
}

/// Returns whether mremap(2) would replace the mappings of a range, as it is called.
fn is_fixed_move(flags: c_int, moved: &Range<usize>, replaced: &Range<usize>) -> bool {
    const FIXED: c_int = libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE;
    let overlap = moved.start < replaced.end && replaced.start < moved.end;
    flags & FIXED == FIXED && !overlap
}

/// Changes the protection of a range by `change`.
fn protect(range: Range<usize>, protection: c_int, change: impl FnOnce() -> c_int) -> c_int {
    doorbells::remove_mapped(&range);
    check::lift(&range);
    match process::devices_of_memory(&range) {
        Some(devices) => {
            let _scope = internal::enter();
            embedded::protect_registered(devices, range, protection, change)
        }
        None => change(),
    }
}

fn is_registered(range: &Range<usize>) -> bool {
    process::devices_of_memory(range).is_some_and(|devices| {
        let _scope = internal::enter();
        embedded::has_registered(devices, range)
    })
}

/// Called before the end of the data segment changes.
fn before_break(end: usize) {
    // The system changes nothing then; `brk(NULL)` is a usual query.
    if end < DATA_START.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: a query.
    let now = unsafe { real::sbrk(0) } as usize;
    if let Some(end) = end
        .checked_next_multiple_of(page_size())
        .filter(|end| *end < now)
    {
        before_unmapping(pages(end, now - end), Loss::Unmapped);
    }
}

export! {
    mmap = mmap64 (
        address: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int,
        offset: i64
    ) -> *mut c_void {
        let program_offset = offset;
        let mut has_doorbells = false;
        let offset = match find_for_use(if flags & libc::MAP_ANONYMOUS != 0 { -1 } else { fd }) {
            Lookup::Other | Lookup::Netlink => Ok(offset),
            Lookup::Open(object) if matches!(object.kind, ObjectKind::Device(_)) => {
                let shared = flags & libc::MAP_SHARED != 0;
                let allowed = shared && protection & libc::PROT_EXEC == 0;
                let offset = Embedded::mapping_offset(offset, length);
                has_doorbells = Embedded::is_doorbell_page(program_offset)
                    && protection & libc::PROT_WRITE != 0;
                offset.filter(|_| allowed).ok_or(libc::EINVAL)
            }
            Lookup::Open(_) => Err(libc::ENODEV),
            Lookup::Stale | Lookup::Foreign => Err(libc::EIO),
        };
        match offset {
            Ok(offset) => {
                let replaced = pages(address as usize, length);
                if flags & libc::MAP_FIXED != 0 {
                    doorbells::remove(&replaced);
                    check::lift(&replaced);
                }
                if flags & libc::MAP_FIXED != 0
                    && embedded::may_be_registered(&replaced)
                    && maps(length, protection, flags, fd, offset)
                {
                    before_unmapping(replaced, Loss::Unmapped);
                }
                // SAFETY: guaranteed by the caller; an offset of registers is within
                // their file.
                let mapped =
                    unsafe { real::mmap(address, length, protection, flags, fd, offset) };
                if has_doorbells && mapped != libc::MAP_FAILED {
                    doorbells::add(mapped as usize, Embedded::is_allocated_uar(offset));
                }
                mapped
            }
            Err(errno) => {
                set_errno(errno);
                libc::MAP_FAILED
            }
        }
    }

    munmap(address: *mut c_void, length: usize) -> c_int {
        let range = pages(address as usize, length);
        doorbells::remove(&range);
        before_unmapping(range, Loss::Unmapped);
        // SAFETY: guaranteed by the caller.
        unsafe { real::munmap(address, length) }
    }

    mremap(
        address: *mut c_void, old: usize, new: usize, flags: c_int, target: *mut c_void
    ) -> *mut c_void {
        let replaced = pages(target as usize, new);
        let moved = address as usize..(address as usize).saturating_add(old);
        if is_fixed_move(flags, &moved, &replaced) {
            doorbells::remove(&replaced);
            before_unmapping(replaced, Loss::Unmapped);
        }
        let kept = pages(address as usize, old.min(new));
        let rest = pages(address as usize, old);
        doorbells::remove_mapped(&rest);
        check::lift(&rest);
        if flags & MREMAP_DONTUNMAP == 0 && !kept.is_empty() {
            before_unmapping(kept.end..rest.end, Loss::Unmapped);
        }
        // SAFETY: guaranteed by the caller.
        let change = || unsafe { real::mremap(address, old, new, flags, target) };
        let Some(devices) = process::devices_of_memory(&kept) else {
            return change();
        };
        let _scope = internal::enter();
        let mut result = libc::MAP_FAILED;
        embedded::move_registered(devices, kept, || {
            result = change();
            let is_moved = result != libc::MAP_FAILED && result != address;
            is_moved.then_some(result as usize)
        });
        result
    }

    mprotect(address: *mut c_void, length: usize, protection: c_int) -> c_int {
        protect(pages(address as usize, length), protection, || {
            // SAFETY: guaranteed by the caller.
            unsafe { real::mprotect(address, length, protection) }
        })
    }

    pkey_mprotect(address: *mut c_void, length: usize, protection: c_int, key: c_int) -> c_int {
        protect(pages(address as usize, length), protection, || {
            // SAFETY: guaranteed by the caller.
            unsafe { real::pkey_mprotect(address, length, protection, key) }
        })
    }

    madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
        let range = pages(address as usize, length);
        check::lift(&range);
        match advice {
            libc::MADV_DONTNEED | MADV_DONTNEED_LOCKED => {
                before_unmapping(range, Loss::Unmapped);
            }
            libc::MADV_REMOVE => before_unmapping(range, Loss::Removed),
            // Pages that are pinned are not freed.
            libc::MADV_FREE if is_registered(&range) => return 0,
            _ => {}
        }
        // SAFETY: guaranteed by the caller.
        unsafe { real::madvise(address, length, advice) }
    }

    brk(end: *mut c_void) -> c_int {
        before_break(end as usize);
        // SAFETY: guaranteed by the caller.
        unsafe { real::brk(end) }
    }

    sbrk(increment: isize) -> *mut c_void {
        if increment < 0 {
            // SAFETY: a query.
            let now = unsafe { real::sbrk(0) } as usize;
            before_break(now.wrapping_add_signed(increment));
        }
        // SAFETY: guaranteed by the caller.
        unsafe { real::sbrk(increment) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_of_the_data_segment() {
        let stat = fs::read_to_string("/proc/self/stat").unwrap();
        let start = data_start(&stat).unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let heap = maps.lines().find(|line| line.ends_with("[heap]")).unwrap();
        assert!(heap.starts_with(&format!("{start:x}-")), "{heap}");
        let (head, fields) = stat.split_once(" (").unwrap();
        let (_, fields) = fields.rsplit_once(") ").unwrap();
        assert_eq!(
            data_start(&format!("{head} (a) 1 b) {fields}")),
            Some(start)
        );
        for damaged in ["", "1 (a)", "1 (a) S 1"] {
            assert_eq!(data_start(damaged), None);
        }
    }
}
