//! Memory of queues and doorbell records, of the process or from allocators of a
//! parent domain or a context.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use ring::{DoorbellRecord, Mapping, Retired};
use uverbs::Existence;

use crate::CreateError;
use crate::abi::BLOCK;

/// Purpose of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A queue pair's queues.
    QueuePair,
    /// A work queue's entries.
    WorkQueue,
    /// A completion queue's entries.
    CompletionQueue,
    /// A shared receive queue's entries.
    SharedQueue,
    /// The two doorbell records of any of these.
    Records,
}

impl Purpose {
    fn name(self) -> &'static str {
        match self {
            Self::QueuePair => "queue pair",
            Self::WorkQueue => "work queue",
            Self::CompletionQueue => "completion queue",
            Self::SharedQueue => "shared receive queue",
            Self::Records => "doorbell records",
        }
    }
}

/// Allocates memory for queues: the allocators of a parent domain or a context.
pub trait QueueAllocator {
    /// Returns exclusive memory of at least `bytes` bytes, aligned to
    /// `alignment`; `None` for the default allocation.
    ///
    /// # Errors
    /// The verb returns the error.
    fn allocate(
        &self,
        purpose: Purpose,
        bytes: usize,
        alignment: usize,
    ) -> io::Result<Option<CustomMemory>>;
}

/// Memory from a [`QueueAllocator`], freed when dropped.
pub struct CustomMemory {
    at: NonNull<u8>,
    free: Option<Box<dyn FnOnce(NonNull<u8>)>>,
}

// SAFETY: the memory is exclusive, and by `new` any thread may free it.
unsafe impl Send for CustomMemory {}
// SAFETY: only `drop` calls `free`.
unsafe impl Sync for CustomMemory {}

impl CustomMemory {
    /// Takes ownership of memory, which `free` frees.
    ///
    /// # Safety
    /// The memory is as [`QueueAllocator::allocate`] says, and readable and writable.
    /// `free` may be called by any thread.
    pub unsafe fn new(at: NonNull<u8>, free: Box<dyn FnOnce(NonNull<u8>)>) -> Self {
        Self {
            at,
            free: Some(free),
        }
    }
}

impl Drop for CustomMemory {
    fn drop(&mut self) {
        if let Some(free) = self.free.take() {
            free(self.at);
        }
    }
}

impl fmt::Debug for CustomMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CustomMemory({:p})", self.at)
    }
}

/// Allocates zeroed memory from the allocator, if there is one.
fn allocate_custom(
    allocator: Option<&dyn QueueAllocator>,
    purpose: Purpose,
    bytes: usize,
    alignment: usize,
) -> io::Result<Option<CustomMemory>> {
    let Some(memory) = allocator
        .map(|allocator| allocator.allocate(purpose, bytes, alignment))
        .transpose()?
        .flatten()
    else {
        return Ok(None);
    };
    if (memory.at.as_ptr() as usize) % alignment != 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: by [`QueueAllocator::allocate`], that many bytes are exclusive and writable.
    unsafe { memory.at.write_bytes(0, bytes) };
    Ok(Some(memory))
}

/// Cached mappings of destroyed queues. Mapping, touching and unmapping memory is
/// most of the time of creating and destroying a queue.
struct MappingCache {
    mappings: Vec<Mapping>,
    bytes: usize,
}

/// One for the process. A locked cache is bypassed, so that a child of fork cannot
/// deadlock.
static MAPPING_CACHE: Mutex<MappingCache> = Mutex::new(MappingCache {
    mappings: Vec::new(),
    bytes: 0,
});

impl MappingCache {
    /// Maximum bytes in the cache.
    const MAX_BYTES: usize = 1 << 20;
    /// Maximum bytes of a cached mapping: clearing a larger one takes as long as
    /// mapping.
    const MAX_MAPPING: usize = 1 << 17;

