//! Memory that peers may reach, and memory that is somebody else's.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use mmap_rs::MmapFlags;
use uverbs::AccessFlags;

use crate::memory::{Registered, bytes, registered};
use crate::operation::RemoteAddr;
use crate::{CloseError, Error, ProtectionDomain, Result};

/// Memory that peers may read, write or do atomics on, as its access says.
///
/// A peer writes when it likes. So this memory is never a Rust slice: it is
/// copied in and out, or accessed 8 bytes at a time, by atomic accesses of whole
/// aligned words of 8 bytes. Of a copy that a peer's write overtakes, each byte is
/// an old or a new one. A copy costs what its words cost; a copy in that does not
/// begin or end at a multiple of 8, a locked instruction there.
///
/// A handle: clones refer to the same memory, which is deregistered and freed
/// when the last clone, [`MemorySlice`] and operation in flight are gone.
#[derive(Clone)]
pub struct RemoteRegion {
    memory: Arc<Registered>,
}

/// What a region of ours may be made with.
const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND)
    .union(AccessFlags::ON_DEMAND)
    .union(AccessFlags::FLUSH_GLOBAL)
    .union(AccessFlags::FLUSH_PERSISTENT)
    .union(AccessFlags::RELAXED_ORDERING);

fn checked(access: AccessFlags) -> Result<AccessFlags> {
    if ACCESS.contains(access) {
        Ok(access | AccessFlags::LOCAL_WRITE)
    } else {
        Err(Error::Invalid {
            what: "access flags that a region of this kind cannot have",
        })
    }
}

impl RemoteRegion {
    /// Allocates and registers `len` bytes, rounded up to whole pages, for
    /// peers to do what `access` says. This side may always write.
    ///
    /// # Errors
    /// [`Error::Invalid`] for flags that make no sense here; ENOMEM over the
    /// locked memory limit (`ulimit -l`) or without memory.
    pub fn alloc(domain: &ProtectionDomain, len: usize, access: AccessFlags) -> Result<Self> {
        Self::with(domain, len, MmapFlags::empty(), access)
    }

    /// As [`RemoteRegion::alloc`], in huge pages
    /// ([`Region::alloc_huge`](crate::Region::alloc_huge)).
    ///
    /// # Errors
    /// As both.
    pub fn alloc_huge(domain: &ProtectionDomain, len: usize, access: AccessFlags) -> Result<Self> {
        Self::with(domain, len, MmapFlags::HUGE_PAGES, access)
    }

    fn with(
        domain: &ProtectionDomain,
        len: usize,
        flags: MmapFlags,
        access: AccessFlags,
    ) -> Result<Self> {
        let memory = Registered::alloc(domain, len, flags, checked(access)?)?;
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

    /// What a peer has to know to reach its first byte.
    pub fn key(&self) -> RemoteAddr {
        RemoteAddr::new(self.memory.addr(), self.memory.rkey())
    }

    /// The domain that it is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.memory.domain()
    }

    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        let there = self.memory.mapped_len();
        if offset > there || len > there - offset {
            return Err(Error::Limit {
                what: "bytes of a region",
                asked: (offset as u64).saturating_add(len as u64),
                allowed: there as u64,
            });
        }
        // SAFETY: within the mapping, as just checked.
        Ok(unsafe { self.memory.start().add(offset) })
    }

    /// Copies from `offset` on into `to`.
    ///
    /// # Errors
    /// [`Error::Limit`] if that is not all within the region.
    pub fn read_at(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.at(offset, to.len())?;
        // SAFETY: so many bytes are mapped there while the region lives. It is
        // whole pages, so their words are all of it, and is only ever accessed
        // by this module's atomic words.
        unsafe { bytes::load(from, to) };
        Ok(())
    }

    /// Copies `from` to `offset` on.
    ///
    /// # Errors
    /// [`Error::Limit`] if that is not all within the region.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.at(offset, from.len())?;
        // SAFETY: as in `read_at`.
        unsafe { bytes::store(to, from) };
        Ok(())
    }

    /// Reads 8 bytes at once, native byte order. What a peer wrote before them
    /// is seen afterwards.
    ///
    /// # Errors
    /// [`Error::Limit`] outside of the region, [`Error::Invalid`] if `offset` is
    /// not a multiple of 8.
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        let place = self.word(offset)?;
        // SAFETY: 8 mapped bytes, aligned, only ever accessed so.
        Ok(unsafe { bytes::load_word(place) })
    }

    /// Writes 8 bytes at once, native byte order, after everything written
    /// before.
    ///
    /// # Errors
    /// As [`RemoteRegion::load_u64`].
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        let place = self.word(offset)?;
        // SAFETY: as in `load_u64`.
        unsafe { bytes::store_word(place, value) };
        Ok(())
    }

    fn word(&self, offset: usize) -> Result<NonNull<u64>> {
        if !offset.is_multiple_of(8) {
            return Err(Error::Invalid {
                what: "an atomic access must be at a multiple of 8",
            });
        }
        // The region begins at a page.
        Ok(self.at(offset, 8)?.cast())
    }

    /// A part of it, to be posted.
    ///
    /// # Errors
    /// [`Error::Limit`] if that is not all within the region.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<MemorySlice> {
        MemorySlice::new(&self.memory, range)
    }

    /// Changes what peers may do. The key may change.
    ///
    /// # Errors
    /// [`Error::Busy`] while clones, slices or operations in flight use it;
    /// [`Error::Invalid`] for flags that make no sense here; what the driver says
    /// (EOPNOTSUPP where it cannot: rdma_rxe of Linux 6.1). The key is what it was
    /// then; a driver may have left it without use, and the region can still be
    /// closed.
    pub fn set_access(&mut self, access: AccessFlags) -> Result<()> {
        let access = checked(access)?;
        match Arc::get_mut(&mut self.memory) {
            Some(memory) => memory.set_access(access),
            None => Err(Error::Busy {
                object: "memory region",
                users: "clones and slices of it, or operations in flight",
            }),
        }
    }

    /// Deregisters and frees the memory; peers can reach it no more.
    ///
    /// # Errors
    /// [`Error::Busy`] while clones, slices, windows or operations in flight use
    /// it; the kernel's reason.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        registered::close(self.memory).map_err(|refused| refused.map(|memory| Self { memory }))
    }
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

