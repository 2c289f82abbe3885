//! Tag matching: an SRQ (an XRQ of that topology) with a list of tags.
//!
//! A message with a tag begins with a header. It is received into the buffer of the
//! first tag of the list that matches; if none does it is unexpected, and received into
//! a WQE of the SRQ, header included. A rendezvous names memory of its sender instead of
//! carrying data: the device reads that memory into the buffer of the tag, and returns
//! the header when it has finished.
//!
//! Work requests of a queue pair that uses the SRQ append and remove tags. Software may
//! append a tag after a message for it has arrived as unexpected, so both sides count
//! unexpected messages: a tag is inactive until software has seen all that preceded it.

use roce::bits::{get_array, get32, get64};
use roce::rule::{Rule, Violation};
use roce::transport::{
    Fence, MessageStart, Operation, RecvDone, RecvWork, SendDone, SendWork, Status,
};

use super::core::Core;
use super::cq::{self, Completion};
use super::qp::Qp;
use super::srq::SRQN_SHIFT;
use super::tags::{TMH_SIZE, TagFields, TagMatch, TaggedReceive, app};
use super::wqe::{LocalBuffers, TagOperation};
use crate::platform::Platform;

/// Maximum number of rendezvous that a queue pair transfers at once; the senders of
/// further ones wait.
const MAX_TRANSFERS: u32 = 64;

/// Operations of the header.
const RNDV: u8 = 1;
const FIN: u8 = 2;
const EAGER: u8 = 3;
/// Offset of the tag in the header.
const TAG_OFFSET: usize = 8;

/// Result of a list operation in its CQE.
const SUCCESS: u8 = 1 << 7;
const COUNTER_RANGE: std::ops::Range<usize> = 4..6;

/// Flags in the identifier of a send request that the device generates: the read of a
/// rendezvous, with the SRQ and the tag in the other bits, or the message that ends it.
const DEVICE_REQUEST: u64 = 1 << 25;
const FIN_MESSAGE: u64 = 1 << 26;

/// Destination of a received message.
pub(super) enum MatchResult {
    Buffer(RecvWork<LocalBuffers>),
    /// A WQE of the SRQ.
    Wqe(TaggedReceive),
    /// The message cannot be received now.
    NotReady,
}

/// Returns the memory that a rendezvous names.
fn rendezvous_memory(payload: &[u8]) -> Option<(u64, u32, u32)> {
    const VA: usize = TMH_SIZE;
    const KEY: usize = TMH_SIZE + 8;
    const LENGTH: usize = TMH_SIZE + 12;
    (payload.len() >= 2 * TMH_SIZE).then(|| {
        (
            get64(payload, VA),
            get32(payload, KEY),
            get32(payload, LENGTH),
        )
    })
}

/// Returns whether the device generated a send request.
pub(super) fn is_device_request(id: u64) -> bool {
    id & DEVICE_REQUEST != 0
}

impl Qp {
    /// Returns whether the device may transfer one more rendezvous.
    fn can_begin_transfer(&self) -> bool {
        self.transfers < MAX_TRANSFERS
    }

    /// Discards the send requests that the device generated.
    pub(crate) fn discard_transfers(&mut self) {
        self.device_requests.clear();
        self.transfers = 0;
    }
}

