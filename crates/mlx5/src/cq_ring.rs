//! The reader of a completion queue.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{DoorbellRecord, Owner, OwnerCheck, cold_path};
use uverbs::Existence;

use crate::abi::{
    CQE_OWNER, CQE_SCATTER_32, CQE_SCATTER_64, CQE_SOLICITED, Cqe, SignatureErrorCqe, cqe_opcode,
};
use crate::cqe::{CompletionSink, CqeRef, decode, decode_any, scatter};
use crate::memory::{Entries, Purpose, QueueAllocator, Records, RetiredEntries};
use crate::qp_table::QpTable;
use crate::session::{Session, is_title};
use crate::{CompletionError, CreateError, ProtectedKeys, tags};

/// The consumer index has 24 bits.
const INDEX: u32 = 0xff_ffff;

/// The CQEs of a completion queue, and its QP table.
///
/// The owner bit says whether an entry is new; it inverts with every pass over the
/// ring. The other bytes are read after it.
///
/// Thread rule: one caller at a time (`&mut`). The methods that read completions
/// neither allocate nor make a system call; the only lock that they take is a
/// shared receive queue's.
#[derive(Debug)]
pub struct CqeRing {
    /// The fields of the next entry; `round` is its owner bit once it is written.
    next: NonNull<Cqe>,
    round: u8,
    /// The consumer index.
    at: u32,
    /// Number of entries, a power of two, less one.
    mask: u32,
    /// Bytes from an entry to the next.
    step: usize,
    format: CqeFormat,
    /// The fields of the first entry.
    fields: NonNull<u8>,
    pub(crate) qps: QpTable,
    /// The current session of compressed CQEs.
    pub(crate) session: Session,
    consumed: DoorbellRecord,
    /// The word that [`EmptyCheck`] reads.
    owner_check: Arc<OwnerCheck>,
    memory: Entries,
    /// Whether a program reads the entries itself.
    pub(crate) is_direct: bool,
    /// Replaced entries, which threads may still read through [`EmptyCheck`].
    retired: Vec<RetiredEntries>,
    /// The doorbell records, which a resize keeps.
    records: Arc<Records>,
    /// The keys whose errors are reported here.
    keys: Option<Arc<ProtectedKeys>>,
}

// SAFETY: it owns its memory, and reads it as memory that the device may write.
unsafe impl Send for CqeRing {}
// SAFETY: as above; safe methods that take `&self` only read.
unsafe impl Sync for CqeRing {}

/// Returns whether an entry with this last byte was written in round `round`.
#[inline]
pub(crate) fn is_written(owner: u8, round: u8) -> bool {
    owner >> 4 != cqe_opcode::INVALID && owner & CQE_OWNER == round
}

/// Checks for an empty completion queue without its lock.
#[derive(Debug)]
pub struct EmptyCheck {
    owner_check: Arc<OwnerCheck>,
}

impl EmptyCheck {
    /// Returns whether the queue is certainly empty. Any thread, no lock.
    #[inline]
    pub fn is_empty(&self) -> bool {
        const OWNER: usize = offset_of!(Cqe, op_own);
        self.owner_check.is_empty::<OWNER>(is_written)
    }
}

/// Format of CQEs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CqeFormat {
    /// Binary logarithm of the size in bytes, 6 or 7. The fields are the last 64 bytes.
    pub shift: u32,
    /// The device may compress CQEs.
    pub compresses: bool,
}

impl CqeFormat {
    /// The format that every device has.
    #[cfg(test)]
    pub(crate) const PLAIN: Self = Self {
        shift: 6,
        compresses: false,
    };

    /// Bytes of an entry.
    pub(crate) fn bytes(self) -> usize {
        1 << self.shift
    }

    /// Offset of an entry's fields.
    pub(crate) fn before(self) -> usize {
        self.bytes() - size_of::<Cqe>()
    }
}

