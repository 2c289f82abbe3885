//! Format of WQEs.
//!
//! This module accesses neither memory nor objects, so that it can be tested and fuzzed
//! by itself.

use roce::bits::{Field, field, flag, get_array, get32, get64};
use roce::rule::{Rule, Violation};
use roce::transport::{Fence, Operation, Service};

use super::tags::TaggedReceive;
use crate::cause;

/// Ends the scatter list of a receive WQE.
pub(crate) const TERMINATE_LKEY: u32 = 0x100;

/// Maximum length of a receive WQE in bytes.
pub(crate) const MAX_RECV_WQE: usize = 512;
/// Size of the buffer for a send WQE. The longest has 63 segments, since their count
/// has six bits.
pub(crate) const MAX_SEND_WQE: usize = 1024;
/// Size of a send queue block in bytes.
pub(crate) const BLOCK: usize = 64;
/// Size of a segment in bytes.
const SEGMENT: usize = 16;

pub(crate) const OP_MOD: Field = field(0, 31, 24);
const INDEX: Field = field(0, 23, 8);
const OPCODE: Field = field(0, 7, 0);
const QPN: Field = field(4, 31, 8);
const SEGMENTS: Field = field(4, 5, 0);
const CONTROL_RESERVED: Field = field(4, 7, 6);
const FENCE: Field = field(8, 7, 5);
const COMPLETION: Field = field(8, 3, 2);
const SOLICITED: Field = flag(8, 1);
const IMMEDIATE: usize = 12;
/// Stream, on DC initiators.
const STREAM: Field = field(8, 23, 8);
/// Set if the address vector has all its fields, as DC requires.
const LONG_AV: Field = flag(8, 31);
const AV: usize = 48;

const INLINE: u32 = 1 << 31;

/// Opcodes of UD.
const DATAGRAM_OPCODES: [u64; 2] = [opcode::SEND as u64, opcode::SEND_IMM as u64];
/// Opcodes of UC.
const UNRELIABLE_OPCODES: [u64; 4] = [
    opcode::SEND as u64,
    opcode::SEND_IMM as u64,
    opcode::RDMA_WRITE as u64,
    opcode::RDMA_WRITE_IMM as u64,
];

/// WQE opcodes.
#[allow(missing_docs)]
pub mod opcode {
    pub const NOP: u8 = 0x00;
    pub const SEND_INVALIDATE: u8 = 0x01;
    pub const RDMA_WRITE: u8 = 0x08;
    pub const RDMA_WRITE_IMM: u8 = 0x09;
    pub const SEND: u8 = 0x0a;
    pub const SEND_IMM: u8 = 0x0b;
    pub const TSO: u8 = 0x0e;
    pub const RDMA_READ: u8 = 0x10;
    pub const COMPARE_SWAP: u8 = 0x11;
    pub const FETCH_ADD: u8 = 0x12;
    pub const LOCAL_INVALIDATE: u8 = 0x1b;
    pub const SET_PSV: u8 = 0x20;
    pub const UMR: u8 = 0x25;
    /// Operation on the list of tags of an SRQ.
    pub const TAG_MATCHING: u8 = 0x28;
    /// Operation on local memory, selected by the modifier.
    pub const MMO: u8 = 0x2f;
}

/// A scatter/gather element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// Length in bytes.
    pub length: u32,
    /// Memory key.
    pub key: u32,
    /// Address that the key translates.
    pub va: u64,
}

impl Segment {
    pub(crate) fn parse(bytes: &[u8]) -> Segment {
        Segment {
            length: get32(bytes, 0) & !INLINE,
            key: get32(bytes, 4),
            va: get64(bytes, 8),
        }
    }
}

/// A list of segments, without allocation for up to two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Segments {
    first: [Segment; 2],
    count: usize,
    rest: Vec<Segment>,
}

