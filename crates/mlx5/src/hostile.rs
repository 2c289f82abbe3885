//! A hostile device, which writes arbitrary CQEs, for the tests and the fuzzer.
//!
//! Whatever it writes, it cannot cause a panic, a completion of a work request that is not
//! outstanding, a second completion of the same work request, or a write outside of the
//! memory of a scatter/gather list.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use uverbs::QpCap;

use crate::context::UserIndex;
use crate::cq_ring::CqeFormat;
use crate::plan::{RecvPlan, SendPlan};
use crate::shared::SharedQueue;
use crate::tags::{TagChange, TagOperation};
use crate::uar::DoorbellRegister;
use crate::wc::{flags, opcode, status};
use crate::{
    CqeRing, CursorEntry, Data, Limits, Opcode, Operands, QpQueues, RecvQueue, Role, SendFlags,
    SendQueue, SendWr, Service, Sge, SrqEntries, WorkCompletion,
};

/// Limits of a device, for tests without one.
pub(crate) const LIMITS: Limits = Limits {
    max_send_entry: 1024,
    max_recv_entry: 512,
    max_send_blocks: 1 << 15,
    max_recv_wr: 1 << 15,
    max_srq_wr: 1 << 15,
    inline_headers: 0,
    ports: 1,
};

/// User index and QP number of the first queue pair.
const FIRST: u32 = 5;
/// Bytes of the memory that lists name, and of the guard areas around it.
const NAMED: usize = 128;
const AROUND: usize = 256;
const UNTOUCHED: u8 = 0xa5;

/// The script, read byte by byte; zeros after its end.
struct Script<'s>(&'s [u8]);

impl Script<'_> {
    fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn below(&mut self, end: u8) -> u8 {
        self.byte() % end
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte())
    }
}

/// A queue pair, and the identifiers of its outstanding work requests, oldest first.
struct TestQp {
    queues: Arc<QpQueues>,
    send: SendQueue,
    recv: RecvQueue,
    sends: Vec<u64>,
    receives: Vec<u64>,
}

impl TestQp {
    fn new(place: u32, shared: Option<&Arc<SrqEntries>>) -> Self {
        let cap = QpCap {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 0,
        };
        let service = match place {
            1 => Service::Datagram,
            _ => Service::ReliableConnection,
        };
        let send = SendPlan::new(&cap, service, &LIMITS, crate::KeyChanges::None, 0);
        let recv = match shared {
            Some(_) => RecvPlan::default(),
            None => RecvPlan::new(&cap, &LIMITS).expect("a small queue"),
        };
        let mut queues = QpQueues::new(
            UserIndex::detached(FIRST + place),
            service,
            send.expect("a small queue"),
            recv,
            shared.map(Arc::clone),
            None,
        )
        .expect("memory");
        queues.scatter_to_cqe = place != 2;
        let queues = Arc::new(queues);
        let (register, _) = DoorbellRegister::in_memory(256);
        Self {
            send: SendQueue::new(Arc::clone(&queues), FIRST + place, false, register),
            recv: RecvQueue::new(Arc::clone(&queues)),
            queues,
            sends: Vec::new(),
            receives: Vec::new(),
        }
    }
}

/// A shared receive queue with tags, and the identifiers of its outstanding work requests.
struct TagFixture {
    send: SendQueue,
    recv: SharedQueue,
    receives: Vec<u64>,
    /// Identifiers of the tags in the list, by handle.
    list: [Option<u64>; TAGS as usize + 1],
    /// Signalled changes, oldest first, with the handles of their tags.
    changes: Vec<(u64, TagChange, u32)>,
    /// All changes, oldest first. The first completion of a change ends it and all before.
    posted: Vec<u64>,
}

/// Tags of the list, and the user indices of its queue and of its changes.
const TAGS: u32 = 3;
const OF_TAGS: u32 = FIRST + 4;
const OF_CHANGES: u32 = FIRST + 5;

