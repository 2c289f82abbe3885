//! The transport in its steady state allocates nothing: packets come from the pool,
//! queues keep their capacity.

use ringverbs_roce::fabric::Faults;
use ringverbs_roce::packet::LinkKind;
use ringverbs_roce::transport::model::{Range, Region, World};
use ringverbs_roce::transport::{Operation, QpConfig, RecvWork, SendWork};
use testing::allocations::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const MEMORY: usize = 1 << 16;

/// Posts a batch of every operation and waits for its completion.
fn run_batch(world: &mut World, count: u64) {
    let mut id = 0;
    for _ in 0..count {
        for (operation, length) in [
            (Operation::Write, 64),
            (Operation::Send, 3000),
            (Operation::WriteImm, 5000),
            (Operation::Read, 9000),
            (Operation::FetchAdd { add: 1 }, 8),
        ] {
            let mut work = SendWork::new(id, operation, length, Range { start: 0, length });
            work.rkey = 1;
            world.hcas[0].post_send(100, work);
            let local = Range {
                start: 0,
                length: 8192,
            };
            let recv = RecvWork {
                id,
                length: 8192,
                local,
            };
            if matches!(operation, Operation::Send | Operation::WriteImm) {
                world.hcas[1].host.queues(200).recvs.push_back(recv);
            }
            id += 1;
        }
    }
    world.settle(10_000_000_000);
}

#[test]
fn the_steady_state_allocates_nothing() {
    for faults in [
        Faults::default(),
        Faults {
            delay: 100,
            loss: 0.01,
            ..Faults::default()
        },
    ] {
        let mut world = World::new(2, LinkKind::Ethernet, MEMORY, 1);
        world.connect(
            (0, 100),
            (1, 200),
            &QpConfig {
                ack_timeout: 4,
                ..QpConfig::default()
            },
        );
        for hca in &mut world.hcas {
            hca.host.count_only = true;
            let (length, access) = (MEMORY as u32, [true; 3]);
            hca.host.regions.push(Region {
                rkey: 1,
                va: 0,
                start: 0,
                length,
                access,
            });
        }
        world.fabric.set_faults(faults);
        // Queues and pool grow to their size. Losses make that take some time.
        for _ in 0..20 {
            run_batch(&mut world, 100);
        }
        let (count, ()) = allocations(|| {
            for _ in 0..5 {
                run_batch(&mut world, 100);
            }
        });
        assert_eq!(world.hcas[0].host.sends_ended, 25 * 500);
        // With losses a queue may still find a new maximum; without there is none.
        let limit = if faults == Faults::default() { 0 } else { 20 };
        assert!(count <= limit, "{count} allocations");
    }
}
