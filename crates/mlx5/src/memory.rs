//! The memory of queues and of their doorbell records: the process's own, or
//! somebody's who has been asked for it.

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ring::{DoorbellRecord, Mapping, Retired};

use crate::CreateError;
use crate::abi::BLOCK;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A queue pair's queues.
    QueuePair,
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
            Self::CompletionQueue => "completion queue",
            Self::SharedQueue => "shared receive queue",
            Self::Records => "doorbell records",
        }
    }
}

/// Somebody who may have memory for queues: the allocators of a parent domain.
pub trait Lender {
    /// At least `bytes` bytes, aligned to `alignment`, which nobody else
    /// touches until they are given back; none if the usual ones will do.
    ///
    /// # Errors
    /// What the caller of the verb is to be told.
    fn lend(&self, purpose: Purpose, bytes: usize, alignment: usize) -> io::Result<Option<Lent>>;
}

/// Memory that somebody has lent, who gets it back when this is dropped.
pub struct Lent {
    at: NonNull<u8>,
    back: Option<Box<dyn FnOnce(NonNull<u8>)>>,
}

// SAFETY: the memory is nobody else's, and giving it back from any thread is
// what `new` asks for.
unsafe impl Send for Lent {}
// SAFETY: `back` is called by `drop` only, which has it for itself.
unsafe impl Sync for Lent {}

impl Lent {
    /// Takes memory over, to be given back by `back`.
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

/// Asks a lender, if there is one, for zeroed memory.
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
    if !(lent.at.as_ptr() as usize).is_multiple_of(alignment) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: that many bytes are this side's, by the lender's word.
    unsafe { lent.at.write_bytes(0, bytes) };
    Ok(Some(lent))
}

/// A queue's entries.
#[derive(Debug)]
pub(crate) enum Entries {
    Own(Mapping),
    Lent(Lent),
}

// SAFETY: they are reached through raw pointers and atomics only; who may write
// which part is said where that is done.
unsafe impl Send for Entries {}
// SAFETY: as above.
unsafe impl Sync for Entries {}

impl Entries {
    /// Zeroed memory for `bytes` bytes of entries, which begins with a page.
    pub(crate) fn new(
        bytes: usize,
        purpose: Purpose,
        lender: Option<&dyn Lender>,
    ) -> Result<Self, CreateError> {
        // A queue without entries needs no memory, but an address.
        let lender = lender.filter(|_| bytes != 0);
        borrow(lender, purpose, bytes, Mapping::page_size())
            .and_then(|lent| match lent {
                Some(lent) => Ok(Self::Lent(lent)),
                None => Mapping::anonymous_large(bytes.max(1)).map(Self::Own),
            })
            .map_err(|error| CreateError::Memory {
                queue: purpose.name(),
                error,
            })
    }

    /// Gives the memory back as far as that can be; its addresses stay
    /// readable.
    pub(crate) fn retire(self) -> RetiredEntries {
        match self {
            Self::Own(mapping) => RetiredEntries::Own(mapping.retire_whole()),
            Self::Lent(lent) => RetiredEntries::Lent(lent),
        }
    }

    /// The first; page aligned.
    pub(crate) fn first(&self) -> NonNull<u8> {
        match self {
            Self::Own(mapping) => mapping.as_ptr(),
            Self::Lent(lent) => lent.at,
        }
    }

    /// Their address, for the driver.
    pub(crate) fn address(&self) -> u64 {
        self.first().as_ptr().expose_provenance() as u64
    }
}