    fn locked() -> Option<MutexGuard<'static, Self>> {
        match MAPPING_CACHE.try_lock() {
            Ok(cache) => Some(cache),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns a zeroed mapping of at least `bytes` bytes.
    fn take(bytes: usize) -> Option<Mapping> {
        let whole = bytes.checked_next_multiple_of(Mapping::page_size())?;
        let mut cache = Self::locked()?;
        // The last one added: it may still be in the processor's cache.
        let index = (cache.mappings.iter()).rposition(|mapping| mapping.len() == whole)?;
        let mapping = cache.mappings.swap_remove(index);
        cache.bytes -= whole;
        drop(cache);
        // SAFETY: the mapping has that many bytes, and is exclusive.
        unsafe { mapping.as_ptr().write_bytes(0, whole) };
        Some(mapping)
    }

    /// Caches a mapping if there is room, else unmaps it.
    fn put(mapping: Mapping) {
        let bytes = mapping.len();
        if bytes <= Self::MAX_MAPPING {
            if let Some(mut cache) = Self::locked() {
                if cache.bytes + bytes <= Self::MAX_BYTES && cache.mappings.try_reserve(1).is_ok() {
                    cache.bytes += bytes;
                    cache.mappings.push(mapping);
                }
            }
        }
    }
}

/// Memory of a kernel object. Dropping it leaks the memory while the object exists (the
/// kernel refused to destroy it), since the device still uses it.
#[derive(Debug)]
struct ObjectMemory<T> {
    memory: ManuallyDrop<T>,
    object: OnceLock<Existence>,
}

impl<T> ObjectMemory<T> {
    fn new(memory: T) -> Self {
        Self {
            memory: ManuallyDrop::new(memory),
            object: OnceLock::new(),
        }
    }

