//! The decoder of CQEs.
//!
//! [`decode`] resolves the queue pair and the work request of a CQE, interprets
//! its opcode and hands the result to a [`CompletionSink`]: a work completion, one with a
//! timestamp, or the entry under a cursor, which reads the other fields on
//! demand. CQEs are untrusted: fields are looked up or masked. An unknown value is
//! a [`CompletionError`], and changes nothing.

use std::mem::{MaybeUninit, offset_of};
use std::ptr::NonNull;

use ring::{Outstanding, cold_path};
use uverbs::WorkCompletion;

use crate::abi::{self, Cqe, SYNDROME, TagCqe, TagHeader, VENDOR_SYNDROME, cqe_opcode};
use crate::plan::KeyChanges;
use crate::qp_table::{NUMBER, QpTable, user_index};
use crate::wc::{flags, opcode, status, status_of, syndrome};
use crate::{CompletionError, QpQueues, SrqEntries, tags};

/// A new CQE, or a copy of one. Each field is read once, when it is requested,
/// because a malfunctioning device may overwrite it.
#[derive(Clone, Copy, Debug)]
pub struct CqeRef {
    at: NonNull<Cqe>,
    /// Whether it is in the ring (until it is released) or a copy.
    pub(crate) in_ring: bool,
}

macro_rules! field {
    ($cqe:expr, $field:ident) => {
        // SAFETY: readable, by the contract of `CqeRef::new`; any bytes are a field.
        unsafe { (&raw const (*$cqe.at.as_ptr()).$field).read_volatile() }
    };
}

/// Bits of `flags_rqpn` that are set if the message has a GRH.
pub(crate) const GRH: u32 = 3 << 28;

impl CqeRef {
    /// A reference to a CQE.
    ///
    /// # Safety
    /// The CQE is readable for as long as this value is used.
    #[inline]
    pub(crate) unsafe fn new(at: NonNull<Cqe>, in_ring: bool) -> Self {
        Self { at, in_ring }
    }

    pub(crate) fn at(self) -> *const Cqe {
        self.at.as_ptr()
    }

    pub(crate) fn copy(self) -> Cqe {
        // SAFETY: readable, by the contract of `CqeRef::new`; any bytes are a CQE.
        unsafe { self.at.read_volatile() }
    }

    /// The raw field with the user index of the queue pair.
    #[inline]
    pub(crate) fn uidx_field(self) -> u32 {
        field!(self, srqn_uidx)
    }

    /// The WQE's index in its queue.
    #[inline]
    pub(crate) fn wqe_counter(self) -> u16 {
        u16::from_be(field!(self, wqe_counter))
    }

    /// The opcode of the work request and the number of the queue pair.
    #[inline]
    fn sop_qpn(self) -> u32 {
        u32::from_be(field!(self, sop_drop_qpn))
    }

    #[inline]
    pub(crate) fn qp_num(self) -> u32 {
        self.sop_qpn() & NUMBER
    }

    #[inline]
    pub(crate) fn byte_len(self) -> u32 {
        u32::from_be(field!(self, byte_cnt))
    }

    /// Immediate data, the invalidated key or the P_Key index, in wire order.
    #[inline]
    pub(crate) fn immediate(self) -> u32 {
        field!(self, imm_inval_pkey)
    }

    /// Service level, GRH and number of the sender's queue pair.
    #[inline]
    pub(crate) fn flags_rqpn(self) -> u32 {
        u32::from_be(field!(self, flags_rqpn))
    }

    #[inline]
    pub(crate) fn src_qp(self) -> u32 {
        self.flags_rqpn() & NUMBER
    }

    #[inline]
    pub(crate) fn sl(self) -> u8 {
        (self.flags_rqpn() >> 24 & 0xf) as u8
    }

    #[inline]
    pub(crate) fn slid(self) -> u16 {
        u16::from_be(field!(self, slid))
    }

    #[inline]
    pub(crate) fn dlid_path_bits(self) -> u8 {
        field!(self, ml_path) & 0x7f
    }