impl TagFixture {
    /// Creates the queue, and attaches it to `ring`.
    fn new(ring: &mut CqeRing) -> Self {
        let shared = SrqEntries::new(3, 2, &LIMITS, None).expect("a small queue");
        let shared = Arc::new(shared.with_tags(TAGS).expect("memory"));
        let cap = QpCap {
            max_send_wr: 4,
            max_send_sge: 1,
            ..QpCap::default()
        };
        let rc = Service::ReliableConnection;
        let send = SendPlan::new(&cap, rc, &LIMITS, crate::KeyChanges::None, 0);
        let queue_pairs = [
            (OF_TAGS, Service::Target, SendPlan::default(), Role::RECEIVE),
            (
                OF_CHANGES,
                rc,
                send.expect("a small queue"),
                Role::SEND | Role::RECEIVE,
            ),
        ];
        let [_, changes] = queue_pairs.map(|(index, service, send, role)| {
            let index = UserIndex::detached(index);
            let shared = Some(Arc::clone(&shared));
            let queues = QpQueues::new(index, service, send, RecvPlan::default(), shared, None);
            let queues = Arc::new(queues.expect("memory"));
            ring.attach(&queues, role).expect("memory");
            queues
        });
        let (register, _) = DoorbellRegister::in_memory(256);
        let mut recv = SharedQueue::new(shared);
        recv.reserve_tag_operations(4).expect("memory");
        Self {
            send: SendQueue::new(changes, OF_CHANGES, false, register),
            recv,
            receives: Vec::new(),
            list: [None; TAGS as usize + 1],
            changes: Vec::new(),
            posted: Vec::new(),
        }
    }

    /// Ends a change. Returns it and all before; empty if it had ended already.
    fn end(&mut self, wr_id: u64) -> Vec<u64> {
        let at = self.posted.iter().position(|posted| *posted == wr_id);
        at.map_or_else(Vec::new, |at| self.posted.drain(..=at).collect())
    }

    /// Ends a change whose work request failed. Returns whether it was outstanding.
    fn failed(&mut self, wr_id: u64) -> bool {
        let ended = self.end(wr_id);
        self.changes.retain(|(wr_id, change, handle)| {
            let stays = !ended.contains(wr_id);
            if let (TagChange::Add { .. }, false) = (change, stays) {
                self.list[*handle as usize] = None;
            }
            stays
        });
        !ended.is_empty()
    }

    /// Accounts for a completion of tag matching. Returns whether it was expected.
    fn done(&mut self, wc: &WorkCompletion) -> bool {
        let kind = wc.wc_flags & (flags::TM_MATCH | flags::TM_DATA_VALID);
        match wc.opcode {
            opcode::TM_ADD | opcode::TM_DEL | opcode::TM_SYNC => {
                let (wr_id, change, handle) = self.changes.remove(0);
                if let (TagChange::Remove(_), 0) = (change, wc.status) {
                    self.list[handle as usize] = None;
                }
                self.end(wr_id);
                wr_id == wc.wr_id
            }
            opcode::TM_RECV if kind != 0 => {
                // The completion of a removed tag only has an error status.
                let at = self.list.iter_mut().find(|id| **id == Some(wc.wr_id));
                match at {
                    Some(id) if kind & flags::TM_DATA_VALID != 0 => *id = None,
                    Some(_) => {}
                    None => assert_eq!(wc.status, status::GENERAL_ERR),
                }
                true
            }
            _ => {
                let at = self.receives.iter().position(|id| *id == wc.wr_id);
                at.map(|at| self.receives.remove(at)).is_some()
            }
        }
    }
}

/// Which completions of a queue pair the ring receives: of the third its sends only.
fn role_of(queues: &QpQueues) -> Role {
    match queues.user_index() - FIRST {
        2 => Role::SEND,
        _ => Role::SEND | Role::RECEIVE,
    }
}

/// All objects of a run.
struct Fixture<'s> {
    script: Script<'s>,
    /// The memory that lists name is in the middle.
    memory: Box<[u8; AROUND + NAMED + AROUND]>,
    pairs: [TestQp; 4],
    shared: SharedQueue,
    shared_receives: Vec<u64>,
    tagged: TagFixture,
    ring: CqeRing,
    /// Number of CQEs that the device has written.
    written: u32,
    next_id: u64,
}

/// Runs a script. Panics if the device violates a guarantee of the module.
pub fn completions(script: &[u8]) {
    let mut script = Script(script);
    let format = CqeFormat {
        shift: 6 + u32::from(script.below(2)),
        compresses: script.below(2) == 1,
    };
    let log2 = 1 + u32::from(script.below(4));
    let shared = SrqEntries::new(3, 2, &LIMITS, None).expect("a small queue");
    let shared = Arc::new(shared);
    let pairs = [None, None, None, Some(&shared)];
    let mut place = 0..;
    let mut ring = CqeRing::new(log2, format, None).expect("a small queue");
    let tagged = TagFixture::new(&mut ring);
    let mut fixture = Fixture {
        script,
        memory: Box::new([UNTOUCHED; AROUND + NAMED + AROUND]),
        pairs: pairs.map(|shared| TestQp::new(place.next().unwrap_or(0), shared)),
        shared: SharedQueue::new(shared),
        shared_receives: Vec::new(),
        tagged,
        ring,
        written: 0,
        next_id: 0,
    };
    for pair in &fixture.pairs {
        let attached = fixture.ring.attach(&pair.queues, role_of(&pair.queues));
        attached.expect("memory");
    }
    while !fixture.script.is_over() {
        fixture.step();
        let (before, rest) = fixture.memory.split_at(AROUND);
        let mut around = before.iter().chain(&rest[NAMED..]);
        assert!(around.all(|byte| *byte == UNTOUCHED), "a byte outside");
    }
}

