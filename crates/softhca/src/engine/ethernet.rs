//! The network interface: sends the frames of its send queues, and receives frames that
//! are not RDMA.
//!
//! Steering selects the receive queues of a frame. Checksum and segmentation offloads
//! of sent frames are performed as requested.

use std::borrow::Cow;

use roce::bits::{Field, field, get32, get64};
use roce::packet::{LinkKind, PACKET_CAPACITY, Packet, Pool};
use roce::rule::{Rule, Violation};

use super::core::Core;
use super::cq::{self, Completion, CqeError};
pub use super::frame::checksum;
use super::frame::{
    Layers, Origin, TCP, UDP, ip_packet_sum, layers, set_checksums, strip_vlan_tag, u16_at,
    verify_checksums,
};
use super::mkey::{Accessor, Rights};
use super::qp::{FetchedWqe, Queue, ReceiveEntry, Ring, Rq, Strides, take_receive};
use super::steering::SelectedQueue;
use super::wqe::{self, LocalBuffers, opcode};
use crate::cause::{Cause, FrameDrop};
use crate::layout::rqc::state;
use crate::platform::Platform;

const MSS: Field = field(4, 15, 0);
const CHECKSUMS: Field = field(4, 31, 24);
const L3_CHECKSUM: u32 = 1 << 6;
const L4_CHECKSUM: u32 = 1 << 7;
const HEADER_LENGTH: Field = field(12, 31, 16);
/// Offset of the inline header in the Ethernet segment.
const HEADER: usize = 14;
const CONTROL: usize = 16;

/// Syndromes of a receive that is too short for the frame, and of one
/// whose memory cannot be written.
const TOO_LONG: CqeError = CqeError::new(0x01, 0xd7, 0);
const NOT_WRITABLE: CqeError = CqeError::new(0x04, 0x32, 0x92);

/// Syndromes of a WQE that is not processed, and of one that cannot be.
const FLUSHED: CqeError = CqeError::new(0x05, 0xf9, 0);
const MALFORMED: CqeError = CqeError::new(0x02, 0x61, 0x01);
/// Syndromes of a WQE whose memory cannot be read.
const NOT_READABLE: CqeError = CqeError::new(0x04, 0x53, 0x9d);

/// Why a WQE of a send queue failed: the syndromes, and what was wrong.
type WqeError = (CqeError, Violation);

fn malformed(violation: Violation) -> WqeError {
    (MALFORMED, violation)
}

/// Opcodes of an Ethernet send queue.
const SEND_QUEUE_OPCODES: [u64; 4] = [
    opcode::NOP as u64,
    opcode::UMR as u64,
    opcode::SEND as u64,
    opcode::TSO as u64,
];

/// Maximum length of a frame before segmentation.
const MAX_UNSEGMENTED: usize = 256 << 10;
/// Maximum number of frames from one segmentation, since all of them are buffered.
const MAX_SEGMENTS: usize = 4096;
/// Number of frames after which a send queue waits for its next turn.
const MAX_FRAMES_PER_TURN: usize = 256;