    #[inline]
    pub(crate) fn cvlan(self) -> u16 {
        u16::from_be(field!(self, vlan_info))
    }

    #[inline]
    pub(crate) fn flow_tag(self) -> u32 {
        self.sop_qpn() & NUMBER
    }

    /// `IBV_WC_IP_CSUM_OK` for an IPv4 packet with valid checksums.
    #[cold]
    #[inline(never)]
    fn ip_csum_flag(self) -> u32 {
        let valid = field!(self, hds_ip_ext) & abi::CHECKSUMS_OK == abi::CHECKSUMS_OK;
        let layer3 = field!(self, l4_hdr_type_etc) >> 2 & 3;
        match valid && layer3 == abi::LAYER3_IPV4 {
            true => flags::IP_CSUM_OK,
            false => 0,
        }
    }

    /// The device's clock when the CQE was written; undefined for a failure.
    #[inline]
    pub(crate) fn time(self) -> u64 {
        // SAFETY: as in `field`; aligned, as the CQE is.
        u64::from_be(unsafe {
            let at = self.at.cast::<u8>().add(offset_of!(Cqe, timestamp));
            at.cast::<u64>().read_volatile()
        })
    }

    #[inline]
    pub(crate) fn app(self) -> u8 {
        field!(self, app)
    }

    /// The operation of tag matching ([`abi::tag_op`]).
    #[inline]
    pub(crate) fn app_op(self) -> u8 {
        field!(self, app_op)
    }

    /// The entry of the matched tag.
    pub(crate) fn app_info(self) -> u16 {
        u16::from_be(field!(self, app_info))
    }

    /// For a change of tags: whether it succeeded, and how many unexpected messages the
    /// device counts as handled.
    pub(crate) fn tag_change(self) -> (bool, u16) {
        let at = self.at.cast::<TagCqe>().as_ptr();
        // SAFETY: as in `field`; the structure begins the CQE.
        let (success, phase) = unsafe {
            (
                (&raw const (*at).success).read_volatile(),
                (&raw const (*at).hw_phase_cnt).read_volatile(),
            )
        };
        let success = u32::from_be(success) & abi::TAG_SUCCESS != 0;
        (success, u16::from_be(phase))
    }

    /// Tag and private data of a message with a tag.
    pub(crate) fn tag(self) -> (u64, u32) {
        // SAFETY: as in `field`; the header begins the CQE.
        let header = unsafe { self.at.cast::<TagHeader>().read_volatile() };
        (u64::from_be(header.tag), u32::from_be(header.app_ctx))
    }

    /// The vendor's syndrome and the syndrome of a failure.
    fn syndromes(self) -> (u8, u8) {
        let bytes = field!(self, timestamp);
        (bytes[VENDOR_SYNDROME], bytes[SYNDROME])
    }

    /// Returns whether a receive failed with a page fault (on-demand paging). The
    /// peer sends the message again, which takes another receive.
    pub(crate) fn is_page_fault(self, op_own: u8) -> bool {
        op_own >> 4 == cqe_opcode::RESP_ERR
            && self.syndromes() == (syndrome::VENDOR_PAGE_FAULT, syndrome::REMOTE_ABORTED)
    }
}

/// The fields that the decoder determines. A sink reads the others from the CQE.
#[derive(Clone, Copy, Debug)]
pub struct Decoded {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) wc_flags: u32,
    pub(crate) byte_len: u32,
    pub(crate) vendor_err: u32,
}

/// Destination of the fields of a completion.
pub trait CompletionSink {
    /// Takes a completion.
    #[doc(hidden)]
    fn put(&mut self, cqe: CqeRef, decoded: Decoded);
}