impl CqeRing {
    /// Creates a queue of `1 << log2` entries, all owned by the device.
    pub(crate) fn new(
        log2: u32,
        format: CqeFormat,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Self, CreateError> {
        let memory = Self::new_entries(log2, format, allocator)?;
        let records = Records::new(allocator)?;
        let fields = Self::fields(&memory, format);
        let mut ring = Self {
            next: fields.cast(),
            round: 0,
            at: 0,
            mask: (1 << log2) - 1,
            step: format.bytes(),
            format,
            fields,
            qps: QpTable::default(),
            session: Session::default(),
            consumed: records.record(0),
            owner_check: Arc::default(),
            memory,
            is_direct: false,
            retired: Vec::new(),
            records: Arc::new(records),
            keys: None,
        };
        ring.publish();
        Ok(ring)
    }

    /// Allocates `1 << log2` entries, all owned by the device.
    pub(crate) fn new_entries(
        log2: u32,
        format: CqeFormat,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Entries, CreateError> {
        let memory = Entries::new(format.bytes() << log2, Purpose::CompletionQueue, allocator)?;
        let fields = Self::fields(&memory, format);
        for slot in 0..1usize << log2 {
            let at = slot * format.bytes() + offset_of!(Cqe, op_own);
            // SAFETY: inside the memory, which has `1 << log2` entries.
            unsafe { fields.add(at).write(cqe_opcode::INVALID << 4) };
        }
        Ok(memory)
    }

    /// The fields of the first entry.
    pub(crate) fn fields(memory: &Entries, format: CqeFormat) -> NonNull<u8> {
        // SAFETY: inside the first entry.
        unsafe { memory.first().add(format.before()) }
    }

    pub(crate) fn memory(&self) -> &Entries {
        &self.memory
    }

    /// Keeps its memory as long as the object exists.
    pub(crate) fn hold_for(&self, object: &Existence) {
        self.memory.hold_for(object);
        self.records.hold_for(object);
    }

    pub(crate) fn records(&self) -> &Arc<Records> {
        &self.records
    }

    pub(crate) fn format(&self) -> CqeFormat {
        self.format
    }

    pub(crate) fn compresses(&self) -> bool {
        self.format.compresses
    }

    /// Number of entries.
    pub fn capacity(&self) -> u32 {
        self.mask + 1
    }

    /// The fields of the entry at `at`.
    #[inline]
    pub(crate) fn slot(&self, at: u32) -> NonNull<Cqe> {
        let slot = (at & self.mask) as usize;
        // SAFETY: one of the entries, by the mask.
        unsafe { self.fields.add(slot * self.step).cast() }
    }

    /// The owner bit that the entry at `at` has when it is written.
    #[inline]
    pub(crate) fn round(&self, at: u32) -> u8 {
        u8::from(at & self.capacity() != 0)
    }

    /// Reads the last byte of an entry; the other bytes are read after it.
    ///
    /// # Safety
    /// It is an entry of this ring.
    #[inline]
    unsafe fn op_own(slot: NonNull<Cqe>) -> u8 {
        // SAFETY: a byte of the entry, which outlives this call.
        unsafe { Owner::new(slot.cast::<u8>().add(offset_of!(Cqe, op_own))) }.read()
    }

    /// The CQE at `at` and its last byte, if the device has written it.
    pub(crate) fn written(&self, at: u32) -> Option<(CqeRef, u8)> {
        let slot = self.slot(at);
        // SAFETY: an entry, which lives as long as this does.
        let (cqe, op_own) = unsafe { (CqeRef::new(slot, true), Self::op_own(slot)) };
        is_written(op_own, self.round(at)).then_some((cqe, op_own))
    }

    /// Returns whether the queue is certainly empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        // SAFETY: `next` is an entry of this ring.
        let op_own = unsafe { Self::op_own(self.next) };
        self.session.left == 0 && !is_written(op_own, self.round)
    }

    /// Polls completions into the front of `out`, in order, each once. Returns how
    /// many were written.
    ///
    /// # Errors
    /// The next completion is malformed. It stays the next one until
    /// [`CqeRing::skip`], so that the call can be repeated once its queue
    /// pair is attached. If completions were read before it, they are returned, and
    /// the next call reports the error.
    ///
    /// # Safety
    /// The contracts of `publish` were kept on all queues that complete here.
    #[inline]
    pub unsafe fn poll<S: CompletionSink>(
        &mut self,
        out: &mut [S],
    ) -> Result<usize, CompletionError> {
        let mut count = 0;
        let result = loop {
            let Some(sink) = out.get_mut(count) else {
                break Ok(count);
            };
            // SAFETY: as the caller says.
            match unsafe { self.next(sink) } {
                Ok(true) => count += 1,
                Ok(false) => break Ok(count),
                Err(error) => break Err(error),
            }
        };
        if count == 0 {
            return result;
        }
        self.publish();
        Ok(count)
    }

    /// Decodes the next completion into `sink`. Returns whether there was one.
    /// [`CqeRing::publish`] releases its CQE.
    ///
    /// A receive of a shared queue that failed with a page fault (on-demand
    /// paging) is posted again, and completes later. A wrong signature is reported to its
    /// key ([`CqeRing::set_protected_keys`]), and is no completion.
    ///
    /// # Errors
    /// As for [`CqeRing::poll`].
    ///
    /// # Safety
    /// As for [`CqeRing::poll`].
    #[inline(always)]
    pub unsafe fn next(&mut self, sink: &mut impl CompletionSink) -> Result<bool, CompletionError> {
        const SENT: u8 = cqe_opcode::REQ << 4;
        const RECEIVED: u8 = cqe_opcode::RESP_SEND << 4;
        const RECEIVED_IMM: u8 = cqe_opcode::RESP_SEND_IMM << 4;
        if self.session.left == 0 {
            // SAFETY: `next` is an entry of this ring, which lives as long as that.
            let (cqe, op_own) = unsafe { (CqeRef::new(self.next, true), Self::op_own(self.next)) };
            // Fast path: a new CQE of a common opcode, without data, not compressed.
            // Each opcode has its own copy of the decoder.
            let decoded = match (op_own ^ self.round) & !CQE_SOLICITED {
                SENT => decode(&mut self.qps, cqe, SENT, 0, sink).is_ok(),
                RECEIVED => decode(&mut self.qps, cqe, RECEIVED, 0, sink).is_ok(),
                RECEIVED_IMM => decode(&mut self.qps, cqe, RECEIVED_IMM, 0, sink).is_ok(),
                _ if !is_written(op_own, self.round) => return Ok(false),
                _ => false,
            };
            if decoded {
                self.advance();
                return Ok(true);
            }
        }
        // SAFETY: as the caller says.
        unsafe { self.next_slow(sink) }
    }

    /// Slow path of [`CqeRing::next`]: any completion, or a malformed CQE.
    ///
    /// # Safety
    /// As for [`CqeRing::poll`].
    #[cold]
    #[inline(never)]
    unsafe fn next_slow(
        &mut self,
        sink: &mut impl CompletionSink,
    ) -> Result<bool, CompletionError> {
        loop {
            let at = self.at;
            if self.session.left != 0 {
                let cqe = self.expand(at);
                // SAFETY: it lives until it is decoded.
                let copy = unsafe { CqeRef::new(NonNull::from(&cqe), false) };
                decode_any(&mut self.qps, copy, cqe.op_own, 0, sink)?;
                self.advance_session(at);
                self.advance();
                return Ok(true);
            }
            let Some((cqe, op_own)) = self.written(at) else {
                return Ok(false);
            };
            if self.format.compresses && is_title(op_own) {
                self.open_session(at, cqe.copy())?;
                continue;
            }
            if cqe.is_page_fault(op_own) && self.post_again(cqe) {
                self.advance();
                self.publish();
                continue;
            }
            if tags::may_be_tagged(cqe, op_own) {
                // SAFETY: as the caller says.
                if let Some(decoded) = unsafe { self.next_tagged(at, cqe, op_own, sink) } {
                    decoded?;
                    self.advance();
                    return Ok(true);
                }
            }
            if op_own >> 4 == cqe_opcode::SIG_ERR && self.report(cqe) {
                self.advance();
                self.publish();
                continue;
            }
            if op_own & (CQE_SCATTER_32 | CQE_SCATTER_64) != 0
                && op_own >> 4 <= cqe_opcode::RESP_SEND_INV
            {
                let mut copy = cqe.copy();
                let wide = self.wide(at);
                // SAFETY: as the caller says.
                let status = unsafe { scatter(&mut self.qps, &mut copy, op_own, wide.as_ref())? };
                // SAFETY: it lives until it is decoded.
                let copy = unsafe { CqeRef::new(NonNull::from(&copy), false) };
                decode_any(&mut self.qps, copy, op_own, status, sink)?;
            } else {
                decode_any(&mut self.qps, cqe, op_own, 0, sink)?;
            }
            self.advance();
            return Ok(true);
        }
    }

    /// The first half of the entry at `at`, if it has 128 bytes.
    fn wide(&self, at: u32) -> Option<[u8; 64]> {
        (self.format.before() != 0).then(|| {
            // SAFETY: 64 bytes of the entry come before its fields.
            unsafe { self.slot(at).cast::<[u8; 64]>().sub(1).read() }
        })
    }

    /// Decodes a CQE of tag matching, at `at`; `None` if its queue has no tags.
    ///
    /// # Safety
    /// As for [`CqeRing::poll`].
    unsafe fn next_tagged(
        &mut self,
        at: u32,
        cqe: CqeRef,
        op_own: u8,
        sink: &mut impl CompletionSink,
    ) -> Option<Result<(), CompletionError>> {
        let wide = self.wide(at);
        let queues = self.qps.receiver(cqe.uidx_field())?;
        let shared = queues.shared.as_ref().filter(|shared| shared.has_tags())?;
        // SAFETY: as the caller says.
        Some(unsafe { tags::decode(queues, shared, cqe, op_own, wide.as_ref(), sink) })
    }

    /// Posts a receive of a shared queue again that failed with a page fault. Returns false
    /// and posts nothing if it was not outstanding.
    fn post_again(&mut self, cqe: CqeRef) -> bool {
        let queues = self.qps.receiver(cqe.uidx_field());
        queues
            .and_then(|queues| queues.shared.as_ref())
            .is_some_and(|shared| shared.enter().post_again(cqe.wqe_counter()))
    }

    /// Sets the keys to which signature errors are reported.
    pub fn set_protected_keys(&mut self, keys: &Arc<ProtectedKeys>) {
        self.keys = Some(Arc::clone(keys));
    }

    /// Reports a signature error to its key. Returns false if the key is unknown.
    fn report(&self, cqe: CqeRef) -> bool {
        // SAFETY: both are 64 bytes without padding, for which any bytes are valid.
        let error = unsafe { std::mem::transmute::<Cqe, SignatureErrorCqe>(cqe.copy()) };
        (self.keys.as_ref()).is_some_and(|keys| keys.report(error))
    }

    /// Skips the CQE that was reported as malformed.
    #[cold]
    pub fn skip(&mut self) {
        if self.session.left != 0 {
            self.expand(self.at);
            self.advance_session(self.at);
        } else if self.written(self.at).is_none() {
            return;
        }
        self.resume_at(self.at.wrapping_add(1));
    }

    /// Releases the entries that were read to the device.
    #[inline]
    pub fn publish(&mut self) {
        // The empty check is moved before the entries are released: it must not read
        // an entry that the device may overwrite.
        if self.session.left != 0 {
            self.owner_check.suspend();
        } else {
            // SAFETY: replaced entries stay readable (`retired`), and no
            // `EmptyCheck` is used after the ring is dropped (`empty_check`).
            unsafe { self.owner_check.publish(self.next.cast(), self.round) };
        }
        self.consumed.publish(self.at & INDEX);
    }

    /// Returns the check for other threads.
    ///
    /// # Safety
    /// It is not used after the ring is dropped.
    pub unsafe fn empty_check(&self) -> EmptyCheck {
        EmptyCheck {
            owner_check: Arc::clone(&self.owner_check),
        }
    }

    /// Called before a resize: the queue does not count as empty until
    /// [`CqeRing::publish`].
    pub(crate) fn suspend(&mut self) -> Result<(), CreateError> {
        self.retired
            .try_reserve(1)
            .map_err(|_| CreateError::NoMemory)?;
        self.owner_check.suspend();
        Ok(())
    }

    /// The consumer index, published or not.
    pub(crate) fn position(&self) -> u32 {
        self.at
    }

    /// Advances to the next entry.
    #[inline]
    fn advance(&mut self) {
        self.at = self.at.wrapping_add(1);
        if self.at & self.mask != 0 {
            // SAFETY: `at` has not wrapped, so this is an entry.
            self.next = unsafe { self.next.byte_add(self.step) };
        } else {
            cold_path();
            self.set_position(self.at);
        }
    }

    /// Sets the consumer index to `at`.
    fn set_position(&mut self, at: u32) {
        self.at = at;
        self.next = self.slot(at);
        self.round = self.round(at);
    }

    /// Sets the consumer index to `at`, and publishes it.
    pub(crate) fn resume_at(&mut self, at: u32) {
        self.set_position(at);
        self.publish();
    }

    /// Replaces the memory by `1 << log2` entries, and sets the consumer index to `at`.
    pub(crate) fn resume_in(&mut self, memory: Entries, log2: u32, at: u32) {
        self.fields = Self::fields(&memory, self.format);
        self.mask = (1 << log2) - 1;
        let old = std::mem::replace(&mut self.memory, memory);
        self.retired.push(old.retire());
        self.resume_at(at);
    }

    /// Creates a queue in the format that every device has.
    #[cfg(test)]
    pub(crate) fn plain(log2: u32) -> Result<Self, CreateError> {
        Self::new(log2, CqeFormat::PLAIN, None)
    }

    /// The queue's memory, for tests that act as the device.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn entries(&self) -> NonNull<u8> {
        self.memory.first()
    }
}
