//! Work requests whose data is set after they are part of the batch: the quick
//! way against the long one.

use proptest::prelude::*;
use uverbs::Sge;

use super::*;
use crate::plan::SendPlan;
use crate::{Besides, Opcode, PostError, SendFlags};

/// What sets data.
#[derive(Clone, Copy, Debug)]
enum Set {
    One(Sge),
    List(Sge),
    Inline(usize),
}

/// A work request as it is told.
#[derive(Clone, Debug)]
struct Told {
    opcode: Opcode,
    wr_id: u64,
    flags: SendFlags,
    besides: Besides,
    sets: Vec<Set>,
}

static DATA: [u8; 200] = [0x5a; 200];

fn lengths() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 1u32..1000, 1 => Just(0), 1 => Just(1 << 31)]
}

fn sets() -> impl Strategy<Value = Set> {
    let one = || {
        (any::<u64>(), lengths(), any::<u32>()).prop_map(|(addr, length, lkey)| Sge {
            addr,
            length,
            lkey,
        })
    };
    prop_oneof![
        4 => one().prop_map(Set::One),
        1 => one().prop_map(Set::List),
        2 => (0usize..80).prop_map(Set::Inline),
    ]
}

fn told() -> impl Strategy<Value = Told> {
    // Among them some that are not built quickly.
    let opcode = prop_oneof![
        4 => (0u32..5).prop_map(Opcode),
        1 => Just(Opcode::SEND_WITH_INV),
        1 => Just(Opcode::ATOMIC_FETCH_AND_ADD),
        1 => Just(Opcode::LOCAL_INV),
    ];
    let besides = any::<(u32, u64, u32)>().prop_map(|(immediate, remote_addr, rkey)| Besides {
        immediate,
        remote_addr,
        rkey,
    });
    let sets = prop::collection::vec(sets(), 0..3);
    (opcode, any::<u64>(), 0u32..8, besides, sets).prop_map(
        |(opcode, wr_id, flags, besides, sets)| Told {
            opcode,
            wr_id,
            flags: SendFlags::from_bits_retain(flags),
            besides,
            sets,
        },
    )
}

/// Builds it quickly; whether that has been done.
fn build(pair: &mut Pair, told: &Told) -> bool {
    macro_rules! build {
        ($($opcode:ident)+) => {
            match told.opcode {
                $(Opcode::$opcode => pair.send.build::<{ Opcode::$opcode.0 }>(
                    told.wr_id,
                    told.flags,
                    told.besides,
                ),)+
                _ => false,
            }
        };
    }
    build!(SEND SEND_WITH_IMM SEND_WITH_INV RDMA_WRITE RDMA_WRITE_WITH_IMM RDMA_READ
        ATOMIC_FETCH_AND_ADD LOCAL_INV)
}

/// As a face that tries the quick way first, or does not.
fn tell(pair: &mut Pair, told: &Told, quickly: bool) -> Result<(), PostError> {
    if !(quickly && build(pair, told)) {
        let mut wqe = pair.send.open(told.wr_id, told.opcode, told.flags)?;
        wqe.no_data();
        wqe.immediate_or_key(told.besides.immediate);
        wqe.rdma(told.besides.remote_addr, told.besides.rkey);
        pair.send.accept();
    }
    for set in &told.sets {
        // SAFETY: no more than there is.
        let quick = quickly
            && unsafe {
                match *set {
                    Set::One(sge) => pair.send.set_one(sge),
                    Set::List(_) => false,
                    Set::Inline(length) => pair.send.set_inline(DATA.as_ptr(), length),
                }
            };
        if quick {
            continue;
        }
        let mut wqe = pair.send.last().unwrap();
        match *set {
            Set::One(sge) | Set::List(sge) => wqe.sge_list(&[sge])?,
            Set::Inline(length) => {
                let pieces = [(DATA.as_ptr(), length)];
                // SAFETY: as above.
                unsafe { wqe.inline_raw(pieces.into_iter())? };
            }
        }
        pair.send.settle();
    }
    Ok(())
}