/// Memory of somebody else's that was registered: a borrowed range, or a DMA
/// buffer. This crate never looks at it.
#[derive(Clone)]
pub struct ForeignRegion {
    memory: Arc<Registered>,
}

impl ForeignRegion {
    /// Registers `memory` for what `access` says.
    ///
    /// # Errors
    /// EFAULT if it is not mapped, or not writable though the access needs it;
    /// ENOMEM over the locked memory limit (`ulimit -l`).
    ///
    /// # Safety
    /// Until it is deregistered, the memory stays mapped. It is when
    /// [`ForeignRegion::close`] says so, which is refused while anything of it
    /// is in use: clones, slices, operations in flight, and windows that are
    /// bound to it or were, until what they were bound to next is known to be
    /// done. Dropped, all of that keeps it registered until the last is gone,
    /// and forgotten, or where the kernel refuses, for ever.
    ///
    /// Until then, while an operation in flight reads it, it is not written;
    /// while one writes it, it is neither read nor written; and if peers may
    /// reach it, by its access or through a window (one may be bound to it by
    /// whoever has a slice, if the access has [`AccessFlags::MW_BIND`]), it is
    /// treated at all times as memory that another thread reads, or writes.
    pub unsafe fn register(
        domain: &ProtectionDomain,
        memory: NonNull<[u8]>,
        access: AccessFlags,
    ) -> Result<Self> {
        // SAFETY: passed on to the caller.
        let memory = unsafe { Registered::foreign(domain, memory, access) }?;
        Ok(Self {
            memory: Arc::new(memory),
        })
    }

    /// Registers `len` bytes from `offset` on of a DMA buffer, which the kernel
    /// keeps alive. Work requests and peers use `iova` for its first byte, which
    /// must be at the same place in its page as `offset`.
    ///
    /// # Errors
    /// EOPNOTSUPP of a driver that cannot.
    pub fn from_dmabuf(
        domain: &ProtectionDomain,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        let memory = Registered::dmabuf(domain, fd, offset, len, iova, access)?;
        Ok(Self {
            memory: Arc::new(memory),
        })
    }

    /// What a peer has to know to reach its first byte.
    pub fn key(&self) -> RemoteAddr {
        RemoteAddr::new(self.memory.addr(), self.memory.rkey())
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A part of it, to be posted.
    ///
    /// # Errors
    /// [`Error::Limit`] if that is not all within the region.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<MemorySlice> {
        MemorySlice::new(&self.memory, range)
    }

    /// Deregisters it. The device, and peers through windows, do not touch the
    /// memory any more then.
    ///
    /// # Errors
    /// As [`RemoteRegion::close`].
    pub fn close(self) -> Result<(), CloseError<Self>> {
        registered::close(self.memory).map_err(|refused| refused.map(|memory| Self { memory }))
    }
}

impl fmt::Debug for ForeignRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

/// A part of a [`RemoteRegion`] or [`ForeignRegion`], to be posted in place of a
/// buffer. It keeps the region.
#[derive(Clone)]
pub struct MemorySlice {
    memory: Arc<Registered>,
    offset: usize,
    len: usize,
}

impl MemorySlice {
    fn new(memory: &Arc<Registered>, range: impl RangeBounds<usize>) -> Result<Self> {
        let there = memory.len();
        let begin = match range.start_bound() {
            Bound::Included(&at) => at,
            Bound::Excluded(&at) => at.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&at) => at.saturating_add(1),
            Bound::Excluded(&at) => at,
            Bound::Unbounded => there,
        };
        if begin > end || end > there {
            return Err(Error::Limit {
                what: "bytes of a region",
                asked: begin.max(end) as u64,
                allowed: there as u64,
            });
        }
        Ok(Self {
            memory: Arc::clone(memory),
            offset: begin,
            len: end - begin,
        })
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins in its region.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// What a peer has to know to reach its first byte.
    pub fn key(&self) -> RemoteAddr {
        RemoteAddr::new(self.device_addr(), self.memory.rkey())
    }

    #[inline(always)]
    pub(crate) fn device_addr(&self) -> u64 {
        self.memory.addr().wrapping_add(self.offset as u64)
    }

    #[inline(always)]
    pub(crate) fn memory(&self) -> &Arc<Registered> {
        &self.memory
    }
}

impl fmt::Debug for MemorySlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemorySlice")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish()
    }
}

impl ProtectionDomain {
    /// Allocates memory that peers may reach. See [`RemoteRegion`].
    ///
    /// # Errors
    /// As [`RemoteRegion::alloc`].
    pub fn alloc_remote(&self, len: usize, access: AccessFlags) -> Result<RemoteRegion> {
        RemoteRegion::alloc(self, len, access)
    }
}
