//! Tag matching.

use uverbs::abi::ids::*;
use uverbs::{SrqInit, SrqKind};

use super::objects::{CREATE_SRQ, FakeDevice, VALID_ANSWER};
use super::*;
use crate::cq_ring::CqeFormat;
use crate::shared::SharedQueue;
use crate::tags::{TagChange, TagOperation};
use crate::{CursorEntry, KeyChanges, Role, SharedReceiveQueue};

const WITH_IMM: u32 = 1 << 1;
const SYNC_REQ: u32 = 1 << 4;
const MATCH: u32 = 1 << 5;
const VALID: u32 = 1 << 6;

const TM_ADD: u32 = 130;
const TM_DEL: u32 = 131;
const TM_SYNC: u32 = 132;
const TM_RECV: u32 = 133;
const TM_NO_TAG: u32 = 134;

/// User indices of the shared queue, and of the queue pair that changes its tags.
const SHARED: u32 = 5;
const CHANGES: u32 = 6;

/// A shared receive queue of three tags, three receives and four operations.
struct TagFixture {
    send: SendQueue,
    pair: TestQp,
    recv: SharedQueue,
    ring: CqeRing,
    device: Device,
}

fn fixture_with(format: CqeFormat) -> TagFixture {
    let shared = SrqEntries::new(3, 1, &LIMITS, None).unwrap();
    let shared = Arc::new(shared.with_tags(3).unwrap());
    let own = qp_queues(
        SHARED,
        Service::Target,
        &cap(0, 0, 0),
        Some(Arc::clone(&shared)),
    );
    let plan = SendPlan::new(
        &cap(4, 1, 0),
        Service::ReliableConnection,
        &LIMITS,
        KeyChanges::None,
        0,
    );
    let changes = qp_queues_with_plan(
        CHANGES,
        Service::ReliableConnection,
        plan.unwrap(),
        &cap(4, 1, 0),
        Some(Arc::clone(&shared)),
    );
    let mut ring = CqeRing::new(4, format, None).unwrap();
    ring.attach(&own, Role::RECEIVE).unwrap();
    ring.attach(&changes, Role::SEND | Role::RECEIVE).unwrap();
    let pair = TestQp::with(Arc::clone(&changes), false);
    let (register, _) = DoorbellRegister::in_memory(256);
    let send = SendQueue::new(changes, QPN, false, register);
    let mut recv = SharedQueue::new(shared);
    recv.reserve_tag_operations(send.capacity()).unwrap();
    TagFixture {
        send,
        pair,
        recv,
        device: Device::of(&ring),
        ring,
    }
}

fn fixture() -> TagFixture {
    fixture_with(CqeFormat::PLAIN)
}

fn change(change: TagChange) -> TagOperation {
    TagOperation {
        wr_id: 1,
        signalled: false,
        handled: None,
        change,
    }
}

fn add(tag: u64) -> TagOperation {
    change(TagChange::Add {
        wr_id: 100 + tag,
        tag,
        mask: 0xffff,
        memory: None,
    })
}

fn signalled(wr_id: u64, operation: TagOperation) -> TagOperation {
    TagOperation {
        wr_id,
        signalled: true,
        ..operation
    }
}

/// A CQE of tag matching, with a tag's entry or a receive's slot.
fn tagged(opcode: u8, operation: u8, place: u16) -> [u8; 64] {
    let mut bytes = TestCqe {
        opcode,
        user_index: SHARED,
        slot: place,
        byte_count: 5,
        ..TestCqe::default()
    }
    .bytes();
    // The header, where it is not of a change.
    bytes[4..8].copy_from_slice(&7u32.to_be_bytes());
    bytes[8..16].copy_from_slice(&0x1_2345_6789u64.to_be_bytes());
    bytes[40] = 1;
    bytes[41] = operation;
    bytes[42..44].copy_from_slice(&place.to_be_bytes());
    bytes
}