proptest! {
    /// The quick way writes the same bytes as the other, and refuses the same.
    #[test]
    fn what_is_built_is_what_is_written_at_length(
        batches in prop::collection::vec(prop::collection::vec(told(), 1..4), 1..20),
        service in prop::sample::select(vec![
            Service::ReliableConnection,
            Service::UnreliableConnection,
            Service::XrcInitiator,
        ]),
        (sges, signal_all) in (0u32..2, any::<bool>()),
    ) {
        let cap = cap(4, sges, 60);
        let make = || {
            let plan = SendPlan::new(&cap, service, &LIMITS, true).unwrap();
            Pair::with(work_of(1, service, plan, &cap, None), signal_all)
        };
        let (mut quick, mut long) = (make(), make());
        let mut posted = 0;
        for batch in &batches {
            let mut results = [&mut quick, &mut long].into_iter().zip([true, false]).map(
                |(pair, quickly)| {
                    pair.send.begin();
                    let told = batch.iter().try_for_each(|told| tell(pair, told, quickly));
                    if told.is_err() {
                        pair.send.abort();
                    }
                    // SAFETY: there is no device.
                    (told, unsafe { pair.send.publish() })
                },
            );
            prop_assert_eq!(results.next(), results.next());
            drop(results);
            let size = quick.work.send.bytes();
            prop_assert_eq!(quick.sent(0, size), long.sent(0, size));
            for word in 0..64 {
                prop_assert_eq!(quick.flamed(word), long.flamed(word));
            }
            for slot in 0..quick.work.send.blocks {
                let find = |pair: &Pair| pair.work.sends.find(slot).map(|found| found.wr_id);
                prop_assert_eq!(find(&quick), find(&long));
            }
            prop_assert_eq!(quick.record(1), long.record(1));
            // All complete, so that there is room.
            while posted != quick.record(1) {
                for pair in [&quick, &long] {
                    let slot = posted & (pair.work.send.blocks - 1);
                    if let Some(found) = pair.work.sends.find(slot) {
                        pair.work.sends.complete(found);
                    }
                }
                posted = (posted + 1) & 0xffff;
            }
        }
    }
}

#[test]
fn only_what_was_built_in_this_batch_gets_data() {
    let element = Sge {
        addr: 1,
        length: 2,
        lkey: 3,
    };
    let mut pair = Pair::new(1, Service::ReliableConnection, &cap(4, 1, 60));
    let build = |pair: &mut Pair| {
        pair.send
            .build::<{ Opcode::SEND.0 }>(7, SendFlags::empty(), Besides::default())
    };
    assert!(!pair.send.set_one(element));
    pair.send.begin();
    assert!(!pair.send.set_one(element));
    assert!(build(&mut pair) && pair.send.set_one(element));
    // SAFETY: there is no device.
    assert!(unsafe { pair.send.publish() });
    let sent = pair.sent(0, 256);
    // It is the device's.
    let (again, data) = (pair.send.set_one(element), DATA.as_ptr());
    // SAFETY: as long as that.
    let inline = unsafe { pair.send.set_inline(data, 8) };
    assert!(!again && !inline);
    pair.send.begin();
    assert!(!pair.send.set_one(element) && pair.send.last().is_none());
    // Nor does one that was opened at length, or given up.
    pair.send.begin();
    assert!(build(&mut pair));
    let open = pair.send.open(8, Opcode::SEND, SendFlags::empty());
    open.unwrap().no_data();
    assert!(!pair.send.set_one(element));
    pair.send.abort();
    assert!(!pair.send.set_one(element));
    assert_eq!(pair.sent(0, 64), sent[..64]);
}

#[test]
fn no_more_is_built_than_there_is_room_for() {
    let mut pair = Pair::new(1, Service::ReliableConnection, &cap(4, 1, 0));
    for round in 0..3 {
        pair.send.begin();
        let built = (0..9).filter(|wr_id| {
            pair.send
                .build::<{ Opcode::SEND.0 }>(*wr_id, SendFlags::empty(), Besides::default())
        });
        assert_eq!(built.count(), 4, "{round}");
        // SAFETY: there is no device.
        assert!(unsafe { pair.send.publish() });
        let last = pair.work.sends.find(3).unwrap();
        pair.work.sends.complete(last);
    }
}