impl CompletionSink for MaybeUninit<WorkCompletion> {
    #[inline]
    fn put(&mut self, cqe: CqeRef, decoded: Decoded) {
        let mut wc = WorkCompletion {
            wr_id: decoded.wr_id,
            status: decoded.status,
            opcode: decoded.opcode,
            vendor_err: decoded.vendor_err,
            byte_len: decoded.byte_len,
            wc_flags: decoded.wc_flags,
            qp_num: cqe.qp_num(),
            ..WorkCompletion::default()
        };
        if decoded.opcode & opcode::RECV != 0 {
            // One field for immediate data, invalidated key and P_Key index.
            let immediate = cqe.immediate();
            if decoded.wc_flags & flags::WITH_IMM != 0 {
                wc.ex = immediate;
            } else if decoded.wc_flags & flags::WITH_INV != 0 {
                wc.ex = u32::from_be(immediate);
            } else {
                wc.pkey_index = u32::from_be(immediate) as u16;
            }
            let flags_rqpn = cqe.flags_rqpn();
            wc.src_qp = flags_rqpn & NUMBER;
            wc.sl = (flags_rqpn >> 24 & 0xf) as u8;
            wc.slid = cqe.slid();
            wc.dlid_path_bits = cqe.dlid_path_bits();
        }
        self.write(wc);
    }
}

/// A completion with its time in ticks of the device's clock (undefined for a
/// failure).
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct TimedCompletion {
    /// The completion.
    pub completion: WorkCompletion,
    /// The time.
    pub time: u64,
}

impl CompletionSink for MaybeUninit<TimedCompletion> {
    #[inline]
    fn put(&mut self, cqe: CqeRef, decoded: Decoded) {
        let time = cqe.time();
        let mut completion = MaybeUninit::uninit();
        completion.put(cqe, decoded);
        // SAFETY: a sink is written by `put`.
        let completion = unsafe { completion.assume_init() };
        self.write(TimedCompletion { completion, time });
    }
}

/// Whether a CQE consumed a receive.
pub(crate) fn is_receive(op_own: u8) -> bool {
    matches!(
        op_own >> 4,
        cqe_opcode::RESP_WR_IMM
            | cqe_opcode::RESP_SEND
            | cqe_opcode::RESP_SEND_IMM
            | cqe_opcode::RESP_SEND_INV
            | cqe_opcode::RESP_ERR
    )
}

/// Decodes a CQE into `sink`, and completes its work request. `op_own` is its last
/// byte; `status` is the result of [`scatter`], 0 for a CQE without data.
#[inline(always)]
pub(crate) fn decode(
    qps: &mut QpTable,
    cqe: CqeRef,
    op_own: u8,
    status: u32,
    sink: &mut impl CompletionSink,
) -> Result<(), CompletionError> {
    decode_of::<false>(qps, cqe, op_own, status, sink)
}

/// [`decode`]; with `TAGS` also unmatched receives of a shared queue with tags.
// `always`: without it the cursor takes up to 29 instructions more, a poll 15.
#[inline(always)]
fn decode_of<const TAGS: bool>(
    qps: &mut QpTable,
    cqe: CqeRef,
    op_own: u8,
    status: u32,
    sink: &mut impl CompletionSink,
) -> Result<(), CompletionError> {
    let success = |wr_id, opcode, wc_flags, byte_len| Decoded {
        wr_id,
        status,
        opcode,
        wc_flags,
        byte_len,
        vendor_err: 0,
    };
    let decoded = match op_own >> 4 {
        cqe_opcode::REQ => {
            let queues = sender(qps, cqe)?;
            let (opcode, wc_flags, byte_len) = request(queues, cqe)?;
            success(complete_send(queues, cqe)?, opcode, wc_flags, byte_len)
        }
        kind @ (cqe_opcode::RESP_SEND
        | cqe_opcode::RESP_SEND_IMM
        | cqe_opcode::RESP_SEND_INV
        | cqe_opcode::RESP_WR_IMM) => {
            let queues = receiver(qps, cqe)?;
            let (wr_id, checksum) = complete_receive::<TAGS>(queues, cqe)?;
            let opcode = match kind {
                cqe_opcode::RESP_WR_IMM => opcode::RECV_RDMA_WITH_IMM,
                _ => opcode::RECV,
            };
            let mut wc_flags = match kind {
                cqe_opcode::RESP_SEND => checksum,
                cqe_opcode::RESP_SEND_INV => flags::WITH_INV,
                _ => flags::WITH_IMM,
            };
            if cqe.flags_rqpn() & GRH != 0 {
                wc_flags |= flags::GRH;
            }
            success(wr_id, opcode, wc_flags, cqe.byte_len())
        }
        kind @ (cqe_opcode::REQ_ERR | cqe_opcode::RESP_ERR) => {
            cold_path();
            // Of a failure the opcode is undefined, but programs tell receives by it.
            let (wr_id, opcode) = match kind {
                cqe_opcode::REQ_ERR => (complete_send(sender(qps, cqe)?, cqe)?, opcode::SEND),
                _ => {
                    let (wr_id, ..) = complete_receive::<TAGS>(receiver(qps, cqe)?, cqe)?;
                    (wr_id, opcode::RECV)
                }
            };
            let (vendor, syndrome) = cqe.syndromes();
            Decoded {
                status: status_of(syndrome),
                vendor_err: vendor.into(),
                ..success(wr_id, opcode, 0, 0)
            }
        }
        _ => return Err(unknown_opcode(cqe, op_own)),
    };
    sink.put(cqe, decoded);
    Ok(())
}

