//! The same crate on a ConnectX that is played: its queues are in this process's
//! memory, and where the device reads and writes is counted here.
//!
//! softhca cannot serve these tests: it writes no malformed or stale completions, none out of
//! order with its doorbells, and fails no command after carrying it out.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use ringverbs::qp::{Init, Mtu, QueuePairBuilder, ReadyToReceive, ReadyToSend, State};
use ringverbs::raw::{Flags, SendRequest, Sge, WindowBind};
use ringverbs::{
    AccessFlags, AhAttr, Buffer, Completion, CompletionQueue, Context, Error, FlushRange, FlushTo,
    PacketQueue, ProtectionDomain, QueuePair, RemoteAddr, SharedReceiveQueue, Status, Transport,
    WindowType, WorkRequest,
};
use uverbs::Errno;
use uverbs::abi::ids::*;
use uverbs::abi::write::{CMD_FLAG_EXTENDED, ExQueryDeviceResp, QueryQpResp, cmd};
use uverbs::discovery::DriverId;
use uverbs::kernel::fake::{DRIVER, FakeKernel, Target};

use device_testing::rxe::kernel::{CREATE_CQ, CREATE_QP};

const GET_CONTEXT: Target = Target::Method(OBJECT_DEVICE, METHOD_GET_CONTEXT);
const MODIFY_QP: Target = Target::Write(cmd::CMD_MODIFY_QP);
const QUERY_QP: Target = Target::Write(cmd::CMD_QUERY_QP);
const CREATE_SRQ: Target = Target::Method(OBJECT_SRQ, METHOD_SRQ_CREATE);

/// Opcodes of completions.
pub(crate) const SENT: u8 = 0;
pub(crate) const RECEIVED: u8 = 2;
pub(crate) const SEND_FAILED: u8 = 13;
/// The opcode of a send's work request.
const SEND: u8 = 0x0a;
/// The bit of a completion that has the data in it.
const WITH_DATA: u8 = 4;
/// Where completion queues are armed, in the first page of registers.
const ARM: usize = 0x20;
/// Registers, of which each page has numbers for four, and two: the first of all,
/// which takes doorbells only; one that queue pairs share; one of their own.
const DOORBELLS: u32 = 0;
const SHARED: u32 = 5;
const OWN: u32 = 24;
/// Bytes of a register's half.
const HALF: usize = 256;

/// What the driver was told of a queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Queues {
    entries: usize,
    records: usize,
    /// Entries of a completion queue.
    count: u32,
    recv_bytes: usize,
    flags: u32,
    pub(crate) user_index: u32,
}

impl Queues {
    fn of(told: &[u8]) -> Self {
        let word = |at: usize| u64::from_ne_bytes(told[at..at + 8].try_into().unwrap()) as usize;
        Self {
            entries: word(0),
            records: word(8),
            ..Self::default()
        }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.entries + offset)
    }

    /// Doorbell record 0 or 1.
    fn record(&self, index: usize) -> u32 {
        let at = std::ptr::with_exposed_provenance::<u32>(self.records + index * 4);
        // SAFETY: the queue is alive, and has two of them there.
        u32::from_be(unsafe { at.read_volatile() })
    }
}

#[derive(Default)]
struct DriverState {
    cqs: Vec<Queues>,
    qps: Vec<Queues>,
    srqs: Vec<Queues>,
}

