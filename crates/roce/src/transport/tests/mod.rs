//! Tests of the transport: HCAs with the model engine, connected by the fabric.

mod capture;
pub(super) mod causes;
mod congestion;
mod datagram;
mod dynamic;
mod errors;
mod flood;
mod hostile;
mod loopback;
mod lossy;
mod order;
mod recovery;
mod segments;

use super::model::{Hca, Range, Region, World};
use super::*;
use crate::fabric::Faults;
use crate::packet::{LinkKind, Mtu};

const KINDS: [LinkKind; 3] = [LinkKind::Ib, LinkKind::Ethernet, LinkKind::Ip];
/// Those whose ports have addresses, so that a fabric connects more than two.
const ADDRESSED: [LinkKind; 2] = [LinkKind::Ib, LinkKind::Ethernet];
/// Key of the whole memory of an HCA.
const RKEY: u32 = 0x1234;
const VA: u64 = 0x7000_0000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;

/// Creates two HCAs with queue pairs 100 and 200 connected, and all memory accessible.
fn pair(kind: LinkKind, memory: usize, seed: u64, config: &QpConfig) -> World {
    pair_with_recovery(kind, memory, seed, config, [false; 2])
}

/// As [`pair`]; `recovers` says which HCAs recover from losses before a timeout.
fn pair_with_recovery(
    kind: LinkKind,
    memory: usize,
    seed: u64,
    config: &QpConfig,
    recovers: [bool; 2],
) -> World {
    let mut world = World::new(2, kind, memory, seed);
    for (hca, recovers) in world.hcas.iter_mut().zip(recovers) {
        hca.transport.set_lossy(recovers);
    }
    world.connect((0, 100), (1, 200), config);
    for hca in &mut world.hcas {
        open(hca, memory);
    }
    world
}

fn open(hca: &mut Hca, memory: usize) {
    let length = memory as u32;
    let access = [true; 3];
    hca.host.regions.push(Region {
        rkey: RKEY,
        va: VA,
        start: 0,
        length,
        access,
    });
}

/// Returns a work request of `length` bytes, locally from `start` and remotely from
/// `at`.
fn work(id: u64, operation: Operation, start: usize, length: u32, at: usize) -> SendWork<Range> {
    let mut work = SendWork::new(id, operation, length, Range { start, length });
    work.va = VA + at as u64;
    work.rkey = RKEY;
    work
}

/// Fills memory with a pattern that depends on the offset.
fn fill(memory: &mut [u8], seed: u8) {
    for (i, byte) in memory.iter_mut().enumerate() {
        *byte = (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed;
    }
}

fn statuses(hca: &mut Hca, qpn: u32) -> Vec<(u64, Status)> {
    hca.host
        .queues(qpn)
        .sent
        .iter()
        .map(|(id, done)| (*id, done.status()))
        .collect()
}

fn recv_statuses(hca: &mut Hca, qpn: u32) -> Vec<(u64, Status)> {
    hca.host
        .queues(qpn)
        .received
        .iter()
        .map(|(id, done)| (*id, done.status()))
        .collect()
}

fn events(hca: &mut Hca, qpn: u32) -> Vec<QpEvent> {
    hca.host.queues(qpn).events.clone()
}
