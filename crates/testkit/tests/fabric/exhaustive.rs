//! A fault at every packet of an exchange.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ringverbs::completion::Status;
use ringverbs::{AccessFlags, Completion};
use ringverbs_testkit::{Fabric, Fault, Frames, Link};

use crate::pair::{LONG, Side, pair};

const LENGTH: usize = 10_000;
const WAYS: [fn(Frames) -> Fault; 5] = [
    Frames::lose,
    Frames::duplicate,
    Frames::corrupt,
    Frames::reorder,
    |frames| frames.after(0).lose(),
];

fn bytes(seed: u8) -> Vec<u8> {
    (0..LENGTH)
        .map(|at| (at as u8).wrapping_mul(seed))
        .collect()
}

fn check(completion: &Completion, may_fail: bool) -> bool {
    match &completion.result {
        Ok(_) => true,
        Err(failure) => {
            let expected = [Status::RETRY_EXC_ERR, Status::WR_FLUSH_ERR];
            assert!(may_fail && expected.contains(&failure.status), "{failure}");
            false
        }
    }
}

/// A message, a write, a read of the written data, and a message in return. Returns the number
/// of frames.
fn exchange(fabric: &Fabric, may_fail: bool) -> usize {
    let (mut a, mut b) = pair(fabric);
    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let region = b.domain.alloc_remote(LENGTH, access).unwrap();
    let remote = region.key();
    let done = |side: &mut Side| {
        let completion = side.cq.poll_for(LONG).unwrap();
        completion.filter(|completion| check(completion, may_fail))
    };
    let mut run = || {
        b.qp.receive(b.buffer(&[0; LENGTH]), 1).unwrap();
        a.qp.receive(a.buffer(&[0; LENGTH]), 2).unwrap();
        a.qp.send(a.buffer(&bytes(3)), 3).unwrap();
        done(&mut a)?;
        assert!(*done(&mut b)?.take_buffer().unwrap() == bytes(3)[..]);
        a.qp.write(a.buffer(&bytes(5)), remote, 4).unwrap();
        done(&mut a)?;
        a.qp.read(a.buffer(&[0; LENGTH]), remote, 5).unwrap();
        assert!(*done(&mut a)?.take_buffer().unwrap() == bytes(5)[..]);
        b.qp.send(b.buffer(&bytes(7)), 6).unwrap();
        done(&mut b)?;
        assert!(*done(&mut a)?.take_buffer().unwrap() == bytes(7)[..]);
        Some(())
    };
    let finished = run();
    assert!(finished.is_some() || may_fail);
    drop((a, b, region));
    fabric.capture().frames.len()
}

#[test]
fn every_packet_may_be_lost_duplicated_corrupted_or_reordered() {
    for link in [Link::Roce, Link::InfiniBand] {
        let build = || Fabric::builder().link(link).build(2).unwrap();
        let count = exchange(&build(), false);
        assert!(count > 10);
        for position in 1..=count as u64 + 1 {
            for (way, set) in WAYS.iter().enumerate() {
                let fabric = build();
                let forever = way == 4;
                let frames = match forever {
                    true => fabric.frames().after(position - 1),
                    false => fabric.frames().nth(position),
                };
                if forever {
                    frames.lose();
                } else {
                    set(frames);
                }
                let run = catch_unwind(AssertUnwindSafe(|| exchange(&fabric, forever)));
                assert!(run.is_ok(), "{way} at {position}:\n{}", fabric.capture());
            }
        }
    }
}