pub(crate) struct World {
    pub(crate) cq: CompletionQueue,
    pub(crate) domain: ProtectionDomain,
    context: Context,
    raised: u32,
    /// What the device's clock says.
    time: u64,
    driver_state: Arc<Mutex<DriverState>>,
    fake: Arc<FakeKernel>,
    registers: File,
    /// The number of the register that the next queue pair is given.
    register: Arc<AtomicU32>,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

impl World {
    pub(crate) fn new(entries: u32) -> Self {
        let fake = FakeKernel::new();
        // SAFETY: a name, and no flags.
        let fd = unsafe { libc::memfd_create(c"registers".as_ptr(), 0) };
        // SAFETY: new, and nobody else's.
        let mut registers = unsafe { File::from_raw_fd(fd) };
        registers.write_all(&[0; 8 * 4096]).unwrap();
        // SAFETY: the file is in this value, which drops it last.
        let context = unsafe {
            let kernel = Box::new(Arc::clone(&fake));
            uverbs::Context::from_borrowed_fd(kernel, registers.as_raw_fd(), DRIVER)
        };
        let mut answer = [0u8; 72];
        let mut set = |at: usize, value: &[u8]| answer[at..at + value.len()].copy_from_slice(value);
        set(4, &512u32.to_ne_bytes());
        set(8, &16u32.to_ne_bytes());
        set(16, &1024u16.to_ne_bytes());
        set(18, &512u16.to_ne_bytes());
        for at in [20, 24, 28] {
            set(at, &(1u32 << 15).to_ne_bytes());
        }
        set(44, &[1]);
        set(60, &1u32.to_ne_bytes());
        fake.on(GET_CONTEXT, move |reply| {
            reply.set_driver_out(&answer);
            Ok(())
        });
        let driver_state: Arc<Mutex<DriverState>> = Arc::default();
        let cqs = Arc::clone(&driver_state);
        fake.on(CREATE_CQ, move |reply| {
            let cqe = reply.call().u32(ATTR_CREATE_CQ_CQE).unwrap();
            let mut queue = Queues::of(reply.call().driver_in());
            queue.count = cqe + 1;
            cqs.lock().unwrap().cqs.push(queue);
            reply.set(ATTR_CREATE_CQ_RESP_CQE, &cqe.to_ne_bytes());
            reply.set_driver_out(&[0x99, 0, 0, 0, 0, 0, 0, 0]);
            Ok(())
        });
        let qps = Arc::clone(&driver_state);
        let register = Arc::new(AtomicU32::new(SHARED));
        let given = Arc::clone(&register);
        fake.on(CREATE_QP, move |reply| {
            let asked = reply.call().driver_in();
            let mut queue = Queues::of(asked);
            queue.recv_bytes = (word(asked, 20) as usize) << word(asked, 24);
            queue.flags = word(asked, 28);
            queue.user_index = word(asked, 32);
            let number = {
                let mut driver_state = qps.lock().unwrap();
                driver_state.qps.push(queue);
                driver_state.qps.len() as u32
            };
            reply.set(ATTR_CREATE_QP_RESP_CAP, &[0; 20]);
            reply.set(ATTR_CREATE_QP_RESP_QP_NUM, &number.to_ne_bytes());
            let register = given.load(Ordering::Relaxed).to_ne_bytes();
            reply.set_driver_out(&[&register[..], &[0; 36]].concat());
            Ok(())
        });
        let srqs = Arc::clone(&driver_state);
        fake.on(CREATE_SRQ, move |reply| {
            let queue = Queues::of(reply.call().driver_in());
            srqs.lock().unwrap().srqs.push(queue);
            for (asked, got) in [
                (ATTR_CREATE_SRQ_MAX_WR, ATTR_CREATE_SRQ_RESP_MAX_WR),
                (ATTR_CREATE_SRQ_MAX_SGE, ATTR_CREATE_SRQ_RESP_MAX_SGE),
            ] {
                let value = reply.call().u32(asked).unwrap();
                reply.set(got, &value.to_ne_bytes());
            }
            reply.set_driver_out(&[0x44, 0, 0, 0, 0, 0, 0, 0]);
            Ok(())
        });
        // SAFETY: the context is given away; nothing of it is mapped but pages of
        // a file that stays as long as it is.
        let context = unsafe { Context::over_as(context, DriverId::MLX5) }.unwrap();
        let cq = context.completion_queue().entries(entries).build().unwrap();
        let domain = context.alloc_pd().unwrap();
        Self {
            cq,
            domain,
            context,
            raised: 0,
            time: 0,
            driver_state,
            fake,
            registers,
            register,
        }
    }

    pub(crate) fn queue_pair(&self, srq: Option<&SharedReceiveQueue>) -> (QueuePair, Queues) {
        let mut builder = self.domain.queue_pair(Transport::Reliable, &self.cq);
        if let Some(srq) = srq {
            builder = builder.srq(srq);
        }
        self.build(builder)
    }

    fn build(&self, builder: QueuePairBuilder) -> (QueuePair, Queues) {
        let mut qp = builder.send_depth(8).recv_depth(8).build().unwrap();
        connect(&mut qp);
        let queues = *self.driver_state.lock().unwrap().qps.last().unwrap();
        (qp, queues)
    }

    /// A raw packet queue, to whose completion queue the device then writes.
    pub(crate) fn packet_queue(&mut self, frame_size: usize) -> (PacketQueue, Queues) {
        const QUERY: Target = Target::Write(CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE);
        self.fake.on(QUERY, |reply| {
            let mut answer = ExQueryDeviceResp::default();
            answer.response_length = size_of_val(&answer) as u32;
            reply.set_core_out(&answer);
            Ok(())
        });
        let builder = self.domain.packet_queue().frame_size(frame_size);
        let queue = builder.send_depth(8).recv_depth(4).build().unwrap();
        let mut driver_state = self.driver_state.lock().unwrap();
        driver_state.cqs.remove(0);
        (queue, *driver_state.qps.last().unwrap())
    }

    /// Another completion queue, with times.
    fn take_times(&mut self) {
        let cq = self.context.completion_queue().entries(15).timestamps();
        self.cq = cq.build().unwrap();
        self.driver_state.lock().unwrap().cqs.remove(0);
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.domain.alloc(64).unwrap().into_buffer();
        buffer.copy_from(bytes).unwrap();
        buffer
    }

    /// The device writes a completion.
    pub(crate) fn raise(&mut self, qp: &Queues, opcode: u8, slot: u16, length: u32) {
        self.raise_with(qp, opcode, slot, length, 0, &[]);
    }

    fn raise_with(
        &mut self,
        qp: &Queues,
        opcode: u8,
        slot: u16,
        length: u32,
        bits: u8,
        data: &[u8],
    ) {
        let mut bytes = [0u8; 64];
        bytes[48..56].copy_from_slice(&self.time.to_be_bytes());
        bytes[..data.len()].copy_from_slice(data);
        bytes[32..36].copy_from_slice(&qp.user_index.to_be_bytes());
        bytes[44..48].copy_from_slice(&length.to_be_bytes());
        if opcode == SEND_FAILED {
            // A remote access error.
            bytes[55] = 0x13;
        }
        bytes[56] = SEND;
        bytes[59] = 7;
        bytes[60..62].copy_from_slice(&slot.to_be_bytes());
        bytes[63] = opcode << 4 | bits;
        self.write(&bytes, None);
    }