/// A CQE of a change of the list.
fn changed(operation: u8, success: bool, phase: u16) -> [u8; 64] {
    let mut bytes = tagged(6, operation, 0);
    bytes[..16].fill(0);
    bytes[0] = u8::from(success) << 7;
    bytes[4..6].copy_from_slice(&phase.to_be_bytes());
    bytes
}

impl TagFixture {
    /// Posts operations, each by itself. Returns handles.
    fn post(&mut self, operation: &TagOperation) -> Result<u32, PostError> {
        self.recv.entries().lock().lock();
        // SAFETY: the lock is taken; tags' memory is this test's.
        let pushed = unsafe {
            let pushed = self.recv.push_tag(&mut self.send, operation);
            self.send.publish();
            pushed
        };
        self.recv.entries().lock().unlock();
        pushed
    }

    fn receives(&mut self, count: u64) {
        for wr_id in 0..count {
            self.recv.locked().push(wr_id, &[]).unwrap();
        }
        // SAFETY: there is no memory.
        unsafe { self.recv.locked().publish() };
    }

    /// The completion of what the device writes.
    fn told(&mut self, bytes: [u8; 64]) -> WorkCompletion {
        self.device.write(bytes);
        // SAFETY: tags and receives name memory of the test.
        let wc = unsafe { read(&mut self.ring) }.unwrap().unwrap();
        self.ring.publish();
        wc
    }

    /// What the device writes is malformed.
    fn malformed(&mut self, bytes: [u8; 64]) {
        self.device.write(bytes);
        // SAFETY: as above.
        assert!(unsafe { read(&mut self.ring) }.unwrap().is_err());
    }
}

#[test]
fn changes_are_what_the_device_reads() {
    let mut fixture = fixture();
    let memory = Sge {
        addr: 0x1122_3344_5566,
        length: 77,
        lkey: 0x99,
    };
    let operation = TagOperation {
        wr_id: 9,
        signalled: true,
        handled: Some(0x1_0005),
        change: TagChange::Add {
            wr_id: 10,
            tag: 0xa1a2_a3a4_a5a6_a7a8,
            mask: 0xff00,
            memory: Some(memory),
        },
    };
    assert_eq!(fixture.post(&operation), Ok(0));
    let bytes = fixture.pair.sent(0, 64);
    assert_eq!(be32(&bytes, 0), 0x28);
    assert_eq!(be32(&bytes, 4), QPN << 8 | 4);
    // No completion of the work request itself.
    assert_eq!(bytes[8..16], [0; 8]);
    // An addition, with completion and count; the next tag is 1.
    assert_eq!(bytes[16..24], [0x10, 0xc0, 0, 1, 0, 0, 0, 5]);
    assert_eq!(bytes[24..32], [0; 8]);
    assert_eq!(be64(&bytes, 32), 0xa1a2_a3a4_a5a6_a7a8);
    assert_eq!(be64(&bytes, 40), 0xff00);
    assert_eq!((be32(&bytes, 48), be32(&bytes, 52)), (77, 0x99));
    assert_eq!(be64(&bytes, 56), 0x1122_3344_5566);
    assert_eq!(fixture.pair.record(1), 1);

    // Without memory: the end of a list.
    assert_eq!(fixture.post(&add(3)), Ok(1));
    let bytes = fixture.pair.sent(64, 64);
    assert_eq!(be32(&bytes, 0), 1 << 8 | 0x28);
    assert_eq!(bytes[16..24], [0x10, 0, 0, 2, 0, 0, 0, 0]);
    assert_eq!((be32(&bytes, 48), be32(&bytes, 52)), (0, 0x100));
    assert_eq!(be64(&bytes, 56), 0);

    assert_eq!(fixture.post(&change(TagChange::Remove(1))), Ok(1));
    let bytes = fixture.pair.sent(128, 48);
    assert_eq!(be32(&bytes, 4), QPN << 8 | 3);
    assert_eq!(bytes[16..24], [0x20, 0, 0, 1, 0, 0, 0, 0]);
    assert_eq!(bytes[24..48], [0; 24]);

    let sync = TagOperation {
        handled: Some(2),
        ..signalled(4, change(TagChange::Sync))
    };
    fixture.post(&sync).unwrap();
    let bytes = fixture.pair.sent(192, 48);
    assert_eq!(bytes[16..24], [0, 0xc0, 0, 0, 0, 0, 0, 2]);
    assert_eq!(fixture.pair.record(1), 4);
    // Four are outstanding.
    assert_eq!(fixture.post(&sync), Err(PostError::Full));
    // The last completes all before it, in the order of the signalled ones.
    assert_eq!(fixture.told(changed(5, true, 5)).wr_id, 9);
    assert_eq!(fixture.post(&sync), Ok(0));
    assert_eq!(fixture.post(&sync), Err(PostError::Full));
    assert_eq!(fixture.told(changed(7, true, 5)).wr_id, 4);
    for _ in 0..3 {
        assert_eq!(fixture.post(&sync), Ok(0));
    }
    assert_eq!(fixture.post(&sync), Err(PostError::Full));
    assert_eq!(fixture.pair.record(1), 8);
    assert_eq!(be32(&fixture.pair.sent(0, 4), 0), 4 << 8 | 0x28);
}

