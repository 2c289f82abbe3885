//! The reader of work completions.

use std::mem::{MaybeUninit, offset_of};
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{DoorbellRecord, Glance, Owner, Retired};

use crate::abi::{CQE_OWNER, Cqe, cqe_opcode};
use crate::cqe::{Before, decode};
use crate::directory::Directory;
use crate::session::Session;
use crate::work::QueueMemory;
use crate::{CompletionError, CreateError, Usual, WorkCompletion};

/// The consumer index has 24 bits.
const INDEX: u32 = 0xff_ffff;

/// The entries of a completion queue, and what they are about.
///
/// An entry is the device's or this side's by its owner bit, which turns with
/// every round; its other bytes are read after that.
///
/// Thread rule: one caller at a time (`&mut`). The methods that read
/// completions neither allocate, lock (but a shared receive queue's free list)
/// nor call the system.
#[derive(Debug)]
pub struct CompletionRing {
    /// Where the fields of the first entry are.
    fields: NonNull<u8>,
    /// Binary logarithm of the number of entries.
    log2: u32,
    shape: Shape,
    /// How many were consumed.
    at: u32,
    /// The device's clock when the completion read last was written.
    time: u64,
    consumed: DoorbellRecord,
    pub(crate) directory: Directory,
    /// Completions that were told together, of which some are not read yet.
    pub(crate) session: Session,
    /// The entries.
    memory: QueueMemory,
    /// Where others look whether there is something to read.
    glance: Arc<Glance>,
    /// What is left of entries that were replaced, for those who may still be
    /// looking at them.
    retired: Vec<Retired>,
    /// The doorbell records, which stay where they are when the entries move.
    records: Arc<QueueMemory>,
}

// SAFETY: it owns its memory; the device writes to it, and is read as one that
// does.
unsafe impl Send for CompletionRing {}
// SAFETY: as above; nothing is done through a shared reference.
unsafe impl Sync for CompletionRing {}

/// Says of an entry's last byte whether the device has written the entry, of
/// which the owner bit is `round` then.
#[inline(always)]
fn is_written(owner: u8, round: u8) -> bool {
    owner >> 4 != cqe_opcode::INVALID && owner & CQE_OWNER == round
}

/// Whether a completion queue has something to read, without its lock.
#[derive(Debug)]
pub struct Look {
    glance: Arc<Glance>,
}

impl Look {
    /// Whether there is certainly nothing to read. Any thread, no lock.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        const OWNER: usize = offset_of!(Cqe, op_own);
        self.glance.is_empty::<OWNER>(is_written)
    }
}

/// What entries look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Binary logarithm of an entry's bytes, 6 or 7. The fields are the last 64.
    pub shift: u32,
    /// The device may tell several together.
    pub compresses: bool,
}

impl Shape {
    /// What every device has.
    #[cfg(test)]
    pub(crate) const PLAIN: Self = Self {
        shift: 6,
        compresses: false,
    };

    /// Bytes of an entry.
    pub(crate) fn bytes(self) -> usize {
        1 << self.shift
    }

    /// Where an entry's fields begin.
    pub(crate) fn before(self) -> usize {
        self.bytes() - size_of::<Cqe>()
    }
}

impl CompletionRing {
    /// A queue of `1 << log2` entries, all of them the device's.
    pub(crate) fn new(log2: u32, shape: Shape) -> Result<Self, CreateError> {
        let memory = Self::fresh(log2, shape)?;
        let records = QueueMemory::new(0, "completion queue")?;
        let mut ring = Self {
            fields: Self::fields(&memory, shape),
            log2,
            shape,
            at: 0,
            time: 0,
            consumed: records.record(0),
            directory: Directory::default(),
            session: Session::default(),
            memory,
            glance: Arc::default(),
            retired: Vec::new(),
            records: Arc::new(records),
        };
        ring.publish();
        Ok(ring)
    }

    /// Memory for `1 << log2` entries, all of them the device's.
    pub(crate) fn fresh(log2: u32, shape: Shape) -> Result<QueueMemory, CreateError> {
        let memory = QueueMemory::new(shape.bytes() << log2, "completion queue")?;
        let fields = Self::fields(&memory, shape);
        for slot in 0..1usize << log2 {
            let at = slot * shape.bytes() + offset_of!(Cqe, op_own);
            // SAFETY: inside the memory, which has `1 << log2` entries.
            unsafe { fields.add(at).write(cqe_opcode::INVALID << 4) };
        }
        Ok(memory)
    }

