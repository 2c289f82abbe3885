//! Tag matching: the tags of a shared receive queue.
//!
//! Changes of the list are work requests of a separate queue pair. The device matches
//! messages against the list. A message goes to the memory of the first matching tag, which
//! is then consumed; an unexpected message goes to a receive.
//!
//! Device and driver number tags alike: each added tag names the entry of the next one.
//! Entries are used in the order in which they became free.
//!
//! Posters and pollers use the list under the queue's lock.

use std::collections::VecDeque;

use uverbs::Sge;

use crate::abi::{
    self, CQE_SCATTER_32, CQE_SCATTER_64, Cqe, TagSegment, cqe_opcode, tag_change, tag_flag, tag_op,
};
use crate::cqe::{CompletionSink, CqeRef, Decoded, GRH, unknown_request};
use crate::wc::{flags, opcode, status};
use crate::{
    CompletionError, CreateError, MAX_SEGMENT, PostError, QpQueues, SendQueue, SharedQueue,
    SrqEntries,
};

/// Maximum unhandled unexpected messages; beyond it the program is asked to synchronize.
const MAX_UNHANDLED: i32 = 0x3fff;

/// A change of the list of tags.
#[derive(Clone, Copy, Debug)]
pub struct TagOperation {
    /// Identifies its completion.
    pub wr_id: u64,
    /// Whether it has a completion.
    pub signalled: bool,
    /// Tells the device how many unexpected messages were handled.
    pub handled: Option<u32>,
    /// The change.
    pub change: TagChange,
}

/// The change of a [`TagOperation`].
#[derive(Clone, Copy, Debug)]
pub enum TagChange {
    /// Adds a tag.
    Add {
        /// Identifies completions of its message.
        wr_id: u64,
        /// A message matches if its tag has these bits ...
        tag: u64,
        /// ... under this mask.
        mask: u64,
        /// The message's memory.
        memory: Option<Sge>,
    },
    /// Removes a tag, by the handle that [`SharedQueue::push_tag`] returned.
    Remove(u32),
    /// No change: only synchronizes.
    Sync,
}

/// An entry of the list.
#[derive(Clone, Copy, Debug, Default)]
struct Tag {
    /// The next free entry.
    next: u16,
    /// Unexpected messages that were handled when the tag was added.
    phase: u16,
    /// The tag is in the device's list: a message may match it.
    in_list: bool,
    /// Outstanding signalled operations. The entry is free if there are none and it is not
    /// in the list.
    operations: u32,
    length: u32,
    addr: u64,
    wr_id: u64,
}

/// A signalled operation.
#[derive(Clone, Copy, Debug)]
struct Operation {
    /// The operation in its CQE (`tag_op`).
    kind: u8,
    tag: Option<u16>,
    /// The block of its WQE.
    block: u32,
    wr_id: u64,
}

/// The list of tags, under the lock of its shared receive queue.
#[derive(Debug)]
pub(crate) struct TagList {
    tags: Box<[Tag]>,
    /// The entry of the next tag.
    first_free: u16,
    /// The last free entry. It is not used, since an added tag has to name a next entry.
    last_free: u16,
    /// Outstanding signalled operations, in order; the capacity suffices for all.
    operations: VecDeque<Operation>,
    /// The block of the last completed operation, until the poster takes it.
    completed: Option<u32>,
    /// User index of the queue pair that posts the operations.
    changes: Option<u32>,
    /// Unexpected messages that were received, and those that the program has handled.
    unexpected: u32,
    handled: u32,
}

impl TagList {
    pub(crate) fn new(max_tags: u32) -> Result<Self, CreateError> {
        // Entries have 16 bits.
        let last = u16::try_from(max_tags).map_err(|_| CreateError::TooLarge {
            what: "max_num_tags",
        })?;
        let mut tags = Vec::new();
        tags.try_reserve_exact(usize::from(last) + 1)
            .map_err(|_| CreateError::NoMemory)?;
        tags.extend((0..=last).map(|entry| Tag {
            next: entry.wrapping_add(1),
            ..Tag::default()
        }));
        Ok(Self {
            tags: tags.into_boxed_slice(),
            first_free: 0,
            last_free: last,
            operations: VecDeque::new(),
            completed: None,
            changes: None,
            unexpected: 0,
            handled: 0,
        })
    }