    /// Returns the memory, which the object no longer uses.
    fn into_inner(self) -> T {
        let mut this = ManuallyDrop::new(self);
        drop(std::mem::take(&mut this.object));
        // SAFETY: the value is not dropped, so the memory is taken once.
        unsafe { ManuallyDrop::take(&mut this.memory) }
    }
}

impl<T> Drop for ObjectMemory<T> {
    fn drop(&mut self) {
        if self.object.get().is_none_or(Existence::has_ended) {
            // SAFETY: once, here.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

/// Memory of the process for entries, cached or unmapped when dropped.
#[derive(Debug)]
struct ProcessMemory {
    mapping: ManuallyDrop<Mapping>,
}

impl ProcessMemory {
    /// Allocates at least `bytes` zeroed bytes.
    fn new(bytes: usize) -> io::Result<Self> {
        let mapping = match MappingCache::take(bytes) {
            Some(mapping) => mapping,
            None => Mapping::anonymous_large(bytes)?,
        };
        Ok(Self {
            mapping: ManuallyDrop::new(mapping),
        })
    }

    /// Returns the mapping.
    fn into_mapping(self) -> Mapping {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: the value is not dropped, so the mapping is taken once.
        unsafe { ManuallyDrop::take(&mut this.mapping) }
    }
}

impl Drop for ProcessMemory {
    fn drop(&mut self) {
        // SAFETY: once, here.
        MappingCache::put(unsafe { ManuallyDrop::take(&mut self.mapping) });
    }
}

#[derive(Debug)]
enum EntriesMemory {
    Process(ProcessMemory),
    Custom(CustomMemory),
}

/// A queue's entries.
#[derive(Debug)]
pub(crate) struct Entries(ObjectMemory<EntriesMemory>);

// SAFETY: accessed through raw pointers and atomics only, each with its own
// argument.
unsafe impl Send for Entries {}
// SAFETY: as above.
unsafe impl Sync for Entries {}

impl Entries {
    /// Allocates `bytes` zeroed bytes of entries, in whole pages.
    pub(crate) fn new(
        bytes: usize,
        purpose: Purpose,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Self, CreateError> {
        // A queue without entries needs no memory, but an address.
        let allocator = allocator.filter(|_| bytes != 0);
        let page = Mapping::page_size();
        allocate_custom(allocator, purpose, bytes.next_multiple_of(page), page)
            .and_then(|memory| match memory {
                Some(memory) => Ok(EntriesMemory::Custom(memory)),
                None => ProcessMemory::new(bytes.max(1)).map(EntriesMemory::Process),
            })
            .map(|memory| Self(ObjectMemory::new(memory)))
            .map_err(|error| CreateError::Memory {
                queue: purpose.name(),
                error,
            })
    }

    /// Keeps the memory as long as the object exists.
    pub(crate) fn hold_for(&self, object: &Existence) {
        let _ = self.0.object.set(object.clone());
    }

    /// Returns whether the memory is held for the object.
    pub(crate) fn is_held_for(&self, object: &Existence) -> bool {
        self.0
            .object
            .get()
            .is_some_and(|held| held.is_same_object(object))
    }

    /// Frees the memory, which the object no longer uses, where possible; its
    /// addresses stay readable.
    pub(crate) fn retire(self) -> RetiredEntries {
        match self.0.into_inner() {
            EntriesMemory::Process(memory) => {
                RetiredEntries::Process(memory.into_mapping().retire_whole())
            }
            EntriesMemory::Custom(memory) => RetiredEntries::Custom(memory),
        }
    }

    /// The first entry; page aligned.
    pub(crate) fn first(&self) -> NonNull<u8> {
        match &*self.0.memory {
            EntriesMemory::Process(memory) => memory.mapping.as_ptr(),
            EntriesMemory::Custom(memory) => memory.at,
        }
    }

    /// Their address, for the driver.
    pub(crate) fn address(&self) -> u64 {
        self.first().as_ptr().expose_provenance() as u64
    }
}

/// Keeps the addresses of replaced entries readable. Custom memory is kept until the queue
/// is dropped.
#[derive(Debug)]
pub(crate) enum RetiredEntries {
    Process(#[allow(dead_code, reason = "held for its address")] Retired),
    Custom(#[allow(dead_code, reason = "held for its address")] CustomMemory),
}

#[derive(Debug)]
enum RecordsMemory {
    Process(RecordBlock),
    Custom(CustomMemory),
}

/// A queue's two doorbell records.
#[derive(Debug)]
pub(crate) struct Records(ObjectMemory<RecordsMemory>);

// SAFETY: as for `Entries`.
unsafe impl Send for Records {}
// SAFETY: as above.
unsafe impl Sync for Records {}

impl Records {
    /// Bytes of both records.
    const BYTES: usize = 8;

    /// Allocates two zeroed records.
    pub(crate) fn new(allocator: Option<&dyn QueueAllocator>) -> Result<Self, CreateError> {
        allocate_custom(allocator, Purpose::Records, Self::BYTES, Self::BYTES)
            .and_then(|memory| match memory {
                Some(memory) => Ok(RecordsMemory::Custom(memory)),
                None => RecordBlock::take().map(RecordsMemory::Process),
            })
            .map(|memory| Self(ObjectMemory::new(memory)))
            .map_err(|error| CreateError::Memory {
                queue: Purpose::Records.name(),
                error,
            })
    }

    /// Keeps the records as long as the object exists.
    pub(crate) fn hold_for(&self, object: &Existence) {
        let _ = self.0.object.set(object.clone());
    }

    /// The first record; aligned to 8 bytes.
    pub(crate) fn first(&self) -> NonNull<u8> {
        match &*self.0.memory {
            RecordsMemory::Process(block) => block.at,
            RecordsMemory::Custom(memory) => memory.at,
        }
    }

    /// Their address, for the driver.
    pub(crate) fn address(&self) -> u64 {
        self.first().as_ptr().expose_provenance() as u64
    }

    /// Doorbell record 0 or 1. Copies must not outlive this.
    pub(crate) fn record(&self, index: usize) -> DoorbellRecord {
        // SAFETY: both lie in the memory, which is aligned to 8 bytes.
        unsafe { DoorbellRecord::new(self.first().add((index & 1) * 4).cast()) }
    }
}

/// A page of doorbell records, in blocks of their own cache lines.
struct Page<M> {
    memory: M,
    /// Allocated blocks, as bits.
    allocated: u64,
}

/// Memory of a page.
trait PageMemory {
    fn at(&self) -> NonNull<u8>;
}

impl PageMemory for Mapping {
    fn at(&self) -> NonNull<u8> {
        self.as_ptr()
    }
}

impl PageMemory for CustomMemory {
    fn at(&self) -> NonNull<u8> {
        self.at
    }
}

/// Bytes of a page that blocks divide.
const PAGE: usize = u64::BITS as usize * BLOCK;

/// Pages of doorbell records with an allocated block. One lock, taken when queues are
/// created and destroyed.
struct Pages<M>(Mutex<Vec<Page<M>>>);

// SAFETY: only the owners of its blocks access a page.
unsafe impl<M> Send for Pages<M> {}
// SAFETY: as above; the list has a lock.
unsafe impl<M> Sync for Pages<M> {}

impl<M: PageMemory> Pages<M> {
    fn locked(&self) -> MutexGuard<'_, Vec<Page<M>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a zeroed block, from a new page if all pages are full.
    ///
    /// # Safety
    /// A new page has [`PAGE`] bytes, writable and exclusive.
    unsafe fn take(&self, new: impl FnOnce() -> io::Result<M>) -> io::Result<NonNull<u8>> {
        let mut pages = self.locked();
        let index = match pages.iter().position(|page| page.allocated != u64::MAX) {
            Some(index) => index,
            None => {
                pages
                    .try_reserve(1)
                    .map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
                pages.push(Page {
                    memory: new()?,
                    allocated: 0,
                });
                pages.len() - 1
            }
        };
        let page = &mut pages[index];
        let block = page.allocated.trailing_ones();
        page.allocated |= 1 << block;
        // SAFETY: the page has 64 blocks, of which this one is unused.
        let at = unsafe { page.memory.at().add(block as usize * BLOCK) };
        // SAFETY: as above.
        unsafe { at.write_bytes(0, BLOCK) };
        Ok(at)
    }

    /// Frees a block. A page without allocated blocks is freed too, unless that leaves fewer
    /// than `min_pages` pages.
    fn free(&self, at: NonNull<u8>, min_pages: usize) {
        let mut pages = self.locked();
        let offset = |page: &Page<M>| {
            let distance = (at.as_ptr() as usize).wrapping_sub(page.memory.at().as_ptr() as usize);
            (distance < PAGE).then_some(distance)
        };
        let found = (pages.iter().enumerate()).find_map(|(i, page)| Some((i, offset(page)?)));
        if let Some((index, offset)) = found {
            let page = &mut pages[index];
            page.allocated &= !(1 << (offset / BLOCK));
            if page.allocated == 0 && pages.len() > min_pages {
                pages.swap_remove(index);
            }
        }
    }
}

static PAGES: Pages<Mapping> = Pages(Mutex::new(Vec::new()));

/// A block of a page of doorbell records, freed when dropped.
#[derive(Debug)]
pub(crate) struct RecordBlock {
    at: NonNull<u8>,
}

impl RecordBlock {
    /// Allocates a zeroed block.
    fn take() -> io::Result<Self> {
        // SAFETY: a mapping of its own.
        let at = unsafe { PAGES.take(|| Mapping::anonymous(PAGE)) }?;
        Ok(Self { at })
    }
}

impl Drop for RecordBlock {
    fn drop(&mut self) {
        // One page is kept for later queues.
        PAGES.free(self.at, 1);
    }
}

/// Pages of doorbell records from an allocator of whole pages.
pub struct CustomRecordPages(Pages<CustomMemory>);

impl Default for CustomRecordPages {
    fn default() -> Self {
        Self(Pages(Mutex::default()))
    }
}

impl CustomRecordPages {
    /// Allocates a block for the records of a queue. `allocate_page` allocates another page
    /// of the given length; EINVAL if it is not aligned.
    ///
    /// # Errors
    /// Those of `allocate_page`.
    pub fn block(
        self: &Arc<Self>,
        allocate_page: impl FnOnce(usize) -> io::Result<CustomMemory>,
    ) -> io::Result<CustomMemory> {
        let page = || {
            let memory = allocate_page(Mapping::page_size())?;
            if (memory.at.as_ptr() as usize) % Mapping::page_size() != 0 {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            Ok(memory)
        };
        // SAFETY: by `CustomMemory::new` the memory is writable and exclusive.
        let at = unsafe { self.0.take(page) }?;
        let pages = Arc::clone(self);
        // SAFETY: exclusive until it is freed, which any thread may do.
        Ok(unsafe { CustomMemory::new(at, Box::new(move |at| pages.0.free(at, 0))) })
    }
}

/// Memory of a queue and its doorbell records.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    pub(crate) entries: Entries,
    pub(crate) records: Records,
}

impl QueueMemory {
    /// Allocates `bytes` zeroed bytes of entries, and two doorbell records.
    pub(crate) fn new(
        bytes: usize,
        purpose: Purpose,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Self, CreateError> {
        Ok(Self {
            entries: Entries::new(bytes, purpose, allocator)?,
            records: Records::new(allocator)?,
        })
    }

    /// Keeps the memory as long as the object exists.
    pub(crate) fn hold_for(&self, object: &Existence) {
        self.entries.hold_for(object);
        self.records.hold_for(object);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn records_share_pages_but_no_cache_line() {
        let mut all: Vec<_> = (0..200).map(|_| Records::new(None).unwrap()).collect();
        let mut at: Vec<_> = all.iter().map(Records::address).collect();
        at.sort_unstable();
        assert!(at.iter().all(|at| at % 64 == 0));
        assert!(at.windows(2).all(|pair| pair[0] + 64 <= pair[1]));
        let mut in_pages: Vec<_> = at.iter().map(|at| at / 4096).collect();
        in_pages.dedup();
        // Other tests of this process allocate records, too.
        assert!(in_pages.len() <= 8, "{}", in_pages.len());
        // A freed record is zero when it is allocated again.
        for records in &all {
            records.record(0).publish(7);
            records.record(1).publish(8);
        }
        // Their pages stay mapped: other blocks of them are allocated.
        let mut count = 0;
        all.retain(|_| {
            count += 1;
            count % 2 == 0
        });
        let reused: Vec<_> = (0..100).map(|_| Records::new(None).unwrap()).collect();
        for records in &reused {
            let both = [records.record(0), records.record(1)];
            assert_eq!(both.map(|record| record.published()), [0, 0]);
        }
    }

    #[test]
    fn entries_are_zeroed_whole_pages() {
        for bytes in [0, 1, 4096, 4097, 3 << 20] {
            let entries = Entries::new(bytes, Purpose::QueuePair, None).unwrap();
            let EntriesMemory::Process(ProcessMemory { mapping }) = &*entries.0.memory else {
                panic!("custom memory")
            };
            assert!(mapping.len() >= bytes.max(1) && mapping.len() % 4096 == 0);
            let last = bytes.max(1) - 1;
            // SAFETY: in the memory.
            unsafe {
                assert_eq!(entries.first().add(last).read(), 0);
                entries.first().add(last).write(1);
            }
            drop(entries.retire());
        }
    }

    /// One test: the cache belongs to the process.
    #[test]
    fn freed_pages_are_reused_up_to_the_limit() {
        const UNUSUAL_SIZE: usize = 23 * 4096;
        let entries = |bytes| Entries::new(bytes, Purpose::QueuePair, None).unwrap();
        let cache = || MAPPING_CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        let is_cached = |bytes| {
            cache()
                .mappings
                .iter()
                .any(|mapping| mapping.len() == bytes)
        };

        // Repeated, since another test may hold the lock of the cache.
        let reused = (0..100).any(|_| {
            let first = entries(UNUSUAL_SIZE);
            let address = first.address();
            // SAFETY: in the memory.
            unsafe { first.first().add(UNUSUAL_SIZE - 1).write(1) };
            drop(first);
            let second = entries(UNUSUAL_SIZE - 4095);
            // SAFETY: in the memory.
            assert_eq!(unsafe { second.first().add(UNUSUAL_SIZE - 1).read() }, 0);
            second.address() == address
        });
        assert!(reused);
        let many: Vec<_> = (0..64).map(|_| entries(29 * 4096)).collect();
        let large = entries(MappingCache::MAX_MAPPING + 4096);
        drop(large);
        assert!(!is_cached(MappingCache::MAX_MAPPING + 4096));
        drop(many);
        let bytes: usize = cache().mappings.iter().map(Mapping::len).sum();
        assert_eq!(bytes, cache().bytes);
        assert!(
            bytes > MappingCache::MAX_BYTES / 2 && bytes <= MappingCache::MAX_BYTES,
            "{bytes}"
        );
    }

    /// An allocator that records its calls.
    #[derive(Default)]
    struct RecordingAllocator {
        calls: Rc<RefCell<Vec<(Purpose, usize, usize)>>>,
        freed: Rc<RefCell<usize>>,
        uses_default: bool,
        /// Added to the address.
        offset: usize,
    }

    impl QueueAllocator for RecordingAllocator {
        fn allocate(
            &self,
            purpose: Purpose,
            bytes: usize,
            alignment: usize,
        ) -> io::Result<Option<CustomMemory>> {
            self.calls.borrow_mut().push((purpose, bytes, alignment));
            if self.uses_default {
                return Ok(None);
            }
            let memory = Mapping::anonymous(bytes + self.offset)?;
            // SAFETY: in the mapping, which the closure owns.
            let at = unsafe { memory.as_ptr().add(self.offset) };
            // SAFETY: as above.
            unsafe { at.write_bytes(0x5a, bytes) };
            let freed = Rc::clone(&self.freed);
            let free = Box::new(move |_| {
                *freed.borrow_mut() += 1;
                drop(memory);
            });
            // SAFETY: exclusive; the test has one thread.
            Ok(Some(unsafe { CustomMemory::new(at, free) }))
        }
    }

    #[test]
    fn custom_memory_is_allocated_and_freed() {
        let allocator = RecordingAllocator::default();
        let memory = QueueMemory::new(5000, Purpose::SharedQueue, Some(&allocator)).unwrap();
        let calls = [(Purpose::SharedQueue, 8192, 4096), (Purpose::Records, 8, 8)];
        assert_eq!(*allocator.calls.borrow(), calls);
        assert_eq!(memory.records.record(1).published(), 0);
        // SAFETY: in the memory.
        let last = unsafe { memory.entries.first().add(4999).read() };
        assert_eq!(last, 0);
        let QueueMemory { entries, records } = memory;
        // Replaced entries are still read.
        let retired = entries.retire();
        assert_eq!(*allocator.freed.borrow(), 0);
        drop((retired, records));
        assert_eq!(*allocator.freed.borrow(), 2);
    }

    #[test]
    fn record_pages_are_shared_and_freed() {
        let allocator = RecordingAllocator::default();
        let pages = Arc::new(CustomRecordPages::default());
        let block =
            || pages.block(|bytes| Ok(allocator.allocate(Purpose::Records, bytes, 0)?.unwrap()));
        let mut blocks: Vec<_> = (0..65).map(|_| block().unwrap()).collect();
        assert_eq!(allocator.calls.borrow().len(), 2);
        // SAFETY: in a block.
        assert_eq!(unsafe { blocks[64].at.add(BLOCK - 1).read() }, 0);
        drop(blocks.pop());
        assert_eq!(*allocator.freed.borrow(), 1);
        let freed = blocks.swap_remove(7).at;
        assert_eq!(block().unwrap().at, freed);
        drop((blocks, pages));
        assert_eq!(*allocator.freed.borrow(), 2);

        let unaligned = RecordingAllocator {
            offset: 64,
            ..RecordingAllocator::default()
        };
        let pages = Arc::new(CustomRecordPages::default());
        let block =
            pages.block(|bytes| Ok(unaligned.allocate(Purpose::Records, bytes, 0)?.unwrap()));
        assert_eq!(block.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(*unaligned.freed.borrow(), 1);
    }

    #[test]
    fn allocators_that_fail_or_return_unaligned_memory() {
        let uses_default = RecordingAllocator {
            uses_default: true,
            ..RecordingAllocator::default()
        };
        let memory = QueueMemory::new(64, Purpose::QueuePair, Some(&uses_default)).unwrap();
        assert!(matches!(
            &*memory.entries.0.memory,
            EntriesMemory::Process(_)
        ));
        assert!(matches!(
            &*memory.records.0.memory,
            RecordsMemory::Process(_)
        ));
        // Without entries the allocator is not called.
        let unused = RecordingAllocator::default();
        Entries::new(0, Purpose::QueuePair, Some(&unused)).unwrap();
        assert!(unused.calls.borrow().is_empty());
        let unaligned = RecordingAllocator {
            offset: 4,
            ..RecordingAllocator::default()
        };
        let error = Entries::new(64, Purpose::QueuePair, Some(&unaligned)).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
        assert_eq!(*unaligned.freed.borrow(), 1);
    }
}