/// As [`decode`], for any work request: also for a raw WQE
/// ([`SendQueue::push_raw`](crate::SendQueue::push_raw)), and for a failed change of tags.
pub(crate) fn decode_any(
    qps: &mut QpTable,
    cqe: CqeRef,
    op_own: u8,
    status: u32,
    sink: &mut impl CompletionSink,
) -> Result<(), CompletionError> {
    let Err(error) = decode_of::<true>(qps, cqe, op_own, status, sink) else {
        return Ok(());
    };
    let failed = match op_own >> 4 {
        cqe_opcode::REQ => false,
        cqe_opcode::REQ_ERR => true,
        _ => return Err(error),
    };
    let queues = sender(qps, cqe)?;
    let slot = cqe.wqe_counter();
    let (vendor, syndrome) = cqe.syndromes();
    let failure = |wr_id, opcode| Decoded {
        wr_id,
        status: status_of(syndrome),
        opcode,
        wc_flags: 0,
        byte_len: 0,
        vendor_err: vendor.into(),
    };
    let shared = queues.shared.as_deref().filter(|_| failed);
    if let Some(wr_id) = shared.and_then(|shared| tags::fail(queues, shared, slot)) {
        sink.put(cqe, failure(wr_id, opcode::SEND));
        return Ok(());
    }
    if !queues.raw_wqe {
        return Err(error);
    }
    let found = queues.sends.find_marked(slot.into());
    let found = found.ok_or(error)?;
    let decoded = match failed {
        true => failure(found.wr_id, opcode::RAW_WQE),
        false => {
            // The opcode of a raw WQE may be unknown.
            let (_, wc_flags, byte_len) = request(queues, cqe).unwrap_or_default();
            Decoded {
                wr_id: found.wr_id,
                status,
                opcode: opcode::RAW_WQE,
                wc_flags,
                byte_len,
                vendor_err: 0,
            }
        }
    };
    queues.sends.complete(found);
    sink.put(cqe, decoded);
    Ok(())
}

/// Resolves the queue pair of a send CQE.
#[inline]
fn sender(qps: &mut QpTable, cqe: CqeRef) -> Result<&QpQueues, CompletionError> {
    qps.sender(cqe.uidx_field())
        .ok_or_else(|| unknown_queue(cqe))
}

/// Resolves the queue pair of a receive CQE.
#[inline]
fn receiver(qps: &mut QpTable, cqe: CqeRef) -> Result<&QpQueues, CompletionError> {
    qps.receiver(cqe.uidx_field())
        .ok_or_else(|| unknown_queue(cqe))
}

/// Completes the WQE of a CQE, and all before it in the send queue. The poster may reuse
/// their slots at once: read them first.
#[inline]
fn complete_send(queues: &QpQueues, cqe: CqeRef) -> Result<u64, CompletionError> {
    complete(&queues.sends, cqe)
}

