//! The reader of work completions.

use std::hint::cold_path;
use std::mem::{MaybeUninit, offset_of};
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{DoorbellRecord, Glance, Owner};

use crate::abi::{CQE_OWNER, Cqe, cqe_opcode};
use crate::cqe::{Before, decode};
use crate::directory::Directory;
use crate::memory::{Entries, Lender, Purpose, Records, RetiredEntries};
use crate::session::Session;
use crate::usual::{Place, RECEIVED};
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
    /// The entry to be read next, by its fields; and its owner bit when it is
    /// written, or [`NO_ROUND`].
    pub(crate) next: NonNull<Cqe>,
    pub(crate) round: u32,
    /// With that bit, the last byte of an entry that tells of a message; so nearly
    /// every one is known by one comparison.
    pub(crate) message: u32,
    /// How many were consumed.
    at: u32,
    /// One less than the number of entries.
    mask: u32,
    /// Bytes from an entry to the next.
    pub(crate) step: usize,
    /// Binary logarithm of the number of entries.
    log2: u32,
    shape: Shape,
    /// Where the fields of the first entry are.
    fields: NonNull<u8>,
    /// The device's clock when the completion read last was written.
    pub(crate) time: u64,
    consumed: DoorbellRecord,
    pub(crate) directory: Directory,
    /// Completions that were told together, of which some are not read yet.
    pub(crate) session: Session,
    /// The entries.
    memory: Entries,
    /// Where others look whether there is something to read.
    glance: Arc<Glance>,
    /// What is left of entries that were replaced, for those who may still be
    /// looking at them.
    retired: Vec<RetiredEntries>,
    /// The doorbell records, which stay where they are when the entries move.
    records: Arc<Records>,
}

// SAFETY: it owns its memory; the device writes to it, and is read as one that
// does.
unsafe impl Send for CompletionRing {}
// SAFETY: as above; nothing is done through a shared reference.
unsafe impl Sync for CompletionRing {}