impl Segments {
    pub(crate) fn push(&mut self, segment: Segment) {
        match self.first.get_mut(self.count) {
            Some(slot) => *slot = segment,
            None => self.rest.push(segment),
        }
        self.count += 1;
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Segment> {
        let first = self.count.min(self.first.len());
        self.first[..first].iter_mut().chain(&mut self.rest)
    }

    /// Iterates over the segments.
    pub fn iter(&self) -> impl Iterator<Item = Segment> {
        let first = self.count.min(self.first.len());
        self.first[..first].iter().chain(&self.rest).copied()
    }
}

/// Data that is scattered into the CQE instead of memory.
#[derive(Debug, Clone, Copy)]
pub struct CqeScatter {
    /// Maximum length in bytes.
    pub(crate) limit: u8,
    pub(crate) length: u8,
    pub(crate) bytes: [u8; 64],
}

impl CqeScatter {
    /// Returns space for `limit` bytes; `None` if that is 0.
    pub(crate) fn up_to(limit: u8) -> Option<Box<CqeScatter>> {
        (limit != 0).then(|| {
            Box::new(CqeScatter {
                limit,
                length: 0,
                bytes: [0; 64],
            })
        })
    }
}

/// Local buffers of a work request.
#[derive(Debug, Clone)]
pub struct LocalBuffers {
    /// Scatter/gather list.
    pub segments: Segments,
    /// Inline data, before that of the list; for local operations, the whole WQE.
    pub inline: Vec<u8>,
    pub(crate) pd: u32,
    pub(crate) privileged: bool,
    /// Of a send: its number in the queue.
    pub(crate) number: u32,
    /// Of a receive.
    pub(crate) receives: bool,
    pub(crate) cqe_scatter: Option<Box<CqeScatter>>,
    /// In receives of an SRQ with tag matching.
    pub(crate) tagging: Option<TaggedReceive>,
}

impl LocalBuffers {
    pub(crate) fn new(pd: u32, privileged: bool) -> LocalBuffers {
        LocalBuffers {
            segments: Segments::default(),
            inline: Vec::new(),
            pd,
            privileged,
            number: 0,
            receives: false,
            cqe_scatter: None,
            tagging: None,
        }
    }

    /// Returns the first buffers of the list, and the number of all, for a cause.
    pub(crate) fn listed(&self) -> ([cause::Buffer; 4], usize) {
        let mut buffers = [cause::Buffer::default(); 4];
        let count = self.segments.iter().count();
        for (buffer, segment) in buffers.iter_mut().zip(self.segments.iter()) {
            *buffer = cause::Buffer {
                va: segment.va,
                length: segment.length,
                key: segment.key,
            };
        }
        (buffers, count)
    }

    /// Returns the data to be scattered into the CQE.
    pub(crate) fn cqe_data(&self) -> &[u8] {
        match &self.cqe_scatter {
            Some(cqe_scatter) => &cqe_scatter.bytes[..usize::from(cqe_scatter.length)],
            None => &[],
        }
    }
}

/// A parsed send WQE.
#[derive(Debug, Clone)]
pub struct SendWqe {
    /// Opcode, which its completion repeats.
    pub opcode: u8,
    /// Index in the WQE, in blocks.
    pub index: u16,
    /// Queue pair number in the WQE.
    pub qpn: u32,
    /// Number of blocks.
    pub blocks: u16,
    /// Signalled: a completion is requested.
    pub signaled: bool,
    /// Operation.
    pub operation: Operation,
    /// Length of the message in bytes.
    pub length: u32,
    /// Local buffers.
    pub local: LocalBuffers,
    /// Immediate data, or the rkey to invalidate.
    pub immediate: u32,
    /// Fence.
    pub fence: Fence,
    /// A solicited event at the receiver is requested.
    pub solicited: bool,
    /// Remote address.
    pub va: u64,
    /// Remote key.
    pub rkey: u32,
    /// SRQ number at the peer (XRC).
    pub xrc_srqn: u32,
    /// Address vector (UD, DC).
    pub av: Option<[u8; 48]>,
    /// Stream (DC).
    pub stream: u16,
    /// What broke which rule, if the WQE is malformed.
    pub violation: Option<Box<Violation>>,
}

/// A work request that changes a list of tags, or reports the number of messages that
/// software has seen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TagOperation {
    pub(crate) kind: u32,
    pub(crate) signaled: bool,
    /// Index of the tag that is removed, or of the one after the appended.
    pub(crate) index: u16,
    /// Unexpected messages that software has seen.
    pub(crate) seen: Option<u16>,
    pub(crate) tag: u64,
    pub(crate) mask: u64,
    pub(crate) buffer: Segment,
}

impl TagOperation {
    pub(crate) const NOOP: u32 = 0;
    pub(crate) const APPEND: u32 = 1;
    pub(crate) const REMOVE: u32 = 2;

