//! Remote memory, and memory that the caller owns.

use std::fmt;
use std::ops::RangeBounds;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use mmap_rs::MmapFlags;
use uverbs::AccessFlags;

use crate::memory::{Registered, bytes, checked_range, registered};
use crate::operation::RemoteAddr;
use crate::{CloseError, Error, ProtectionDomain, Result};

/// Memory that peers may read, write or modify atomically, as its access rights
/// allow.
///
/// A peer may write at any time, so this memory is never a Rust slice: it is copied in
/// and out, or accessed 8 bytes at a time, by atomic accesses to aligned 8-byte words. If
/// a peer writes during a copy, each copied byte has either the old or the new value. A
/// copy accesses each word once; a copy in also takes a locked instruction for each end
/// that is not at a multiple of 8.
///
/// A handle: clones refer to the same memory, which is deregistered and freed
/// when the last clone, [`MemorySlice`] and operation in flight are dropped.
#[derive(Clone)]
pub struct RemoteRegion {
    memory: Arc<Registered>,
}

/// Access flags that a region allocated here may have.
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
    /// Allocates and registers `len` bytes, rounded up to whole pages, with the
    /// access rights `access` for peers. The local side can always write.
    ///
    /// # Errors
    /// [`Error::Invalid`] for flags that do not apply to this kind of region;
    /// ENOMEM if the locked memory limit (`ulimit -l`) is exceeded or memory is
    /// exhausted.
    pub fn alloc(domain: &ProtectionDomain, len: usize, access: AccessFlags) -> Result<Self> {
        Self::with(domain, len, MmapFlags::empty(), access)
    }

    /// As [`RemoteRegion::alloc`], in huge pages
    /// ([`Region::alloc_huge`](crate::Region::alloc_huge)).
    ///
    /// # Errors
    /// As [`RemoteRegion::alloc`] and
    /// [`Region::alloc_huge`](crate::Region::alloc_huge).
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

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether the length is zero, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first byte and the rkey, for use by a peer.
    pub fn key(&self) -> RemoteAddr {
        RemoteAddr::new(self.memory.addr(), self.memory.rkey())
    }

    /// Returns the protection domain that the region is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.memory.domain()
    }

    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        let mapped = self.memory.mapped_len();
        if offset > mapped || len > mapped - offset {
            return Err(Error::Limit {
                what: "bytes of a region",
                asked: (offset as u64).saturating_add(len as u64),
                allowed: mapped as u64,
            });
        }
        // SAFETY: within the mapping, as checked above.
        Ok(unsafe { self.memory.start().add(offset) })
    }

    /// Copies `to.len()` bytes from `offset` into `to`.
    ///
    /// # Errors
    /// [`Error::Limit`] if the range exceeds the region.
    pub fn read_at(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.at(offset, to.len())?;
        // SAFETY: that many bytes are mapped there while the region lives. The
        // region consists of whole pages, so all of their words are in it, and
        // only this module's word-sized atomics access it.
        unsafe { bytes::load(from, to) };
        Ok(())
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// [`Error::Limit`] if the range exceeds the region.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.at(offset, from.len())?;
        // SAFETY: as in `read_at`.
        unsafe { bytes::store(to, from) };
        Ok(())
    }

    /// Reads 8 bytes atomically, in native byte order. A peer's writes before this value
    /// are visible afterwards.
    ///
    /// # Errors
    /// [`Error::Limit`] outside of the region, [`Error::Invalid`] if `offset` is
    /// not a multiple of 8.
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        let word = self.word(offset)?;
        // SAFETY: 8 mapped bytes, aligned, accessed only in this way.
        Ok(unsafe { bytes::load_word(word) })
    }

    /// Writes 8 bytes atomically, in native byte order, after all earlier writes.
    ///
    /// # Errors
    /// As [`RemoteRegion::load_u64`].
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        let word = self.word(offset)?;
        // SAFETY: as in `load_u64`.
        unsafe { bytes::store_word(word, value) };
        Ok(())
    }

    fn word(&self, offset: usize) -> Result<NonNull<u64>> {
        if offset % 8 != 0 {
            return Err(Error::Invalid {
                what: "an atomic access must be at a multiple of 8",
            });
        }
        // The region starts at a page boundary, so this is aligned.
        Ok(self.at(offset, 8)?.cast())
    }

    /// Returns a part of the region, for posting.
    ///
    /// # Errors
    /// [`Error::Limit`] if the range exceeds the region.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<MemorySlice> {
        MemorySlice::new(&self.memory, range)
    }

    /// Changes the access rights of peers. The key may change.
    ///
    /// # Errors
    /// [`Error::Busy`] while clones, slices or operations in flight use the
    /// region; [`Error::Invalid`] for flags that do not apply to this kind of
    /// region; the driver's error (EOPNOTSUPP where it is not supported: rdma_rxe
    /// of Linux 6.1). After an error the key is unchanged, but a driver may have
    /// made it unusable; the region can still be closed.
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

    /// Deregisters and frees the memory; peers can no longer access it.
    ///
    /// # Errors
    /// Returns the region with [`Error::Busy`] while clones, slices, windows or
    /// operations in flight use it, or with the kernel's error.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        registered::close(self.memory).map_err(|refused| refused.map(|memory| Self { memory }))
    }
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