#[test]
fn entries_are_used_in_the_order_in_which_they_became_free() {
    let mut fixture = fixture();
    // The list's end is no tag: three of four entries.
    for handle in 0..3 {
        let operation = signalled(handle, add(handle));
        assert_eq!(fixture.post(&operation), Ok(handle as u32));
        let wc = fixture.told(changed(5, true, 0));
        assert_eq!((wc.wr_id, wc.opcode, wc.status), (handle, TM_ADD, 0));
    }
    assert_eq!(fixture.post(&add(9)), Err(PostError::Full));
    // A message that completes at once, of the second.
    let wc = fixture.told(tagged(2, 0xa, 1));
    assert_eq!((wc.wr_id, wc.opcode, wc.status), (101, TM_RECV, 0));
    assert_eq!((wc.wc_flags, wc.byte_len), (MATCH | VALID, 5));
    // Its place is the end now, the former end the next.
    assert_eq!(fixture.post(&signalled(50, add(9))), Ok(3));
    let at = fixture.pair.record(1) as usize - 1;
    assert_eq!(be16(&fixture.pair.sent(at * 64 + 18, 2), 0), 1);
    assert_eq!(fixture.told(changed(5, true, 0)).wr_id, 50);
    assert_eq!(fixture.post(&add(9)), Err(PostError::Full));
    // It is gone: it is neither consumed nor removed twice.
    assert_eq!(fixture.told(tagged(2, 0xa, 1)).status, 21);
    let twice = fixture.post(&change(TagChange::Remove(1)));
    assert_eq!(twice, Err(PostError::BadOperation));
    let beyond = fixture.post(&change(TagChange::Remove(4)));
    assert_eq!(beyond, Err(PostError::BadOperation));
    // Removed without a completion: free at once.
    assert_eq!(fixture.post(&change(TagChange::Remove(0))), Ok(0));
    assert_eq!(fixture.post(&signalled(51, add(9))), Ok(1));
    assert_eq!(fixture.post(&add(9)), Err(PostError::Full));
}

#[test]
fn an_entry_is_free_when_its_changes_completed() {
    let mut fixture = fixture();
    fixture.post(&signalled(7, add(0))).unwrap();
    fixture.post(&add(1)).unwrap();
    fixture.post(&add(2)).unwrap();
    // Its message comes first.
    assert_eq!(fixture.told(tagged(2, 0xa, 0)).wr_id, 100);
    assert_eq!(fixture.post(&add(3)), Err(PostError::Full));
    assert_eq!(fixture.told(changed(5, true, 0)).wr_id, 7);
    assert_eq!(fixture.post(&add(3)), Ok(3));
    assert_eq!(fixture.post(&add(4)), Err(PostError::Full));
}