    /// The device writes an entry: the next one, unless it is told another. The
    /// owner bit is turned as the round is.
    pub(crate) fn write(&mut self, bytes: &[u8; 64], elsewhere: Option<u32>) {
        let cq = self.driver_state.lock().unwrap().cqs[0];
        let mut bytes = *bytes;
        bytes[63] ^= (self.raised / cq.count) as u8 & 1;
        let at = elsewhere.unwrap_or(self.raised) % cq.count;
        // SAFETY: an entry of the queue, which is alive.
        unsafe {
            cq.at(at as usize * 64)
                .cast::<[u8; 64]>()
                .write_volatile(bytes)
        };
        self.raised += u32::from(elsewhere.is_none());
    }

    fn poll(&mut self) -> Option<Completion> {
        self.cq.poll_one().unwrap()
    }

    /// What the reader has given back.
    fn consumed(&self) -> u32 {
        self.driver_state.lock().unwrap().cqs[0].record(0)
    }

    /// What was written to a register: the beginnings of its two halves.
    fn written(&self, register: u32) -> [[u8; 64]; 2] {
        let (page, which) = (register / 4, register % 4);
        let at = page as usize * 4096 + 0x800 + which as usize * 2 * HALF;
        [at, at + HALF].map(|at| {
            let mut bytes = [0; 64];
            (self.registers.read_exact_at(&mut bytes, at as u64)).unwrap();
            bytes
        })
    }

