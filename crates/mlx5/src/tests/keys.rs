//! Work requests that change memory keys, as the device reads them.

use proptest::prelude::*;

use super::*;
use crate::{Bind, MwType, Operands, Role};

const RC: Service = Service::ReliableConnection;

/// A queue pair that may change keys.
fn pair(service: Service, wr: u32) -> TestQp {
    let cap = cap(wr, 1, 0);
    let send = SendPlan::new(&cap, service, &LIMITS, crate::KeyChanges::Windows, 0).unwrap();
    TestQp::with(qp_queues_with_plan(70, service, send, &cap, None), false)
}

const BIND: Bind = Bind {
    window_rkey: 0x0001_2345,
    rkey: 0x0001_2346,
    window_type: MwType::TYPE_1,
    addr: 0x1111_2222_3333_4444,
    length: 0x8000,
    lkey: 0x77,
    // Write, read, atomic.
    access: 2 | 4 | 8,
};

enum Change {
    Bind(Bind),
    Invalidate(u32),
    Send,
}

/// Posts work requests as one batch; the slot of the first.
fn post(pair: &mut TestQp, flags: SendFlags, changes: &[Change]) -> u16 {
    let slot = pair.record(1) as u16;
    pair.send.begin();
    for change in changes {
        let none = SendWr::new(9, Opcode::SEND, flags);
        let wr = match change {
            Change::Bind(bind) => SendWr {
                opcode: Opcode::BIND_MW,
                operands: Operands::Bind(bind),
                ..none
            },
            Change::Invalidate(key) => SendWr {
                opcode: Opcode::LOCAL_INV,
                imm_or_key: *key,
                ..none
            },
            Change::Send => none,
        };
        push(&mut pair.send, &wr).unwrap();
    }
    // SAFETY: there is no device.
    assert!(unsafe { pair.send.publish() });
    slot
}

/// The control segment, but for the number of segments and fences.
fn control(bytes: &[u8], segments: u32, key: u32) {
    assert_eq!(bytes[3], 0x25);
    assert_eq!(be32(bytes, 4), QPN << 8 | segments);
    assert_eq!(be32(bytes, 12), key);
}

#[test]
fn a_window_of_the_domain_is_bound() {
    let mut pair = pair(RC, 4);
    post(&mut pair, SendFlags::SIGNALED, &[Change::Bind(BIND)]);
    let bytes = pair.sent(0, 192);
    control(&bytes, 12, 0x0001_2345);
    // What changes: inline, offset; four octowords; length, start, key, four
    // rights, free.
    assert_eq!(bytes[16..24], [0x90, 0, 0, 0, 0, 4, 0, 0]);
    let changes = 1 | 1 << 6 | 1 << 13 | 0xf << 18 | 1 << 29;
    assert_eq!(be64(&bytes, 24), changes);
    assert_eq!(bytes[32..64], [0; 32]);
    // To what: not free; write, read, atomic; any queue pair.
    assert_eq!(bytes[64..68], [0, 0, 0x70, 0]);
    assert_eq!(be32(&bytes, 68), 0xffff_ff46);
    assert_eq!(be64(&bytes, 72), 0);
    assert_eq!(be64(&bytes, 80), 0x1111_2222_3333_4444);
    assert_eq!(be64(&bytes, 88), 0x8000);
    assert_eq!(bytes[96..128], [0; 32]);
    // Of what.
    assert_eq!((be32(&bytes, 128), be32(&bytes, 132)), (0x8000, 0x77));
    assert_eq!(be64(&bytes, 136), 0x1111_2222_3333_4444);
    assert_eq!(bytes[144..192], [0; 48]);
    assert_eq!(pair.record(1), 3);
    // It is short enough for the register.
    assert_eq!(pair.blue_flame_word(17), be64(&bytes, 136));
}

