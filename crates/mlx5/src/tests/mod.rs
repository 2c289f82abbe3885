//! The queues against a handwritten device, whose offsets are literal here, not those of
//! `abi`.

mod clock;
mod completion;
mod decode;
mod device_memory;
mod devx;
mod dynamic;
mod empty_check;
mod hostile;
mod import;
mod ioctl;
mod keys;
mod layouts;
mod objects;
mod packets;
mod protection;
mod qp_table;
mod raw;
mod resize;
mod send;
mod session;
mod shared;
mod tags;
mod xrc;

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use uverbs::{QpCap, Sge};

use crate::context::UserIndex;
use crate::plan::{RecvPlan, SendPlan};
use crate::uar::DoorbellRegister;
use crate::{
    Address, CompletionError, CompletionSink, CqeRing, Data, Opcode, PostError, QpQueues,
    RecvQueue, SendFlags, SendQueue, SendWr, Service, SrqEntries, TimedCompletion, WorkCompletion,
};

pub(crate) use crate::hostile::LIMITS;

/// The QP number of every queue pair in the tests.
pub const QPN: u32 = 0xab_cdef;

pub fn cap(wr: u32, sge: u32, inline: u32) -> QpCap {
    QpCap {
        max_send_wr: wr,
        max_recv_wr: wr,
        max_send_sge: sge,
        max_recv_sge: sge,
        max_inline_data: inline,
    }
}

pub fn qp_queues(
    index: u32,
    service: Service,
    cap: &QpCap,
    shared: Option<Arc<SrqEntries>>,
) -> Arc<QpQueues> {
    // As small as possible, so that queues wrap often.
    let send = SendPlan::new(cap, service, &LIMITS, crate::KeyChanges::None, 0).unwrap();
    qp_queues_with_plan(index, service, send, cap, shared)
}

pub fn qp_queues_with_plan(
    index: u32,
    service: Service,
    send: SendPlan,
    cap: &QpCap,
    shared: Option<Arc<SrqEntries>>,
) -> Arc<QpQueues> {
    let recv = match shared {
        Some(_) => RecvPlan::default(),
        None => RecvPlan::new(cap, &LIMITS).unwrap(),
    };
    Arc::new(
        QpQueues::new(
            UserIndex::detached(index),
            service,
            send,
            recv,
            shared,
            None,
        )
        .unwrap(),
    )
}

/// Reads the next completion with its time; skips a malformed one. Its CQE is not released.
///
/// # Safety
/// As for [`CqeRing::poll`].
pub unsafe fn read_timed(ring: &mut CqeRing) -> Option<Result<TimedCompletion, CompletionError>> {
    let mut out = MaybeUninit::<TimedCompletion>::uninit();
    // SAFETY: as the caller says.
    match unsafe { ring.next(&mut out) } {
        Ok(false) => None,
        // SAFETY: it was written.
        Ok(true) => Some(Ok(unsafe { out.assume_init() })),
        Err(error) => {
            ring.skip();
            Some(Err(error))
        }
    }
}

/// As [`read_timed`], without its time.
///
/// # Safety
/// As there.
pub unsafe fn read(ring: &mut CqeRing) -> Option<Result<WorkCompletion, CompletionError>> {
    // SAFETY: as the caller says.
    Some(unsafe { read_timed(ring) }?.map(|timed| timed.completion))
}

/// Polls; skips a malformed completion.
///
/// # Safety
/// As for [`CqeRing::poll`].
pub unsafe fn poll<S: CompletionSink>(
    ring: &mut CqeRing,
    out: &mut [S],
) -> Result<usize, CompletionError> {
    // SAFETY: as the caller says.
    let result = unsafe { ring.poll(out) };
    if result.is_err() {
        ring.skip();
    }
    result
}

/// A work request with that list.
pub fn request(wr_id: u64, opcode: Opcode, flags: SendFlags, list: &[Sge]) -> SendWr<'_, Address> {
    SendWr {
        data: Data::Sges(list),
        ..SendWr::new(wr_id, opcode, flags)
    }
}

/// Adds a work request to the batch.
pub fn push(queue: &mut SendQueue, wr: &SendWr<'_, Address>) -> Result<(), PostError> {
    // SAFETY: inline data of a test is readable.
    unsafe { queue.push(wr) }
}

/// Adds a signalled send without data to the batch.
pub fn push_send(queue: &mut SendQueue, wr_id: u64) -> Result<(), PostError> {
    push(
        queue,
        &SendWr::new(wr_id, Opcode::SEND, SendFlags::SIGNALED),
    )
}

/// Posts a send on the queue pair whose user index is 70, and completes it.
pub fn complete_one(pair: &mut TestQp, device: &mut Device, wr_id: u64) {
    let slot = pair.record(1) as u16;
    pair.send.begin();
    push_send(&mut pair.send, wr_id).unwrap();
    // SAFETY: there is no data.
    unsafe { pair.send.publish() };
    device.write_cqe(&TestCqe {
        user_index: 70,
        slot,
        request: 0x0a,
        ..TestCqe::default()
    });
}

/// A queue pair without a kernel, and its memory as the device sees it.
pub struct TestQp {
    pub queues: Arc<QpQueues>,
    pub send: SendQueue,
    pub recv: RecvQueue,
    /// The BlueFlame register.
    pub register: NonNull<u64>,
}

impl TestQp {
    pub fn new(index: u32, service: Service, cap: &QpCap) -> Self {
        Self::with(qp_queues(index, service, cap, None), false)
    }