    /// The tag of an entry.
    fn tag(&mut self, entry: u16) -> &mut Tag {
        &mut self.tags[usize::from(entry)]
    }

    /// The entry of a tag in the list.
    fn entry_of(&self, handle: u32) -> Option<u16> {
        let tag = self.tags.get(handle as usize)?;
        tag.in_list.then_some(handle as u16)
    }

    /// Removes a tag from the list.
    fn remove(&mut self, entry: u16) {
        let tag = self.tag(entry);
        if std::mem::take(&mut tag.in_list) && tag.operations == 0 {
            self.free(entry);
        }
    }

    /// Counts a signalled operation on a tag as completed.
    fn end_operation(&mut self, entry: u16) {
        let tag = self.tag(entry);
        // Cannot underflow: the operation was counted.
        tag.operations -= 1;
        if tag.operations == 0 && !tag.in_list {
            self.free(entry);
        }
    }

    fn free(&mut self, entry: u16) {
        let last = std::mem::replace(&mut self.last_free, entry);
        self.tag(last).next = entry;
    }

    /// The segment of a change, and the memory of an added tag, if it has any.
    ///
    /// # Errors
    /// As of [`SharedQueue::push_tag`].
    fn segment(
        &self,
        operation: &TagOperation,
    ) -> Result<(TagSegment, Option<Option<Sge>>), PostError> {
        if operation.signalled && self.operations.len() == self.operations.capacity() {
            return Err(PostError::Full);
        }
        let mut segment = TagSegment::default();
        if operation.signalled {
            segment.flags |= tag_flag::CQE_REQ;
        }
        if let Some(handled) = operation.handled {
            segment.flags |= tag_flag::SW_CNT;
            segment.sw_cnt = (handled as u16).to_be();
        }
        let (change, memory) = match operation.change {
            TagChange::Add {
                tag, mask, memory, ..
            } => {
                if memory.is_some_and(|sge| sge.length >= MAX_SEGMENT) {
                    return Err(PostError::MessageTooLong);
                }
                if self.first_free == self.last_free {
                    return Err(PostError::Full);
                }
                segment.index = self.tags[usize::from(self.first_free)].next.to_be();
                segment.append_tag = tag.to_be();
                segment.append_mask = mask.to_be();
                (
                    tag_change::APPEND,
                    Some(memory.filter(|sge| sge.length != 0)),
                )
            }
            TagChange::Remove(handle) => {
                let entry = self.entry_of(handle).ok_or(PostError::BadOperation)?;
                segment.index = entry.to_be();
                (tag_change::REMOVE, None)
            }
            TagChange::Sync => (tag_change::NOP, None),
        };
        segment.opcode = change << 4;
        Ok((segment, memory))
    }

    /// Applies the operation, whose WQE is in `block`, to the list. Returns the handle of the
    /// tag.
    fn apply(&mut self, operation: &TagOperation, block: u32) -> u32 {
        if let Some(handled) = operation.handled {
            self.handled = handled;
        }
        let (kind, tag, handle) = match operation.change {
            TagChange::Add { wr_id, memory, .. } => {
                let (entry, phase) = (self.first_free, self.handled as u16);
                let memory = memory.unwrap_or_default();
                let tag = self.tag(entry);
                let next = tag.next;
                *tag = Tag {
                    next,
                    phase,
                    in_list: true,
                    operations: 0,
                    length: memory.length,
                    addr: memory.addr,
                    wr_id,
                };
                self.first_free = next;
                (tag_op::APPEND, Some(entry), entry.into())
            }
            TagChange::Remove(handle) => (tag_op::REMOVE, Some(handle as u16), handle),
            TagChange::Sync => (tag_op::NOOP, None, 0),
        };
        if operation.signalled {
            self.operations.push_back(Operation {
                kind,
                tag,
                block,
                wr_id: operation.wr_id,
            });
            if let Some(entry) = tag {
                self.tag(entry).operations += 1;
            }
        } else if let (tag_op::REMOVE, Some(entry)) = (kind, tag) {
            self.remove(entry);
        }
        handle
    }