impl<P: Platform> Core<P> {
    /// Performs a list operation of a queue pair.
    pub(super) fn execute_tag_operation(
        &mut self,
        qpn: u32,
        index: u16,
        entry: &[u8],
    ) -> Result<(), Violation> {
        let operation = TagOperation::parse(entry);
        let srqn = self.qp(qpn).and_then(|qp| qp.srqn);
        let srq = srqn.and_then(|srqn| self.srqs.get_mut(srqn));
        let Some((tags, cqn, uidx)) =
            srq.and_then(|srq| Some((srq.tags.as_deref_mut()?, srq.cqn, srq.uidx)))
        else {
            let rule = Rule::With("an SRQ that has a list of tags");
            return Err(Violation::new("operation on tags", operation.kind, rule));
        };
        if let Some(seen) = operation.seen {
            tags.synchronize(seen);
        }
        let (app, result) = match operation.kind {
            TagOperation::NOOP => (app::NOOP, Ok(true)),
            TagOperation::APPEND => {
                let rule = (operation.tag, operation.mask);
                let result = tags.append(operation.index, rule, operation.buffer);
                (app::APPEND, result.map(|()| true))
            }
            TagOperation::REMOVE => (app::REMOVE, Ok(tags.remove(operation.index))),
            kind => {
                let violation = Violation::new("operation on tags", kind, Rule::Known);
                (app::NOOP, Err(violation))
            }
        };
        let phase = tags.received;
        let result = result?;
        if operation.signaled {
            let mut fields = TagFields::new(app);
            fields.header[0] = if result { SUCCESS } else { 0 };
            fields.header[COUNTER_RANGE].copy_from_slice(&phase.to_be_bytes());
            let completion = Completion {
                opcode: cq::opcode::NO_PACKET,
                qpn,
                uidx,
                wqe_counter: index,
                tag: Some(fields),
                ..Completion::default()
            };
            self.complete(cqn, &completion);
        }
        Ok(())
    }

    /// Returns where a message to a queue pair is received; `None` if its SRQ has no
    /// tags.
    pub(super) fn match_tag(
        &mut self,
        qpn: u32,
        srqn: u32,
        start: &MessageStart<'_>,
    ) -> Option<MatchResult> {
        // Most SRQs have none.
        self.srqs.get(srqn)?.tags.as_ref()?;
        let qp = self.qp(qpn)?;
        let may_transfer = qp.offloads_rendezvous && start.may_read;
        let can_begin_transfer = qp.can_begin_transfer();
        let srq = self.srqs.get_mut(srqn)?;
        let tags = srq.tags.as_deref_mut()?;
        let wqe = |operation| Some(MatchResult::Wqe(TaggedReceive::Wqe(operation)));
        let payload = start.payload;
        let kind = payload.first().copied().unwrap_or(0);
        if payload.len() < TMH_SIZE || !matches!(kind, EAGER | RNDV) {
            return wqe(app::NO_TAG);
        }
        let Some(position) = tags.find(get64(payload, TAG_OFFSET)) else {
            return wqe(app::UNEXPECTED);
        };
        let buffer = tags.tags[position].buffer;
        let transfer = match kind {
            RNDV => rendezvous_memory(payload)
                .filter(|_| may_transfer && tags.transfers)
                .filter(|(_, _, length)| *length <= buffer.length),
            _ => None,
        };
        if transfer.is_some() && !can_begin_transfer {
            return Some(MatchResult::NotReady);
        }
        let tag = tags.tags.remove(position);
        let software = kind == RNDV && transfer.is_none();
        let header = get_array(payload, 0);
        let tagged = TagMatch {
            header,
            single_packet: start.single_packet,
            transfer,
            software,
        };
        let mut local = LocalBuffers::new(srq.pd, false);
        if buffer.length != 0 {
            local.segments.push(buffer);
        }
        local.tagging = Some(TaggedReceive::Buffer(Box::new(tagged)));
        let (cqn, uidx) = (srq.cqn, srq.uidx);
        if !start.single_packet && transfer.is_none() {
            let operation = match software {
                true => app::CONSUMED_SOFTWARE,
                false => app::CONSUMED,
            };
            self.post_tag_cqe(cqn, uidx, qpn, (operation, tag.index, header));
        }
        self.stats.receive_requests += 1;
        Some(MatchResult::Buffer(RecvWork {
            id: u64::from(srqn) << SRQN_SHIFT | u64::from(tag.index),
            length: match transfer {
                // Only the header of the message matters.
                Some(_) => u32::MAX,
                None => buffer.length.saturating_add(TMH_SIZE as u32),
            },
            local,
        }))
    }