    /// The last that asked for an event.
    fn armed(&self) -> u64 {
        let mut bytes = [0; 8];
        (self.registers.read_exact_at(&mut bytes, ARM as u64)).unwrap();
        u64::from_be_bytes(bytes)
    }
}

fn connect(qp: &mut QueuePair) {
    qp.transition(Init::reliable(1, AccessFlags::empty()))
        .unwrap();
    let path = AhAttr::default();
    qp.transition(ReadyToReceive::reliable(path, 1, 0, Mtu::Bytes1024))
        .unwrap();
    qp.transition(ReadyToSend::reliable(0)).unwrap();
}

#[test]
fn operations_complete_with_what_they_own() {
    let mut world = World::new(16);
    let (mut qp, queues) = world.queue_pair(None);
    qp.receive(world.buffer(b""), 1).unwrap();
    qp.send(world.buffer(b"five!"), 2).unwrap();
    // Both queues' doorbell records, and the entry that was sent.
    assert_eq!((queues.record(0), queues.record(1)), (1, 1));
    // SAFETY: the send queue begins behind the receive queue, and is alive.
    let entry = unsafe { queues.at(queues.recv_bytes).cast::<[u8; 64]>().read() };
    assert_eq!((entry[3], entry[7] & 0x3f), (SEND, 2));
    assert_eq!(entry[16..20], 5u32.to_be_bytes());
    assert!(world.poll().is_none());
    world.raise(&queues, SENT, 0, 0);
    world.raise(&queues, RECEIVED, 0, 5);
    let sent = world.poll().unwrap();
    assert_eq!((sent.token, sent.status()), (2, Status::SUCCESS));
    let mut received = world.poll().unwrap();
    assert_eq!((received.token, received.qp_num), (1, 7));
    assert_eq!(received.take_buffer().unwrap().len(), 5);
    assert!(world.poll().is_none());
    assert_eq!((qp.in_flight(), world.consumed()), ((0, 0), 2));
    // One that failed.
    qp.send(world.buffer(b"more"), 3).unwrap();
    world.raise(&queues, SEND_FAILED, 1, 0);
    let failed = world.poll().unwrap();
    assert_eq!((failed.token, failed.status()), (3, Status::REM_ACCESS_ERR));
    assert_eq!(failed.payload.into_buffer().unwrap()[..], *b"more");
}

/// More at once than are decoded ahead, and around the device's queue.
#[test]
fn completions_are_in_order_however_many_there_are() {
    let mut world = World::new(400);
    let (mut qp, queues) = world.queue_pair(None);
    let mut slot = 0u16;
    let mut out: Vec<_> = (0..64).map(|_| Completion::default()).collect();
    for _ in 0..400 {
        for token in 0..8 {
            qp.send(world.buffer(b"x"), token).unwrap();
            world.raise(&queues, SENT, slot, 0);
            slot = slot.wrapping_add(1);
        }
        assert_eq!(world.cq.poll(&mut out).unwrap(), 8);
        let tokens: Vec<_> = out[..8].iter().map(|done| done.token).collect();
        assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
    assert_eq!(world.consumed(), 3200);
    // 300 that nobody has read, of a shared queue's receives.
    let builder = world.domain.shared_receive_queue().depth(300);
    let mut srq = builder.build().unwrap();
    let (_qp, queues) = world.queue_pair(Some(&srq));
    for token in 0..300 {
        srq.receive(world.buffer(b""), token).unwrap();
        world.raise(&queues, RECEIVED, token as u16, 0);
    }
    let mut tokens = Vec::new();
    loop {
        let count = world.cq.poll(&mut out).unwrap();
        if count == 0 {
            break;
        }
        tokens.extend(out[..count].iter().map(|done| done.token));
    }
    assert_eq!(tokens, (0..300).collect::<Vec<_>>());
    assert_eq!((srq.in_flight(), world.consumed()), (0, 3500));
}

#[test]
fn malformed_cqe_is_corruption_and_skipped() {
    let mut world = World::new(16);
    let (mut qp, queues) = world.queue_pair(None);
    let nobody = Queues {
        user_index: 0x1234,
        ..queues
    };
    let malformed = [
        (nobody, SENT, 0),
        // A slot where nothing is, and one that is too large.
        (queues, SENT, 3),
        (queues, SENT, u16::MAX),
        // Nothing was received, and of that kind there is none.
        (queues, RECEIVED, 0),
        (queues, 9, 0),
    ];
    qp.send(world.buffer(b"kept"), 5).unwrap();
    for (of, opcode, slot) in malformed {
        world.raise(&of, opcode, slot, 0);
        assert!(matches!(
            world.cq.poll_one(),
            Err(Error::Corruption { wr_id: 0, .. })
        ));
        world.raise(&of, opcode, slot, 0);
        let mut cursor = world.cq.cursor();
        assert!(matches!(
            cursor.next_entry(),
            Err(Error::Corruption { wr_id: 0, .. })
        ));
        assert!(cursor.next_entry().unwrap().is_none());
        drop(cursor);
        // Nobody's, for those that number their operations themselves.
        world.raise(&of, opcode, slot, 0);
        assert_eq!(world.cq.poll_raw(8, |_| panic!("nothing has completed")), 0);
    }
    assert_eq!(qp.in_flight(), (1, 0));
    world.raise(&queues, SENT, 0, 0);
    assert_eq!(world.poll().unwrap().token, 5);
    // Once only.
    world.raise(&queues, SENT, 0, 0);
    assert!(world.cq.poll_one().is_err());
}

/// Data goes where the operation says, or nowhere: its memory may be somebody
/// else's when the completion is read.
#[test]
fn no_data_in_cqes() {
    let mut world = World::new(16);
    let (mut qp, queues) = world.queue_pair(None);
    assert_eq!(queues.flags & 2, 0);
    let there = world.domain.alloc(64).unwrap().into_buffer();
    let addr = there.as_ptr();
    qp.receive(there, 1).unwrap();
    world.raise_with(&queues, RECEIVED, 0, 8, WITH_DATA, b"smuggled");
    let done = world.poll().unwrap();
    assert_eq!(done.status(), Status::LOC_LEN_ERR);
    // SAFETY: the completion has the buffer.
    assert_eq!(unsafe { addr.cast::<[u8; 8]>().read_volatile() }, [0; 8]);
}

/// Its number is nobody else's as long as completions that name it may be
/// there, and they are stale.
#[test]
fn completions_of_a_destroyed_queue_pair_are_stale() {
    let mut world = World::new(16);
    let (mut old, gone) = world.queue_pair(None);
    for token in 0..3 {
        old.send(world.buffer(b"old"), token).unwrap();
    }
    world.raise(&gone, SENT, 0, 0);
    assert_eq!(world.poll().unwrap().token, 0);
    world.raise(&gone, SENT, 1, 0);
    drop(old);
    world.raise(&gone, SENT, 2, 0);
    let (mut new, queues) = world.queue_pair(None);
    assert_ne!(queues.user_index, gone.user_index);
    new.send(world.buffer(b"new"), 9).unwrap();
    world.raise(&queues, SENT, 0, 0);
    let done = world.poll().unwrap();
    assert_eq!(done.token, 9);
    assert_eq!(done.payload.into_buffer().unwrap()[..], *b"new");
    assert!(world.poll().is_none());
    // All were read: the number is free.
    let (_next, queues) = world.queue_pair(None);
    assert_eq!(queues.user_index, gone.user_index);
    // ... and what names it now, of the old one, is nothing.
    world.raise(&gone, SENT, 2, 0);
    assert!(world.cq.poll_one().is_err());
}

/// A queue pair that goes while the queue is never empty is forgotten all the
/// same, when as many have been read as could be its.
#[test]
fn nonempty_queue_releases_destroyed_queue_pairs() {
    let mut world = World::new(300);
    let (old, gone) = world.queue_pair(None);
    let (mut qp, queues) = world.queue_pair(None);
    drop(old);
    let mut out = Completion::default();
    let mut raised = 0u16;
    let mut ahead = 0;
    let mut free_at = None;
    for step in 0..1200 {
        // More than are decoded ahead stay there.
        while ahead < 200 {
            let slot = raised;
            raised += 1;
            ahead += 1;
            // Only the newest 8 can be outstanding: the others are malformed.
            let _ = qp.send(world.buffer(b"x"), 1);
            world.raise(&queues, SENT, slot, 0);
        }
        let _ = world.cq.poll(std::slice::from_mut(&mut out));
        ahead -= 1;
        let (probe, now) = world.queue_pair(None);
        if now.user_index == gone.user_index {
            free_at = Some(step);
            break;
        }
        std::mem::forget(probe);
    }
    let at = free_at.expect("the number is never free again");
    assert!(at > 300, "free after {at} while completions may be there");
}

/// Receives of a shared queue are its own, whoever used them.
#[test]
fn destroyed_queue_pair_returns_shared_receives() {
    let mut world = World::new(16);
    let mut srq = world.domain.shared_receive_queue().build().unwrap();
    let (qp, queues) = world.queue_pair(Some(&srq));
    srq.receive(world.buffer(b""), 4).unwrap();
    world.raise(&queues, RECEIVED, 0, 3);
    drop(qp);
    let mut done = world.poll().unwrap();
    assert_eq!((done.token, done.take_buffer().unwrap().len()), (4, 3));
    assert_eq!(srq.in_flight(), 0);
    drop(done);
    srq.close().unwrap();
}

#[test]
fn queue_is_rearmed_after_each_event() {
    let world = World::new(16);
    let channel = world.context.completion_channel().unwrap();
    let mut cq = (world.context.completion_queue().entries(8))
        .channel(&channel)
        .build()
        .unwrap();
    assert!(!cq.arm(false).unwrap());
    assert_eq!(world.armed() >> 32, 0);
    assert_eq!(world.armed() as u32, 0x99);
    // The kernel tells of an event by the queue's number.
    let fd = channel.as_raw_fd();
    world.fake.push_read(fd, Ok(cq.id().to_ne_bytes().to_vec()));
    assert!(channel.try_event().unwrap().unwrap().is_of(&cq));
    assert!(!cq.arm(true).unwrap());
    assert_eq!(world.armed() >> 32, 1 << 28 | 1 << 24);
    // An event of a destroyed queue is stale.
    let id = cq.id();
    drop(cq);
    world.fake.push_read(fd, Ok(id.to_ne_bytes().to_vec()));
    assert_eq!(channel.try_event().unwrap().unwrap().queue, id);
}

/// Of a batch by the doorbell, of one alone by all of it, where the register takes
/// that: alone or in a queue pair's turn, whether it has that register for itself.
#[test]
fn every_post_updates_the_doorbell_record() {
    for register in [DOORBELLS, SHARED, OWN] {
        let mut world = World::new(16);
        world.register.store(register, Ordering::Relaxed);
        let (mut qp, queues) = world.queue_pair(None);
        let entry = |block: usize| {
            // SAFETY: the send queue begins behind the receive queue, and is alive.
            unsafe {
                queues
                    .at(queues.recv_bytes + block * 64)
                    .cast::<[u8; 64]>()
                    .read()
            }
        };
        let rung = |block| std::array::from_fn(|at| if at < 8 { entry(block)[at] } else { 0 });
        let alone = |block| match register {
            DOORBELLS => rung(block),
            _ => entry(block),
        };
        // Without halves it is always the first.
        let next = usize::from(register != DOORBELLS);
        qp.send(world.buffer(b"one"), 1).unwrap();
        assert_eq!(world.written(register)[0], alone(0), "{register}");
        let request = WorkRequest::send(ringverbs::Inline(b"two"));
        qp.post(request.token(2)).unwrap();
        assert_eq!(world.written(register)[next], alone(1), "{register}");
        qp.batch(|to| {
            for token in [3, 4] {
                to.post(WorkRequest::send(world.buffer(b"more")).token(token))?;
            }
            Ok::<_, ringverbs::PostError<_>>(())
        })
        .unwrap();
        // The rest is what was there before.
        assert_eq!(world.written(register)[0][..8], entry(3)[..8]);
        assert_eq!(queues.record(1), 4);
        for slot in 0..4 {
            world.raise(&queues, SENT, slot, 0);
            assert_eq!(world.poll().unwrap().token, u64::from(slot) + 1);
        }
    }
}

/// Completions decoded before a malformed CQE are returned first, then the error,
/// also if the queue is empty by then.
#[test]
fn malformed_cqe_is_reported_in_order() {
    let mut world = World::new(16);
    let (mut qp, queues) = world.queue_pair(None);
    qp.send(world.buffer(b"x"), 1).unwrap();
    world.raise(&queues, SENT, 0, 0);
    world.raise(&queues, SENT, 3, 0);
    assert_eq!(world.poll().unwrap().token, 1);
    assert!(matches!(
        world.cq.poll_one(),
        Err(Error::Corruption { wr_id: 0, .. })
    ));
    assert!(world.poll().is_none());
}

#[test]
fn reset_queue_pair_starts_over() {
    let mut world = World::new(16);
    let (mut qp, queues) = world.queue_pair(None);
    for token in 0..3 {
        qp.send(world.buffer(b"x"), token).unwrap();
        world.raise(&queues, SENT, token as u16, 0);
        assert_eq!(world.poll().unwrap().token, token);
    }
    qp.receive(world.buffer(b""), 8).unwrap();
    world.raise(&queues, RECEIVED, 0, 0);
    assert_eq!(world.poll().unwrap().token, 8);
    assert_eq!((queues.record(0), queues.record(1)), (1, 3));
    let attr = ringverbs::qp::QpAttr {
        qp_state: State::RESET,
        ..Default::default()
    };
    qp.modify(&attr, ringverbs::qp::QpAttrMask::STATE).unwrap();
    assert_eq!((queues.record(0), queues.record(1)), (0, 0));
    connect(&mut qp);
    qp.send(world.buffer(b"x"), 7).unwrap();
    qp.receive(world.buffer(b""), 8).unwrap();
    assert_eq!((queues.record(0), queues.record(1)), (1, 1));
    world.raise(&queues, SENT, 0, 0);
    assert_eq!(world.poll().unwrap().token, 7);
}

/// A reset that is said to have failed and was done: entries of before are not
/// the device's again.
#[test]
fn failed_reset_counts_as_done() {
    for (state, reset) in [(0, true), (3, false)] {
        let mut world = World::new(16);
        let (mut qp, queues) = world.queue_pair(None);
        for token in 0..3 {
            qp.receive(world.buffer(b""), token).unwrap();
            world.raise(&queues, RECEIVED, token as u16, 0);
            assert_eq!(world.poll().unwrap().token, token);
        }
        world.fake.on(MODIFY_QP, |_| Err(Errno::new(libc::EIO)));
        world.fake.on(QUERY_QP, move |reply| {
            reply.set_core_out(&QueryQpResp {
                qp_state: state,
                ..QueryQpResp::default()
            });
            Ok(())
        });
        let attr = ringverbs::qp::QpAttr {
            qp_state: State::RESET,
            ..Default::default()
        };
        let error = qp.modify(&attr, ringverbs::qp::QpAttrMask::STATE);
        assert_eq!(error.unwrap_err().errno(), libc::EIO);
        assert_eq!(qp.state() == State::RESET, reset);
        assert_eq!(queues.record(0), if reset { 0 } else { 3 });
        assert_eq!(qp.receive(world.buffer(b""), 9).is_err(), reset);
    }
}

/// After a panic in the middle of a reset nothing is posted before the next reset, which
/// sets the ring position.
#[test]
fn interrupted_reset_is_done_again() {
    let mut world = World::new(16);
    let (mut qp, queues) = world.queue_pair(None);
    for token in 0..3 {
        qp.receive(world.buffer(b""), token).unwrap();
        world.raise(&queues, RECEIVED, token as u16, 0);
        assert_eq!(world.poll().unwrap().token, token);
    }
    let mut to = |state| {
        let attr = ringverbs::qp::QpAttr {
            qp_state: state,
            ..Default::default()
        };
        qp.modify(&attr, ringverbs::qp::QpAttrMask::STATE)
    };
    world
        .fake
        .on(MODIFY_QP, |_| resume_unwind(Box::new("halfway")));
    let reset = AssertUnwindSafe(|| drop(to(State::RESET)));
    assert!(catch_unwind(reset).is_err());
    world.fake.on(MODIFY_QP, |_| Ok(()));
    to(State::INIT).unwrap_err();
    to(State::RTS).unwrap_err();
    assert_eq!(queues.record(0), 3);
    to(State::RESET).unwrap();
    assert_eq!(queues.record(0), 0);
    to(State::INIT).unwrap();
    qp.receive(world.buffer(b""), 9).unwrap();
    assert_eq!(queues.record(0), 1);
}

/// A bind, an unbind and an invalidation are work requests of three blocks, or
/// of two, each of which says what it changes.
#[test]
fn key_changes_are_written_with_their_operands() {
    let mut world = World::new(16);
    let builder = world.domain.queue_pair(Transport::Reliable, &world.cq);
    let (mut qp, queues) = world.build(builder.memory_windows());
    let region = world.domain.alloc_remote(4096, AccessFlags::MW_BIND);
    let region = region.unwrap();
    let word = |at: usize| {
        // SAFETY: the send queue begins behind the receive queue, and is alive.
        unsafe { queues.at(queues.recv_bytes + at).cast::<u32>().read() }.swap_bytes()
    };
    let mut block = 0;
    for kind in [WindowType::One, WindowType::Two] {
        let window = world.domain.memory_window(kind).unwrap();
        let before = window.rkey();
        let part = region.slice(64..1064).unwrap();
        let sge = part.raw_sge();
        let bind = WorkRequest::bind(&window, part, AccessFlags::REMOTE_WRITE);
        qp.post(bind.token(1)).unwrap();
        let at = block * 64;
        // Twelve segments; the window's key so far, and its next variant; the
        // queue pair, of type 2 alone; what it stands for.
        assert_eq!((word(at) & 0xff, word(at + 4) & 0x3f), (0x25, 12));
        assert_eq!(word(at + 12), before);
        let owner = match kind {
            WindowType::One => 0xff_ffff,
            WindowType::Two => qp.qp_num(),
        };
        assert_eq!(word(at + 68), owner << 8 | window.rkey() & 0xff);
        assert_eq!(word(at + 128), 1000);
        assert_eq!(word(at + 132), sge.lkey);
        assert_eq!(
            u64::from(word(at + 136)) << 32 | u64::from(word(at + 140)),
            sge.addr
        );
        world.raise(&queues, SENT, block as u16, 0);
        let done = world.poll().unwrap();
        assert_eq!(done.operation, ringverbs::Operation::BindWindow);
        done.result.unwrap();
        block += 3;

        let bound = window.rkey();
        qp.post(match kind {
            WindowType::One => WorkRequest::unbind(&window),
            WindowType::Two => WorkRequest::local_invalidate(bound),
        })
        .unwrap();
        let at = block * 64;
        assert_eq!((word(at) & 0xff, word(at + 4) & 0x3f), (0x25, 8));
        assert_eq!(word(at + 12), bound);
        world.raise(&queues, SENT, block as u16, 0);
        world.poll().unwrap().result.unwrap();
        block += 2;
    }
    assert_eq!(queues.record(1), 10);
    // One byte too long: nothing is posted, so nothing stays behind.
    let large = world
        .domain
        .alloc_remote((2 << 30) + 1, AccessFlags::MW_BIND);
    let large = large.unwrap();
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let whole = || large.slice(..).unwrap();
    let bind = WorkRequest::bind(&window, whole(), AccessFlags::empty());
    let error = qp.post(bind).unwrap_err().error;
    assert!(matches!(error, Error::Limit { .. }), "{error}");
    let error = WindowBind::new(&window, &whole(), AccessFlags::empty());
    assert!(matches!(error, Err(Error::Limit { .. })));
    assert_eq!(queues.record(1), 10);
}

/// The time that the device wrote, of a queue with times, of what was done.
#[test]
fn timestamp_is_read_from_the_device() {
    let mut world = World::new(16);
    world.take_times();
    let (mut qp, queues) = world.queue_pair(None);
    for token in 0..3 {
        qp.send(world.buffer(b"x"), token).unwrap();
    }
    world.time = 0x0102_0304_0506_0708;
    for (slot, opcode) in [(0, SENT), (1, SENT), (2, SEND_FAILED)] {
        world.raise(&queues, opcode, slot, 0);
        world.time += 1;
    }
    let mut cursor = world.cq.cursor();
    for time in 0x0102_0304_0506_0708..0x0102_0304_0506_070a {
        let entry = cursor.next_entry().unwrap().unwrap();
        let fields = entry.result().unwrap();
        assert_eq!(fields.timestamp().unwrap().ticks(), time);
    }
    let failed = cursor.next_entry().unwrap().unwrap();
    assert_eq!(failed.result().unwrap_err().status, Status::REM_ACCESS_ERR);
}

#[test]
fn operations_missing_on_connectx_are_unsupported() {
    let world = World::new(16);
    let (mut qp, _) = world.queue_pair(None);
    let there = RemoteAddr::new(0x1000, 7);
    let refused = qp.post(WorkRequest::atomic_write(there, [0; 8]));
    let error = refused.unwrap_err().error;
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let (range, to) = (FlushRange::Bytes(8), FlushTo::GlobalVisibility);
    let raw = SendRequest::flush(1, there, range, to);
    let error = qp.raw_send().push(&raw).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    // What changes keys takes room that was not asked for.
    let window = world.domain.memory_window(WindowType::One).unwrap();
    for request in [
        WorkRequest::local_invalidate(9),
        WorkRequest::unbind(&window),
    ] {
        let error = qp.post(request).unwrap_err().error;
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
    let region = world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let part = region.slice(..).unwrap();
    let bind = WindowBind::new(&window, &part, AccessFlags::empty()).unwrap();
    for request in [
        SendRequest::bind_window(1, &bind),
        SendRequest::local_invalidate(1, 9),
    ] {
        let error = qp.raw_send().push(&request).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
    let large = world.domain.queue_pair(Transport::Reliable, &world.cq);
    let large = large.send_depth(1 << 20).build();
    assert!(
        matches!(
            large,
            Err(Error::Limit {
                asked: 0x10_0000,
                allowed: 0x8000,
                ..
            })
        ),
        "{large:?}"
    );
    assert_eq!(qp.in_flight(), (0, 0));
    // The queue goes on where it was.
    qp.send(world.buffer(b"x"), 1).unwrap();
}

/// Lists of none, one and two elements in one batch, each in its entry; and what
/// is refused leaves the batch as it was.
#[test]
fn receives_of_any_list_are_written_in_their_order() {
    let mut world = World::new(16);
    let builder = world.domain.queue_pair(Transport::Reliable, &world.cq);
    let (mut qp, queues) = world.build(builder.recv_pieces(2));
    let sge = |length| Sge {
        addr: 0x1000 + u64::from(length),
        length,
        lkey: 7,
    };
    // Length, key and address of a segment; what ends a list has no bytes and a
    // key that is none.
    let segment = |entry: usize, at: usize| {
        // SAFETY: an entry of two segments of the receive queue, which is alive.
        let bytes = unsafe { queues.at(entry * 32 + at * 16).cast::<[u8; 16]>().read() };
        let length = u32::from_be_bytes(bytes[..4].try_into().unwrap());
        let lkey = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
        (
            length,
            lkey,
            u64::from_be_bytes(bytes[8..].try_into().unwrap()),
        )
    };
    let written = |sge: Sge| (sge.length, sge.lkey, sge.addr);
    const END: (u32, u32, u64) = (0, 0x100, 0);
    let too_long = |list: &[Sge], error: Error| {
        assert!(matches!(error, Error::Limit { .. }), "{list:?}: {error}");
    };
    let two = [sge(3), sge(4)];
    let lists = [&[sge(1)][..], &two, &[], &[sge(0)], &[sge(5)]];
    let mut queue = qp.raw_receive().unwrap();
    for round in 0..5 {
        for (id, list) in lists.into_iter().enumerate() {
            queue.push(id as u64, list).unwrap();
            for list in [
                &[sge(1); 3][..],
                &[sge(1 << 31)],
                &[sge((1 << 31) - 1), sge(1)],
            ] {
                too_long(list, queue.push(9, list).unwrap_err());
            }
        }
        // SAFETY: there is no device.
        unsafe { queue.publish() };
        assert_eq!(queues.record(0), (round + 1) * 5);
        let entry = |n| (round as usize * 5 + n) % 8;
        for n in [0, 4] {
            assert_eq!(segment(entry(n), 0), written(lists[n][0]));
            assert_eq!(segment(entry(n), 1), END);
        }
        assert_eq!([0, 1].map(|at| segment(entry(1), at)), two.map(written));
        assert_eq!([2, 3].map(|n| segment(entry(n), 0)), [END; 2]);
        for n in 0..5 {
            world.raise(&queues, RECEIVED, (round * 5 + n) as u16, 0);
        }
        let mut ids = Vec::new();
        assert_eq!(world.cq.poll_raw(8, |entry| ids.push(entry.wr_id())), 5);
        assert_eq!(ids, [0, 1, 2, 3, 4]);
    }
    // As many as there is room for, in one batch; the one after it is refused.
    for id in 0..8 {
        queue.push(id, &two[..id as usize % 3]).unwrap();
    }
    for list in [&two[..1], &two] {
        let full = queue.push(8, list).unwrap_err();
        assert!(matches!(full, Error::QueueFull { capacity: 8 }), "{full}");
    }
    // A batch that was not published is gone.
    let _ = queue;
    let mut queue = qp.raw_receive().unwrap();
    queue.push(0, &two).unwrap();
    // SAFETY: there is no device.
    unsafe { queue.publish() };
    assert_eq!(queues.record(0), 26);
}

/// What a shared queue refuses is not in it.
#[test]
fn refused_shared_receives_are_returned() {
    let world = World::new(16);
    let builder = world.domain.shared_receive_queue().depth(3).pieces(2);
    let mut srq = builder.build().unwrap();
    let queue = world.driver_state.lock().unwrap().srqs[0];
    // An entry has room for three.
    let pieces: Vec<_> = (0..4).map(|_| world.buffer(b"")).collect();
    let refused = srq.receive(pieces, 1).unwrap_err();
    assert!(matches!(refused.error, Error::Limit { .. }));
    assert_eq!(refused.data.unwrap().len(), 4);
    for token in 0..u64::from(srq.capacity()) {
        srq.receive(world.buffer(b""), token).unwrap();
        assert_eq!(u64::from(queue.record(0)), token + 1);
    }
    let refused = srq.receive(world.buffer(b""), 9).unwrap_err();
    assert!(matches!(refused.error, Error::QueueFull { capacity: 3 }));
    assert!(refused.data.is_some());
    assert_eq!((srq.in_flight(), queue.record(0)), (3, 3));
}

/// Identifiers of the raw layer are the caller's.
#[test]
fn the_raw_layer_reads_and_writes() {
    let mut world = World::new(16);
    let (mut qp, queues) = world.queue_pair(None);
    let buffer = world.buffer(b"raw");
    let mut queue = qp.raw_send();
    for id in [77, 78] {
        let send = SendRequest::send(id).flags(Flags::SIGNALED);
        queue.push(&send.sges(&[buffer.raw_sge()])).unwrap();
    }
    // SAFETY: there is no device.
    unsafe { queue.publish().unwrap() };
    assert_eq!(queues.record(1), 2);
    world.raise(&queues, SENT, 0, 0);
    world.raise(&queues, SENT, 1, 0);
    let mut ids = Vec::new();
    assert_eq!(world.cq.poll_raw(1, |entry| ids.push(entry.wr_id())), 1);
    assert_eq!(world.cq.poll_raw(8, |entry| ids.push(entry.wr_id())), 1);
    assert_eq!(ids, [77, 78]);
}

/// The safe layer does not count what the raw layer has posted, so the device's
/// queue may be full when its own table is not.
#[test]
fn a_send_that_the_queue_has_no_room_for_is_refused_when_it_is_posted() {
    let mut world = World::new(16);
    let builder = world.domain.queue_pair(Transport::Reliable, &world.cq);
    let (mut qp, queues) = world.build(builder.memory_windows());
    let depth = qp.capacity().max_send_wr;
    let buffer = world.buffer(b"raw");
    let list = [buffer.raw_sge()];
    let mut queue = qp.raw_send();
    for id in 0..depth {
        let send = SendRequest::send(id.into()).flags(Flags::SIGNALED);
        queue.push(&send.sges(&list)).unwrap();
    }
    let is_full = |error: Error| {
        assert!(matches!(error, Error::QueueFull { capacity } if capacity == depth));
    };
    is_full(queue.push(&SendRequest::send(99)).unwrap_err());
    // SAFETY: there is no device.
    unsafe { queue.publish().unwrap() };
    assert_eq!(queues.record(1), depth);
    let refused = qp.send(world.buffer(b"x"), 1).unwrap_err();
    assert_eq!(&refused.data.unwrap()[..], b"x");
    is_full(refused.error);
    let region = world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let before = window.rkey();
    let bind = || {
        let part = region.slice(..).unwrap();
        WorkRequest::bind(&window, part, AccessFlags::empty())
    };
    is_full(qp.post(bind()).unwrap_err().error);
    assert_eq!((window.rkey(), qp.in_flight().0), (before, 0));
    // The last one's completion is that of all.
    world.raise(&queues, SENT, depth as u16 - 1, 0);
    assert_eq!(world.cq.poll_raw(8, |_| ()), 1);
    qp.post(bind()).unwrap();
    qp.send(world.buffer(b"x"), 1).unwrap();
    assert_ne!(window.rkey(), before);
    assert_eq!((queues.record(1), qp.in_flight().0), (depth + 4, 2));
}

#[test]
fn data_that_an_operation_does_not_have_is_refused() {
    let world = World::new(16);
    let (mut qp, queues) = world.queue_pair(None);
    let there = RemoteAddr::new(0x1000, 7);
    let mut queue = qp.raw_send();
    for request in [
        SendRequest::read(1, there).immediate(1),
        SendRequest::fetch_add(1, there, 1).invalidate(1),
        SendRequest::write(1, there).invalidate(1),
        SendRequest::send(1).immediate(1).invalidate(1),
        SendRequest::send(1).invalidate(1).immediate(1),
        SendRequest::read(1, there).inline(b"data"),
    ] {
        let error = queue.push(&request).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
    // SAFETY: nothing was pushed.
    unsafe { queue.publish().unwrap() };
    assert_eq!(queues.record(1), 0);
}