impl<P: Platform> Core<P> {
    /// Processes a send queue; the frames are appended to `out`. Returns true if there
    /// may be more to do.
    pub(crate) fn run_sq(&mut self, sqn: u32, pool: &Pool, out: &mut Vec<Packet>) -> bool {
        let mut bytes = [0; wqe::MAX_SEND_WQE];
        for _ in 0..MAX_FRAMES_PER_TURN {
            if out.len() >= MAX_FRAMES_PER_TURN {
                return true;
            }
            let Some(Queue::Sq(sq)) = self.queues.get(sqn) else {
                return false;
            };
            let in_error = match sq.state {
                state::RDY => false,
                state::ERR if sq.flushes => true,
                _ => return false,
            };
            let (pd, cqn, uidx, privileged) = (sq.pd, sq.cqn, sq.uidx, sq.privileged);
            let index = sq.ring.head;
            let length = match self.fetch(sqn, &mut bytes) {
                FetchedWqe::Nothing => return false,
                FetchedWqe::Malformed(violation) => {
                    self.report_work_request(sqn, index, *violation);
                    // The WQEs after it cannot be found, so they are dropped.
                    if let Some(Queue::Sq(sq)) = self.queues.get_mut(sqn) {
                        sq.ring.head = sq.ring.tail;
                    }
                    self.fail_sq(sqn, index, if in_error { FLUSHED } else { MALFORMED });
                    return false;
                }
                FetchedWqe::Entry(length) => length,
            };
            if in_error {
                self.fail_sq(sqn, index, FLUSHED);
                continue;
            }
            let entry = &bytes[..length];
            let accessor = Accessor {
                qpn: sqn,
                pd,
                privileged,
            };
            let request = wqe::opcode_of(entry);
            let result = match request {
                opcode::NOP => Ok(()),
                opcode::UMR => {
                    let changed = self.change_key(accessor, get32(entry, 12), entry);
                    changed.map_err(malformed)
                }
                opcode::SEND => self.gather_frame(accessor, entry).map(|frame| {
                    self.send_frame(&frame, pool, out);
                }),
                opcode::TSO => self.gather_frame(accessor, entry).map(|frame| {
                    let mss = MSS.at(CONTROL).get(entry) as usize;
                    let header = HEADER_LENGTH.at(CONTROL).get(entry) as usize;
                    for segment in segment_tcp(&frame, header, mss) {
                        self.send_frame(&segment, pool, out);
                    }
                }),
                _ => {
                    let rule = Rule::OneOf(&SEND_QUEUE_OPCODES);
                    Err(malformed(Violation::new("opcode", request, rule)))
                }
            };
            if let Err((error, violation)) = result {
                self.report_work_request(sqn, index, violation);
                self.fail_sq(sqn, index, error);
                continue;
            }
            if wqe::is_signaled(entry) {
                self.complete(
                    cqn,
                    &Completion {
                        opcode: cq::opcode::REQUESTER,
                        qpn: sqn,
                        request,
                        uidx,
                        wqe_counter: index,
                        ..Completion::default()
                    },
                );
            }
        }
        true
    }

    /// Moves a send queue to the error state, and completes the WQE at an index with an
    /// error.
    fn fail_sq(&mut self, sqn: u32, index: u16, error: CqeError) {
        let Some(Queue::Sq(sq)) = self.queues.get_mut(sqn) else {
            return;
        };
        sq.state = state::ERR;
        let (cqn, uidx) = (sq.cqn, sq.uidx);
        self.complete(
            cqn,
            &Completion {
                opcode: cq::opcode::REQUESTER_ERROR,
                qpn: sqn,
                uidx,
                wqe_counter: index,
                error: Some(error),
                ..Completion::default()
            },
        );
    }