    /// Takes the oldest outstanding operation, if it is of that kind.
    fn complete(&mut self, kind: u8) -> Option<Operation> {
        let operation = *self.operations.front().filter(|first| first.kind == kind)?;
        self.operations.pop_front();
        self.completed = Some(operation.block);
        Some(operation)
    }

    /// Ends signalled operations up to the first whose work request is outstanding. A tag
    /// that was not added is removed from the list; a tag that was not removed stays, since
    /// a message may still match it.
    fn end_failed(&mut self, is_outstanding: impl Fn(u32) -> bool) {
        while let Some(first) = self.operations.front().copied() {
            if is_outstanding(first.block) {
                return;
            }
            self.operations.pop_front();
            let Some(entry) = first.tag else { continue };
            if first.kind == tag_op::APPEND {
                self.remove(entry);
            }
            self.end_operation(entry);
        }
    }
}

impl SharedQueue {
    /// Reserves memory for `count` outstanding changes of tags: the capacity of the send
    /// queue that is passed to [`SharedQueue::push_tag`].
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] if the queue has no tags; [`CreateError::NoMemory`].
    pub fn reserve_tag_operations(&mut self, count: u32) -> Result<(), CreateError> {
        let mut locked = self.entries().enter();
        let list = locked.tags().ok_or(CreateError::Unsupported {
            what: "changing the tags of a shared receive queue without tag matching",
        })?;
        let count = count as usize;
        let reserved = list.operations.try_reserve_exact(count);
        reserved.map_err(|_| CreateError::NoMemory)
    }

    /// Adds a change of tags to the batch of `changes`, the send queue of a queue pair that
    /// uses this queue and is connected to itself. Returns the handle of an added tag.
    ///
    /// Until a tag was removed or its message has arrived, its memory stays registered and
    /// is neither read nor written by the process: the contract of [`SendQueue::publish`].
    ///
    /// # Errors
    /// [`PostError::Full`] for too many changes or tags; [`PostError::BadOperation`] for a
    /// tag that is not in the list; [`PostError::MessageTooLong`]. Nothing has changed.
    ///
    /// # Safety
    /// The caller has [`SrqEntries::lock`].
    pub unsafe fn push_tag(
        &mut self,
        changes: &mut SendQueue,
        operation: &TagOperation,
    ) -> Result<u32, PostError> {
        // SAFETY: as the caller says.
        let list = unsafe { self.entries().tags() }.ok_or(PostError::BadOperation)?;
        if let Some(block) = list.completed.take() {
            changes.complete(block);
        }
        list.changes = Some(changes.queues().user_index());
        let (segment, memory) = list.segment(operation)?;
        let block = changes.push_tag(operation.wr_id, segment, memory)?;
        Ok(list.apply(operation, block))
    }
}

/// Ends the failed change of tags in `slot` of `queues`, and those before it. Returns its
/// identifier; `None` if it is not outstanding, since an earlier completion ended it.
#[cold]
pub(crate) fn fail(queues: &QpQueues, shared: &SrqEntries, slot: u16) -> Option<u64> {
    // Under the poster's lock: the poster completes work requests, too.
    let mut locked = shared.enter();
    let list = locked.tags()?;
    if list.changes != Some(queues.user_index()) {
        return None;
    }
    let complete = |slot| {
        let found = queues.sends.find_marked(slot)?;
        queues.sends.complete(found);
        Some(found.wr_id)
    };
    list.completed.take().and_then(complete);
    let wr_id = complete(slot.into())?;
    list.end_failed(|block| queues.sends.find_marked(block).is_some());
    Some(wr_id)
}