/// The CQE of a change that has failed: the device refuses it, or flushes it.
fn failed(slot: u16, syndrome: u8) -> [u8; 64] {
    TestCqe {
        opcode: 13,
        user_index: CHANGES,
        slot,
        syndrome,
        ..TestCqe::default()
    }
    .bytes()
}

#[test]
fn changes_that_failed_are_not_outstanding() {
    let mut fixture = fixture();
    fixture.post(&signalled(1, add(0))).unwrap();
    assert_eq!(fixture.told(changed(5, true, 0)).wr_id, 1);
    fixture.post(&signalled(2, add(1))).unwrap();
    for (wr_id, tag) in [(3, 0), (4, 1)] {
        let remove = change(TagChange::Remove(tag));
        fixture.post(&signalled(wr_id, remove)).unwrap();
    }
    let sync = change(TagChange::Sync);
    fixture.post(&signalled(5, sync)).unwrap();
    assert_eq!(fixture.post(&signalled(6, sync)), Err(PostError::Full));
    for (slot, syndrome) in [(1, 4), (2, 5), (3, 5), (4, 5)] {
        let wc = fixture.told(failed(slot, syndrome));
        assert_eq!(
            (wc.wr_id, wc.status),
            (1 + u64::from(slot), syndrome.into())
        );
    }
    // The first tag is still there, the second never was.
    assert_eq!(fixture.told(tagged(2, 0xa, 0)).status, 0);
    assert_eq!(fixture.told(tagged(2, 0xa, 1)).status, 21);
    // Later changes are flushed, however many.
    for n in 0..9 {
        fixture.post(&signalled(n, add(n))).unwrap();
        let slot = (fixture.pair.record(1) - 1) as u16;
        assert_eq!(fixture.told(failed(slot, 5)).wr_id, n);
    }
}

#[test]
fn the_first_completion_ends_a_change() {
    for fails_first in [false, true] {
        let mut fixture = fixture();
        fixture.post(&signalled(1, add(0))).unwrap();
        let (added, refused) = (changed(5, true, 0), failed(0, 4));
        let (first, second) = match fails_first {
            true => (refused, added),
            false => (added, refused),
        };
        assert_eq!(fixture.told(first).wr_id, 1);
        fixture.malformed(second);
    }
    // One that fails ends those before it, of which nothing was said.
    let mut fixture = fixture();
    fixture.post(&signalled(1, add(0))).unwrap();
    fixture.post(&add(1)).unwrap();
    assert_eq!(fixture.told(failed(1, 4)).wr_id, 1);
    fixture.malformed(failed(0, 5));
}

#[test]
fn a_message_in_two_steps_frees_its_tag_with_the_second() {
    let mut fixture = fixture();
    fixture.post(&add(1)).unwrap();
    let wc = fixture.told(tagged(6, 1, 0));
    assert_eq!((wc.wr_id, wc.opcode, wc.wc_flags), (101, TM_RECV, MATCH));
    let wc = fixture.told(tagged(3, 2, 0));
    assert_eq!((wc.wr_id, wc.opcode), (101, TM_RECV));
    assert_eq!(wc.wc_flags, VALID | WITH_IMM);
    assert_eq!(fixture.told(tagged(2, 2, 0)).status, 21);
    // Those whose rendezvous the program has to finish.
    for (operation, flags) in [(9, MATCH), (0xb, MATCH | VALID), (0xc, MATCH | VALID)] {
        let mut fixture = fixture_with(CqeFormat::PLAIN);
        fixture.post(&add(1)).unwrap();
        let wc = fixture.told(tagged(2, operation, 0));
        assert_eq!((wc.status, wc.wr_id, wc.wc_flags), (23, 101, flags));
        let again = fixture.told(tagged(2, 0xa, 0)).status;
        assert_eq!(again, if operation == 9 { 0 } else { 21 });
    }
}