    /// Returns the frame of a WQE, including its inline header.
    fn gather_frame(&mut self, accessor: Accessor, entry: &[u8]) -> Result<Vec<u8>, WqeError> {
        let short = |least| malformed(wqe::too_short(entry, least));
        let segment = entry.get(CONTROL..).ok_or_else(|| short(CONTROL))?;
        let header = HEADER_LENGTH.get(segment) as usize;
        let inline = segment.get(HEADER..HEADER + header);
        let inline = inline.ok_or_else(|| short(CONTROL + HEADER + header))?;
        let mut frame = inline.to_vec();
        let after = (HEADER + header.max(2)).next_multiple_of(16);
        let mut rest = segment.get(after..).unwrap_or(&[]);
        while rest.len() >= 16 {
            let first = get32(rest, 0);
            if first & 1 << 31 != 0 {
                let n = (first & !(1 << 31)) as usize;
                let data = rest.get(4..4 + n).ok_or_else(|| {
                    let rule = Rule::AtMost((rest.len() - 4) as u64);
                    malformed(Violation::new("length of the inline data", n, rule))
                })?;
                frame.extend_from_slice(data);
                rest = rest.get((4 + n).next_multiple_of(16)..).unwrap_or(&[]);
                continue;
            }
            let length = first as usize;
            let from = frame.len();
            if from + length > MAX_UNSEGMENTED {
                let rule = Rule::AtMost(MAX_UNSEGMENTED as u64);
                let length = from + length;
                return Err(malformed(Violation::new(
                    "length of the frame",
                    length,
                    rule,
                )));
            }
            frame.resize(from + length, 0);
            let (key, va) = (get32(rest, 4), get64(rest, 8));
            let rights = Rights::LOCAL_READ;
            let read = self.read_key(accessor, key, va, &mut frame[from..], rights);
            self.observe_access(&read, accessor, key, (va, length as u64), rights);
            read.map_err(|_| {
                let violation = Violation::new("address of the frame", va, Rule::Readable);
                (NOT_READABLE, violation)
            })?;
            rest = &rest[16..];
        }
        let flags = CHECKSUMS.get(segment);
        if flags & (L3_CHECKSUM | L4_CHECKSUM) != 0 && wqe::opcode_of(entry) == opcode::SEND {
            set_checksums(&mut frame, flags & L4_CHECKSUM != 0);
        }
        Ok(frame)
    }

    fn send_frame(&mut self, frame: &[u8], pool: &Pool, out: &mut Vec<Packet>) {
        if !self.link_up {
            self.drop_frame(None, frame.len(), FrameDrop::LinkDown);
            return;
        }
        match pool.copy_of(LinkKind::Ethernet, frame) {
            Some(packet) => {
                self.stats.ethernet_sent += 1;
                self.stats.bytes_gathered += frame.len() as u64;
                self.stats.bytes_delivered += frame.len() as u64;
                out.push(packet);
            }
            None => self.drop_frame(None, frame.len(), FrameDrop::NoBuffer),
        }
    }

    /// Counts a frame that is dropped, and tells the observer.
    pub(crate) fn drop_frame(&mut self, queue: Option<u32>, length: usize, cause: FrameDrop) {
        self.stats.ethernet_dropped += 1;
        self.observe_frame(queue, length, cause);
    }

    /// Tells the observer of packets that the port does not send, since its link is down.
    pub(crate) fn observe_unsent(&mut self, packets: &[Packet]) {
        for packet in packets {
            self.observe_frame(None, packet.frame().len(), FrameDrop::LinkDown);
        }
    }

    /// Tells the observer of a frame that is dropped.
    pub(crate) fn observe_frame(&mut self, queue: Option<u32>, length: usize, cause: FrameDrop) {
        self.observe(|_| {
            Some(Cause::Frame {
                queue,
                length,
                cause,
            })
        });
    }

    /// Delivers a frame to the receive queues that steering selects.
    pub(crate) fn receive_frame(&mut self, frame: &[u8], origin: Origin) {
        let queues = match frame.len() {
            ..=PACKET_CAPACITY => self.steering.steer(frame, origin),
            _ => Vec::new(),
        };
        if queues.is_empty() {
            if origin == Origin::Wire {
                let cause = match frame.len() {
                    ..=PACKET_CAPACITY => FrameDrop::NoRule,
                    _ => FrameDrop::TooLong(PACKET_CAPACITY as u64),
                };
                self.drop_frame(None, frame.len(), cause);
            }
            return;
        }
        for SelectedQueue { rqn, tag, changed } in queues {
            self.deliver_frame(rqn, tag, changed.as_deref().unwrap_or(frame));
        }
    }