    /// Reports that a message has matched a tag, or that its reception has been canceled.
    fn post_tag_cqe(
        &mut self,
        cqn: u32,
        uidx: u32,
        qpn: u32,
        (operation, index, header): (u8, u16, [u8; TMH_SIZE]),
    ) {
        let completion = Completion {
            opcode: cq::opcode::NO_PACKET,
            qpn,
            uidx,
            tag: Some(TagFields {
                header,
                operation,
                index,
            }),
            ..Completion::default()
        };
        self.complete(cqn, &completion);
    }

    /// Counts a message as unexpected.
    pub(super) fn count_if_unexpected(&mut self, srqn: u32, tagging: &TaggedReceive) {
        let srq = self.srqs.get_mut(srqn);
        let tags = srq.and_then(|srq| srq.tags.as_deref_mut());
        if let (Some(tags), TaggedReceive::Wqe(app::UNEXPECTED)) = (tags, tagging) {
            tags.received = tags.received.wrapping_add(1);
        }
    }

    /// Completes a receive of a message that matched a tag. `completion` has the fields
    /// of a received message. Returns whether the device generated send requests.
    pub(super) fn complete_tagged(
        &mut self,
        cqn: u32,
        (work, tagged): (&RecvWork<LocalBuffers>, &TagMatch),
        done: &RecvDone,
        mut completion: Completion<'_>,
    ) -> bool {
        let (qpn, uidx, index) = (completion.qpn, completion.uidx, work.id as u16);
        if done.status() != Status::Success {
            let canceled = (app::CANCELED, index, [0; TMH_SIZE]);
            self.post_tag_cqe(cqn, uidx, qpn, canceled);
            return false;
        }
        if let Some(from) = tagged.transfer {
            self.post_tag_cqe(cqn, uidx, qpn, (app::CONSUMED, index, tagged.header));
            self.begin_transfer(qpn, work, tagged, from);
            return true;
        }
        let operation = match (tagged.single_packet, tagged.software) {
            (false, _) => app::EXPECTED,
            (true, false) => app::CONSUMED_MESSAGE,
            (true, true) => app::CONSUMED_MESSAGE_SOFTWARE,
        };
        completion.byte_count = done.length.saturating_sub(TMH_SIZE as u32);
        completion.tag = Some(TagFields {
            // The header was reported with the match.
            header: if tagged.single_packet {
                tagged.header
            } else {
                [0; TMH_SIZE]
            },
            operation,
            index,
        });
        self.complete(cqn, &completion);
        false
    }

    /// Queues the read of a rendezvous, and the message that ends it.
    fn begin_transfer(
        &mut self,
        qpn: u32,
        work: &RecvWork<LocalBuffers>,
        tagged: &TagMatch,
        (va, rkey, length): (u64, u32, u32),
    ) {
        let id = work.id | DEVICE_REQUEST;
        let mut buffer = work.local.clone();
        (buffer.tagging, buffer.cqe_scatter) = (None, None);
        let mut fin = LocalBuffers::new(buffer.pd, false);
        fin.inline = tagged.header.to_vec();
        fin.inline[0] = FIN;
        let mut read = SendWork::new(id, Operation::Read, length, buffer);
        (read.va, read.rkey) = (va, rkey);
        let mut send = SendWork::new(id | FIN_MESSAGE, Operation::Send, TMH_SIZE as u32, fin);
        send.fence = Fence::Reads;
        if let Some(qp) = self.qp_mut(qpn) {
            qp.transfers += 1;
            qp.device_requests.extend([read, send]);
        }
    }