    /// Parses a WQE; missing fields are zero.
    pub(crate) fn parse(entry: &[u8]) -> TagOperation {
        const KIND: Field = field(0x10, 31, 28);
        const SIGNALED: Field = flag(0x10, 23);
        const HAS_SW_COUNT: Field = flag(0x10, 22);
        const INDEX: Field = field(0x10, 15, 0);
        const SEEN: Field = field(0x14, 15, 0);
        const TAG: usize = 0x20;
        const MASK: usize = 0x28;
        const BUFFER: usize = 0x30;
        TagOperation {
            kind: KIND.get(entry),
            signaled: SIGNALED.is_set(entry),
            index: INDEX.get(entry) as u16,
            seen: HAS_SW_COUNT.is_set(entry).then(|| SEEN.get(entry) as u16),
            tag: get64(entry, TAG),
            mask: get64(entry, MASK),
            buffer: Segment::parse(entry.get(BUFFER..).unwrap_or(&[])),
        }
    }
}

/// Attributes of a queue pair that determine how its WQEs are parsed.
#[derive(Debug, Clone, Copy)]
pub struct WqeContext {
    /// Service, which determines the segments.
    pub service: Service,
    /// Protection domain of local keys.
    pub pd: u32,
    /// May use the reserved lkey.
    pub privileged: bool,
    /// Refuse WQEs whose reserved bits are set.
    pub strict: bool,
}

/// Returns the length in bytes of the WQE that begins with `control`; `None` if its
/// segment count is 0.
pub fn length(control: &[u8]) -> Option<usize> {
    match SEGMENTS.get(control) as usize {
        0 => None,
        n => Some(n * SEGMENT),
    }
}

/// Returns the queue pair number in a WQE, or in its first 8 bytes.
pub fn queue(control: &[u8]) -> u32 {
    QPN.get(control)
}

/// Returns the index in a WQE, or in its first 8 bytes.
pub fn index(control: &[u8]) -> u16 {
    INDEX.get(control) as u16
}

/// Returns the opcode of a WQE.
pub fn opcode_of(control: &[u8]) -> u8 {
    OPCODE.get(control) as u8
}

/// Returns whether a WQE is signalled.
pub fn is_signaled(control: &[u8]) -> bool {
    COMPLETION.get(control) == 2
}

/// Offset of the byte of the control segment that requests a completion.
const COMPLETION_BYTE: usize = 11;

/// Returns whether a BlueFlame copy that differs from its ring, first at byte `at`, is
/// Linux's test of write combining: NOPs that are signalled in the copy alone, so that
/// a completion shows that the copy was used.
pub(crate) fn is_write_combining_test(copy: &[u8], at: usize) -> bool {
    at == COMPLETION_BYTE && opcode_of(copy) == opcode::NOP
}

/// Parses a send WQE. The result is always a work request; a malformed one completes
/// with an error, in order.
pub fn parse_send(bytes: &[u8], context: &WqeContext) -> SendWqe {
    let opcode = OPCODE.get(bytes) as u8;
    let mut work = SendWqe {
        opcode,
        index: INDEX.get(bytes) as u16,
        qpn: QPN.get(bytes),
        blocks: bytes.len().div_ceil(BLOCK).max(1) as u16,
        signaled: COMPLETION.get(bytes) == 2,
        operation: Operation::Local,
        length: 0,
        local: LocalBuffers::new(context.pd, context.privileged),
        immediate: get32(bytes, IMMEDIATE),
        fence: match FENCE.get(bytes) {
            0 | 1 => Fence::None,
            2 | 4 => Fence::Reads,
            _ => Fence::All,
        },
        solicited: SOLICITED.is_set(bytes),
        va: 0,
        rkey: 0,
        xrc_srqn: 0,
        av: None,
        stream: STREAM.get(bytes) as u16,
        violation: None,
    };
    if let Err(violation) = parse_segments(&mut work, bytes, context) {
        work.violation = Some(Box::new(violation));
    }
    work
}

fn parse_segments(work: &mut SendWqe, bytes: &[u8], context: &WqeContext) -> Result<(), Violation> {
    if context.strict {
        check_reserved_bits(work.opcode, bytes, context.service)?;
    }
    let mut rest = WqeReader(
        bytes
            .get(SEGMENT..)
            .ok_or_else(|| too_short(bytes, SEGMENT))?,
    );
    if work.opcode == opcode::NOP {
        return Ok(());
    }
    if matches!(
        work.opcode,
        opcode::UMR
            | opcode::LOCAL_INVALIDATE
            | opcode::SET_PSV
            | opcode::TAG_MATCHING
            | opcode::MMO
    ) {
        if context.service == Service::Ud {
            return Err(refused_opcode(work, Rule::OneOf(&DATAGRAM_OPCODES)));
        }
        work.local.inline = bytes.to_vec();
        return Ok(());
    }
    parse_destination(work, &mut rest, context.service)?;
    work.operation = operation(work, context.service)?;
    parse_remote(work, &mut rest, context.strict)?;
    let length = parse_data(work, &mut rest)?;
    work.length = match work.operation {
        Operation::FetchAdd { .. } | Operation::CompareSwap { .. } => 8,
        _ => u32::try_from(length).map_err(|_| {
            let limit = Rule::AtMost(u32::MAX.into());
            Violation::new("length of the message", length, limit)
        })?,
    };
    Ok(())
}

