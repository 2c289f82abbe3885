//! Registered memory of our own.

use std::fmt;
use std::sync::Arc;

use mmap_rs::MmapFlags;
use uverbs::AccessFlags;

use crate::memory::{Buffer, Registered, registered};
use crate::{CloseError, ProtectionDomain, Result};

/// Memory that was allocated and registered here, for operations posted here:
/// no peer can reach it by its own doing.
///
/// It is whole pages, filled with zeros, pinned until the last piece of it is
/// dropped. [`Region::into_buffer`] gives the memory, to be cut into pieces.
pub struct Region {
    pub(super) memory: Arc<Registered>,
}

impl Region {
    /// Allocates and registers `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// ENOMEM over the locked memory limit (`ulimit -l`) or without memory.
    pub fn alloc(domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::with(domain, len, MmapFlags::empty(), AccessFlags::empty())
    }

    /// As [`Region::alloc`], in huge pages of the default size, rounded up to
    /// whole ones: fewer entries in the device's translation table.
    ///
    /// # Errors
    /// As there; ENOMEM if not enough huge pages were reserved
    /// (`/proc/sys/vm/nr_hugepages`); [`Error::Unsupported`](crate::Error::Unsupported) of a kernel without.
    pub fn alloc_huge(domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::with(domain, len, MmapFlags::HUGE_PAGES, AccessFlags::empty())
    }

    /// As [`Region::alloc`], with pages that are not pinned but faulted in when
    /// the device comes to them. [`ProtectionDomain::advise`] fetches them
    /// ahead.
    ///
    /// # Errors
    /// As there; EOPNOTSUPP of a device without on-demand paging.
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

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it has no bytes; it never has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The domain that it is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.memory.domain()
    }

    /// All of its memory, as one buffer.
    pub fn into_buffer(self) -> Buffer {
        Buffer::whole(self)
    }

    /// Its memory, cut into buffers of exactly `size` bytes. As a region is whole
    /// pages there may be more of them than it was allocated for; what is too
    /// short for another at the end is left over.
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
    /// The kernel's reason, with the region; [`Error::Busy`](crate::Error::Busy) while a buffer of
    /// no bytes, cut off from it, is alive.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        registered::close(self.memory).map_err(|refused| refused.map(|memory| Self { memory }))
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("len", &self.len()).finish()
    }
}