    /// Completes a send request that the device generated.
    pub(super) fn transfer_done(&mut self, qpn: u32, id: u64, done: SendDone) {
        if id & FIN_MESSAGE != 0 {
            return;
        }
        if let Some(qp) = self.qp_mut(qpn) {
            qp.transfers = qp.transfers.saturating_sub(1);
        }
        let Some(srq) = self.srqs.get((id >> SRQN_SHIFT) as u32) else {
            return;
        };
        let (cqn, uidx, index) = (srq.cqn, srq.uidx, id as u16);
        if done.status() != Status::Success {
            self.post_tag_cqe(cqn, uidx, qpn, (app::CANCELED, index, [0; TMH_SIZE]));
            return;
        }
        let completion = Completion {
            opcode: cq::opcode::SEND,
            qpn,
            uidx,
            byte_count: done.length,
            tag: Some(TagFields {
                index,
                ..TagFields::new(app::EXPECTED)
            }),
            ..Completion::default()
        };
        self.complete(cqn, &completion);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tags::TagList;
    use super::super::wqe::Segment;
    use super::*;

    fn append(list: &mut TagList, tag: u64, mask: u64) -> Result<u16, Violation> {
        let index = list.next;
        let next = (index + 1) & ((1 << list.log_size) - 1);
        list.append(next, (tag, mask), Segment::default())?;
        Ok(index)
    }

    fn take_match(list: &mut TagList, tag: u64) -> Option<u16> {
        list.find(tag)
            .map(|position| list.tags.remove(position).index)
    }

    #[test]
    fn the_first_matching_tag_is_used() {
        let mut list = TagList::new(3, true);
        append(&mut list, 5, u64::MAX).unwrap();
        append(&mut list, 0x10, 0xf0).unwrap();
        append(&mut list, 0x15, u64::MAX).unwrap();
        // Bits of a tag outside its mask match nothing.
        append(&mut list, 0x3f, 0xf0).unwrap();
        assert_eq!(take_match(&mut list, 0x15), Some(1));
        assert_eq!(take_match(&mut list, 0x15), Some(2));
        assert_eq!(take_match(&mut list, 0x15), None);
        assert_eq!(take_match(&mut list, 0x3f), None);
        assert_eq!(take_match(&mut list, 5), Some(0));
    }

    #[test]
    fn each_append_names_the_index_of_the_next() {
        let mut list = TagList::new(2, true);
        for next in [3, 1, 2] {
            list.append(next, (0, 0), Segment::default()).unwrap();
        }
        assert_eq!(
            [0; 3].map(|tag| take_match(&mut list, tag).unwrap()),
            [0, 3, 1]
        );
        assert!(list.append(4, (0, 0), Segment::default()).is_err());
        assert_eq!(list.next, 2);
        list.append(2, (0, 0), Segment::default()).unwrap();
        assert!(list.append(3, (0, 0), Segment::default()).is_err());
        assert!(!list.remove(3));
        assert!(list.remove(2));
        assert!(!list.remove(2));
    }

    #[test]
    fn a_tag_is_inactive_until_software_has_seen_all_unexpected_messages() {
        let mut list = TagList::new(3, true);
        append(&mut list, 1, u64::MAX).unwrap();
        list.received = 2;
        append(&mut list, 2, u64::MAX).unwrap();
        assert_eq!(take_match(&mut list, 1), Some(0));
        list.synchronize(1);
        assert_eq!(take_match(&mut list, 2), None);
        list.synchronize(2);
        assert_eq!(take_match(&mut list, 2), Some(1));
    }

    #[test]
    fn the_header_is_not_stored() {
        let tagged = TagMatch {
            header: [0; TMH_SIZE],
            single_packet: true,
            transfer: None,
            software: false,
        };
        let buffer = TaggedReceive::Buffer(Box::new(tagged.clone()));
        let data: Vec<u8> = (0..40).collect();
        assert_eq!(buffer.stored(0, &data), (0, &data[TMH_SIZE..]));
        assert_eq!(buffer.stored(100, &data), (84, &data[..]));
        assert_eq!(buffer.stored(0, &data[..3]), (0, &data[..0]));
        assert_eq!(
            TaggedReceive::Wqe(app::NO_TAG).stored(0, &data),
            (0, &data[..])
        );
        let transfer = TaggedReceive::Buffer(Box::new(TagMatch {
            transfer: Some((0, 0, 1)),
            ..tagged
        }));
        assert_eq!(transfer.stored(0, &data), (0, &data[..0]));
    }
}