#[cold]
fn refused_opcode(work: &SendWqe, rule: Rule) -> Violation {
    Violation::new("opcode", work.opcode, rule)
}

/// Parses the segment that names the destination, for services that have one.
#[inline]
fn parse_destination(
    work: &mut SendWqe,
    rest: &mut WqeReader<'_>,
    service: Service,
) -> Result<(), Violation> {
    match service {
        Service::XrcInitiator => {
            let segment = rest.take(SEGMENT)?;
            work.xrc_srqn = get32(segment, 0) & 0xff_ffff;
        }
        Service::XrcTarget | Service::DcTarget => {
            return Err(refused_opcode(work, Rule::Without("a target")));
        }
        Service::Ud => {
            let av = rest.take(AV)?;
            work.av = Some(get_array(av, 0));
        }
        Service::DcInitiator => {
            let av = rest.take(AV)?;
            if !LONG_AV.is_set(av) {
                let (what, flags) = ("flags of the address vector", get32(av, 8));
                return Err(Violation::new(what, flags, Rule::Contains(1 << 31)));
            }
            work.av = Some(get_array(av, 0));
        }
        Service::Rc | Service::Uc => {}
    }
    Ok(())
}

/// Returns the operation of a work request that is sent. The operands of atomics follow.
#[inline]
fn operation(work: &SendWqe, service: Service) -> Result<Operation, Violation> {
    let unreliable = matches!(service, Service::Uc | Service::Ud);
    Ok(match work.opcode {
        opcode::SEND => Operation::Send,
        opcode::SEND_IMM => Operation::SendImm,
        opcode::SEND_INVALIDATE if !unreliable => Operation::SendInvalidate,
        _ if service == Service::Ud => {
            return Err(refused_opcode(work, Rule::OneOf(&DATAGRAM_OPCODES)));
        }
        opcode::RDMA_WRITE => Operation::Write,
        opcode::RDMA_WRITE_IMM => Operation::WriteImm,
        _ if unreliable => {
            return Err(refused_opcode(work, Rule::OneOf(&UNRELIABLE_OPCODES)));
        }
        opcode::RDMA_READ => Operation::Read,
        opcode::FETCH_ADD => Operation::FetchAdd { add: 0 },
        opcode::COMPARE_SWAP => Operation::CompareSwap {
            compare: 0,
            swap: 0,
        },
        _ => return Err(refused_opcode(work, Rule::Known)),
    })
}

/// Parses the remote address, and the operands of an atomic.
#[inline]
fn parse_remote(
    work: &mut SendWqe,
    rest: &mut WqeReader<'_>,
    strict: bool,
) -> Result<(), Violation> {
    if matches!(
        work.operation,
        Operation::Write
            | Operation::WriteImm
            | Operation::Read
            | Operation::FetchAdd { .. }
            | Operation::CompareSwap { .. }
    ) {
        let remote = rest.take(SEGMENT)?;
        work.va = get64(remote, 0);
        work.rkey = get32(remote, 8);
        let reserved = get32(remote, 12);
        if strict && reserved != 0 {
            let what = "reserved word of the remote address segment";
            return Err(Violation::new(what, reserved, Rule::Zero));
        }
    }
    match &mut work.operation {
        Operation::FetchAdd { add } => *add = get64(rest.take(SEGMENT)?, 0),
        Operation::CompareSwap { compare, swap } => {
            let atomic = rest.take(SEGMENT)?;
            *swap = get64(atomic, 0);
            *compare = get64(atomic, 8);
        }
        _ => {}
    }
    Ok(())
}