/// Whether a CQE with this last byte may be of tag matching.
#[inline]
pub(crate) fn may_be_tagged(cqe: CqeRef, op_own: u8) -> bool {
    let kind = op_own >> 4;
    cqe.app() == abi::APP_TAG_MATCHING
        && (cqe_opcode::RESP_WR_IMM..=cqe_opcode::NO_PACKET).contains(&kind)
        && kind != cqe_opcode::RESIZE_CQ
}

/// Whether a CQE of tag matching consumed a receive.
pub(crate) fn takes_receive(cqe: CqeRef) -> bool {
    matches!(cqe.app_op(), tag_op::UNEXPECTED | tag_op::NO_TAG)
}

/// Decodes a CQE of tag matching into `sink`, for the queue of `shared`. Its data goes to the
/// memory of the tag or the receive. `wide` is the first half of a CQE of 128 bytes.
///
/// # Safety
/// The lists of outstanding work requests and of tags name valid memory.
#[cold]
pub(crate) unsafe fn decode(
    queues: &QpQueues,
    shared: &SrqEntries,
    cqe: CqeRef,
    op_own: u8,
    wide: Option<&[u8; 64]>,
    sink: &mut impl CompletionSink,
) -> Result<(), CompletionError> {
    let copy = cqe.copy();
    let bytes = match op_own & (CQE_SCATTER_32 | CQE_SCATTER_64) {
        0 => None,
        scatter => Some(match scatter & CQE_SCATTER_64 {
            0 => Some(first_half(&copy)),
            _ => wide.map(|wide| &wide[..]),
        }),
    };
    let data = bytes.map(|bytes| {
        let count = cqe.byte_len() as usize;
        let data = bytes.and_then(|bytes| bytes.get(..count));
        data.filter(|_| queues.scatter_to_cqe).ok_or(TooLong)
    });
    let mut decoded = Decoded {
        wr_id: 0,
        status: 0,
        opcode: opcode::TM_RECV,
        wc_flags: match op_own >> 4 {
            cqe_opcode::RESP_WR_IMM | cqe_opcode::RESP_SEND_IMM => flags::WITH_IMM,
            cqe_opcode::RESP_SEND_INV => flags::WITH_INV,
            _ => 0,
        },
        byte_len: cqe.byte_len(),
        vendor_err: 0,
    };
    // With 32 bytes of data the sender's fields are overwritten.
    if cqe.flags_rqpn() & GRH != 0 && op_own & CQE_SCATTER_32 == 0 {
        decoded.wc_flags |= flags::GRH;
    }
    let mut locked = shared.enter();
    let kind = cqe.app_op();
    if takes_receive(cqe) {
        let slot = cqe.wqe_counter();
        let fits = match data {
            None => true,
            // SAFETY: as the caller says, if it is outstanding.
            Some(Ok(data)) => unsafe { locked.scatter(slot, data) },
            Some(Err(TooLong)) => false,
        };
        decoded.wr_id = locked.take(slot).ok_or_else(|| unknown_request(slot))?;
        if !fits {
            decoded.status = status::LOC_LEN_ERR;
        }
    }
    let list = locked.tags().ok_or_else(|| unknown_request(0))?;
    match kind {
        tag_op::NO_TAG => decoded.opcode = opcode::TM_NO_TAG,
        tag_op::UNEXPECTED => {
            list.unexpected = list.unexpected.wrapping_add(1);
            if list.unexpected.wrapping_sub(list.handled) as i32 > MAX_UNHANDLED {
                decoded.wc_flags |= flags::TM_SYNC_REQ;
            }
        }
        tag_op::APPEND | tag_op::REMOVE | tag_op::NOOP => {
            list.decode_operation(cqe, &mut decoded)?
        }
        // SAFETY: as the caller says.
        _ => unsafe { list.decode_message(cqe, data, &mut decoded) }?,
    }
    sink.put(cqe, decoded);
    Ok(())
}

