//! Rates of the transport: messages per second between two HCAs over the in-memory
//! fabric, with both ends and the engine model on one thread.
//!
//! `cargo run --release -p ringverbs-roce --features test-utils --example rate`

use std::time::Instant;

use ringverbs_roce::packet::{LinkKind, Mtu};
use ringverbs_roce::transport::model::{Range, Region, World};
use ringverbs_roce::transport::{Operation, QpConfig, RecvWork, SendWork};

const DEPTH: u64 = 128;

fn measure(name: &str, kind: LinkKind, operation: Operation, length: u32, count: u64) {
    let memory = 1 << 20;
    let mut world = World::new(2, kind, memory, 1);
    let config = QpConfig {
        mtu: Mtu::B4096,
        ..QpConfig::default()
    };
    world.connect((0, 100), (1, 200), &config);
    for hca in &mut world.hcas {
        hca.host.count_only = true;
        let access = [true; 3];
        let region = Region {
            rkey: 1,
            va: 0,
            start: 0,
            length: memory as u32,
            access,
        };
        hca.host.regions.push(region);
    }
    let local = Range { start: 0, length };
    let start = Instant::now();
    let mut posted = 0;
    let mut received = 0;
    while world.hcas[0].host.sends_ended < count {
        let ended = world.hcas[0].host.sends_ended;
        while posted < count && posted - ended < DEPTH {
            let mut work = SendWork::new(posted, operation, length, local);
            work.rkey = 1;
            world.hcas[0].post_send(100, work);
            posted += 1;
        }
        while received < posted + DEPTH && operation == Operation::Send {
            let work = RecvWork {
                id: received,
                length,
                local,
            };
            world.hcas[1].host.queues(200).recvs.push_back(work);
            received += 1;
        }
        world.now = start.elapsed().as_nanos() as u64;
        world.turn();
    }
    let elapsed = start.elapsed().as_secs_f64();
    let packets: u64 = world
        .hcas
        .iter()
        .map(|h| h.transport.counters().packets_sent)
        .sum();
    println!(
        "{name:24} {length:7} bytes  {:6.2} M messages/s  {:6.2} M packets/s  {:7.2} Gbit/s",
        count as f64 / elapsed / 1e6,
        packets as f64 / elapsed / 1e6,
        count as f64 * f64::from(length) * 8.0 / elapsed / 1e9,
    );
    assert_eq!(world.hcas[0].transport.counters().retransmitted, 0);
}

fn main() {
    for (kind, name) in [
        (LinkKind::Ib, "InfiniBand"),
        (LinkKind::Ethernet, "RoCE v2"),
    ] {
        measure(
            &format!("{name} write"),
            kind,
            Operation::Write,
            64,
            2_000_000,
        );
        measure(
            &format!("{name} send"),
            kind,
            Operation::Send,
            64,
            2_000_000,
        );
        measure(
            &format!("{name} read"),
            kind,
            Operation::Read,
            64,
            1_000_000,
        );
        let add = Operation::FetchAdd { add: 1 };
        measure(&format!("{name} fetch and add"), kind, add, 8, 1_000_000);
        measure(
            &format!("{name} write"),
            kind,
            Operation::Write,
            65536,
            50_000,
        );
        measure(
            &format!("{name} read"),
            kind,
            Operation::Read,
            65536,
            50_000,
        );
    }
}