/// Parses the scatter/gather list or the inline data. Returns the length of the data.
#[inline]
fn parse_data(work: &mut SendWqe, rest: &mut WqeReader<'_>) -> Result<u64, Violation> {
    let mut length = 0u64;
    while !rest.0.is_empty() {
        let first = get32(rest.0, 0);
        if first & INLINE != 0 {
            let n = (first & !INLINE) as usize;
            let whole = (4 + n).next_multiple_of(SEGMENT);
            let data = rest.take(whole.min(rest.0.len()))?;
            let inline = |rule| Violation::new("length of the inline data", n, rule);
            let room = data.len().saturating_sub(4) as u64;
            let data = data.get(4..4 + n);
            let data = data.ok_or_else(|| inline(Rule::AtMost(room)))?;
            if work.local.segments.iter().next().is_some() {
                return Err(inline(Rule::Without("a scatter/gather element before it")));
            }
            if work.operation.is_read_or_atomic() {
                return Err(inline(Rule::Without("a read or atomic")));
            }
            work.local.inline.extend_from_slice(data);
            length += n as u64;
        } else {
            let segment = Segment::parse(rest.take(SEGMENT)?);
            length += u64::from(segment.length);
            work.local.segments.push(segment);
        }
    }
    Ok(length)
}

/// Creates the violation of a work request that is shorter than `least` bytes.
#[cold]
pub(crate) fn too_short(entry: &[u8], least: usize) -> Violation {
    let rule = Rule::AtLeast(least as u64);
    Violation::new("length of the work request", entry.len(), rule)
}

fn check_reserved_bits(opcode: u8, bytes: &[u8], service: Service) -> Result<(), Violation> {
    let modified = matches!(opcode, opcode::UMR | opcode::MMO);
    let streams = service == Service::DcInitiator;
    let unless = |has: bool, field: Field| if has { 0 } else { field.get(bytes) };
    for (what, value) in [
        ("operation modifier", unless(modified, OP_MOD)),
        (
            "reserved bits beside the length",
            CONTROL_RESERVED.get(bytes),
        ),
        ("reserved bits of the flags", get32(bytes, 8) & 0x11),
        ("stream", unless(streams, STREAM)),
    ] {
        if value != 0 {
            return Err(Violation::new(what, value, Rule::Zero));
        }
    }
    Ok(())
}

/// The unparsed rest of a WQE.
struct WqeReader<'a>(&'a [u8]);

impl<'a> WqeReader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], Violation> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or_else(|| {
            let what = "rest of the work request before its next segment";
            Violation::new(what, self.0.len(), Rule::AtLeast(n as u64))
        })?;
        self.0 = rest;
        Ok(taken)
    }
}

/// Parses the scatter list of a receive WQE. Returns it with its total length.
pub(crate) fn parse_receive(bytes: &[u8], pd: u32, privileged: bool) -> (LocalBuffers, u32) {
    let mut local = LocalBuffers::new(pd, privileged);
    local.receives = true;
    let mut length = 0u32;
    for segment in bytes.chunks_exact(SEGMENT).map(Segment::parse) {
        if segment.length == 0 && segment.key == TERMINATE_LKEY {
            break;
        }
        if segment.length == 0 {
            continue;
        }
        length = length.saturating_add(segment.length);
        local.segments.push(segment);
    }
    (local, length)
}

#[cfg(test)]
mod tests {
    use roce::bits::{put32, put64};

    use super::*;

    const RC: WqeContext = WqeContext {
        service: Service::Rc,
        pd: 1,
        privileged: false,
        strict: true,
    };

    fn control(opcode: u8, index: u16, segments: u32) -> Vec<u8> {
        let mut bytes = vec![0; segments as usize * 16];
        put32(&mut bytes, 0, u32::from(index) << 8 | u32::from(opcode));
        put32(&mut bytes, 4, 0x1234 << 8 | segments);
        bytes[11] = 8;
        bytes
    }

    #[test]
    fn a_write_has_its_fields() {
        let mut bytes = control(opcode::RDMA_WRITE, 7, 3);
        put64(&mut bytes, 16, 0xabcd_0000_1111);
        put32(&mut bytes, 24, 0x5566);
        put32(&mut bytes, 32, 64);
        put32(&mut bytes, 36, 0x7700);
        put64(&mut bytes, 40, 0x1000);
        let work = parse_send(&bytes, &RC);
        assert_eq!(work.violation, None);
        assert_eq!(work.operation, Operation::Write);
        assert_eq!((work.qpn, work.index, work.length), (0x1234, 7, 64));
        assert_eq!((work.va, work.rkey), (0xabcd_0000_1111, 0x5566));
        assert!(work.signaled && !work.solicited);
        let segments: Vec<_> = work.local.segments.iter().collect();
        assert_eq!(
            segments,
            [Segment {
                length: 64,
                key: 0x7700,
                va: 0x1000
            }]
        );
    }

