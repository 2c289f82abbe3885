//! Exclusively owned pieces of a region.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::memory::{Region, Registered};
use crate::{Error, ProtectionDomain, Result};

/// Registered bytes, owned as a `Box<[u8]>` is: nobody else can reach them, the
/// device included, until they are posted. Posting moves the buffer into the
/// operation; its completion gives it back.
///
/// A buffer has a capacity, and a length up to that. It is sent from as far as
/// its length goes, and received into as far as its capacity goes; a completed
/// receive sets the length to the message's.
///
/// Cutting a buffer in two ([`split_to`](Self::split_to),
/// [`split_off`](Self::split_off)) copies and allocates nothing. The memory is
/// freed when the last piece of its region is dropped.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
    memory: Arc<Registered>,
}

// SAFETY: the bytes are owned exclusively, as those of a box are.
unsafe impl Send for Buffer {}
// SAFETY: shared access is only ever reading.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(super) fn whole(region: Region) -> Self {
        let memory = region.memory;
        Self {
            start: memory.start(),
            len: memory.len(),
            capacity: memory.len(),
            memory,
        }
    }

    /// Bytes that it has, of which [`len`](slice::len) are in use.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets how many bytes are in use. All bytes up to the capacity have a
    /// value (zero at first), so none are uninitialised.
    ///
    /// # Errors
    /// [`Error::Limit`] over the capacity.
    #[inline]
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len > self.capacity {
            return Err(Error::Limit {
                what: "length of a buffer",
                asked: len as u64,
                allowed: self.capacity as u64,
            });
        }
        self.len = len;
        Ok(())
    }

    /// Uses all bytes again, up to the capacity.
    #[inline]
    pub fn fill_up(&mut self) {
        self.len = self.capacity;
    }

    /// Copies `bytes` to the beginning and sets the length to theirs.
    ///
    /// # Errors
    /// [`Error::Limit`] over the capacity; nothing is copied.
    pub fn copy_from(&mut self, bytes: &[u8]) -> Result<()> {
        self.set_len(bytes.len())?;
        self.copy_from_slice(bytes);
        Ok(())
    }

    /// Takes the first `at` bytes of the capacity off, as a buffer of their
    /// own; `self` keeps the rest. Both use all their bytes afterwards.
    ///
    /// # Panics
    /// If `at` is over the capacity, as slices do.
    pub fn split_to(&mut self, at: usize) -> Self {
        let rest = self.split_off(at);
        std::mem::replace(self, rest)
    }

    /// Takes what follows the first `at` bytes of the capacity off, as a buffer
    /// of its own. Both use all their bytes afterwards.
    ///
    /// # Panics
    /// If `at` is over the capacity, as slices do.
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.capacity, "split behind the end of a buffer");
        let rest = self.capacity - at;
        self.capacity = at;
        self.len = at;
        Self {
            // SAFETY: `at` bytes behind the start is within, or at the end of,
            // the piece that this buffer owns.
            start: unsafe { self.start.add(at) },
            len: rest,
            capacity: rest,
            memory: Arc::clone(&self.memory),
        }
    }

    /// Joins a buffer that begins where this one ends, as they were before a
    /// split. All bytes are in use afterwards.
    ///
    /// # Errors
    /// `other` back, if it does not.
    pub fn unsplit(&mut self, other: Self) -> Result<(), Self> {
        // SAFETY: the end of the piece that this buffer owns.
        let end = unsafe { self.start.add(self.capacity) };
        if end != other.start || !Arc::ptr_eq(&self.memory, &other.memory) {
            return Err(other);
        }
        self.capacity += other.capacity;
        self.len = self.capacity;
        Ok(())
    }

    /// The region, if this is all of it.
    ///
    /// # Errors
    /// The buffer back, if other pieces are alive.
    pub fn try_into_region(self) -> Result<Region, Self> {
        if self.capacity < self.memory.len() || self.memory.len() == 0 {
            return Err(self);
        }
        Ok(Region {
            memory: self.memory,
        })
    }

    /// The domain that it is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.memory.domain()
    }

    /// What the device knows the bytes by.
    #[inline(always)]
    pub(crate) fn memory(&self) -> &Arc<Registered> {
        &self.memory
    }

    /// The address that the device knows the first byte by.
    #[inline(always)]
    pub(crate) fn device_addr(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// A message of `len` bytes was received here. (What the device says is
    /// not trusted further than the capacity.)
    #[inline(always)]
    pub(crate) fn received(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }
}

impl Deref for Buffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: this value owns `capacity` bytes at `start` exclusively, they
        // have values, and `len` is no more.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .finish()
    }
}