impl TagList {
    /// Decodes the completion of an operation on the list.
    fn decode_operation(
        &mut self,
        cqe: CqeRef,
        decoded: &mut Decoded,
    ) -> Result<(), CompletionError> {
        let (slot, kind) = (cqe.wqe_counter(), cqe.app_op());
        let operation = self.complete(kind).ok_or_else(|| unknown_request(slot))?;
        decoded.wr_id = operation.wr_id;
        let (success, phase) = cqe.tag_change();
        decoded.opcode = match kind {
            tag_op::APPEND => opcode::TM_ADD,
            tag_op::REMOVE => opcode::TM_DEL,
            _ => opcode::TM_SYNC,
        };
        if let Some(entry) = operation.tag {
            if kind == tag_op::REMOVE && success {
                self.remove(entry);
            }
            self.end_operation(entry);
            if self.tag(entry).phase != phase {
                decoded.wc_flags |= flags::TM_SYNC_REQ;
            }
        }
        if kind == tag_op::REMOVE && !success {
            decoded.status = status::TM_ERR;
        }
        Ok(())
    }

    /// Decodes the CQE of a message that matched a tag, whose memory gets the data.
    ///
    /// # Safety
    /// The tags in the list name valid memory.
    unsafe fn decode_message(
        &mut self,
        cqe: CqeRef,
        data: Option<Result<&[u8], TooLong>>,
        decoded: &mut Decoded,
    ) -> Result<(), CompletionError> {
        let (matched, filled, incomplete) = match cqe.app_op() {
            tag_op::CONSUMED => (true, false, false),
            tag_op::CONSUMED_SW_RNDV => (true, false, true),
            tag_op::EXPECTED => (false, true, false),
            tag_op::CONSUMED_MSG => (true, true, false),
            tag_op::CONSUMED_MSG_SW_RNDV | tag_op::CANCELED => (true, true, true),
            _ => return Err(unknown_request(cqe.wqe_counter())),
        };
        let entry = cqe.app_info();
        let tag = *(self.tags.get(usize::from(entry))).ok_or_else(|| unknown_request(entry))?;
        decoded.wr_id = tag.wr_id;
        if matched {
            decoded.wc_flags |= flags::TM_MATCH;
        }
        if filled {
            decoded.wc_flags |= flags::TM_DATA_VALID;
        }
        if incomplete {
            decoded.status = status::TM_RNDV_INCOMPLETE;
        }
        if !tag.in_list {
            // The message arrived before an unsignalled removal took effect.
            decoded.status = status::GENERAL_ERR;
            return Ok(());
        }
        let fits = match data {
            None => true,
            // SAFETY: as the caller says: it is in the list.
            Some(Ok(data)) => unsafe { tag.scatter(data) },
            Some(Err(TooLong)) => false,
        };
        if !fits {
            decoded.status = status::LOC_LEN_ERR;
        }
        if filled {
            self.remove(entry);
        }
        Ok(())
    }
}

/// The length in a CQE exceeds the data in it.
#[derive(Clone, Copy)]
struct TooLong;

/// The half of a CQE that holds its data.
fn first_half(cqe: &Cqe) -> &[u8] {
    // SAFETY: a CQE has 64 bytes and no padding.
    unsafe { std::slice::from_raw_parts((&raw const *cqe).cast::<u8>(), 32) }
}

impl Tag {
    /// Writes data of a CQE to the tag's memory. Returns false if it does not fit.
    ///
    /// # Safety
    /// The memory is valid, as the program guaranteed when it added the tag.
    unsafe fn scatter(&self, data: &[u8]) -> bool {
        if data.len() > self.length as usize {
            return false;
        }
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.addr as usize);
        // SAFETY: as the caller says.
        unsafe { to.copy_from(data.as_ptr(), data.len()) };
        true
    }
}