    /// Where the fields of the first entry are.
    pub(crate) fn fields(memory: &QueueMemory, shape: Shape) -> NonNull<u8> {
        // SAFETY: inside the first entry.
        unsafe { memory.entries().add(shape.before()) }
    }

    pub(crate) fn memory(&self) -> &QueueMemory {
        &self.memory
    }

    pub(crate) fn records(&self) -> &Arc<QueueMemory> {
        &self.records
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn compresses(&self) -> bool {
        self.shape.compresses
    }

    /// Entries that it holds at most.
    pub fn capacity(&self) -> u32 {
        1 << self.log2
    }

    /// The fields of the entry at `at`.
    #[inline(always)]
    pub(crate) fn slot(&self, at: u32) -> NonNull<Cqe> {
        let mask = (1u32 << self.log2) - 1;
        let offset = ((at & mask) as usize) << self.shape.shift;
        // SAFETY: one of the entries, by the mask.
        unsafe { self.fields.add(offset).cast::<Cqe>() }
    }

    /// The owner bit that the entry at `at` has when it is written.
    #[inline(always)]
    pub(crate) fn round(&self, at: u32) -> u8 {
        (at >> self.log2) as u8 & CQE_OWNER
    }

    /// The entry at `at`, if the device has written it.
    #[inline(always)]
    pub(crate) fn written(&self, at: u32) -> Option<NonNull<Cqe>> {
        let slot = self.slot(at);
        // SAFETY: a byte of the entry, which lives as long as this does.
        let owner = unsafe { Owner::new(slot.cast::<u8>().add(offset_of!(Cqe, op_own))) };
        let owner = owner.look();
        is_written(owner, self.round(at)).then_some(slot)
    }

    /// Whether there is certainly nothing to read.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.session.left == 0 && self.written(self.at).is_none()
    }

    /// The next completion; none if there is none. What is read is consumed
    /// with [`CompletionRing::publish`].
    ///
    /// # Errors
    /// [`CompletionError`]: it makes no sense, and is passed over.
    ///
    /// # Safety
    /// The queues that complete here were published to as their contracts say.
    #[inline(always)]
    pub unsafe fn read(&mut self) -> Option<Result<WorkCompletion, CompletionError>> {
        if self.session.left != 0 {
            // SAFETY: as the caller says.
            return Some(unsafe { self.read_told_together() });
        }
        let entry = self.written(self.at)?;
        // SAFETY: a valid entry, any bytes of which are one; it is this side's
        // until consumed, and copied once, whatever the device does.
        let cqe = unsafe { entry.read() };
        if cqe.is_title() && self.shape.compresses {
            // SAFETY: as the caller says.
            return Some(unsafe { self.read_title(&cqe) });
        }
        self.at = self.at.wrapping_add(1);
        self.time = u64::from_be_bytes(cqe.timestamp);
        let before = Before::of(entry, self.shape.before());
        // SAFETY: as the caller says.
        Some(unsafe { decode(&cqe, before, &self.directory) })
    }