    /// Completes the receives of a queue in the error state as flushed.
    pub(crate) fn flush_rq(&mut self, rqn: u32) {
        let Some(Queue::Rq(rq)) = self.queues.get_mut(rqn) else {
            return;
        };
        if rq.state != state::ERR || !rq.flushes {
            return;
        }
        let (cqn, uidx) = (rq.cqn, rq.uidx);
        let strides = rq.strides.as_ref().map(|strides| strides.count);
        let current = rq.strides.as_mut().and_then(|it| it.current.take());
        let used = current.map(|(index, _, used)| (index, used));
        let rest = (0..1 << rq.ring.log_size).map_while(|_| {
            let taken = take_receive(&self.platform, &mut rq.ring).ok()??;
            Some((taken.0, 0))
        });
        let posted: Vec<(u16, u32)> = used.into_iter().chain(rest).collect();
        for (index, used) in posted {
            self.complete(
                cqn,
                &Completion {
                    opcode: cq::opcode::RESPONDER_ERROR,
                    qpn: rqn,
                    uidx,
                    wqe_counter: strides.map_or(index, |_| used as u16),
                    wqe_id: strides.map_or(0, |_| index),
                    byte_count: strides.map_or(0, |count| (count - used) << CONSUMED_STRIDES),
                    error: Some(FLUSHED),
                    ..Completion::default()
                },
            );
        }
    }

    /// Writes a frame to the memory of a receive, from an offset on.
    fn scatter_frame(
        &mut self,
        accessor: Accessor,
        (local, capacity): &(LocalBuffers, u32),
        offset: u64,
        frame: &[u8],
    ) -> Result<(), CqeError> {
        let capacity = u64::from(*capacity);
        if frame.len() as u64 + offset > capacity {
            let cause = FrameDrop::TooLong(capacity.saturating_sub(offset));
            self.observe_frame(Some(accessor.qpn), frame.len(), cause);
            return Err(TOO_LONG);
        }
        let mut at = 0;
        let mut before = offset;
        for segment in local.segments.iter() {
            let skipped = before.min(u64::from(segment.length));
            before -= skipped;
            let n = (frame.len() - at).min((u64::from(segment.length) - skipped) as usize);
            if n > 0 {
                let chunk = &frame[at..at + n];
                let va = segment.va.wrapping_add(skipped);
                let (key, rights) = (segment.key, Rights::LOCAL_WRITE);
                let written = self.write_key(accessor, key, va, chunk, rights);
                self.observe_access(&written, accessor, key, (va, n as u64), rights);
                at += n;
                self.stats.bytes_scattered += n as u64;
                written.map_err(|_| NOT_WRITABLE)?;
            }
        }
        Ok(())
    }