    #[test]
    fn inline_data_is_taken_from_the_entry() {
        let mut bytes = control(opcode::SEND_IMM, 0, 3);
        put32(&mut bytes, 12, 0xdead_beef);
        put32(&mut bytes, 16, INLINE | 20);
        bytes[20..40].fill(7);
        let work = parse_send(&bytes, &RC);
        assert_eq!(work.local.inline, [7; 20]);
        assert_eq!((work.length, work.immediate), (20, 0xdead_beef));
    }

    #[test]
    fn malformed_wqes_are_refused() {
        let with = |opcode, segments, words: &[(usize, u32)]| {
            let mut bytes = control(opcode, 0, segments);
            words
                .iter()
                .for_each(|(at, word)| put32(&mut bytes, *at, *word));
            bytes
        };
        let (send, inline) = (opcode::SEND, "length of the inline data");
        let rest = "rest of the work request before its next segment";
        let cases: [(Vec<u8>, Service, Violation); 15] = [
            (
                with(send, 3, &[(16, 8), (32, INLINE | 4)]),
                Service::Rc,
                Violation::new(
                    inline,
                    4,
                    Rule::Without("a scatter/gather element before it"),
                ),
            ),
            (
                with(opcode::RDMA_READ, 3, &[(32, INLINE | 4)]),
                Service::Rc,
                Violation::new(inline, 4, Rule::Without("a read or atomic")),
            ),
            (
                with(send, 2, &[(16, INLINE | 13)]),
                Service::Rc,
                Violation::new(inline, 13, Rule::AtMost(12)),
            ),
            (
                with(opcode::RDMA_WRITE, 1, &[]),
                Service::Rc,
                Violation::new(rest, 0, Rule::AtLeast(16)),
            ),
            (
                with(send, 3, &[]),
                Service::Ud,
                Violation::new(rest, 32, Rule::AtLeast(48)),
            ),
            (
                with(0x3f, 2, &[]),
                Service::Rc,
                Violation::new("opcode", 0x3f, Rule::Known),
            ),
            (
                with(opcode::RDMA_READ, 5, &[(64, 8)]),
                Service::Ud,
                Violation::new("opcode", 0x10, Rule::OneOf(&[0xa, 0xb])),
            ),
            (
                with(opcode::UMR, 5, &[]),
                Service::Ud,
                Violation::new("opcode", 0x25, Rule::OneOf(&[0xa, 0xb])),
            ),
            (
                with(opcode::RDMA_READ, 3, &[]),
                Service::Uc,
                Violation::new("opcode", 0x10, Rule::OneOf(&[0xa, 0xb, 8, 9])),
            ),
            (
                with(send, 1, &[]),
                Service::XrcTarget,
                Violation::new("opcode", 0xa, Rule::Without("a target")),
            ),
            (
                with(send, 4, &[(24, 0x1234)]),
                Service::DcInitiator,
                Violation::new(
                    "flags of the address vector",
                    0x1234,
                    Rule::Contains(1 << 31),
                ),
            ),
            (
                with(send, 2, &[(8, 1 << 16)]),
                Service::Rc,
                Violation::new("stream", 0x100, Rule::Zero),
            ),
            (
                with(opcode::RDMA_WRITE, 2, &[(28, 3)]),
                Service::Rc,
                Violation::new("reserved word of the remote address segment", 3, Rule::Zero),
            ),
            (
                with(send, 4, &[(16, 1 << 31 >> 1), (32, !INLINE), (48, !INLINE)]),
                Service::Rc,
                Violation::new(
                    "length of the message",
                    (1u64 << 30) + 2 * ((1 << 31) - 1),
                    Rule::AtMost(u32::MAX.into()),
                ),
            ),
            (
                Vec::new(),
                Service::Rc,
                Violation::new("length of the work request", 0, Rule::AtLeast(16)),
            ),
        ];
        for (bytes, service, violation) in cases {
            let context = WqeContext { service, ..RC };
            let work = parse_send(&bytes, &context);
            assert_eq!(work.violation.as_deref(), Some(&violation));
        }
    }

    #[test]
    fn a_receive_list_ends_at_the_terminator() {
        let mut bytes = vec![0; 64];
        put32(&mut bytes, 0, 100);
        put32(&mut bytes, 4, 0x55);
        put32(&mut bytes, 20, TERMINATE_LKEY);
        put32(&mut bytes, 32, 100);
        let (local, length) = parse_receive(&bytes, 1, false);
        assert_eq!((local.segments.iter().count(), length), (1, 100));
    }
}
