//! The queues of a queue pair: memory and outstanding work requests.

use std::ptr::NonNull;

use bitflags::bitflags;
use ring::{Mapping, Outstanding};

use crate::abi::{self, BLOCK, ControlSegment, DataSegment, INVALID_LKEY, SEGMENT};
use crate::context::UserIndex;
use crate::memory::{Purpose, QueueAllocator, QueueMemory};
use crate::plan::{RecvPlan, SendPlan};
use crate::qp::TsoLimits;
use crate::shared::SrqEntries;
use crate::{CreateError, Service};
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

bitflags! {
    /// Which completions of a queue pair a completion queue receives.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Role: u8 {
        /// Those of its send queue.
        const SEND = 1;
        /// Those of its receives.
        const RECEIVE = 2;
    }
}

/// The work queues of a queue pair, shared by posters and pollers. Owns their memory.
#[derive(Debug)]
pub struct QpQueues {
    user_index: UserIndex,
    pub(crate) service: Service,
    pub(crate) memory: QueueMemory,
    pub(crate) send: SendPlan,
    pub(crate) recv: RecvPlan,
    pub(crate) sends: Outstanding,
    pub(crate) receives: Outstanding,
    /// The shared receive queue, if there is one.
    pub(crate) shared: Option<Arc<SrqEntries>>,
    /// Whether CQEs may carry data.
    pub(crate) scatter_to_cqe: bool,
    /// Whether work requests may copy in local memory.
    pub(crate) memcpy: bool,
    /// Whether raw WQEs of the program may be posted.
    pub(crate) raw_wqe: bool,
    /// Whether posted work requests may be cancelled.
    pub(crate) sig_pipelining: bool,
    /// Whether the device computes and checks the checksums of packets.
    pub(crate) checksums: bool,
    /// Receives complete in any order. Receives of the queue pair's own queue are marked
    /// ([`Outstanding::post_marked`]), so that the fast path finds none.
    pub(crate) out_of_order: bool,
    /// Receives need no other decision to complete: there is no shared queue, and checksums
    /// are not checked. Also set for a shared queue with tags, so that the fast path finds
    /// no receives.
    pub(crate) plain_receives: bool,
    /// Bytes of a packet's headers that its WQE carries.
    pub(crate) inline_headers: usize,
    /// Limits of TSO.
    pub(crate) segmentation: TsoLimits,
    /// For raw packets, replaces the doorbell record of receives until
    /// [`RecvQueue::announce`](crate::RecvQueue::announce).
    pub(crate) unannounced: Option<Box<AtomicU32>>,
}

impl QpQueues {
    pub(crate) fn new(
        user_index: UserIndex,
        service: Service,
        send: SendPlan,
        recv: RecvPlan,
        shared: Option<Arc<SrqEntries>>,
        allocator: Option<(Purpose, &dyn QueueAllocator)>,
    ) -> Result<Self, CreateError> {
        let (purpose, allocator) = match allocator {
            Some((purpose, allocator)) => (purpose, Some(allocator)),
            None => (Purpose::QueuePair, None),
        };
        let packets = service.has_packets();
        let bytes = send_offset(service, &recv) + send.bytes();
        Ok(Self {
            user_index,
            service,
            memory: QueueMemory::new(bytes, purpose, allocator)?,
            sends: Outstanding::new(send.blocks).ok_or(CreateError::NoMemory)?,
            receives: Outstanding::new(recv.entries).ok_or(CreateError::NoMemory)?,
            send,
            recv,
            scatter_to_cqe: true,
            memcpy: false,
            raw_wqe: false,
            sig_pipelining: false,
            checksums: false,
            out_of_order: false,
            plain_receives: shared.as_ref().is_none_or(|shared| shared.has_tags()),
            inline_headers: 0,
            segmentation: TsoLimits::default(),
            unannounced: packets.then(Box::default),
            shared,
        })
    }

    /// Sets whether the device computes and checks the checksums of packets.
    pub(crate) fn set_checksums(&mut self, checksums: bool) {
        self.checksums = checksums;
        self.plain_receives &= !checksums;
    }

    /// Maximum number of outstanding receives of the queue pair's own receive queue.
    pub(crate) fn max_recv_wr(&self) -> u32 {
        match self.out_of_order && self.recv.entries > 1 {
            true => self.recv.entries / 2,
            false => self.recv.entries,
        }
    }

    /// Whether receives complete in any order.
    pub fn is_out_of_order(&self) -> bool {
        self.out_of_order
    }

    /// Whether it sends packets whose WQEs carry no headers, with computed checksums.
    pub(crate) fn plain_packets(&self) -> bool {
        self.service == Service::Packet && self.inline_headers == 0 && self.checksums
    }

    /// Whether it sends as another queue pair (IPoIB underlay).
    pub fn is_underlay(&self) -> bool {
        self.service == Service::Underlay
    }

    /// Whether it belongs to a DC initiator.
    pub fn is_dc_initiator(&self) -> bool {
        self.service == Service::DcInitiator
    }

    /// Whether its queue pair stops at a wrong signature.
    pub fn has_sig_pipelining(&self) -> bool {
        self.sig_pipelining
    }