/// Completes the receive of a CQE. Returns its identifier, and `IBV_WC_IP_CSUM_OK` for a
/// packet with valid checksums.
#[inline(always)]
fn complete_receive<const TAGS: bool>(
    queues: &QpQueues,
    cqe: CqeRef,
) -> Result<(u64, u32), CompletionError> {
    if queues.plain_receives && !(TAGS && (queues.shared.is_some() || queues.out_of_order)) {
        return Ok((complete(&queues.receives, cqe)?, 0));
    }
    match &queues.shared {
        None if TAGS && queues.out_of_order => complete_out_of_order(queues, cqe),
        None => Ok((complete(&queues.receives, cqe)?, cqe.ip_csum_flag())),
        Some(shared) => {
            let slot = cqe.wqe_counter();
            let wr_id = complete_shared(shared, slot).ok_or_else(|| unknown_request(slot))?;
            Ok((wr_id, 0))
        }
    }
}

/// Completes a receive of a queue that completes in any order.
#[inline(never)]
fn complete_out_of_order(queues: &QpQueues, cqe: CqeRef) -> Result<(u64, u32), CompletionError> {
    let slot = cqe.wqe_counter();
    let found = (queues.receives.find_any(slot.into())).ok_or_else(|| unknown_request(slot))?;
    queues.receives.complete_any(found);
    let checksum = match queues.checksums {
        true => cqe.ip_csum_flag(),
        false => 0,
    };
    Ok((found.wr_id, checksum))
}

/// Completes a receive of a shared queue.
#[inline(never)]
fn complete_shared(shared: &SrqEntries, slot: u16) -> Option<u64> {
    shared.enter().take(slot)
}

#[inline(always)]
fn complete(queue: &Outstanding, cqe: CqeRef) -> Result<u64, CompletionError> {
    let slot = cqe.wqe_counter();
    let found = (queue.find(slot.into())).ok_or_else(|| unknown_request(slot))?;
    queue.complete(found);
    Ok(found.wr_id)
}

/// Opcode, flags and length of a completed work request of the send queue.
#[inline]
fn request(queues: &QpQueues, cqe: CqeRef) -> Result<(u32, u32, u32), CompletionError> {
    let request = (cqe.sop_qpn() >> 24) as u8;
    match request {
        abi::opcode::SEND => Ok((opcode::SEND, 0, 0)),
        abi::opcode::RDMA_WRITE => Ok((opcode::RDMA_WRITE, 0, 0)),
        _ => other_request(queues, cqe, request),
    }
}

/// Slow path of [`request`]: neither a send nor a write.
#[inline(never)]
fn other_request(
    queues: &QpQueues,
    cqe: CqeRef,
    request: u8,
) -> Result<(u32, u32, u32), CompletionError> {
    Ok(match request {
        abi::opcode::SEND_INVAL => (opcode::SEND, 0, 0),
        abi::opcode::SEND_IMM => (opcode::SEND, flags::WITH_IMM, 0),
        abi::opcode::TSO => (opcode::TSO, 0, 0),
        abi::opcode::RDMA_WRITE_IMM => (opcode::RDMA_WRITE, flags::WITH_IMM, 0),
        abi::opcode::RDMA_READ => (opcode::RDMA_READ, 0, cqe.byte_len()),
        abi::opcode::ATOMIC_CS => (opcode::COMP_SWAP, 0, 8),
        abi::opcode::ATOMIC_FA => (opcode::FETCH_ADD, 0, 8),
        abi::opcode::SET_PSV if queues.send.keys == KeyChanges::Layouts => {
            (opcode::KEY_LAYOUT, 0, 0)
        }
        abi::opcode::NOP if queues.sig_pipelining => {
            return match queues.cancelled_opcode(cqe.wqe_counter()) {
                abi::opcode::SEND => Ok((opcode::SEND, 0, 0)),
                abi::opcode::RDMA_WRITE => Ok((opcode::RDMA_WRITE, 0, 0)),
                abi::opcode::NOP => Err(unknown_opcode(cqe, cqe_opcode::REQ << 4)),
                cancelled => other_request(queues, cqe, cancelled),
            };
        }
        abi::opcode::MMO if queues.memcpy => (opcode::MEMCPY, 0, 0),
        // Bind, invalidate or layout: the poster stored which in the second slot.
        abi::opcode::UMR => {
            let second = u32::from(cqe.wqe_counter()).wrapping_add(1);
            match queues.sends.noted(second) as u32 {
                opcode::LOCAL_INV => (opcode::LOCAL_INV, 0, 0),
                opcode::KEY_LAYOUT if queues.send.keys == KeyChanges::Layouts => {
                    (opcode::KEY_LAYOUT, 0, 0)
                }
                _ => (opcode::BIND_MW, 0, 0),
            }
        }
        _ => return Err(unknown_opcode(cqe, cqe_opcode::REQ << 4)),
    })
}