#[test]
fn a_removal_fails_if_a_message_has_consumed_the_tag() {
    let mut fixture = fixture();
    let remove = |handle| signalled(8, change(TagChange::Remove(handle)));
    fixture.post(&add(1)).unwrap();
    fixture.post(&add(2)).unwrap();
    fixture.post(&remove(0)).unwrap();
    let wc = fixture.told(changed(6, true, 0));
    assert_eq!((wc.wr_id, wc.opcode, wc.status), (8, TM_DEL, 0));
    assert_eq!(fixture.post(&remove(0)), Err(PostError::BadOperation));
    // Another's message comes first.
    fixture.post(&remove(1)).unwrap();
    assert_eq!(fixture.told(tagged(2, 0xa, 1)).wr_id, 102);
    let wc = fixture.told(changed(6, false, 0));
    assert_eq!((wc.wr_id, wc.opcode, wc.status), (8, TM_DEL, 22));
    // Both places are free, and the third.
    for _ in 0..2 {
        fixture.post(&signalled(1, add(1))).unwrap();
        fixture.told(changed(5, true, 0));
    }
    fixture.post(&add(1)).unwrap();
    assert_eq!(fixture.post(&add(1)), Err(PostError::Full));
    // No other kind of operation is due; nothing has changed.
    fixture
        .post(&signalled(77, change(TagChange::Sync)))
        .unwrap();
    fixture.malformed(changed(5, true, 0));
    fixture.malformed(changed(6, true, 0));
    assert_eq!(fixture.told(changed(7, true, 0)).wr_id, 77);
    fixture.malformed(changed(7, true, 0));
    fixture.malformed(tagged(2, 0xd, 0));
    fixture.malformed(tagged(2, 0xa, 4));
}

#[test]
fn unexpected_messages_take_receives() {
    let mut fixture = fixture();
    fixture.receives(3);
    let wc = fixture.told(tagged(2, 3, 1));
    assert_eq!(
        (wc.wr_id, wc.opcode, wc.status, wc.wc_flags),
        (1, TM_RECV, 0, 0)
    );
    let wc = fixture.told(tagged(2, 4, 0));
    assert_eq!(
        (wc.wr_id, wc.opcode, wc.status, wc.wc_flags),
        (0, TM_NO_TAG, 0, 0)
    );
    fixture.malformed(tagged(2, 3, 1));
    // One that is not of tag matching, and a failure.
    let plain = TestCqe {
        opcode: 1,
        user_index: SHARED,
        slot: 2,
        byte_count: 4,
        ..TestCqe::default()
    };
    let wc = fixture.told(plain.bytes());
    assert_eq!((wc.wr_id, wc.opcode, wc.wc_flags), (2, 129, WITH_IMM));
    fixture.malformed(plain.bytes());
    fixture.receives(1);
    let failed = TestCqe {
        opcode: 14,
        syndrome: 5,
        slot: 3,
        ..plain
    };
    assert_eq!(fixture.told(failed.bytes()).status, 5);
    fixture.malformed(failed.bytes());
}

#[test]
fn counts_that_differ_ask_to_synchronize() {
    let mut fixture = fixture();
    fixture.post(&signalled(1, add(1))).unwrap();
    assert_eq!(fixture.told(changed(5, true, 1)).wc_flags, SYNC_REQ);
    fixture.post(&signalled(1, add(2))).unwrap();
    assert_eq!(fixture.told(changed(5, true, 0)).wc_flags, 0);
    // A later operation of the same tag has its count.
    let sync = TagOperation {
        handled: Some(0x1_0001),
        ..signalled(2, change(TagChange::Sync))
    };
    fixture.post(&sync).unwrap();
    let wc = fixture.told(changed(7, true, 9));
    assert_eq!((wc.opcode, wc.wc_flags), (TM_SYNC, 0));
    fixture
        .post(&signalled(1, change(TagChange::Remove(1))))
        .unwrap();
    assert_eq!(fixture.told(changed(6, true, 1)).wc_flags, SYNC_REQ);
    // A new tag has the new one.
    fixture.post(&signalled(1, add(3))).unwrap();
    assert_eq!(fixture.told(changed(5, true, 1)).wc_flags, 0);
    // Too many that were not handled; 1 was.
    let sync = TagOperation {
        handled: Some(0),
        ..sync
    };
    fixture.post(&sync).unwrap();
    fixture.told(changed(7, true, 9));
    fixture.receives(1);
    let mut at = 0;
    for count in 1..=0x4000u32 {
        let flags = fixture.told(tagged(2, 3, at)).wc_flags;
        assert_eq!(flags, if count == 0x4000 { SYNC_REQ } else { 0 });
        at = fixture.recv.entries().enter().ends().0;
        fixture.receives(1);
    }
}