/// Says of an entry's last byte whether the device has written the entry, of
/// which the owner bit is `round` then.
#[inline(always)]
pub(crate) fn is_written(owner: u8, round: u8) -> bool {
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

/// The round while the next completion is not told by the next entry: no byte
/// of an entry is that.
const NO_ROUND: u32 = 1 << 8;

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
    pub(crate) fn new(
        log2: u32,
        shape: Shape,
        lender: Option<&dyn Lender>,
    ) -> Result<Self, CreateError> {
        let memory = Self::fresh(log2, shape, lender)?;
        let records = Records::new(lender)?;
        let fields = Self::fields(&memory, shape);
        let mut ring = Self {
            next: fields.cast(),
            round: 0,
            message: RECEIVED,
            at: 0,
            mask: (1 << log2) - 1,
            step: shape.bytes(),
            log2,
            shape,
            fields,
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
    pub(crate) fn fresh(
        log2: u32,
        shape: Shape,
        lender: Option<&dyn Lender>,
    ) -> Result<Entries, CreateError> {
        let memory = Entries::new(shape.bytes() << log2, Purpose::CompletionQueue, lender)?;
        let fields = Self::fields(&memory, shape);
        for slot in 0..1usize << log2 {
            let at = slot * shape.bytes() + offset_of!(Cqe, op_own);
            // SAFETY: inside the memory, which has `1 << log2` entries.
            unsafe { fields.add(at).write(cqe_opcode::INVALID << 4) };
        }
        Ok(memory)
    }

    /// Where the fields of the first entry are.
    pub(crate) fn fields(memory: &Entries, shape: Shape) -> NonNull<u8> {
        // SAFETY: inside the first entry.
        unsafe { memory.first().add(shape.before()) }
    }

    pub(crate) fn memory(&self) -> &Entries {
        &self.memory
    }

    pub(crate) fn records(&self) -> &Arc<Records> {
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
        let offset = (at & self.mask) as usize * self.step;
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
        // SAFETY: a byte of the entry, which lives as long as this does.
        let owner = unsafe { Owner::new(self.next.cast::<u8>().add(offset_of!(Cqe, op_own))) };
        !self.is_in_session() && !is_written(owner.look(), self.round as u8)
    }

    /// The next completion; none if there is none. What is read is consumed
    /// with [`CompletionRing::publish`].
    ///
    /// A receive of a shared queue whose memory was not there (on-demand paging)
    /// is posted again. Its completion is nobody's; if no other follows, it is
    /// consumed here.
    ///
    /// # Errors
    /// [`CompletionError`]: it makes no sense, and is passed over.
    ///
    /// # Safety
    /// The queues that complete here were published to as their contracts say.
    #[inline(always)]
    pub unsafe fn read(&mut self) -> Option<Result<WorkCompletion, CompletionError>> {
        let mut faults = false;
        loop {
            if self.session.left != 0 {
                // SAFETY: as the caller says.
                return Some(unsafe { self.read_told_together() });
            }
            let Some(entry) = self.written(self.at) else {
                if faults {
                    // Nobody else would.
                    self.publish();
                }
                return None;
            };
            // SAFETY: a valid entry, any bytes of which are one; it is this
            // side's until consumed, and copied once, whatever the device does.
            let cqe = unsafe { entry.read() };
            if cqe.is_title() && self.shape.compresses {
                // SAFETY: as the caller says.
                return Some(unsafe { self.read_title(&cqe) });
            }
            self.stand_at(self.at.wrapping_add(1));
            if cqe.is_page_fault() && self.directory.post_again(&cqe) {
                faults = true;
                continue;
            }
            self.time = u64::from_be_bytes(cqe.timestamp);
            let before = Before::of(entry, self.shape.before());
            // SAFETY: as the caller says.
            return Some(unsafe { decode(&cqe, before, &self.directory) });
        }
    }

    /// As [`CompletionRing::read`], at a title.
    ///
    /// # Safety
    /// As there.
    #[cold]
    unsafe fn read_title(&mut self, title: &Cqe) -> Result<WorkCompletion, CompletionError> {
        if let Err(error) = self.open_session(self.at, title) {
            self.stand_at(self.at.wrapping_add(1));
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
        self.stand_at(self.at.wrapping_add(1));
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
        if self.round == NO_ROUND {
            self.glance.suspend();
        } else {
            // SAFETY: entries that are replaced stay readable (`retired`), and
            // who looks does not outlive the ring (`look`).
            unsafe { self.glance.publish(self.next.cast(), self.round as u8) };
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
        // SAFETY: as the caller says.
        let (taken, why) = match out {
            // SAFETY: as the caller says.
            [one] => match unsafe { self.read_usual(one) } {
                Usual::Taken => (1, Usual::Taken),
                why => (0, why),
            },
            // SAFETY: as the caller says.
            _ => unsafe { self.take_usual(out) },
        };
        if why == Usual::Other {
            // SAFETY: as the caller says.
            return unsafe { self.take_rest(out, taken) };
        }
        if taken != 0 {
            self.publish();
        }
        Ok(taken)
    }

    /// Polls completions into `out`, in order, each once; how many there were.
    ///
    /// # Errors
    /// The next completion is malformed. It stays the next one, so that the call
    /// can be repeated once its queue pair is attached, until
    /// [`CompletionRing::skip`]. An error behind other completions is reported by
    /// the next call.
    ///
    /// # Safety
    /// The queues that complete here were published to as their contracts say.
    pub unsafe fn poll<P: Place>(
        &mut self,
        out: &mut [MaybeUninit<P>],
    ) -> Result<usize, CompletionError> {
        let mut count = 0;
        let result = loop {
            // SAFETY: as the caller says.
            let (more, why) = unsafe { self.take_usual(&mut out[count..]) };
            count += more;
            if why != Usual::Other || count == out.len() {
                break Ok(count);
            }
            let left = self.session.left;
            // SAFETY: as the caller says.
            match unsafe { self.read() } {
                Some(Ok(wc)) => {
                    let place = &raw mut out[count];
                    // SAFETY: a place begins with a completion, and is writable.
                    unsafe {
                        place.cast::<WorkCompletion>().write(wc);
                        P::set_time(place, self.time);
                    }
                    count += 1;
                }
                Some(Err(error)) => {
                    self.unread(left);
                    break if count == 0 { Err(error) } else { Ok(count) };
                }
                None => break Ok(count),
            }
        };
        if count != 0 {
            self.publish();
        }
        result
    }

    /// Passes over the completion that [`CompletionRing::poll`] reported as
    /// malformed.
    #[cold]
    pub fn skip(&mut self) {
        if self.session.left != 0 {
            self.next_of_session(self.at);
        } else if self.written(self.at).is_none() {
            return;
        }
        self.stand_at(self.at.wrapping_add(1));
        self.publish();
    }

    /// As [`CompletionRing::take`], when `taken` were taken and the next is not
    /// one of the usual.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn take_rest(
        &mut self,
        out: &mut [MaybeUninit<WorkCompletion>],
        mut taken: usize,
    ) -> Result<usize, CompletionError> {
        let mut failed = None;
        while taken < out.len() {
            let left = self.session.left;
            // SAFETY: as the caller says.
            match unsafe { self.read() } {
                Some(Ok(wc)) => {
                    out[taken].write(wc);
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
            // SAFETY: as the caller says.
            let (usual, why) = unsafe { self.take_usual(&mut out[taken..]) };
            taken += usual;
            if why != Usual::Other {
                break;
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
        // Within a session, or at its title, or at its last.
        if left != self.session.left {
            self.session.undo();
        }
        self.stand_at(self.at.wrapping_sub(1));
    }

    /// Where reading goes on.
    #[inline(always)]
    pub(crate) fn position(&self) -> u32 {
        self.at
    }

    /// Whether the next completion is not told by the next entry alone.
    #[inline(always)]
    pub(crate) fn is_in_session(&self) -> bool {
        self.round == NO_ROUND
    }

    /// Entries from the position to the memory's end.
    #[inline(always)]
    pub(crate) fn to_end(&self) -> usize {
        (!self.at & self.mask) as usize + 1
    }

    /// Goes on behind `count` entries that were read by themselves, which are
    /// no more than there are to the memory's end; `next` is behind the last.
    #[inline(always)]
    pub(crate) fn pass(&mut self, count: usize, next: NonNull<Cqe>) {
        self.at = self.at.wrapping_add(count as u32);
        self.next = next;
        if self.at & self.mask == 0 {
            cold_path();
            self.stand_at(self.at);
        }
    }

    /// Goes on reading at `at`. After every change of the session as well.
    #[inline(always)]
    pub(crate) fn stand_at(&mut self, at: u32) {
        self.at = at;
        self.next = self.slot(at);
        self.round = if self.session.left == 0 {
            self.round(at).into()
        } else {
            NO_ROUND
        };
        self.message = RECEIVED | self.round;
    }

    /// Goes on reading at `at`, and says so to the device.
    pub(crate) fn go_on_at(&mut self, at: u32) {
        self.stand_at(at);
        self.publish();
    }

    /// Goes on reading at `at` in other memory, of `1 << log2` entries.
    pub(crate) fn go_on_in(&mut self, memory: Entries, log2: u32, at: u32) {
        self.fields = Self::fields(&memory, self.shape);
        self.log2 = log2;
        self.mask = (1 << log2) - 1;
        let old = std::mem::replace(&mut self.memory, memory);
        self.retired.push(old.retire());
        self.go_on_at(at);
    }

    /// Of entries as every device has them.
    #[cfg(test)]
    pub(crate) fn plain(log2: u32) -> Result<Self, CreateError> {
        Self::new(log2, Shape::PLAIN, None)
    }

    /// The queue's memory, for tests that play the device.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn entries(&self) -> NonNull<u8> {
        self.memory.first()
    }
}
