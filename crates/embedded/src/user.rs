//! Validation of the addresses in a command.
//!
//! The kernel copies from and to the memory of a process, and pins what a
//! device will use; both fail with EFAULT for unmapped memory. Here the device
//! is in the process, so memory is checked in the same way before it is
//! accessed.

use std::sync::atomic::{AtomicU8, Ordering};

use mmap_rs::MmapOptions;

use crate::{Result, refuse};

/// Access that memory must permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Faults in memory that the device will use, as pinning would (`ib_umem_get`).
///
/// # Errors
/// EINVAL for an empty range or one that overflows the address space; EFAULT if
/// it is not entirely mapped, or not writable but required to be.
pub(crate) fn fault_in(address: u64, length: u64, need: Access) -> Result<()> {
    let page = MmapOptions::page_size() as u64;
    let end = address
        .checked_add(length)
        .and_then(|end| end.checked_next_multiple_of(page));
    let Some(end) = end.filter(|_| length != 0) else {
        return refuse(libc::EINVAL);
    };
    let first = address / page * page;
    // The first page is rejected, even if something is mapped there.
    if first == 0 || !is_mapped(first, end - first, need) {
        return refuse(libc::EFAULT);
    }
    Ok(())
}

/// Checks that data of a command can be copied (`copy_from_user`,
/// `copy_to_user`).
///
/// # Errors
/// EFAULT if not.
pub(crate) fn copyable(address: u64, length: u64, need: Access) -> Result<()> {
    if length == 0 {
        return Ok(());
    }
    fault_in(address, length, need).or(refuse(libc::EFAULT))
}

/// Copies data that a command points to (`copy_from_user`).
///
/// # Errors
/// EFAULT if they are not mapped.
///
/// # Safety
/// The memory must stay valid, and not be written, during the call, if it is mapped.
pub(crate) unsafe fn copy_in(address: u64, length: usize) -> Result<Vec<u8>> {
    copyable(address, length as u64, Access::Read)?;
    let mut bytes = vec![0; length];
    let from = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the memory is readable, by the check and the caller; the vector is new, so the
    // two do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), length) };
    Ok(bytes)
}

/// Returns whether the system has `MADV_POPULATE_READ`.
fn can_populate() -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    // No `OnceLock`: a child of fork would wait forever for a thread of its parent that was
    // about to set it.
    static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
    match KNOWN.load(Ordering::Relaxed) {
        UNKNOWN => {
            let here = 0u64;
            let address = (&raw const here).expose_provenance() as u64;
            let page = MmapOptions::page_size() as u64;
            let can = advise(address / page * page, page, libc::MADV_POPULATE_READ);
            KNOWN.store(if can { YES } else { NO }, Ordering::Relaxed);
            can
        }
        known => known == YES,
    }
}

/// Returns whether whole pages are mapped and permit the access.
fn is_mapped(first: u64, length: u64, need: Access) -> bool {
    match need {
        // Linux before 5.14, and some sandboxes, can only report what is
        // mapped, not whether it is writable.
        _ if !can_populate() => {
            let first = std::ptr::with_exposed_provenance_mut(first as usize);
            // SAFETY: MS_ASYNC starts no I/O; the call fails if a page is not
            // mapped.
            unsafe { libc::msync(first, length as usize, libc::MS_ASYNC) == 0 }
        }
        Access::Read => advise(first, length, libc::MADV_POPULATE_READ),
        Access::Write => advise(first, length, libc::MADV_POPULATE_WRITE),
    }
}

fn advise(first: u64, length: u64, advice: i32) -> bool {
    let first = std::ptr::with_exposed_provenance_mut(first as usize);
    // SAFETY: this advice maps only what an access would map; it changes no
    // existing content, and fails for unmapped addresses.
    unsafe { libc::madvise(first, length as usize, advice) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mmap_rs::MmapOptions;

    fn errno(result: Result<()>) -> i32 {
        result.map_or_else(|errno| errno.raw(), |()| 0)
    }

    #[test]
    fn only_mapped_memory_with_the_right_access_is_accepted() {
        let page = MmapOptions::page_size() as u64;
        let mapping = MmapOptions::new(2 * page as usize).and_then(MmapOptions::map_mut);
        let mapping = mapping.unwrap();
        let address = mapping.as_ptr().expose_provenance() as u64;
        assert_eq!(errno(fault_in(address, 2 * page, Access::Write)), 0);
        assert_eq!(errno(fault_in(address + 8, 8, Access::Read)), 0);
        for need in [Access::Read, Access::Write] {
            assert_eq!(errno(fault_in(0, 8, need)), libc::EFAULT);
            assert_eq!(errno(fault_in(page - 1, 2, need)), libc::EFAULT);
            assert_eq!(errno(fault_in(page, 8, need)), libc::EFAULT);
            assert_eq!(errno(fault_in(1 << 60, 8, need)), libc::EFAULT);
            assert_eq!(errno(fault_in(u64::MAX - 7, 8, need)), libc::EINVAL);
            assert_eq!(errno(fault_in(u64::MAX - 8, 8, need)), libc::EINVAL);
            assert_eq!(errno(fault_in(address, 0, need)), libc::EINVAL);
            assert_eq!(errno(fault_in(address, u64::MAX, need)), libc::EINVAL);
            assert_eq!(errno(copyable(0, 0, need)), 0);
            assert_eq!(errno(copyable(u64::MAX, 8, need)), libc::EFAULT);
        }
        let mapping = mapping
            .make_read_only()
            .unwrap_or_else(|(_, error)| panic!("{error}"));
        assert_eq!(errno(fault_in(address, page, Access::Read)), 0);
        assert_eq!(errno(fault_in(address, page, Access::Write)), libc::EFAULT);
        drop(mapping);
    }
}