#[test]
fn data_in_completions_goes_to_the_tag_or_the_receive() {
    const WIDE: CqeFormat = CqeFormat {
        shift: 7,
        compresses: false,
    };
    let mut fixture = fixture_with(WIDE);
    let mut memory = [0u8; 64];
    let addr = memory.as_mut_ptr().expose_provenance() as u64;
    let list = |at: usize, length| Sge {
        addr: addr + at as u64,
        length,
        lkey: 1,
    };
    let message: [u8; 64] = std::array::from_fn(|i| i as u8 + 1);
    let with = |mut bytes: [u8; 64], count: u32, scatter: u8| {
        bytes[44..48].copy_from_slice(&count.to_be_bytes());
        bytes[63] |= scatter;
        bytes
    };
    let operation = |length| {
        change(TagChange::Add {
            wr_id: 3,
            tag: 1,
            mask: 1,
            memory: Some(list(8, length)),
        })
    };
    fixture.post(&operation(6)).unwrap();
    fixture.device.put_before(message);
    assert_eq!(fixture.told(with(tagged(2, 0xa, 0), 6, 8)).status, 0);
    fixture.post(&operation(6)).unwrap();
    fixture.device.put_before(message);
    assert_eq!(fixture.told(with(tagged(2, 0xa, 1), 7, 8)).status, 1);
    // Its memory was given back.
    fixture.device.put_before([0xff; 64]);
    assert_eq!(fixture.told(with(tagged(2, 0xa, 0), 6, 8)).status, 21);
    // Receives: of both halves.
    for (at, scatter) in [(16, 8), (24, 4)] {
        fixture.recv.locked().push(1, &[list(at, 4)]).unwrap();
        // SAFETY: the memory is not used meanwhile.
        unsafe { fixture.recv.locked().publish() };
        fixture.device.put_before(message);
        let slot = u16::from(scatter == 4);
        let mut bytes = with(tagged(2, 3, slot), 4, scatter);
        if scatter == 4 {
            bytes[..32].copy_from_slice(&message[..32]);
        }
        let wc = fixture.told(bytes);
        assert_eq!((wc.status, wc.wr_id, wc.wc_flags), (0, 1, 0));
    }
    let mut expected = [0u8; 64];
    expected[8..14].copy_from_slice(&message[..6]);
    expected[16..20].copy_from_slice(&message[..4]);
    expected[24..28].copy_from_slice(&message[..4]);
    // SAFETY: the memory, which was written to by its address.
    let memory = unsafe { (&raw const memory).read_volatile() };
    assert_eq!(memory, expected);
}

#[test]
fn a_cursor_reads_the_tag() {
    let mut fixture = fixture();
    fixture.post(&add(1)).unwrap();
    fixture.device.write(tagged(2, 0xa, 0));
    let mut entry = CursorEntry::default();
    // SAFETY: there is no memory.
    assert_eq!(unsafe { fixture.ring.next(&mut entry) }, Ok(true));
    assert_eq!((entry.opcode(), entry.wr_id()), (TM_RECV, 101));
    // SAFETY: it was decoded, and nothing published since.
    assert_eq!(unsafe { entry.tag() }, (0x1_2345_6789, 7));
}

