//! Memory that a driver shares with the process.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::ptr::NonNull;

use mmap_rs::{Mmap, MmapFlags, MmapMut, MmapOptions, PageSize, UnsafeMmapFlags};

/// Bytes of a huge page, on x86-64 and with pages of 4 KiB on aarch64.
const HUGE_PAGE: usize = 2 << 20;

/// A shared, writable mapping of a queue; unmapped when dropped.
///
/// The driver may write to it at any time, so there is never a slice of it: the bytes
/// are accessed through [`Mapping::as_ptr`] only.
#[derive(Debug)]
pub struct Mapping {
    map: MmapMut,
}

pub(crate) fn to_io(error: mmap_rs::Error) -> io::Error {
    match error {
        mmap_rs::Error::Nix(errno) => io::Error::from_raw_os_error(errno as i32),
        mmap_rs::Error::Io(error) => error,
        _ => io::Error::from_raw_os_error(libc::EINVAL),
    }
}

impl Mapping {
    /// Maps `size` bytes at `offset` of the driver's file `fd`.
    ///
    /// # Errors
    /// What mmap(2) says; EINVAL for a size of zero.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, size: usize) -> io::Result<Self> {
        // SAFETY: the descriptor is open for the length of this call and is
        // not closed through this File, which is never dropped.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd.as_raw_fd()) });
        let options = MmapOptions::new(size).map_err(to_io)?;
        // SAFETY: others write to this memory while it is mapped; it is only
        // reached through raw pointers and atomics.
        let options = unsafe { options.with_file(&file, offset) };
        let map = options
            .with_flags(MmapFlags::SHARED)
            .map_mut()
            .map_err(to_io)?;
        Ok(Self { map })
    }

    /// Maps private memory for a device: zeroed, in whole pages, at least `size` bytes.
    ///
    /// A driver pins it while an object uses it; pinned pages remain with the parent when
    /// the process forks (Linux 5.12 and later).
    ///
    /// # Errors
    /// Those of mmap(2); EINVAL for a size of zero.
    pub fn anonymous(size: usize) -> io::Result<Self> {
        let whole = size
            .checked_next_multiple_of(MmapOptions::page_size())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let map = MmapOptions::new(whole)
            .map_err(to_io)?
            .map_mut()
            .map_err(to_io)?;
        Ok(Self { map })
    }

    /// As [`Mapping::anonymous`], in huge pages if it is at least as large as one: from the
    /// huge page pool if that has enough, else transparent huge pages.
    ///
    /// # Errors
    /// As [`Mapping::anonymous`].
    pub fn anonymous_large(size: usize) -> io::Result<Self> {
        if size < HUGE_PAGE {
            return Self::anonymous(size);
        }
        if let Some(huge) = Self::huge(size) {
            return Ok(huge);
        }
        let mapping = Self::anonymous(size)?;
        // The result is ignored, since this is only advice.
        // SAFETY: the mapping is this value's, and advice changes no byte.
        unsafe {
            let at = mapping.as_ptr().as_ptr().cast();
            libc::madvise(at, mapping.len(), libc::MADV_HUGEPAGE);
        }
        Ok(mapping)
    }

    /// Maps pages of the huge page pool; `None` if it has too few.
    fn huge(size: usize) -> Option<Self> {
        let whole = size.checked_next_multiple_of(HUGE_PAGE)?;
        let options = MmapOptions::new(whole).ok()?;
        let map = options.with_page_size(PageSize(HUGE_PAGE)).map_mut().ok()?;
        let mapping = Self { map };
        // The pages are populated now: a cgroup may have a limit on huge pages, which is
        // checked only here. Exceeding it is an error of this call, but SIGBUS at the first
        // access to a page.
        // SAFETY: the mapping is this value's, and nobody else's yet.
        let taken = unsafe {
            let at = mapping.as_ptr().as_ptr().cast();
            libc::madvise(at, whole, libc::MADV_POPULATE_WRITE)
        };
        (taken == 0).then_some(mapping)
    }

    /// Page size in bytes, of which the size of every mapping is a multiple.
    pub fn page_size() -> usize {
        MmapOptions::page_size()
    }

    /// The first byte. Valid for [`Mapping::len`] bytes while this lives.
    pub fn as_ptr(&self) -> NonNull<u8> {
        NonNull::new(self.map.as_ptr().cast_mut()).unwrap_or(NonNull::dangling())
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.map.size()
    }

    /// Returns false: a mapping is never empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Unmaps the driver's memory, but keeps the first page's address readable, as zeros,
    /// for threads that may still read the header through a [`crate::IndexCheck`]. Costs a
    /// page of address space, no memory.
    pub fn retire(mut self) -> Retired {
        let page = MmapOptions::page_size();
        if self.map.size() > page {
            // The pages after the header's are unmapped here.
            drop(self.map.split_off(page));
        }
        self.retire_whole()
    }

    /// Releases the memory, but keeps all of its addresses readable, as zeros, for threads
    /// that may still read them through a [`crate::OwnerCheck`]. Costs address space, no
    /// memory.
    pub fn retire_whole(self) -> Retired {
        let overlaid = MmapOptions::new(self.map.size())
            .map_err(to_io)
            .and_then(|options| {
                // SAFETY: exactly what `self.map` owns is replaced; on success
                // its ownership passes to the new mapping.
                unsafe { options.with_unsafe_flags(UnsafeMmapFlags::MAP_FIXED) }
                    .with_address(self.map.start())
                    .map()
                    .map_err(to_io)
            });
        match overlaid {
            Ok(zeros) => {
                std::mem::forget(self.map);
                Retired::Zeros(zeros)
            }
            Err(_) => Retired::Kept(self.map),
        }
    }
}

/// Placeholder that keeps the addresses of a replaced queue readable.
#[derive(Debug)]
pub enum Retired {
    /// Private zero pages in place of the memory.
    Zeros(#[allow(dead_code, reason = "held for its address")] Mmap),
    /// The memory itself, if it could not be replaced.
    Kept(#[allow(dead_code, reason = "held for its address")] MmapMut),
}
