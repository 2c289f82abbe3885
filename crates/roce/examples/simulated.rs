//! Two HCAs in simulated time, and a network that loses and duplicates packets: a message
//! arrives once all the same. Another seed loses others.
//!
//! `cargo run -p ringverbs-roce --features test-utils --example simulated [SEED]`

use ringverbs_roce::fabric::Faults;
use ringverbs_roce::packet::LinkKind;
use ringverbs_roce::transport::model::{Range, World};
use ringverbs_roce::transport::{Operation, QpConfig, SendWork};

const LENGTH: u32 = 1 << 20;
const SECOND: u64 = 1_000_000_000;

fn main() {
    let seed = std::env::args().nth(1).and_then(|seed| seed.parse().ok());
    let memory = LENGTH as usize;
    let mut world = World::new(2, LinkKind::Ethernet, memory, seed.unwrap_or(1));
    world.fabric.set_faults(Faults {
        loss: 0.01,
        duplicate: 0.01,
        delay: 5_000,
        ..Faults::default()
    });
    // Queue pair 100 of the first HCA, 200 of the second.
    let config = QpConfig {
        ack_timeout: 8,
        ..QpConfig::default()
    };
    world.connect((0, 100), (1, 200), &config);

    let data = (0..LENGTH).map(|index| index as u8);
    world.hcas[0].host.memory = data.collect();
    world.hcas[1].post_recv(200, 1, 0, LENGTH);
    let local = Range {
        start: 0,
        length: LENGTH,
    };
    let work = SendWork::new(2, Operation::Send, LENGTH, local);
    world.hcas[0].post_send(100, work);
    world.settle(60 * SECOND);

    let [sender, receiver] = &mut world.hcas[..] else {
        unreachable!("there are two")
    };
    println!("send:    {:?}", sender.host.queues(100).sent);
    println!("receive: {:?}", receiver.host.queues(200).received);
    println!(
        "{} packets, {} of them again, in {} us",
        sender.transport.counters().packets_sent,
        sender.transport.counters().retransmitted,
        world.now / 1000,
    );
    assert!(receiver.host.memory == sender.host.memory);
}