#[test]
fn a_queue_without_tags_has_no_such_completions() {
    let mut ring = CqeRing::plain(3).unwrap();
    let pair = TestQp::new(SHARED, Service::ReliableConnection, &cap(4, 1, 0));
    ring.attach(&pair.queues, Role::RECEIVE).unwrap();
    let mut device = Device::of(&ring);
    for bytes in [tagged(6, 5, 0), tagged(2, 3, 0)] {
        device.write(bytes);
        // SAFETY: there is no memory.
        assert!(unsafe { read(&mut ring) }.unwrap().is_err());
    }
    // The field means nothing to it.
    let TestQp { mut recv, .. } = pair;
    recv.begin();
    recv.push(4, &[]).unwrap();
    // SAFETY: as above.
    unsafe { recv.publish() };
    device.write(tagged(2, 3, 0));
    // SAFETY: as above.
    let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
    assert_eq!((wc.wr_id, wc.opcode), (4, 128));
}

#[test]
fn detached_completions_free_receives_only() {
    let mut fixture = fixture();
    fixture.receives(3);
    fixture.post(&add(1)).unwrap();
    fixture.device.write(tagged(2, 3, 0));
    fixture.device.write(tagged(2, 0xa, 1));
    let changes = Arc::clone(&fixture.pair.queues);
    let of_pair = |mut bytes: [u8; 64]| {
        bytes[35] = CHANGES as u8;
        bytes
    };
    fixture.device.write(of_pair(tagged(2, 0xa, 2)));
    fixture.device.write(of_pair(tagged(2, 3, 2)));
    fixture.ring.detach(&changes);
    let mut receives = fixture.recv.entries().enter();
    assert_eq!(
        [0, 1, 2].map(|slot| receives.find(slot)),
        [Some(0), Some(1), None]
    );
}

#[test]
fn a_queue_with_tags_has_its_own_user_index() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    let cq = machine.cq(3).unwrap();
    machine.fake.on(CREATE_SRQ, |reply| {
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_WR, &[0; 4]);
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_SGE, &[0; 4]);
        reply.set_driver_out(&[0x44, 0, 0, 0, 0, 0, 0, 0]);
        Ok(())
    });
    let pd = uverbs::pd::alloc(&machine.context, uverbs::Udata::none()).unwrap();
    let init = |max_num_tags| SrqInit {
        pd,
        user_handle: 0,
        max_wr: 3,
        max_sge: 1,
        limit: 0,
        kind: SrqKind::TagMatching {
            cq: cq.object.handle(),
            max_num_tags,
        },
        async_fd: None,
    };
    let create = |init| SharedReceiveQueue::create(&machine.context, &device, &init);
    let mut srq = create(init(5)).unwrap();
    let calls = machine.fake.take_ioctls();
    let call = calls.iter().find(|call| call.target() == CREATE_SRQ);
    let index = srq.xrc.as_ref().unwrap().user_index().to_ne_bytes();
    assert_eq!(call.unwrap().driver_in()[24..28], index);
    assert_eq!(call.unwrap().u32(ATTR_CREATE_SRQ_MAX_NUM_TAGS), Some(5));
    srq.recv.reserve_tag_operations(7).unwrap();
    // Entries have 16 bits.
    assert!(create(init(0xffff)).is_ok());
    let error = create(init(0x1_0000)).unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL);
    // A queue of another type has no tags.
    let mut plain = create(SrqInit {
        kind: SrqKind::Basic,
        ..init(0)
    })
    .unwrap();
    assert!(plain.recv.reserve_tag_operations(7).is_err());
    let mut pair = TestQp::new(7, Service::ReliableConnection, &cap(4, 1, 0));
    plain.recv.entries().lock().lock();
    // SAFETY: the lock is taken.
    let pushed = unsafe { plain.recv.push_tag(&mut pair.send, &add(1)) };
    plain.recv.entries().lock().unlock();
    assert_eq!(pushed, Err(PostError::BadOperation));
}
