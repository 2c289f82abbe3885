//! Pools of buffers, and buffers that several operations read at once.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::memory::{Buffer, Registered, checked_range};
use crate::{Error, ProtectionDomain, Result};

/// Sizes are multiples of this, so that no two buffers share a cache line.
const LINE: usize = 64;

/// Buffers that are registered once, in size classes, and return to the pool when they
/// are dropped: by the program, or by the library after an operation whose future was
/// dropped.
///
/// A handle: clones refer to the same pool. Any thread may use it. Taking and returning
/// a buffer locks its class, and does not allocate. The memory is deregistered when the
/// last handle and buffer are dropped.
///
/// A buffer contains the bytes of its last use, initially zeros.
///
/// ```no_run
/// # fn f(domain: &ringverbs::ProtectionDomain, qp: &mut ringverbs::QueuePair)
/// # -> Result<(), ringverbs::Error> {
/// use ringverbs::{BufferPool, PostError};
/// let pool = BufferPool::new(domain, &[(256, 1000), (65_536, 16)])?;
/// if let Some(mut buffer) = pool.get(100) {
///     buffer.copy_from(b"hello")?;
///     qp.send(buffer, 1).map_err(PostError::into_error)?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Shared>,
}

struct Shared {
    /// By size.
    classes: Vec<Class>,
    domain: ProtectionDomain,
}

#[expect(clippy::vec_box, reason = "a box moves to the buffer that is taken")]
struct Class {
    size: usize,
    count: usize,
    /// Free buffers; has capacity for all buffers of the class.
    free: Mutex<Vec<Box<Slot>>>,
}

impl Class {
    #[expect(clippy::vec_box, reason = "as above")]
    fn free(&self) -> MutexGuard<'_, Vec<Box<Slot>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer of a pool.
struct Slot {
    buffer: Buffer,
    class: usize,
    /// `None` while it is in the pool.
    pool: Option<Arc<Shared>>,
}

impl BufferPool {
    /// Registers memory for a pool with these classes: the size of the buffers, rounded up
    /// to a multiple of 64, and their number.
    ///
    /// # Errors
    /// As [`Region::alloc`](crate::Region::alloc); [`Error::Invalid`] for a size of
    /// 0, or no buffers.
    pub fn new(domain: &ProtectionDomain, classes: &[(usize, usize)]) -> Result<Self> {
        let rounded = |(size, count): (usize, usize)| {
            let size = size.checked_next_multiple_of(LINE).ok_or(Error::NoMemory)?;
            Ok((size, count))
        };
        let mut classes = classes
            .iter()
            .map(|&class| rounded(class))
            .collect::<Result<Vec<_>>>()?;
        classes.sort_unstable();
        let total = classes.iter().try_fold(0_usize, |total, (size, count)| {
            total.checked_add(size.checked_mul(*count)?)
        });
        let total = total.ok_or(Error::NoMemory)?;
        if total == 0 || classes.iter().any(|(size, _)| *size == 0) {
            return Err(Error::Invalid {
                what: "a pool needs buffers, and their size must not be zero",
            });
        }
        let mut memory = domain.alloc(total)?.into_buffer();
        let classes = classes.into_iter().enumerate();
        let classes = classes.map(|(class, (size, count))| {
            let slots = (0..count).map(|_| {
                Box::new(Slot {
                    buffer: memory.split_to(size),
                    class,
                    pool: None,
                })
            });
            let free = Mutex::new(slots.collect());
            Class { size, count, free }
        });
        Ok(Self {
            shared: Arc::new(Shared {
                classes: classes.collect(),
                domain: domain.clone(),
            }),
        })
    }

    /// Returns the protection domain that the memory is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.shared.domain
    }

    /// Takes a buffer from the smallest class with a free buffer of at least `len` bytes,
    /// and sets its length to `len`. Returns `None` if none is free; buffers return when
    /// operations complete.
    pub fn get(&self, len: usize) -> Option<PoolBuffer> {
        let fitting = self.shared.classes.iter().filter(|class| class.size >= len);
        let mut slot = fitting.filter_map(|class| class.free().pop()).next()?;
        slot.pool = Some(Arc::clone(&self.shared));
        slot.buffer.set_len(len).ok()?;
        Some(PoolBuffer { slot: Some(slot) })
    }

    /// Takes up to `count` buffers of at least `len` bytes from one class, under one lock,
    /// and appends them to `out`. Allocates only if `out` has no room.
    pub(crate) fn get_several(&self, len: usize, count: usize, out: &mut Vec<PoolBuffer>) {
        let fitting = self.shared.classes.iter().find(|class| class.size >= len);
        let Some(class) = fitting else { return };
        let mut free = class.free();
        let first = free.len().saturating_sub(count);
        out.extend(free.drain(first..).map(|mut slot| {
            slot.pool = Some(Arc::clone(&self.shared));
            slot.buffer.fill_up();
            PoolBuffer { slot: Some(slot) }
        }));
    }

    /// Returns for each class the size of the buffers, their number, and the number of free
    /// ones.
    pub fn classes(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let classes = self.shared.classes.iter();
        classes.map(|class| (class.size, class.count, class.free().len()))
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.classes()).finish()
    }
}

/// A buffer of a [`BufferPool`], to which it returns when it is dropped. Otherwise it is
/// like a [`Buffer`]: owned exclusively, and moved into the operation when it is posted.
pub struct PoolBuffer {
    /// `None` only while it is dropped.
    slot: Option<Box<Slot>>,
}