    fn deliver_frame(&mut self, rqn: u32, tag: u32, frame: &[u8]) {
        let Some(Queue::Rq(rq)) = self.queues.get_mut(rqn) else {
            return;
        };
        let (pd, cqn, uidx, privileged) = (rq.pd, rq.cqn, rq.uidx, rq.privileged);
        let counter_set = rq.counter_set;
        let (frame, vlan) = match rq.strips_vlan {
            true => strip_vlan_tag(frame),
            false => (Cow::Borrowed(frame), None),
        };
        let frame = &*frame;
        if rq.state != state::RDY {
            let cause = FrameDrop::State(rq.state);
            self.drop_frame(Some(rqn), frame.len(), cause);
            return;
        }
        let ReceiveSlot {
            index,
            entry: (bytes, length),
            stride,
            filler,
        } = match take_slot(&self.platform, rq, frame.len()) {
            Ok(Some(slot)) => slot,
            Ok(None) => {
                self.count_in(counter_set, |set| set.out_of_buffer += 1);
                return self.drop_frame(Some(rqn), frame.len(), FrameDrop::NoReceive);
            }
            Err(()) => return self.drop_frame(Some(rqn), frame.len(), FrameDrop::Unmapped),
        };
        if let Some(filler) = filler {
            self.complete(
                cqn,
                &Completion {
                    opcode: cq::opcode::SEND,
                    uidx,
                    wqe_id: filler.index,
                    wqe_counter: filler.first as u16,
                    byte_count: FILLER | filler.count << CONSUMED_STRIDES,
                    ..Completion::default()
                },
            );
        }
        // A WQE with strides begins with a segment that links it to the next.
        let skip = if stride.is_some() { 16 } else { 0 };
        let receive = wqe::parse_receive(&bytes[skip..length], pd, privileged);
        let offset = stride.as_ref().map_or(0, |stride| stride.offset);
        let accessor = Accessor {
            qpn: rqn,
            pd,
            privileged,
        };
        let error = self.scatter_frame(accessor, &receive, offset, frame).err();
        let strides = stride.as_ref().map_or(0, |stride| stride.count);
        let (checked, types) = verify_checksums(frame);
        self.stats.ethernet_received += 1;
        self.complete(
            cqn,
            &Completion {
                opcode: if error.is_some() {
                    cq::opcode::RESPONDER_ERROR
                } else {
                    cq::opcode::SEND
                },
                // This field holds the tag of the rule; the queue is identified by its
                // user index.
                qpn: tag,
                uidx,
                wqe_counter: stride.as_ref().map_or(index, |stride| stride.first as u16),
                wqe_id: stride.as_ref().map_or(0, |_| index),
                byte_count: frame.len() as u32 | strides << CONSUMED_STRIDES,
                checksum: ip_packet_sum(frame),
                checked,
                l3_l4: types | u8::from(vlan.is_some()),
                vlan: vlan.unwrap_or(0),
                error,
                ..Completion::default()
            },
        );
    }
}

/// In the byte count of a completion with strides: their number, and that they are
/// skipped.
const CONSUMED_STRIDES: u32 = 16;
const FILLER: u32 = 1 << 31;

/// The WQE, or the strides of it, that receive a frame.
struct ReceiveSlot {
    /// The WQE, by index.
    index: u16,
    entry: ReceiveEntry,
    /// The strides of the frame, of a striding receive queue.
    stride: Option<UsedStrides>,
    /// Strides of the WQE before that are skipped, since the frame does not fit into
    /// them.
    filler: Option<UsedStrides>,
}

/// Consecutive strides of a WQE.
struct UsedStrides {
    index: u16,
    first: u32,
    count: u32,
    /// Offset of the frame in the WQE's memory.
    offset: u64,
}

/// Takes the next receive for a frame of `length` bytes.
fn take_slot<P: Platform>(
    platform: &P,
    rq: &mut Rq,
    length: usize,
) -> Result<Option<ReceiveSlot>, ()> {
    let Some(strides) = &mut rq.strides else {
        let taken = take_receive(platform, &mut rq.ring)?;
        return Ok(taken.map(|(index, entry)| ReceiveSlot {
            index,
            entry,
            stride: None,
            filler: None,
        }));
    };
    take_strides(platform, &mut rq.ring, strides, length)
}

/// Takes strides for a frame of `length` bytes, from the next WQE if the current one has
/// too few left.
fn take_strides<P: Platform>(
    platform: &P,
    ring: &mut Ring,
    strides: &mut Strides,
    length: usize,
) -> Result<Option<ReceiveSlot>, ()> {
    let bytes = length as u32 + strides.shift;
    let count = bytes.div_ceil(strides.size).max(1);
    if count > strides.count {
        return Ok(None);
    }
    let mut filler = None;
    let (index, entry, first) = match strides.current.take() {
        Some((index, entry, used)) if used + count <= strides.count => (index, entry, used),
        before => {
            let Some((index, entry)) = take_receive(platform, ring)? else {
                strides.current = before;
                return Ok(None);
            };
            filler = before.map(|(index, _, used)| UsedStrides {
                index,
                first: used,
                count: strides.count - used,
                offset: 0,
            });
            (index, entry, 0)
        }
    };
    if first + count < strides.count {
        strides.current = Some((index, entry, first + count));
    }
    Ok(Some(ReceiveSlot {
        index,
        entry,
        stride: Some(UsedStrides {
            index,
            first,
            count,
            offset: u64::from(first) * u64::from(strides.size) + u64::from(strides.shift),
        }),
        filler,
    }))
}