/// What keeps addresses of replaced entries readable: those of lent memory
/// cannot be turned into nothing, and are kept until the queue goes.
#[derive(Debug)]
pub(crate) enum RetiredEntries {
    Own(#[allow(dead_code, reason = "held for its address")] Retired),
    Lent(#[allow(dead_code, reason = "held for its address")] Lent),
}

/// A queue's two doorbell records.
#[derive(Debug)]
pub(crate) enum Records {
    Own(Slot),
    Lent(Lent),
}

// SAFETY: as for `Entries`.
unsafe impl Send for Records {}
// SAFETY: as above.
unsafe impl Sync for Records {}

impl Records {
    /// Bytes of the two.
    const BYTES: usize = 8;

    /// Two records of 0.
    pub(crate) fn new(lender: Option<&dyn Lender>) -> Result<Self, CreateError> {
        borrow(lender, Purpose::Records, Self::BYTES, Self::BYTES)
            .and_then(|lent| match lent {
                Some(lent) => Ok(Self::Lent(lent)),
                None => Slot::take().map(Self::Own),
            })
            .map_err(|error| CreateError::Memory {
                queue: Purpose::Records.name(),
                error,
            })
    }

    /// The first; aligned to 8 bytes.
    pub(crate) fn first(&self) -> NonNull<u8> {
        match self {
            Self::Own(slot) => slot.at,
            Self::Lent(lent) => lent.at,
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
struct Page {
    mapping: Mapping,
    /// Blocks that are taken, as bits.
    taken: u64,
}

// SAFETY: only the owners of its blocks reach into it.
unsafe impl Send for Page {}

/// The pages of which a block is taken. One lock for the process: it is taken
/// when queues are made and destroyed, for a few instructions.
static PAGES: Mutex<Vec<Page>> = Mutex::new(Vec::new());

fn pages() -> MutexGuard<'static, Vec<Page>> {
    PAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block of a page of doorbell records; free for others when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    at: NonNull<u8>,
}

impl Slot {
    /// Takes a block, of zeros.
    fn take() -> io::Result<Self> {
        let mut pages = pages();
        let place = match pages.iter().position(|page| page.taken != u64::MAX) {
            Some(place) => place,
            None => {
                pages
                    .try_reserve(1)
                    .map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
                pages.push(Page {
                    mapping: Mapping::anonymous(u64::BITS as usize * BLOCK)?,
                    taken: 0,
                });
                pages.len() - 1
            }
        };
        let page = &mut pages[place];
        let block = page.taken.trailing_ones();
        page.taken |= 1 << block;
        // SAFETY: the mapping has 64 blocks, of which this one is nobody's.
        let at = unsafe { page.mapping.as_ptr().add(block as usize * BLOCK) };
        // SAFETY: as above.
        unsafe { at.write_bytes(0, BLOCK) };
        Ok(Self { at })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut pages = pages();
        let offset = |page: &Page| {
            let distance =
                (self.at.as_ptr() as usize).wrapping_sub(page.mapping.as_ptr().as_ptr() as usize);
            (distance < u64::BITS as usize * BLOCK).then_some(distance)
        };
        let found = (pages.iter().enumerate()).find_map(|(i, page)| Some((i, offset(page)?)));
        if let Some((place, offset)) = found {
            let page = &mut pages[place];
            page.taken &= !(1 << (offset / BLOCK));
            if page.taken == 0 {
                pages.swap_remove(place);
            }
        }
    }
}

/// Memory that a queue and its doorbell records lie in.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    pub(crate) entries: Entries,
    pub(crate) records: Records,
}

impl QueueMemory {
    /// Zeroed memory for `bytes` bytes of entries and two doorbell records.
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
        assert!(at.iter().all(|at| at.is_multiple_of(64)));
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
            let Entries::Own(mapping) = &entries else {
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
        let seen = [(Purpose::SharedQueue, 5000, 4096), (Purpose::Records, 8, 8)];
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
    fn who_lends_nothing_and_what_does_not_fit() {
        let usual = Book {
            usual: true,
            ..Book::default()
        };
        let memory = QueueMemory::new(64, Purpose::QueuePair, Some(&usual)).unwrap();
        assert!(matches!(memory.entries, Entries::Own(_)));
        assert!(matches!(memory.records, Records::Own(_)));
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