    /// As [`CompletionRing::read`], apart from the quick way.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn read_other(&mut self) -> Option<Result<WorkCompletion, CompletionError>> {
        // SAFETY: as the caller says.
        unsafe { self.read() }
    }

    /// As [`CompletionRing::read`], at a title.
    ///
    /// # Safety
    /// As there.
    #[cold]
    unsafe fn read_title(&mut self, title: &Cqe) -> Result<WorkCompletion, CompletionError> {
        if let Err(error) = self.open_session(self.at, title) {
            self.at = self.at.wrapping_add(1);
            return Err(error);
        }
        // SAFETY: as the caller says.
        unsafe { self.read_told_together() }
    }

    /// As [`CompletionRing::read`], in a session.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn read_told_together(&mut self) -> Result<WorkCompletion, CompletionError> {
        let cqe = self.next_of_session(self.at);
        self.at = self.at.wrapping_add(1);
        self.time = u64::from_be_bytes(cqe.timestamp);
        // SAFETY: as the caller says.
        unsafe { decode(&cqe, Before::NOTHING, &self.directory) }
    }

    /// When the device wrote the completion that was read last, in ticks of its
    /// clock; nothing that means anything if that is of a failed operation.
    #[inline(always)]
    pub fn time(&self) -> u64 {
        self.time
    }

    /// Gives what was read back to the device.
    #[inline(always)]
    pub fn publish(&mut self) {
        // First where to look, then what is the device's again: nobody is to
        // look at an entry that it may write anew.
        if self.session.left != 0 {
            self.glance.suspend();
        } else {
            let round = self.round(self.at);
            // SAFETY: entries that are replaced stay readable (`retired`), and
            // who looks does not outlive the ring (`look`).
            unsafe { self.glance.publish(self.slot(self.at).cast(), round) };
        }
        self.consumed.publish(self.at & INDEX);
    }

    /// Whether there is something to read, for those who are not the one caller.
    ///
    /// # Safety
    /// It is not used any more when the ring goes.
    pub unsafe fn look(&self) -> Look {
        Look {
            glance: Arc::clone(&self.glance),
        }
    }

    /// The device is about to be told other entries: nothing is called empty,
    /// until [`CompletionRing::publish`].
    pub(crate) fn suspend(&mut self) -> Result<(), CreateError> {
        self.retired
            .try_reserve(1)
            .map_err(|_| CreateError::NoMemory)?;
        self.glance.suspend();
        Ok(())
    }

    /// Takes completions, in order, each once; how many.
    ///
    /// # Errors
    /// [`CompletionError`] if the first makes no sense; it is consumed. One
    /// behind others is left for the next call.
    ///
    /// # Safety
    /// As for [`CompletionRing::read`].
    #[inline(always)]
    pub unsafe fn take(
        &mut self,
        out: &mut [MaybeUninit<WorkCompletion>],
    ) -> Result<usize, CompletionError> {
        let mut taken = 0;
        let mut failed = None;
        for place in out {
            // SAFETY: as the caller says.
            match unsafe { self.read_usual(place) } {
                Usual::Taken => {
                    taken += 1;
                    continue;
                }
                Usual::Nothing => break,
                Usual::Other => {}
            }
            let left = self.session.left;
            // SAFETY: as the caller says.
            match unsafe { self.read_other() } {
                Some(Ok(wc)) => {
                    place.write(wc);
                    taken += 1;
                }
                Some(Err(error)) if taken == 0 => {
                    failed = Some(error);
                    break;
                }
                Some(Err(_)) => {
                    self.unread(left);
                    break;
                }
                None => break,
            }
        }
        if taken != 0 || failed.is_some() {
            self.publish();
        }
        failed.map_or(Ok(taken), Err)
    }

    /// The completion read last is to be read again. `left` were left of a
    /// session before.
    #[cold]
    fn unread(&mut self, left: u32) {
        self.at = self.at.wrapping_sub(1);
        // Within a session, or at its title, or at its last.
        if left != self.session.left {
            self.session.undo();
        }
    }

    /// Where reading goes on.
    #[inline(always)]
    pub(crate) fn position(&self) -> u32 {
        self.at
    }

    /// One completion was read, which was written at `time`.
    #[inline(always)]
    pub(crate) fn pass(&mut self, time: u64) {
        self.at = self.at.wrapping_add(1);
        self.time = time;
    }

    /// Goes on reading at `at`, and says so to the device.
    pub(crate) fn go_on_at(&mut self, at: u32) {
        self.at = at;
        self.publish();
    }

    /// Goes on reading at `at` in other memory, of `1 << log2` entries.
    pub(crate) fn go_on_in(&mut self, memory: QueueMemory, log2: u32, at: u32) {
        self.fields = Self::fields(&memory, self.shape);
        self.log2 = log2;
        let old = std::mem::replace(&mut self.memory, memory);
        self.retired.push(old.retire());
        self.go_on_at(at);
    }

    /// Of entries as every device has them.
    #[cfg(test)]
    pub(crate) fn plain(log2: u32) -> Result<Self, CreateError> {
        Self::new(log2, Shape::PLAIN)
    }

    /// The queue's memory, for tests that play the device.
    #[cfg(test)]
    pub(crate) fn entries(&self) -> NonNull<u8> {
        self.memory.entries()
    }
}