impl PoolBuffer {
    fn buffer(&self) -> &Buffer {
        match &self.slot {
            Some(slot) => &slot.buffer,
            None => unreachable!("it is being dropped"),
        }
    }

    fn buffer_mut(&mut self) -> &mut Buffer {
        match &mut self.slot {
            Some(slot) => &mut slot.buffer,
            None => unreachable!("it is being dropped"),
        }
    }

    /// Returns the capacity in bytes: the size of its class.
    pub fn capacity(&self) -> usize {
        self.buffer().capacity()
    }

    /// Sets the number of bytes in use.
    ///
    /// # Errors
    /// [`Error::Limit`] if `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        self.buffer_mut().set_len(len)
    }

    /// Sets the length to the capacity.
    pub fn fill_up(&mut self) {
        self.buffer_mut().fill_up();
    }

    /// Copies `bytes` to the start of the buffer and sets the buffer's length to theirs.
    ///
    /// # Errors
    /// [`Error::Limit`] if they exceed the capacity; nothing is copied.
    pub fn copy_from(&mut self, bytes: &[u8]) -> Result<()> {
        self.buffer_mut().copy_from(bytes)
    }

    /// Makes the buffer read-only, so that several operations can send it at once.
    /// It returns to the pool when the last of them has ended. Allocates.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer::new(FrozenBuffer::Pooled(self))
    }

    /// Returns whether the buffer belongs to `pool`.
    pub(crate) fn is_of(&self, pool: &BufferPool) -> bool {
        let own = self.slot.as_ref().and_then(|slot| slot.pool.as_ref());
        own.is_some_and(|own| Arc::ptr_eq(own, &pool.shared))
    }

    pub(crate) fn memory(&self) -> &Arc<Registered> {
        self.buffer().memory()
    }

    pub(crate) fn device_addr(&self) -> u64 {
        self.buffer().device_addr()
    }

    pub(crate) fn received(&mut self, len: usize) {
        self.buffer_mut().received(len);
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        let Some(mut slot) = self.slot.take() else {
            return;
        };
        if let Some(pool) = slot.pool.take() {
            if let Some(class) = pool.classes.get(slot.class) {
                class.free().push(slot);
            }
        }
    }
}

impl Deref for PoolBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buffer()
    }
}

impl DerefMut for PoolBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer_mut()
    }
}

impl AsRef<[u8]> for PoolBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for PoolBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for PoolBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuffer")
            .field("len", &self.len())
            .field("capacity", &self.capacity())
            .finish()
    }
}

/// Registered, read-only bytes: the program can read clones, and any number of operations
/// and queue pairs can send or write them to peers at once. No operation can store data
/// in them.
///
/// Created by [`Buffer::freeze`] and [`PoolBuffer::freeze`]. The memory is released, or
/// returned to its pool, with the last clone and operation in flight.
#[derive(Clone)]
pub struct SharedBuffer {
    frozen: Arc<FrozenBuffer>,
    start: usize,
    len: usize,
}

enum FrozenBuffer {
    Buffer(Buffer),
    Pooled(PoolBuffer),
}

impl FrozenBuffer {
    fn buffer(&self) -> &Buffer {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Pooled(pooled) => pooled.buffer(),
        }
    }
}

impl SharedBuffer {
    fn new(frozen: FrozenBuffer) -> Self {
        Self {
            start: 0,
            len: frozen.buffer().len(),
            frozen: Arc::new(frozen),
        }
    }

    /// Returns a part of the buffer, which shares the memory.
    ///
    /// # Errors
    /// [`Error::Limit`] if the range exceeds the length.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let range = checked_range("bytes of a shared buffer", range, self.len)?;
        Ok(Self {
            frozen: Arc::clone(&self.frozen),
            start: self.start + range.start,
            len: range.len(),
        })
    }

    /// Returns the whole buffer if this is its only reference.
    ///
    /// # Errors
    /// Returns `self` while there are clones or operations in flight, and for a pool
    /// buffer.
    pub fn try_into_buffer(self) -> Result<Buffer, Self> {
        let Self { frozen, start, len } = self;
        let rebuild = |frozen| Self { frozen, start, len };
        match Arc::try_unwrap(frozen).map_err(rebuild)? {
            FrozenBuffer::Buffer(buffer) => Ok(buffer),
            pooled => Err(rebuild(Arc::new(pooled))),
        }
    }

    /// As [`try_into_buffer`](Self::try_into_buffer), for a pool buffer.
    ///
    /// # Errors
    /// Returns `self` while there are clones or operations in flight, and for any other
    /// buffer.
    pub fn try_into_pool_buffer(self) -> Result<PoolBuffer, Self> {
        let Self { frozen, start, len } = self;
        let rebuild = |frozen| Self { frozen, start, len };
        match Arc::try_unwrap(frozen).map_err(rebuild)? {
            FrozenBuffer::Pooled(buffer) => Ok(buffer),
            owned => Err(rebuild(Arc::new(owned))),
        }
    }

    pub(crate) fn memory(&self) -> &Arc<Registered> {
        self.frozen.buffer().memory()
    }

    pub(crate) fn device_addr(&self) -> u64 {
        let start = self.frozen.buffer().device_addr();
        start.wrapping_add(self.start as u64)
    }
}

impl Buffer {
    /// Makes the buffer read-only, so that several operations can send it at once.
    /// Allocates.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer::new(FrozenBuffer::Buffer(self))
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let all: &[u8] = self.frozen.buffer();
        all.get(self.start..self.start + self.len)
            .unwrap_or_default()
    }
}

impl AsRef<[u8]> for SharedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer")
            .field("len", &self.len)
            .finish()
    }
}