/// Scatters the data in a CQE to its work request's memory, and clears it from
/// the CQE. Returns the completion's status. `wide` is the first half of a CQE of
/// 128 bytes.
///
/// # Safety
/// The lists of outstanding work requests name valid memory.
pub(crate) unsafe fn scatter(
    qps: &mut QpTable,
    cqe: &mut Cqe,
    op_own: u8,
    wide: Option<&[u8; 64]>,
) -> Result<u32, CompletionError> {
    let mut first = [0; 32];
    let data = if op_own & abi::CQE_SCATTER_64 != 0 {
        wide.map(|wide| &wide[..])
    } else {
        // SAFETY: a CQE has 64 bytes and no padding; any bytes are valid fields.
        let fields = unsafe { &mut *(&raw mut *cqe).cast::<[u8; 32]>() };
        std::mem::swap(&mut first, fields);
        Some(&first[..])
    };
    // SAFETY: `cqe` is borrowed until the end of this function.
    let cqe = unsafe { CqeRef::new(NonNull::from(cqe), false) };
    let slot = cqe.wqe_counter();
    let data = |byte_len: u32| data?.get(..byte_len as usize);
    let fits = if op_own >> 4 == cqe_opcode::REQ {
        let queues = sender(qps, cqe)?;
        let (_, _, byte_len) = request(queues, cqe)?;
        let outstanding = queues.sends.find(slot.into());
        let outstanding = match outstanding {
            None if queues.raw_wqe => queues.sends.find_marked(slot.into()),
            outstanding => outstanding,
        };
        outstanding.ok_or_else(|| unknown_request(slot))?;
        // SAFETY: as the caller says; it is outstanding.
        let scatter = |data: &[u8]| unsafe { queues.scatter_send(slot, data) };
        queues.scatter_to_cqe && data(byte_len).is_some_and(scatter)
    } else {
        let queues = receiver(qps, cqe)?;
        let outstanding = match &queues.shared {
            None if queues.out_of_order => {
                let found = queues.receives.find_any(slot.into());
                found.map(|found| found.wr_id)
            }
            None => queues.receives.find(slot.into()).map(|found| found.wr_id),
            Some(shared) => shared.enter().find(slot),
        };
        outstanding.ok_or_else(|| unknown_request(slot))?;
        // SAFETY: as the caller says; it is outstanding.
        let scatter = |data: &[u8]| unsafe {
            match &queues.shared {
                None => queues.scatter_receive(slot, data),
                Some(shared) => shared.scatter(slot, data),
            }
        };
        queues.scatter_to_cqe && data(cqe.byte_len()).is_some_and(scatter)
    };
    Ok(if fits { 0 } else { status::LOC_LEN_ERR })
}

#[cold]
fn unknown_queue(cqe: CqeRef) -> CompletionError {
    let user_index = user_index(cqe.uidx_field());
    CompletionError::UnknownQueue { user_index }
}

#[cold]
pub(crate) fn unknown_request(slot: u16) -> CompletionError {
    CompletionError::UnknownRequest { slot }
}

#[cold]
fn unknown_opcode(cqe: CqeRef, op_own: u8) -> CompletionError {
    CompletionError::UnknownOpcode {
        completion: op_own >> 4,
        request: (cqe.sop_qpn() >> 24) as u8,
    }
}