/// Splits an Ethernet frame of TCP or UDP into frames with at most `mss` bytes of data each,
/// with checksums. Returns none if it is malformed, or they would be too many.
#[must_use]
pub fn segment_frame(frame: &[u8], mss: usize) -> Vec<Vec<u8>> {
    let Some(at) = layers(frame) else {
        return Vec::new();
    };
    if at.protocol != UDP {
        let words = frame
            .get(at.l4 + 12)
            .map_or(0, |byte| usize::from(byte >> 4));
        return segment_tcp(frame, at.l4 + 4 * words, mss);
    }
    let Some((headers, data)) = frame.split_at_checked(at.l4 + 8) else {
        return Vec::new();
    };
    if mss == 0 || data.len() / mss >= MAX_SEGMENTS {
        return Vec::new();
    }
    let segment = |(number, data): (usize, &[u8])| {
        let mut out = [headers, data].concat();
        set_lengths(&mut out, &at, number as u16);
        let length = (out.len() - at.l4) as u16;
        out[at.l4 + 4..at.l4 + 6].copy_from_slice(&length.to_be_bytes());
        set_checksums(&mut out, true);
        out
    };
    data.chunks(mss).enumerate().map(segment).collect()
}

/// Sets the length of the IP packet in a segment and, with IPv4, counts the identification up.
fn set_lengths(out: &mut [u8], at: &Layers, number: u16) {
    let length = (out.len() - at.l3) as u16;
    if at.ipv4 {
        let id = u16_at(out, at.l3 + 4).unwrap_or(0).wrapping_add(number);
        out[at.l3 + 2..at.l3 + 4].copy_from_slice(&length.to_be_bytes());
        out[at.l3 + 4..at.l3 + 6].copy_from_slice(&id.to_be_bytes());
    } else {
        let length = length.wrapping_sub(40);
        out[at.l3 + 4..at.l3 + 6].copy_from_slice(&length.to_be_bytes());
    }
}

/// Splits a TCP frame whose first `header` bytes are headers into frames with at most
/// `mss` bytes of data each.
fn segment_tcp(frame: &[u8], header: usize, mss: usize) -> Vec<Vec<u8>> {
    let (Some(at), true) = (layers(frame), mss > 0 && header <= frame.len()) else {
        return Vec::new();
    };
    if at.protocol != TCP || at.l4 + 20 > header {
        return Vec::new();
    }
    let (headers, data) = frame.split_at(header);
    if data.len() / mss >= MAX_SEGMENTS {
        return Vec::new();
    }
    let first = get32_at(headers, at.l4 + 4);
    let parts = data.chunks(mss);
    let last = parts.len().saturating_sub(1);
    parts
        .enumerate()
        .map(|(n, segment)| {
            let mut out = headers.to_vec();
            out.extend_from_slice(segment);
            set_lengths(&mut out, &at, n as u16);
            let sequence = first.wrapping_add((n * mss) as u32);
            out[at.l4 + 4..at.l4 + 8].copy_from_slice(&sequence.to_be_bytes());
            if n != last {
                // Only the last frame keeps FIN and PSH.
                out[at.l4 + 13] &= !0b1001;
            }
            set_checksums(&mut out, true);
            out
        })
        .collect()
}

fn get32_at(bytes: &[u8], at: usize) -> u32 {
    get32(bytes, at)
}

#[cfg(test)]
mod tests {
    use super::super::frame::{IPV4, fold, sum};
    use super::*;

