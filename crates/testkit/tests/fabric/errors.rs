//! Errors of a program that no device reports, each with a program that does the same as it
//! should be done.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ringverbs::{AccessFlags, Buffer, CompletionQueue, ProtectionDomain, QueuePair, Transport};
use ringverbs_testkit::{CheckRule, Fabric, ProgramError, connect};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const LENGTH: usize = 64;

fn checked() -> Fabric {
    Fabric::builder().check().build(2).unwrap()
}

fn buffer(domain: &ProtectionDomain, byte: u8) -> ringverbs::Result<Buffer> {
    let mut buffer = domain.alloc(LENGTH)?.into_buffer();
    buffer.set_len(LENGTH)?;
    buffer.fill(byte);
    Ok(buffer)
}

fn rules(errors: &[ProgramError]) -> Vec<CheckRule> {
    errors.iter().map(|it| it.rule).collect()
}

/// A domain and a queue of each of two nodes.
struct Pair {
    domains: [ProtectionDomain; 2],
    queues: [CompletionQueue; 2],
}

impl Pair {
    fn new(fabric: &Fabric, entries: u32) -> Result<Self> {
        let contexts = [fabric.node(0).open()?, fabric.node(1).open()?];
        let queue = |at: usize| contexts[at].completion_queue().entries(entries).build();
        Ok(Self {
            domains: [contexts[0].alloc_pd()?, contexts[1].alloc_pd()?],
            queues: [queue(0)?, queue(1)?],
        })
    }

    fn connected(&self) -> Result<[QueuePair; 2]> {
        let queue_pair = |at: usize| {
            let domain = &self.domains[at];
            let builder = domain.queue_pair(Transport::Reliable, &self.queues[at]);
            builder.build()
        };
        let (mut a, mut b) = (queue_pair(0)?, queue_pair(1)?);
        connect(&mut a, &mut b)?;
        Ok([a, b])
    }
}

/// Two queue pairs of a node write to the other one, of which the first waits for a receive.
/// The second one writes bytes from an offset; if it waits, after the first has ended.
fn overlap(fabric: &Fabric, (byte, offset): (u8, usize), waits: bool) -> Result<()> {
    let mut pair = Pair::new(fabric, 16)?;
    let [mut a, mut b] = pair.connected()?;
    let [mut c, _d] = pair.connected()?;
    let target = pair.domains[1].alloc_remote(4096, AccessFlags::REMOTE_WRITE)?;
    let domain = pair.domains[0].clone();
    a.send(buffer(&domain, 0)?, 0)?;
    // The answer is that there is no receive.
    fabric.advance(Duration::from_micros(20));
    a.write(buffer(&domain, 1)?, target.key(), 1)?;
    fabric.settle();
    if waits {
        b.receive(buffer(&pair.domains[1], 0)?, 0)?;
        for _ in 0..2 {
            pair.queues[0].poll_until_one()?.result.unwrap();
        }
    }
    c.write(buffer(&domain, byte)?, target.key().offset(offset), 2)?;
    fabric.settle();
    if !waits {
        b.receive(buffer(&pair.domains[1], 0)?, 0)?;
    }
    for _ in 0..if waits { 1 } else { 3 } {
        pair.queues[0].poll_until_one()?.result.unwrap();
    }
    Ok(())
}

#[test]
fn writes_that_nothing_orders_are_errors() {
    let fabric = checked();
    overlap(&fabric, (2, 32), false).unwrap();
    let errors = fabric.take_errors();
    assert_eq!(rules(&errors), [CheckRule::OverlappingAccess]);
    let text = errors[0].to_string();
    assert!(text.contains("both access 32 bytes"), "{text}");
    // Ordered by the program, beside, and the same bytes.
    overlap(&fabric, (2, 32), true).unwrap();
    overlap(&fabric, (2, LENGTH), false).unwrap();
    overlap(&fabric, (1, 0), false).unwrap();
    fabric.assert_no_errors();
}

/// Posts as many receives and sends as the queues have entries, or one more.
fn overfill(fabric: &Fabric, count: u64, polls: bool) -> Result<()> {
    let mut pair = Pair::new(fabric, 3)?;
    let [mut a, mut b] = pair.connected()?;
    for token in 0..count {
        b.receive(buffer(&pair.domains[1], 0)?, token)?;
        a.send(buffer(&pair.domains[0], 1)?, token)?;
        if polls {
            for queue in &mut pair.queues {
                queue.poll_until_one()?.result.unwrap();
            }
        }
    }
    fabric.settle();
    Ok(())
}

#[test]
fn completion_queues_that_may_overrun_are_errors() {
    let fabric = checked();
    // Each of the nodes has one.
    overfill(&fabric, 5, false).unwrap();
    let rule = CheckRule::CompletionQueueTooSmall;
    let errors = fabric.take_errors();
    assert_eq!(rules(&errors), [rule; 2]);
    let mut devices = [errors[0].device, errors[1].device];
    devices.sort_unstable();
    assert_eq!(devices, [0, 1]);
    let fabric = checked();
    overfill(&fabric, 4, false).unwrap();
    overfill(&fabric, 50, true).unwrap();
    fabric.assert_no_errors();
}

#[test]
fn a_test_with_errors_fails() {
    let dropped = catch_unwind(AssertUnwindSafe(|| {
        let fabric = checked();
        overlap(&fabric, (2, 32), false).unwrap();
    }));
    let message = dropped.unwrap_err();
    let message = message.downcast_ref::<String>().unwrap();
    let start = "the test has errors:\n  node 0: overlapping-access: RDMA write";
    assert!(message.starts_with(start), "{message}");
    // A fabric without `check` reports no errors.
    let fabric = Fabric::roce(2).unwrap();
    overlap(&fabric, (2, 32), false).unwrap();
    assert!(fabric.take_errors().is_empty());
}

/// With chaos the writes are late by themselves, and the sends before it are not needed.
#[test]
fn chaos_delays_writes_until_they_overlap() {
    let found = (1..100).any(|seed| {
        let builder = Fabric::builder().check().chaos(seed);
        let fabric = builder.build(2).unwrap();
        let mut pair = Pair::new(&fabric, 16).unwrap();
        let [mut a, _b] = pair.connected().unwrap();
        let [mut c, _d] = pair.connected().unwrap();
        let target = pair.domains[1].alloc_remote(4096, AccessFlags::REMOTE_WRITE);
        let target = target.unwrap();
        let domain = pair.domains[0].clone();
        for (qp, byte) in [(&mut a, 1), (&mut c, 2)] {
            let data = buffer(&domain, byte).unwrap();
            qp.write(data, target.key(), 1).unwrap();
        }
        for _ in 0..2 {
            pair.queues[0].poll_until_one().unwrap().result.unwrap();
        }
        rules(&fabric.take_errors()) == [CheckRule::OverlappingAccess]
    });
    assert!(found);
}