/// A registration of memory that the caller owns, or of a DMA buffer. This crate
/// never accesses the memory.
#[derive(Clone)]
pub struct ForeignRegion {
    memory: Arc<Registered>,
}

impl ForeignRegion {
    /// Registers `memory` with the access rights `access`.
    ///
    /// # Errors
    /// EFAULT if the memory is not mapped, or not writable although the access requires
    /// it; ENOMEM if the locked memory limit (`ulimit -l`) is exceeded.
    ///
    /// # Safety
    /// The memory stays mapped until it is deregistered. It is deregistered when
    /// [`ForeignRegion::close`] succeeds. `close` is refused while the
    /// registration is in use: by clones, slices, operations in flight, and
    /// windows that are or were bound to it, until the bind that replaced it is
    /// known to have completed. If those are dropped instead, it stays registered
    /// until the last of them is dropped; if one is forgotten, or the kernel
    /// refuses, forever.
    ///
    /// Until it is deregistered:
    ///
    /// - nothing writes the memory while an operation in flight reads it;
    /// - nothing reads or writes it while an operation in flight writes it;
    /// - if peers may access it, by its access rights or through a window, it is
    ///   treated at all times as memory that another thread reads or writes. If
    ///   the access has [`AccessFlags::MW_BIND`], any owner of a slice may bind a
    ///   window to it.
    pub unsafe fn register(
        domain: &ProtectionDomain,
        memory: NonNull<[u8]>,
        access: AccessFlags,
    ) -> Result<Self> {
        // SAFETY: the caller's obligation.
        let memory = unsafe { Registered::foreign(domain, memory, access) }?;
        Ok(Self {
            memory: Arc::new(memory),
        })
    }

    /// Registers `len` bytes from `offset` of a DMA buffer, which the kernel
    /// keeps alive. Work requests and peers use `iova` as the address of its
    /// first byte; its offset in its page must be the same as that of `offset`.
    ///
    /// # Errors
    /// EOPNOTSUPP if the driver does not support DMA buffers.
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

    /// Returns the address of the first byte and the rkey, for use by a peer.
    pub fn key(&self) -> RemoteAddr {
        RemoteAddr::new(self.memory.addr(), self.memory.rkey())
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a part of the region, to be posted.
    ///
    /// # Errors
    /// [`Error::Limit`] if the range exceeds the region.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<MemorySlice> {
        MemorySlice::new(&self.memory, range)
    }

    /// Deregisters the memory. Afterwards neither the device nor peers, through
    /// windows, access it.
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

/// A part of a [`RemoteRegion`] or [`ForeignRegion`], which can be posted in place of a
/// buffer. It keeps the region alive.
#[derive(Clone)]
pub struct MemorySlice {
    memory: Arc<Registered>,
    offset: usize,
    len: usize,
}

impl MemorySlice {
    fn new(memory: &Arc<Registered>, range: impl RangeBounds<usize>) -> Result<Self> {
        let range = checked_range("bytes of a region", range, memory.len())?;
        Ok(Self {
            memory: Arc::clone(memory),
            offset: range.start,
            len: range.len(),
        })
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the offset in the region, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the address of the first byte and the rkey, for use by a peer.
    pub fn key(&self) -> RemoteAddr {
        RemoteAddr::new(self.device_addr(), self.memory.rkey())
    }

    #[inline]
    pub(crate) fn device_addr(&self) -> u64 {
        self.memory.addr().wrapping_add(self.offset as u64)
    }

    #[inline]
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
    /// Allocates and registers memory that peers may access. See
    /// [`RemoteRegion`].
    ///
    /// # Errors
    /// As [`RemoteRegion::alloc`].
    pub fn alloc_remote(&self, len: usize, access: AccessFlags) -> Result<RemoteRegion> {
        RemoteRegion::alloc(self, len, access)
    }
}