    fn tcp(payload: usize) -> Vec<u8> {
        let mut frame = vec![0; 54 + payload];
        frame[12..14].copy_from_slice(&IPV4.to_be_bytes());
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&((40 + payload) as u16).to_be_bytes());
        frame[23] = TCP;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[46] = 0x50;
        frame[47] = 0b1_1001;
        frame
    }

    #[test]
    fn valid_and_wrong_checksums_are_distinguished() {
        let mut frame = tcp(5);
        frame[54..].copy_from_slice(b"hello");
        assert_eq!(
            verify_checksums(&frame),
            (0b001, 0x18),
            "nothing is computed"
        );
        set_checksums(&mut frame, false);
        assert_eq!(verify_checksums(&frame), (0b011, 0x18));
        set_checksums(&mut frame, true);
        assert_eq!(verify_checksums(&frame), (0b111, 0x18));
        let mut padded = frame.clone();
        padded.extend([1; 9]);
        assert_eq!(
            verify_checksums(&padded),
            (0b111, 0x18),
            "padding is not part of it"
        );
        let mut wrong = frame.clone();
        wrong[54] ^= 1;
        assert_eq!(verify_checksums(&wrong), (0b011, 0x18));
        assert_eq!(verify_checksums(&frame[..58]), (0b011, 0x18), "cut off");
        frame[24] ^= 1;
        assert_eq!(verify_checksums(&frame), (0b101, 0x18));
        assert_eq!(verify_checksums(&[0; 14]), (0b001, 0));
        for length in 0..frame.len() {
            verify_checksums(&frame[..length]);
        }
    }

    #[test]
    fn checksums_add_up_to_zero() {
        let mut frame = tcp(5);
        frame[54..].copy_from_slice(b"hello");
        set_checksums(&mut frame, true);
        assert_eq!(fold(sum(&frame[14..34])), 0);
        let pseudo = sum(&frame[26..34]) + 6 + 25;
        assert_eq!(fold(pseudo + sum(&frame[34..])), 0);
    }

    #[test]
    fn padding_is_excluded_from_the_sum() {
        let mut frame = tcp(5);
        frame[54..].copy_from_slice(b"hello");
        set_checksums(&mut frame, true);
        // The header sums to zero, so this is the sum of the rest.
        let pseudo = sum(&frame[26..34]) + 6 + 25;
        assert_eq!(fold(pseudo + u64::from(ip_packet_sum(&frame))), 0);
        let before = ip_packet_sum(&frame);
        frame.extend([0xa5; 6]);
        assert_eq!(ip_packet_sum(&frame), before, "filled up");
        assert_eq!(ip_packet_sum(&frame[..13]), 0);
    }

    #[test]
    fn a_vlan_tag_is_removed() {
        let plain = tcp(5);
        let tagged = [&plain[..12], &[0x81, 0, 0x61, 0x23], &plain[12..]].concat();
        let (without, tag) = strip_vlan_tag(&tagged);
        assert_eq!((&*without, tag), (&plain[..], Some(0x6123)));
        assert_eq!(strip_vlan_tag(&plain).1, None);
        for end in 0..16 {
            assert_eq!(strip_vlan_tag(&tagged[..end]).1, None, "{end}");
        }
        assert_eq!(strip_vlan_tag(&tagged[..16]).0.len(), 12);
    }

    #[test]
    fn a_long_frame_is_segmented() {
        let parts = segment_tcp(&tcp(2500), 54, 1000);
        let lengths: Vec<_> = parts.iter().map(Vec::len).collect();
        assert_eq!(lengths, [1054, 1054, 554]);
        assert_eq!(get32(&parts[2], 38), 2000);
        assert_eq!(parts[0][47], 0b1_0000);
        assert_eq!(parts[2][47], 0b1_1001);
        assert!(segment_tcp(&tcp(10), 54, 0).is_empty());
        assert!(segment_tcp(&tcp(10), 99, 100).is_empty());
        assert!(segment_tcp(&tcp(5000), 54, 1).is_empty(), "too many");
    }
}