    /// The user index.
    pub fn user_index(&self) -> u32 {
        self.user_index.get()
    }

    /// The send queue's memory; the receive queue's is before it.
    pub(crate) fn send_at(&self) -> NonNull<u8> {
        let offset = send_offset(self.service, &self.recv);
        // SAFETY: inside the mapping: both queues are.
        unsafe { self.memory.entries.first().add(offset) }
    }

    /// Writes data that came in a completion to where the receive in `slot`
    /// wants it. False if it does not fit.
    ///
    /// # Safety
    /// The receive's memory is valid, as whoever posted it has said.
    pub(crate) unsafe fn scatter_receive(&self, slot: u16, data: &[u8]) -> bool {
        if self.recv.entries == 0 {
            return data.is_empty();
        }
        let slot = u32::from(slot) & (self.recv.entries - 1);
        let entry = (slot as usize) << self.recv.shift;
        let segments = (0..self.recv.max_sge as usize).map(|i| {
            // SAFETY: inside the receive queue, by the mask and the plan.
            unsafe { read_segment(self.memory.entries.first().add(entry + i * SEGMENT)) }
        });
        // SAFETY: as the caller says.
        unsafe { scatter(segments, data) }
    }

    /// A word of the control segment of the WQE in the block `slot` of a send queue that
    /// is not empty.
    fn control_word(&self, slot: u16, at: usize) -> u32 {
        const _: () = assert!(size_of::<ControlSegment>() == SEGMENT && BLOCK % SEGMENT == 0);
        let mask = self.send.bytes() - 1;
        let begin = (usize::from(slot) * BLOCK) & mask;
        // SAFETY: inside the send queue: a block's first segment, of which `at` is a word.
        let word = unsafe {
            self.send_at()
                .add(begin + ((at % SEGMENT) & !3))
                .cast::<u32>()
        };
        // SAFETY: as above. Volatile: the slot is named by the device.
        u32::from_be(unsafe { word.read_volatile() })
    }

    /// The opcode of the work request that was cancelled in the block `slot`
    /// ([`SendQueue::cancel`](crate::SendQueue::cancel)).
    pub(crate) fn cancelled_opcode(&self, slot: u16) -> u8 {
        self.control_word(slot, offset_of!(ControlSegment, imm)) as u8
    }

    /// Writes data that came in a completion to where the read or atomic in
    /// the block `slot` wants it. False if it does not fit, or the work request
    /// there does not read.
    ///
    /// # Safety
    /// The work request's memory is valid, as whoever posted it has said.
    pub(crate) unsafe fn scatter_send(&self, slot: u16, data: &[u8]) -> bool {
        if self.send.blocks == 0 {
            return data.is_empty();
        }
        let mask = self.send.bytes() - 1;
        let begin = usize::from(slot) * BLOCK;
        let word = |at| self.control_word(slot, at);
        let before = match word(offset_of!(ControlSegment, opmod_idx_opcode)) as u8 {
            abi::opcode::RDMA_READ => 2,
            abi::opcode::ATOMIC_CS | abi::opcode::ATOMIC_FA => 3,
            _ => return false,
        };
        let before = before + usize::from(self.service.address());
        let segments = (word(offset_of!(ControlSegment, qpn_ds)) & 0x3f) as usize;
        let segments = (before..segments).map(|i| {
            let at = (begin + i * SEGMENT) & mask;
            // SAFETY: inside the send queue, by the mask.
            unsafe { read_segment(self.send_at().add(at)) }
        });
        // SAFETY: as the caller says.
        unsafe { scatter(segments, data) }
    }
}

/// Bytes from the receive queue to the send queue. Those of raw packets are two
/// objects of the device, each of its own pages.
fn send_offset(service: Service, recv: &RecvPlan) -> usize {
    match service.has_packets() {
        true => recv.bytes().next_multiple_of(Mapping::page_size()),
        false => recv.bytes(),
    }
}

/// Reads a data segment as length, key and address.
///
/// # Safety
/// `at` is aligned to a segment and readable.
pub(crate) unsafe fn read_segment(at: NonNull<u8>) -> (u32, u32, u64) {
    // SAFETY: by contract; any bytes are a segment.
    let segment = unsafe { at.cast::<DataSegment>().read_volatile() };
    (
        u32::from_be(segment.byte_count),
        u32::from_be(segment.lkey),
        u64::from_be(segment.addr),
    )
}

/// Writes `data` to the segments. Returns whether it fits.
///
/// # Safety
/// The segments, which are not empty, are of writable memory.
pub(crate) unsafe fn scatter(
    segments: impl Iterator<Item = (u32, u32, u64)>,
    mut data: &[u8],
) -> bool {
    for (length, key, address) in segments {
        if data.is_empty() || (length, key) == (0, INVALID_LKEY) {
            break;
        }
        let (part, rest) = data.split_at(data.len().min(length as usize));
        let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: as the caller says.
        unsafe { to.copy_from(part.as_ptr(), part.len()) };
        data = rest;
    }
    data.is_empty()
}