    pub fn with(queues: Arc<QpQueues>, signal_all: bool) -> Self {
        let (place, register) = DoorbellRegister::in_memory(256);
        Self {
            send: SendQueue::new(Arc::clone(&queues), QPN, signal_all, place),
            recv: RecvQueue::new(Arc::clone(&queues)),
            queues,
            register,
        }
    }

    /// Bytes of the send queue from `at` on, through its end.
    pub fn sent(&self, at: usize, length: usize) -> Vec<u8> {
        let size = self.queues.send.bytes();
        let byte = |i: usize| {
            // SAFETY: inside the queue.
            unsafe { self.queues.send_at().add((at + i) % size).read() }
        };
        (0..length).map(byte).collect()
    }

    /// Bytes of the receive queue.
    pub fn received(&self, at: usize, length: usize) -> Vec<u8> {
        assert!(at + length <= self.queues.recv.bytes());
        // SAFETY: inside the queue, as asserted.
        let byte = |i: usize| unsafe { self.queues.memory.entries.first().add(at + i).read() };
        (0..length).map(byte).collect()
    }

    /// Doorbell record 0 or 1.
    pub fn record(&self, index: usize) -> u32 {
        // SAFETY: there are two words.
        let at = unsafe { self.queues.memory.records.first().add(4 * index) };
        // SAFETY: as above, aligned.
        u32::from_be(unsafe { at.cast::<u32>().read() })
    }

    /// A word of the register.
    pub fn blue_flame_word(&self, word: usize) -> u64 {
        assert!(word < 64);
        // SAFETY: inside the page that stands in for it.
        u64::from_be(unsafe { self.register.add(word).read() })
    }
}

pub fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap())
}

pub fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The contents of a CQE that the device writes.
#[derive(Clone, Copy, Default)]
pub struct TestCqe {
    pub opcode: u8,
    pub user_index: u32,
    pub slot: u16,
    pub request: u8,
    pub byte_count: u32,
    /// The time; only without an error.
    pub time: u64,
    pub immediate: u32,
    pub flags_rqpn: u32,
    pub slid: u16,
    /// For a packet: the valid checksums, and its headers.
    pub checksum: [u8; 2],
    pub path: u8,
    pub syndrome: u8,
    pub vendor: u8,
    /// Bits 2 and 3 of the last byte.
    pub scatter: u8,
}

impl TestCqe {
    pub fn bytes(&self) -> [u8; 64] {
        let mut bytes = [0u8; 64];
        bytes[17] = self.path;
        bytes[22..24].copy_from_slice(&self.slid.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.flags_rqpn.to_be_bytes());
        bytes[28..30].copy_from_slice(&self.checksum);
        bytes[32..36].copy_from_slice(&self.user_index.to_be_bytes());
        bytes[36..40].copy_from_slice(&self.immediate.to_be_bytes());
        bytes[44..48].copy_from_slice(&self.byte_count.to_be_bytes());
        bytes[48..56].copy_from_slice(&self.time.to_be_bytes());
        if self.opcode > 12 {
            bytes[54] = self.vendor;
            bytes[55] = self.syndrome;
        }
        let word = u32::from(self.request) << 24 | QPN;
        bytes[56..60].copy_from_slice(&word.to_be_bytes());
        bytes[60..62].copy_from_slice(&self.slot.to_be_bytes());
        bytes[63] = self.opcode << 4 | self.scatter;
        bytes
    }
}

/// The device's side of a completion queue.
pub struct Device {
    entries: NonNull<u8>,
    records: NonNull<u8>,
    capacity: u32,
    /// Bytes of an entry.
    size: usize,
    written: u32,
}

// SAFETY: the memory is the ring's, which the tests keep; it is not bound to a thread.
unsafe impl Send for Device {}

impl Device {
    pub fn of(ring: &CqeRing) -> Self {
        Self {
            entries: ring.entries(),
            records: ring.records().first(),
            capacity: ring.capacity(),
            size: ring.format().bytes(),
            written: 0,
        }
    }

    pub fn write_cqe(&mut self, what: &TestCqe) {
        self.write(what.bytes());
    }

    /// Writes the resize CQE, and continues in new entries.
    pub fn move_to(&mut self, entries: NonNull<u8>, capacity: u32) {
        let mut mark = [0; 64];
        mark[63] = 5 << 4;
        self.write(mark);
        (self.entries, self.capacity) = (entries, capacity);
    }

    /// Writes an entry with the owner bit of its round.
    pub fn write(&mut self, mut bytes: [u8; 64]) {
        let round = (self.written / self.capacity) & 1;
        bytes[63] = bytes[63] & !1 | round as u8;
        self.put(self.written, bytes);
        self.written += 1;
    }

    /// Writes to the last 64 bytes of the entry at `at`.
    pub fn put(&mut self, at: u32, bytes: [u8; 64]) {
        let at = (at % self.capacity) as usize * self.size + self.size - 64;
        // SAFETY: in an entry of the queue.
        unsafe { self.entries.add(at).cast::<[u8; 64]>().write(bytes) };
    }

    /// Writes to the first 64 bytes of the next entry, which has 128.
    pub fn put_before(&mut self, bytes: [u8; 64]) {
        assert_eq!(self.size, 128);
        let at = (self.written % self.capacity) as usize * 128;
        // SAFETY: in an entry of the queue.
        unsafe { self.entries.add(at).cast::<[u8; 64]>().write(bytes) };
    }

    /// What the other side has consumed, as its doorbell record says.
    pub fn consumed(&self) -> u32 {
        self.record(0)
    }

    /// Doorbell record 0 or 1.
    pub fn record(&self, index: usize) -> u32 {
        // SAFETY: there are two words.
        u32::from_be(unsafe { self.records.add(4 * index).cast::<u32>().read() })
    }
}
