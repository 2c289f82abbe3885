//! Buffers: exclusively owned pieces of a region.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::memory::{Region, Registered};
use crate::{Error, ProtectionDomain, Result};

/// Registered bytes, owned exclusively like a `Box<[u8]>`: nothing else, including the
/// device, can access them until they are posted. Posting moves the buffer into the
/// operation, whose completion returns it.
///
/// A buffer has a capacity, and a length up to the capacity. A send transmits `len`
/// bytes; a receive may fill the whole capacity, and its completion sets the length to
/// that of the message.
///
/// Splitting a buffer ([`split_to`](Self::split_to),
/// [`split_off`](Self::split_off)) copies and allocates nothing. The memory is
/// freed when the last piece of its region is dropped.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
    memory: Arc<Registered>,
}

// SAFETY: the bytes are owned exclusively, like those of a box.
unsafe impl Send for Buffer {}
// SAFETY: shared references give read access only.
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

    /// Returns the capacity in bytes, of which [`len`](slice::len) are in use.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the number of bytes in use. All bytes up to the capacity are
    /// initialised (zero at first).
    ///
    /// # Errors
    /// [`Error::Limit`] if `len` exceeds the capacity.
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

    /// Sets the length to the capacity.
    #[inline]
    pub fn fill_up(&mut self) {
        self.len = self.capacity;
    }

    /// Copies `bytes` to the start of the buffer and sets the buffer's length to theirs.
    ///
    /// # Errors
    /// [`Error::Limit`] if they exceed the capacity; nothing is copied.
    pub fn copy_from(&mut self, bytes: &[u8]) -> Result<()> {
        self.set_len(bytes.len())?;
        self.copy_from_slice(bytes);
        Ok(())
    }

    /// Splits off the first `at` bytes of the capacity and returns them; `self`
    /// keeps the rest. The length of both becomes their capacity.
    ///
    /// # Panics
    /// If `at` exceeds the capacity, as for slices.
    pub fn split_to(&mut self, at: usize) -> Self {
        let rest = self.split_off(at);
        std::mem::replace(self, rest)
    }

    /// Splits off all but the first `at` bytes of the capacity and returns them.
    /// The length of both becomes their capacity.
    ///
    /// # Panics
    /// If `at` exceeds the capacity, as for slices.
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.capacity, "split beyond the end of a buffer");
        let rest = self.capacity - at;
        self.capacity = at;
        self.len = at;
        Self {
            // SAFETY: `at` bytes from the start is within, or at the end of, the
            // piece that this buffer owns.
            start: unsafe { self.start.add(at) },
            len: rest,
            capacity: rest,
            memory: Arc::clone(&self.memory),
        }
    }

    /// Joins a buffer that starts where this one ends, which undoes a split. The
    /// length becomes the capacity.
    ///
    /// # Errors
    /// Returns `other` if it does not start at the end of this buffer.
    pub fn unsplit(&mut self, other: Self) -> Result<(), Self> {
        // SAFETY: this is the end of the piece that this buffer owns.
        let end = unsafe { self.start.add(self.capacity) };
        if end != other.start || !Arc::ptr_eq(&self.memory, &other.memory) {
            return Err(other);
        }
        self.capacity += other.capacity;
        self.len = self.capacity;
        Ok(())
    }

    /// Converts a buffer that spans the whole region back to the region.
    ///
    /// # Errors
    /// Returns the buffer if it is only a part of the region.
    pub fn try_into_region(self) -> Result<Region, Self> {
        if self.capacity < self.memory.len() || self.memory.len() == 0 {
            return Err(self);
        }
        Ok(Region {
            memory: self.memory,
        })
    }

    /// Returns the protection domain that the memory is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.memory.domain()
    }

    /// Returns the identity of the registration that the buffer is a part of.
    pub fn registration(&self) -> Registration {
        Registration(Arc::clone(&self.memory))
    }

    /// Returns whether the buffer is a part of this registration.
    #[inline]
    pub fn is_part_of(&self, registration: &Registration) -> bool {
        Arc::ptr_eq(&self.memory, &registration.0)
    }

    /// Returns the registration.
    #[inline]
    pub(crate) fn memory(&self) -> &Arc<Registered> {
        &self.memory
    }

    /// Returns the device's address of the first byte.
    #[inline]
    pub(crate) fn device_addr(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Sets the length after a receive of `len` bytes. The device's value is not
    /// trusted: it is limited to the capacity.
    #[inline]
    pub(crate) fn received(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }
}

/// The identity of a registration, which no other has as long as this value exists: it keeps
/// the memory registered. By it, completions are told apart by their memory; tokens are the
/// caller's, and may be used twice.
#[derive(Clone)]
pub struct Registration(Arc<Registered>);

impl PartialEq for Registration {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Registration {}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("len", &self.0.len())
            .finish_non_exhaustive()
    }
}

impl Deref for Buffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: this value owns `capacity` initialised bytes at `start`
        // exclusively, and `len` does not exceed `capacity`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
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
