//! Memory regions allocated by this crate.

use std::fmt;
use std::sync::Arc;

use mmap_rs::MmapFlags;
use uverbs::AccessFlags;

use crate::memory::{Buffer, Registered, registered};
use crate::{CloseError, ProtectionDomain, Result};

/// A memory region for operations of this process. Peers have no access to it.
///
/// It consists of whole pages, initially zero, which are pinned until the last piece is
/// dropped. [`Region::into_buffer`] converts it to a buffer, which can be split.
pub struct Region {
    pub(super) memory: Arc<Registered>,
}

impl Region {
    /// Allocates and registers `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// ENOMEM if the locked memory limit (`ulimit -l`) is exceeded or memory is
    /// exhausted.
    pub fn alloc(domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::with(domain, len, MmapFlags::empty(), AccessFlags::empty())
    }

    /// As [`Region::alloc`], in huge pages of the default size; `len` is rounded
    /// up to whole huge pages. The region needs fewer entries in the device's
    /// translation table.
    ///
    /// # Errors
    /// As [`Region::alloc`]; ENOMEM if not enough huge pages are reserved
    /// (`/proc/sys/vm/nr_hugepages`);
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the kernel has no
    /// huge pages.
    pub fn alloc_huge(domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::with(domain, len, MmapFlags::HUGE_PAGES, AccessFlags::empty())
    }

    /// As [`Region::alloc`], with on-demand paging: pages are not pinned, but
    /// faulted in when the device accesses them. [`ProtectionDomain::advise`]
    /// prefetches them.
    ///
    /// # Errors
    /// As [`Region::alloc`]; EOPNOTSUPP if the device has no on-demand paging.
    pub fn alloc_on_demand(domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::with(domain, len, MmapFlags::empty(), AccessFlags::ON_DEMAND)
    }

    fn with(
        domain: &ProtectionDomain,
        len: usize,
        flags: MmapFlags,
        access: AccessFlags,
    ) -> Result<Self> {
        let access = access | AccessFlags::LOCAL_WRITE;
        let memory = Registered::alloc(domain, len, flags, access)?;
        Ok(Self {
            memory: Arc::new(memory),
        })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether the length is zero, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the protection domain that the region is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.memory.domain()
    }

    /// Converts the region to one buffer of its whole length.
    pub fn into_buffer(self) -> Buffer {
        Buffer::whole(self)
    }

    /// Splits the region into buffers of exactly `size` bytes. A region consists of whole
    /// pages, so the iterator may return more buffers than fit in the requested length. A
    /// remainder shorter than `size` stays unused.
    pub fn into_buffers(self, size: usize) -> impl Iterator<Item = Buffer> {
        let mut rest = self.into_buffer();
        std::iter::from_fn(move || {
            if size == 0 || rest.capacity() < size {
                return None;
            }
            Some(rest.split_to(size))
        })
    }

    /// Deregisters and frees the memory.
    ///
    /// # Errors
    /// Returns the region with the kernel's error, or with
    /// [`Error::Busy`](crate::Error::Busy) while an empty buffer that was split
    /// off it exists.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        registered::close(self.memory).map_err(|refused| refused.map(|memory| Self { memory }))
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("len", &self.len()).finish()
    }
}
