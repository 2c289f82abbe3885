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

/// A source of memory for queues: the allocators of a parent domain or a context.
pub trait Lender {
    /// Returns exclusive memory of at least `bytes` bytes, aligned to
    /// `alignment`; `None` for the default allocation.
    ///
    /// # Errors
    /// Returned by the verb.
    fn lend(&self, purpose: Purpose, bytes: usize, alignment: usize) -> io::Result<Option<Lent>>;
}

/// Memory from a [`Lender`], returned when dropped.
pub struct Lent {
    at: NonNull<u8>,
    back: Option<Box<dyn FnOnce(NonNull<u8>)>>,
}

// SAFETY: the memory is exclusive, and by `new` any thread may return it.
unsafe impl Send for Lent {}
// SAFETY: only `drop` calls `back`.
unsafe impl Sync for Lent {}

impl Lent {
    /// Takes ownership of memory, which `back` returns.
    ///
    /// # Safety
    /// The memory is as [`Lender::lend`] says, and readable and writable.
    /// `back` may be called by any thread.
    pub unsafe fn new(at: NonNull<u8>, back: Box<dyn FnOnce(NonNull<u8>)>) -> Self {
        Self {
            at,
            back: Some(back),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(back) = self.back.take() {
            back(self.at);
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({:p})", self.at)
    }
}

/// Requests zeroed memory from the lender, if there is one.
fn borrow(
    lender: Option<&dyn Lender>,
    purpose: Purpose,
    bytes: usize,
    alignment: usize,
) -> io::Result<Option<Lent>> {
    let Some(lent) = lender
        .map(|lender| lender.lend(purpose, bytes, alignment))
        .transpose()?
        .flatten()
    else {
        return Ok(None);
    };
    if (lent.at.as_ptr() as usize) % alignment != 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: by [`Lender::lend`], that many bytes are exclusive and writable.
    unsafe { lent.at.write_bytes(0, bytes) };
    Ok(Some(lent))
}

/// Cached mappings of destroyed queues. Mapping, touching and unmapping memory is
/// most of the time of creating and destroying a queue.
struct Spare {
    mappings: Vec<Mapping>,
    bytes: usize,
}

/// One for the process. It is skipped while locked, so that a child of fork
/// cannot deadlock.
static SPARE: Mutex<Spare> = Mutex::new(Spare {
    mappings: Vec::new(),
    bytes: 0,
});

impl Spare {
    /// Maximum bytes in the cache.
    const MOST: usize = 1 << 20;
    /// Maximum bytes of a cached mapping: clearing a larger one takes as long as
    /// mapping.
    const LARGEST: usize = 1 << 17;

    fn locked() -> Option<MutexGuard<'static, Self>> {
        match SPARE.try_lock() {
            Ok(spare) => Some(spare),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns a zeroed mapping of at least `bytes` bytes.
    fn take(bytes: usize) -> Option<Mapping> {
        let whole = bytes.checked_next_multiple_of(Mapping::page_size())?;
        let mut spare = Self::locked()?;
        // The last one added, which may be in the processor's cache.
        let place = (spare.mappings.iter()).rposition(|mapping| mapping.len() == whole)?;
        let mapping = spare.mappings.swap_remove(place);
        spare.bytes -= whole;
        drop(spare);
        // SAFETY: the mapping has that many bytes, and is exclusive.
        unsafe { mapping.as_ptr().write_bytes(0, whole) };
        Some(mapping)
    }

    /// Caches a mapping if there is room, else unmaps it.
    fn put(mapping: Mapping) {
        let bytes = mapping.len();
        if bytes <= Self::LARGEST {
            if let Some(mut spare) = Self::locked() {
                if spare.bytes + bytes <= Self::MOST && spare.mappings.try_reserve(1).is_ok() {
                    spare.bytes += bytes;
                    spare.mappings.push(mapping);
                }
            }
        }
    }
}

/// Memory of an object. If the object exists when this is dropped, since the
/// kernel refused to destroy it, the memory is leaked: the device still uses it.
#[derive(Debug)]
struct Held<T> {
    memory: ManuallyDrop<T>,
    object: OnceLock<Existence>,
}

impl<T> Held<T> {
    fn new(memory: T) -> Self {
        Self {
            memory: ManuallyDrop::new(memory),
            object: OnceLock::new(),
        }
    }

    /// Takes the memory out, which no object uses any more.
    fn into_inner(self) -> T {
        let mut held = ManuallyDrop::new(self);
        drop(std::mem::take(&mut held.object));
        // SAFETY: the value is not dropped, and so the memory taken once.
        unsafe { ManuallyDrop::take(&mut held.memory) }
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        if self.object.get().is_none_or(Existence::has_ended) {
            // SAFETY: once, here.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

/// Memory of the process for entries, cached or unmapped when dropped.
#[derive(Debug)]
struct Own {
    mapping: ManuallyDrop<Mapping>,
}

impl Own {
    /// Allocates at least `bytes` zeroed bytes.
    fn new(bytes: usize) -> io::Result<Self> {
        let mapping = match Spare::take(bytes) {
            Some(mapping) => mapping,
            None => Mapping::anonymous_large(bytes)?,
        };
        Ok(Self {
            mapping: ManuallyDrop::new(mapping),
        })
    }

    /// Takes the mapping out.
    fn into_mapping(self) -> Mapping {
        let mut own = ManuallyDrop::new(self);
        // SAFETY: the value is not dropped, and so the mapping taken once.
        unsafe { ManuallyDrop::take(&mut own.mapping) }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: once, here.
        Spare::put(unsafe { ManuallyDrop::take(&mut self.mapping) });
    }
}

#[derive(Debug)]
enum EntriesMemory {
    Own(Own),
    Lent(Lent),
}

/// A queue's entries.
#[derive(Debug)]
pub(crate) struct Entries(Held<EntriesMemory>);

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
        lender: Option<&dyn Lender>,
    ) -> Result<Self, CreateError> {
        // A queue without entries needs no memory, but an address.
        let lender = lender.filter(|_| bytes != 0);
        let page = Mapping::page_size();
        borrow(lender, purpose, bytes.next_multiple_of(page), page)
            .and_then(|lent| match lent {
                Some(lent) => Ok(EntriesMemory::Lent(lent)),
                None => Own::new(bytes.max(1)).map(EntriesMemory::Own),
            })
            .map(|memory| Self(Held::new(memory)))
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
            .is_some_and(|held| held.is_of_same(object))
    }

    /// Frees the memory, which the object no longer uses, where possible; its
    /// addresses stay readable.
    pub(crate) fn retire(self) -> RetiredEntries {
        match self.0.into_inner() {
            EntriesMemory::Own(own) => RetiredEntries::Own(own.into_mapping().retire_whole()),
            EntriesMemory::Lent(lent) => RetiredEntries::Lent(lent),
        }
    }

    /// The first entry; page aligned.
    pub(crate) fn first(&self) -> NonNull<u8> {
        match &*self.0.memory {
            EntriesMemory::Own(own) => own.mapping.as_ptr(),
            EntriesMemory::Lent(lent) => lent.at,
        }
    }

    /// Their address, for the driver.
    pub(crate) fn address(&self) -> u64 {
        self.first().as_ptr().expose_provenance() as u64
    }
}

/// Keeps the addresses of replaced entries readable. Lent memory is kept until
/// the queue is dropped.
#[derive(Debug)]
pub(crate) enum RetiredEntries {
    Own(#[allow(dead_code, reason = "held for its address")] Retired),
    Lent(#[allow(dead_code, reason = "held for its address")] Lent),
}

#[derive(Debug)]
enum RecordsMemory {
    Own(Slot),
    Lent(Lent),
}

/// A queue's two doorbell records.
#[derive(Debug)]
pub(crate) struct Records(Held<RecordsMemory>);

// SAFETY: as for `Entries`.
unsafe impl Send for Records {}
// SAFETY: as above.
unsafe impl Sync for Records {}

impl Records {
    /// Bytes of the two.
    const BYTES: usize = 8;

    /// Allocates two records of 0.
    pub(crate) fn new(lender: Option<&dyn Lender>) -> Result<Self, CreateError> {
        borrow(lender, Purpose::Records, Self::BYTES, Self::BYTES)
            .and_then(|lent| match lent {
                Some(lent) => Ok(RecordsMemory::Lent(lent)),
                None => Slot::take().map(RecordsMemory::Own),
            })
            .map(|memory| Self(Held::new(memory)))
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
            RecordsMemory::Own(slot) => slot.at,
            RecordsMemory::Lent(lent) => lent.at,
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
    taken: u64,
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

impl PageMemory for Lent {
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

    /// Allocates a zeroed block, of a new page if no other has one free.
    ///
    /// # Safety
    /// A new page has [`PAGE`] bytes, which are writable, and nobody else's.
    unsafe fn take(&self, new: impl FnOnce() -> io::Result<M>) -> io::Result<NonNull<u8>> {
        let mut pages = self.locked();
        let place = match pages.iter().position(|page| page.taken != u64::MAX) {
            Some(place) => place,
            None => {
                pages
                    .try_reserve(1)
                    .map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
                pages.push(Page {
                    memory: new()?,
                    taken: 0,
                });
                pages.len() - 1
            }
        };
        let page = &mut pages[place];
        let block = page.taken.trailing_ones();
        page.taken |= 1 << block;
        // SAFETY: the page has 64 blocks, of which this one is unused.
        let at = unsafe { page.memory.at().add(block as usize * BLOCK) };
        // SAFETY: as above.
        unsafe { at.write_bytes(0, BLOCK) };
        Ok(at)
    }

    /// Frees a block, and its page if no other block is allocated, except `kept` pages.
    fn give_back(&self, at: NonNull<u8>, kept: usize) {
        let mut pages = self.locked();
        let offset = |page: &Page<M>| {
            let distance = (at.as_ptr() as usize).wrapping_sub(page.memory.at().as_ptr() as usize);
            (distance < PAGE).then_some(distance)
        };
        let found = (pages.iter().enumerate()).find_map(|(i, page)| Some((i, offset(page)?)));
        if let Some((place, offset)) = found {
            let page = &mut pages[place];
            page.taken &= !(1 << (offset / BLOCK));
            if page.taken == 0 && pages.len() > kept {
                pages.swap_remove(place);
            }
        }
    }
}

static PAGES: Pages<Mapping> = Pages(Mutex::new(Vec::new()));

/// A block of a page of doorbell records, freed when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    at: NonNull<u8>,
}

impl Slot {
    /// Allocates a zeroed block.
    fn take() -> io::Result<Self> {
        // SAFETY: a mapping of its own.
        let at = unsafe { PAGES.take(|| Mapping::anonymous(PAGE)) }?;
        Ok(Self { at })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // One page is kept for later queues.
        PAGES.give_back(self.at, 1);
    }
}

/// Pages of doorbell records from an allocator of whole pages.
pub struct LentPages(Pages<Lent>);

impl Default for LentPages {
    fn default() -> Self {
        Self(Pages(Mutex::default()))
    }
}

impl LentPages {
    /// Allocates a block for the records of a queue. `lend` allocates another page, of the
    /// length that it is given; one that is not aligned is EINVAL.
    ///
    /// # Errors
    /// Those of `lend`.
    pub fn block(
        self: &Arc<Self>,
        lend: impl FnOnce(usize) -> io::Result<Lent>,
    ) -> io::Result<Lent> {
        let page = || {
            let lent = lend(Mapping::page_size())?;
            if (lent.at.as_ptr() as usize) % Mapping::page_size() != 0 {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            Ok(lent)
        };
        // SAFETY: by `Lent::new` the memory is writable and exclusive.
        let at = unsafe { self.0.take(page) }?;
        let pages = Arc::clone(self);
        // SAFETY: exclusive until it is given back, by any thread.
        Ok(unsafe { Lent::new(at, Box::new(move |at| pages.0.give_back(at, 0))) })
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
        lender: Option<&dyn Lender>,
    ) -> Result<Self, CreateError> {
        Ok(Self {
            entries: Entries::new(bytes, purpose, lender)?,
            records: Records::new(lender)?,
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
    fn records_share_pages_and_nothing_else() {
        let mut all: Vec<_> = (0..200).map(|_| Records::new(None).unwrap()).collect();
        let mut at: Vec<_> = all.iter().map(Records::address).collect();
        at.sort_unstable();
        assert!(at.iter().all(|at| at % 64 == 0));
        assert!(at.windows(2).all(|pair| pair[0] + 64 <= pair[1]));
        let mut in_pages: Vec<_> = at.iter().map(|at| at / 4096).collect();
        in_pages.dedup();
        // Other tests of this process have some, too.
        assert!(in_pages.len() <= 8, "{}", in_pages.len());
        // What was given up is zeros for the next.
        for records in &all {
            records.record(0).publish(7);
            records.record(1).publish(8);
        }
        // Their pages stay, since others have blocks of them.
        let mut turn = 0;
        all.retain(|_| {
            turn += 1;
            turn % 2 == 0
        });
        let again: Vec<_> = (0..100).map(|_| Records::new(None).unwrap()).collect();
        for records in &again {
            let both = [records.record(0), records.record(1)];
            assert_eq!(both.map(|record| record.published()), [0, 0]);
        }
    }

    #[test]
    fn large_queues_are_zeros_in_whole_pages() {
        for bytes in [0, 1, 4096, 4097, 3 << 20] {
            let entries = Entries::new(bytes, Purpose::QueuePair, None).unwrap();
            let EntriesMemory::Own(Own { mapping }) = &*entries.0.memory else {
                panic!("lent")
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

    /// One test, since it is about what the process keeps.
    #[test]
    fn freed_pages_are_reused_up_to_the_limit() {
        const ODD: usize = 23 * 4096;
        let entries = |bytes| Entries::new(bytes, Purpose::QueuePair, None).unwrap();
        let spare = || SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        let keeps = |bytes| spare().mappings.iter().any(|kept| kept.len() == bytes);

        // More than once, since another test may have the list just then.
        let again = (0..100).any(|_| {
            let first = entries(ODD);
            let address = first.address();
            // SAFETY: in the memory.
            unsafe { first.first().add(ODD - 1).write(1) };
            drop(first);
            let second = entries(ODD - 4095);
            // SAFETY: in the memory.
            assert_eq!(unsafe { second.first().add(ODD - 1).read() }, 0);
            second.address() == address
        });
        assert!(again);
        let many: Vec<_> = (0..64).map(|_| entries(29 * 4096)).collect();
        let large = entries(Spare::LARGEST + 4096);
        drop(large);
        assert!(!keeps(Spare::LARGEST + 4096));
        drop(many);
        let bytes: usize = spare().mappings.iter().map(Mapping::len).sum();
        assert_eq!(bytes, spare().bytes);
        assert!(bytes > Spare::MOST / 2 && bytes <= Spare::MOST, "{bytes}");
    }

    /// Lends, and writes down what happens.
    #[derive(Default)]
    struct Book {
        seen: Rc<RefCell<Vec<(Purpose, usize, usize)>>>,
        back: Rc<RefCell<usize>>,
        usual: bool,
        /// Added to the address.
        off: usize,
    }

    impl Lender for Book {
        fn lend(
            &self,
            purpose: Purpose,
            bytes: usize,
            alignment: usize,
        ) -> io::Result<Option<Lent>> {
            self.seen.borrow_mut().push((purpose, bytes, alignment));
            if self.usual {
                return Ok(None);
            }
            let memory = Mapping::anonymous(bytes + self.off)?;
            // SAFETY: in the mapping, which goes with the closure.
            let at = unsafe { memory.as_ptr().add(self.off) };
            // SAFETY: as above.
            unsafe { at.write_bytes(0x5a, bytes) };
            let back = Rc::clone(&self.back);
            let give = Box::new(move |_| {
                *back.borrow_mut() += 1;
                drop(memory);
            });
            // SAFETY: nobody else's; the test has one thread.
            Ok(Some(unsafe { Lent::new(at, give) }))
        }
    }

    #[test]
    fn memory_is_lent_and_given_back() {
        let book = Book::default();
        let memory = QueueMemory::new(5000, Purpose::SharedQueue, Some(&book)).unwrap();
        let seen = [(Purpose::SharedQueue, 8192, 4096), (Purpose::Records, 8, 8)];
        assert_eq!(*book.seen.borrow(), seen);
        assert_eq!(memory.records.record(1).published(), 0);
        // SAFETY: in the memory.
        let last = unsafe { memory.entries.first().add(4999).read() };
        assert_eq!(last, 0);
        let QueueMemory { entries, records } = memory;
        // Entries that are replaced are still looked at.
        let retired = entries.retire();
        assert_eq!(*book.back.borrow(), 0);
        drop((retired, records));
        assert_eq!(*book.back.borrow(), 2);
    }

    #[test]
    fn lent_pages_are_shared_by_records_and_given_back() {
        let book = Book::default();
        let pages = Arc::new(LentPages::default());
        let block = || pages.block(|bytes| Ok(book.lend(Purpose::Records, bytes, 0)?.unwrap()));
        let mut blocks: Vec<_> = (0..65).map(|_| block().unwrap()).collect();
        assert_eq!(book.seen.borrow().len(), 2);
        // SAFETY: in a block.
        assert_eq!(unsafe { blocks[64].at.add(BLOCK - 1).read() }, 0);
        drop(blocks.pop());
        assert_eq!(*book.back.borrow(), 1);
        let freed = blocks.swap_remove(7).at;
        assert_eq!(block().unwrap().at, freed);
        drop((blocks, pages));
        assert_eq!(*book.back.borrow(), 2);

        let crooked = Book {
            off: 64,
            ..Book::default()
        };
        let pages = Arc::new(LentPages::default());
        let block = pages.block(|bytes| Ok(crooked.lend(Purpose::Records, bytes, 0)?.unwrap()));
        assert_eq!(block.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(*crooked.back.borrow(), 1);
    }

    #[test]
    fn allocators_that_fail_or_return_unaligned_memory() {
        let usual = Book {
            usual: true,
            ..Book::default()
        };
        let memory = QueueMemory::new(64, Purpose::QueuePair, Some(&usual)).unwrap();
        assert!(matches!(&*memory.entries.0.memory, EntriesMemory::Own(_)));
        assert!(matches!(&*memory.records.0.memory, RecordsMemory::Own(_)));
        // Nobody is asked for nothing.
        let none = Book::default();
        Entries::new(0, Purpose::QueuePair, Some(&none)).unwrap();
        assert!(none.seen.borrow().is_empty());
        let crooked = Book {
            off: 4,
            ..Book::default()
        };
        let error = Entries::new(64, Purpose::QueuePair, Some(&crooked)).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
        assert_eq!(*crooked.back.borrow(), 1);
    }
}