impl Fixture<'_> {
    fn step(&mut self) {
        match self.script.below(24) {
            16..19 => self.post_change(),
            19 => self.post_tagged_receive(),
            20..24 => self.write_tag_cqe(),
            0..4 => self.post_send(),
            4..6 => self.post_receive(),
            6..10 => self.write_cqe(),
            10 => self.scribble(),
            11 => self.poll(),
            12 => self.step_cursor(),
            13 => {
                let mut wc = MaybeUninit::<WorkCompletion>::uninit();
                // SAFETY: lists name memory of this world's.
                match unsafe { self.ring.next(&mut wc) } {
                    // SAFETY: it was written.
                    Ok(true) => self.done(unsafe { wc.assume_init_ref() }),
                    Ok(false) => {}
                    Err(_) => self.ring.skip(),
                }
            }
            14 => self.ring.publish(),
            _ => self.change(),
        }
    }

    /// One or two elements of the memory that lists may name. Each ends at the end of its half.
    fn list(&mut self) -> ([Sge; 2], usize) {
        let begin = self.memory[AROUND..].as_mut_ptr().expose_provenance() as u64;
        let elements = std::array::from_fn(|i| {
            let length = self.script.below(NAMED as u8 / 2 + 1);
            Sge {
                addr: begin + ((i + 1) * NAMED / 2) as u64 - u64::from(length),
                length: length.into(),
                lkey: 1,
            }
        });
        (elements, 1 + usize::from(self.script.below(2)))
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn post_send(&mut self) {
        let ((mut list, count), wr_id) = (self.list(), self.id());
        let pair = &mut self.pairs[usize::from(self.script.below(4))];
        let operation = [
            Opcode::SEND,
            Opcode::RDMA_WRITE,
            Opcode::RDMA_READ,
            Opcode::ATOMIC_FETCH_AND_ADD,
        ];
        let operation = operation[usize::from(self.script.below(4))];
        if operation == Opcode::ATOMIC_FETCH_AND_ADD {
            // It has 8 bytes, whatever the list says.
            for element in &mut list {
                element.addr = element.addr + u64::from(element.length) - 8;
                element.length = 8;
            }
        }
        pair.send.begin();
        let wr = SendWr {
            operands: Operands::Atomic {
                compare_add: 1,
                swap: 0,
            },
            data: Data::Sges(&list[..count]),
            ..SendWr::new(wr_id, operation, SendFlags::SIGNALED)
        };
        // SAFETY: no inline data.
        if unsafe { pair.send.push(&wr) }.is_ok() {
            pair.sends.push(wr_id);
        }
        // SAFETY: lists name memory of this world's.
        unsafe { pair.send.publish() };
    }

    fn post_receive(&mut self) {
        let ((list, count), wr_id) = (self.list(), self.id());
        let list = &list[..count];
        let pair = &mut self.pairs[usize::from(self.script.below(4))];
        if pair.queues.shared.is_some() {
            let mut shared = self.shared.locked();
            if shared.push(wr_id, list).is_ok() {
                self.shared_receives.push(wr_id);
            }
            // SAFETY: lists name memory of this world's.
            unsafe { shared.publish() };
            return;
        }
        pair.recv.begin();
        if pair.recv.push(wr_id, list).is_ok() {
            pair.receives.push(wr_id);
        }
        // SAFETY: as above.
        unsafe { pair.recv.publish() };
    }

    /// A change of tags, mostly one that could be.
    fn post_change(&mut self) {
        let ((list, _), recv_id, wr_id) = (self.list(), self.id(), self.id());
        let change = match self.script.below(4) {
            0 => TagChange::Sync,
            1 => TagChange::Remove(self.script.below(TAGS as u8 + 2).into()),
            _ => TagChange::Add {
                wr_id: recv_id,
                tag: 1,
                mask: 1,
                memory: Some(list[1]),
            },
        };
        let operation = TagOperation {
            wr_id,
            signalled: self.script.below(2) == 1,
            handled: (self.script.below(2) == 1).then_some(1),
            change,
        };
        let tagged = &mut self.tagged;
        tagged.recv.entries().lock().lock();
        // SAFETY: the lock is taken; the list names memory of this world's.
        let pushed = unsafe {
            let pushed = tagged.recv.push_tag(&mut tagged.send, &operation);
            tagged.send.publish();
            pushed
        };
        tagged.recv.entries().lock().unlock();
        let Ok(handle) = pushed else {
            return;
        };
        match change {
            TagChange::Add { .. } => {
                let id = tagged.list[handle as usize].replace(recv_id);
                assert_eq!(id, None, "two tags of one entry");
            }
            TagChange::Remove(_) => {
                assert!(tagged.list[handle as usize].is_some(), "it was not there");
                if !operation.signalled {
                    tagged.list[handle as usize] = None;
                }
            }
            TagChange::Sync => {}
        }
        tagged.posted.push(wr_id);
        if operation.signalled {
            tagged.changes.push((wr_id, change, handle));
        }
    }

    fn post_tagged_receive(&mut self) {
        let ((list, count), wr_id) = (self.list(), self.id());
        let tagged = &mut self.tagged;
        let mut recv = tagged.recv.locked();
        if recv.push(wr_id, &list[..count]).is_ok() {
            tagged.receives.push(wr_id);
        }
        // SAFETY: lists name memory of this world's.
        unsafe { recv.publish() };
    }

    /// The device writes a completion of tag matching.
    fn write_tag_cqe(&mut self) {
        let mut bytes: [u8; 64] = std::array::from_fn(|at| at as u8);
        let index = OF_TAGS + u32::from(self.script.below(2));
        bytes[0] = self.script.byte();
        bytes[32..36].copy_from_slice(&index.to_be_bytes());
        bytes[40] = 1;
        bytes[41] = self.script.below(14);
        bytes[42..44].copy_from_slice(&u16::from(self.script.below(6)).to_be_bytes());
        bytes[44..48].copy_from_slice(&u32::from(self.script.byte()).to_be_bytes());
        bytes[60..62].copy_from_slice(&u16::from(self.script.below(5)).to_be_bytes());
        let kind = [6, 2, 3, 14][usize::from(self.script.below(4))];
        bytes[63] = kind << 4 | self.script.byte() & 0xc;
        let (at, owner) = self.place();
        bytes[63] = bytes[63] & !1 | owner;
        self.write(at, &bytes);
        self.written = self.written.wrapping_add(1);
    }

    /// The device writes a completion, mostly one that could be.
    fn write_cqe(&mut self) {
        let what = self.script.byte();
        let mut bytes: [u8; 64] = match what & 3 {
            0 => self.script.bytes(),
            _ => std::array::from_fn(|at| at as u8),
        };
        if what & 3 != 0 {
            bytes[32..36].copy_from_slice(&(FIRST + u32::from(self.script.below(6))).to_be_bytes());
            bytes[44..48].copy_from_slice(&u32::from(self.script.byte()).to_be_bytes());
            bytes[54] = [0x93, 0x6b][usize::from(what >> 2 & 1)];
            bytes[55] = [0x22, 0x05][usize::from(what >> 3 & 1)];
            bytes[56] = match what >> 4 & 7 {
                0..4 => [0x0a, 0x08, 0x10, 0x12][usize::from(what >> 4 & 3)],
                _ => self.script.byte(),
            };
            bytes[60..62].copy_from_slice(&u16::from(self.script.below(9)).to_be_bytes());
            let kind = [0, 1, 2, 3, 4, 13, 14, 5][usize::from(self.script.below(8))];
            bytes[63] = kind << 4 | self.script.byte() & 0xe;
        }
        let (at, owner) = self.place();
        bytes[63] = bytes[63] & !1 | owner;
        self.write(at, &bytes);
        self.written = self.written.wrapping_add(1);
    }

    /// Where the fields of the next completion are, and its owner bit.
    fn place(&self) -> (usize, u8) {
        let (format, capacity) = (self.ring.format(), self.ring.capacity());
        let slot = (self.written % capacity) as usize;
        let owner = (self.written / capacity) as u8 & 1;
        (slot * format.bytes() + format.before(), owner)
    }

    /// Writes to the entries.
    fn write(&mut self, at: usize, bytes: &[u8]) {
        let size = self.ring.format().bytes() * self.ring.capacity() as usize;
        let entries: NonNull<u8> = self.ring.entries();
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: in the entries, by the remainder; nobody else writes now.
            unsafe { entries.add((at + i) % size).write_volatile(*byte) };
        }
    }

    /// The device writes anything anywhere.
    fn scribble(&mut self) {
        let at = usize::from(self.script.byte()) * 8;
        let bytes: [u8; 8] = self.script.bytes();
        self.write(at, &bytes);
    }

    fn poll(&mut self) {
        let mut out = [MaybeUninit::<WorkCompletion>::uninit(); 5];
        let most = usize::from(self.script.below(5)) + 1;
        // SAFETY: lists name memory of this world's.
        match unsafe { self.ring.poll(&mut out[..most]) } {
            Ok(count) => {
                for wc in &out[..count] {
                    // SAFETY: that many were written.
                    self.done(unsafe { wc.assume_init_ref() });
                }
            }
            Err(_) => self.ring.skip(),
        }
    }

    /// Steps of a cursor, whose fields are read.
    fn step_cursor(&mut self) {
        let mut entry = CursorEntry::default();
        for _ in 0..=self.script.below(4) {
            // SAFETY: lists name memory of this world's.
            match unsafe { self.ring.next(&mut entry) } {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => {
                    self.ring.skip();
                    continue;
                }
            }
            // SAFETY: it was decoded, and nothing published since.
            let (byte_len, qp_num) = unsafe { (entry.byte_len(), entry.qp_num()) };
            self.done(&WorkCompletion {
                wr_id: entry.wr_id(),
                status: entry.status(),
                opcode: entry.opcode(),
                byte_len,
                wc_flags: entry.wc_flags(),
                qp_num,
                vendor_err: entry.vendor_err(),
                ..WorkCompletion::default()
            });
        }
        self.ring.publish();
    }

    /// A queue pair goes, is reset, or the entries move.
    fn change(&mut self) {
        let pair = &mut self.pairs[usize::from(self.script.below(4))];
        match self.script.below(3) {
            0 => {
                self.ring.detach(&pair.queues);
                // The same again, or another of its number.
                if self.script.below(2) == 1 {
                    let place = pair.queues.user_index() - FIRST;
                    *pair = TestQp::new(place, pair.queues.shared.clone().as_ref());
                }
                let attached = self.ring.attach(&pair.queues, role_of(&pair.queues));
                attached.expect("memory");
            }
            1 => self.ring.clean(&pair.queues),
            _ => {
                let log2 = 1 + u32::from(self.script.below(4));
                let format = self.ring.format();
                let memory = CqeRing::new_entries(log2, format, None).expect("a small queue");
                self.ring.suspend().expect("memory");
                // With its mark, or without.
                if self.script.below(2) == 1 {
                    let (at, owner) = self.place();
                    self.write(at + 63, &[5 << 4 | owner]);
                }
                self.ring.move_to(memory, log2);
                self.written = self.ring.position();
            }
        }
    }

    /// A completion was told.
    fn done(&mut self, wc: &WorkCompletion) {
        // An error does not say which queue it is of: identifiers are all
        // different.
        let fails = wc.status != 0;
        let receives = wc.opcode & opcode::RECV != 0;
        let mut known = false;
        if wc.opcode > opcode::RECV_RDMA_WITH_IMM && wc.opcode <= opcode::TM_NO_TAG {
            assert!(self.tagged.done(wc), "{} is not due", wc.wr_id);
            return;
        }
        if let Some(at) = (self.tagged.receives.iter()).position(|wr_id| *wr_id == wc.wr_id) {
            assert!(fails || receives, "a receive that was sent");
            known = true;
            self.tagged.receives.remove(at);
        }
        if self.tagged.failed(wc.wr_id) {
            assert!(fails, "a change that was sent");
            known = true;
        }
        for pair in &mut self.pairs {
            for (of_receives, queue) in [(false, &mut pair.sends), (true, &mut pair.receives)] {
                let Some(at) = queue.iter().position(|wr_id| *wr_id == wc.wr_id) else {
                    continue;
                };
                assert!(fails || of_receives == receives, "another queue's kind");
                let role = [Role::SEND, Role::RECEIVE][usize::from(of_receives)];
                assert!(
                    role_of(&pair.queues).contains(role),
                    "it completes elsewhere"
                );
                known = true;
                // Whatever was before it is done as well.
                queue.drain(..=at);
            }
        }
        if let Some(at) = (self.shared_receives.iter()).position(|wr_id| *wr_id == wc.wr_id) {
            assert!(fails || receives, "a receive that was sent");
            known = true;
            self.shared_receives.remove(at);
        }
        assert!(known, "{} is not outstanding", wc.wr_id);
    }
}