#[test]
fn a_window_of_the_queue_pair_is_bound_and_unbound() {
    let mut pair = pair(RC, 4);
    let bind = Bind {
        window_type: MwType::TYPE_2,
        // Zero based; local write.
        access: 32 | 1,
        length: 1 << 31,
        ..BIND
    };
    let none = Bind { length: 0, ..bind };
    let changes = [
        Change::Bind(bind),
        Change::Bind(none),
        Change::Bind(Bind {
            window_type: MwType::TYPE_1,
            ..none
        }),
    ];
    post(&mut pair, SendFlags::empty(), &changes);
    let bytes = pair.sent(0, 192);
    control(&bytes, 12, 0x0001_2345);
    assert_eq!(bytes[16..24], [0xb0, 0, 0, 0, 0, 4, 0, 0]);
    let all = 1 | 1 << 6 | 1 << 13 | 1 << 14 | 0xf << 18 | 1 << 29;
    assert_eq!(be64(&bytes, 24), all);
    assert_eq!(bytes[64..68], [0, 0, 0x08, 0]);
    assert_eq!(be32(&bytes, 68), QPN << 8 | 0x46);
    assert_eq!((be64(&bytes, 80), be64(&bytes, 88)), (0, 1 << 31));
    assert_eq!(be32(&bytes, 128), 1 << 31);
    // Unbound: the queue pair's is checked, and belongs to none.
    let bytes = pair.sent(192, 128);
    control(&bytes, 8, 0x0001_2345);
    assert_eq!(bytes[16..24], [0x98, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(be64(&bytes, 24), 1 << 13 | 1 << 14 | 1 << 29);
    assert_eq!(bytes[64..68], [0x40, 0, 0, 0]);
    assert_eq!(be32(&bytes, 68), 0xffff_ff46);
    assert_eq!(bytes[72..128], [0; 56]);
    let bytes = pair.sent(192 + 128, 128);
    assert_eq!(bytes[16..24], [0x90, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(be64(&bytes, 24), 1 << 13 | 1 << 29);
    assert_eq!(pair.record(1), 7);
}

#[test]
fn a_key_is_invalidated() {
    for service in [RC, Service::UnreliableConnection] {
        let mut pair = pair(service, 4);
        post(
            &mut pair,
            SendFlags::empty(),
            &[Change::Invalidate(0x00ab_cd07)],
        );
        let bytes = pair.sent(0, 128);
        control(&bytes, 8, 0x00ab_cd07);
        assert_eq!(bytes[16..24], [0x98, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(be64(&bytes, 24), 1 << 13 | 1 << 14 | 1 << 29);
        assert_eq!(bytes[64..68], [0x40, 0, 0, 0]);
        assert_eq!(be32(&bytes, 68), 0xffff_ff00);
        assert_eq!(pair.record(1), 2);
    }
}

#[test]
fn request_after_a_key_change_is_fenced() {
    let mut pair = pair(RC, 16);
    let fences = |pair: &TestQp, at: usize| pair.sent(at * 64 + 11, 1)[0];
    // In one batch, and over its end: the two behind the changes.
    post(
        &mut pair,
        SendFlags::empty(),
        &[
            Change::Send,
            Change::Invalidate(1),
            Change::Send,
            Change::Send,
            Change::Bind(BIND),
        ],
    );
    let first: Vec<_> = [0, 1, 3, 4, 5].map(|at| fences(&pair, at)).into();
    assert_eq!(first, [0, 0, 0x20, 0, 0]);
    // A batch that is given up changes nothing; a full fence is enough.
    pair.send.begin();
    push_send(&mut pair.send, 0).unwrap();
    post(&mut pair, SendFlags::FENCE, &[Change::Invalidate(2)]);
    assert_eq!(fences(&pair, 8), 0x80);
    post(&mut pair, SendFlags::empty(), &[Change::Send, Change::Send]);
    assert_eq!((fences(&pair, 10), fences(&pair, 11)), (0x20, 0));
    // The fast branches know no fence: they take the second one only.
    let data = [0u8; 8];
    let list = [Sge {
        addr: (&raw const data).expose_provenance() as u64,
        length: 8,
        lkey: 1,
    }];
    for data in [Data::Sges(&list), Data::Inline(&list)] {
        post(&mut pair, SendFlags::empty(), &[Change::Invalidate(2)]);
        for fence in [0x20, 0] {
            let slot = pair.record(1) as usize;
            let wr = SendWr {
                data,
                ..SendWr::new(9, Opcode::SEND, SendFlags::empty())
            };
            push(&mut pair.send, &wr).unwrap();
            // SAFETY: there is no device.
            assert!(unsafe { pair.send.publish() });
            assert_eq!(fences(&pair, slot), fence);
        }
    }
    // The queue starts anew.
    post(&mut pair, SendFlags::empty(), &[Change::Invalidate(3)]);
    pair.send.reset();
    post(&mut pair, SendFlags::empty(), &[Change::Send]);
    assert_eq!(fences(&pair, 0), 0);
}

#[test]
fn key_changes_have_no_data() {
    let mut pair = pair(RC, 4);
    let list = [Sge {
        addr: 0,
        length: 1,
        lkey: 0,
    }];
    pair.send.begin();
    let mut refused = |opcode, data, bind: &Bind| {
        let wr = SendWr {
            operands: Operands::Bind(bind),
            data,
            ..SendWr::new(0, opcode, SendFlags::empty())
        };
        push(&mut pair.send, &wr).err()
    };
    let bad = Some(PostError::BadOperation);
    for opcode in [Opcode::LOCAL_INV, Opcode::BIND_MW] {
        assert_eq!(refused(opcode, Data::Sges(&list), &BIND), bad);
        assert_eq!(refused(opcode, Data::Inline(&[]), &BIND), bad);
    }
    let none = Data::Sges(&[]);
    let long = Bind {
        length: (1 << 31) + 1,
        ..BIND
    };
    assert_eq!(
        refused(Opcode::BIND_MW, none, &long),
        Some(PostError::Unsupported)
    );
    let zero_based = Bind {
        access: 32 | BIND.access,
        ..BIND
    };
    assert_eq!(refused(Opcode::BIND_MW, none, &zero_based), bad);
    let unknown = Bind {
        window_type: MwType(3),
        ..BIND
    };
    assert_eq!(refused(Opcode::BIND_MW, none, &unknown), bad);
    for opcode in [Opcode::LOCAL_INV, Opcode::BIND_MW] {
        assert_eq!(refused(opcode, none, &BIND), None);
    }
    let without = SendWr::new(0, Opcode::BIND_MW, SendFlags::empty());
    assert_eq!(push(&mut pair.send, &without), Err(PostError::BadOperation));
}

proptest! {
    /// Changes of keys among sends, around the ring, as many as it promises to
    /// hold: each is where the one before it ended, and its completion says
    /// which it was.
    #[test]
    fn key_changes_complete_with_their_opcode(
        batches in prop::collection::vec(prop::collection::vec(0u8..3, 1..=4), 1..40),
    ) {
        let mut ring = CqeRing::plain(3).unwrap();
        let mut device = Device::of(&ring);
        let mut pair = pair(RC, 4);
        prop_assert!(pair.send.capacity() >= 4);
        ring.attach(&pair.queues, Role::SEND).unwrap();
        let mut at = 0u32;
        for batch in batches {
            let changes: Vec<_> = batch
                .iter()
                .map(|kind| match kind {
                    0 => Change::Send,
                    1 => Change::Bind(BIND),
                    _ => Change::Invalidate(5),
                })
                .collect();
            let mut slot = post(&mut pair, SendFlags::SIGNALED, &changes);
            prop_assert_eq!(u32::from(slot), at & 0xffff);
            for kind in batch {
                let (request, opcode, blocks) = [(0x0a, 0, 1), (0x25, 5, 3), (0x25, 6, 2)][usize::from(kind)];
                prop_assert_eq!(pair.sent(usize::from(slot) * 64 + 3, 1)[0], request);
                device.write_cqe(&TestCqe { user_index: 70, slot, request, ..TestCqe::default() });
                // Inside of a work request there is no other.
                if blocks > 1 {
                    prop_assert_eq!(pair.queues.sends.find(u32::from(slot) + 1), None);
                }
                // SAFETY: what was posted has no data.
                let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
                prop_assert_eq!((wc.wr_id, wc.opcode, wc.status), (9, opcode, 0));
                slot = slot.wrapping_add(blocks);
                at += u32::from(blocks);
            }
            ring.publish();
            prop_assert_eq!(pair.record(1), at & 0xffff);
        }
    }
}
