//! Memory use is bounded if a peer floods the responder or restarts timers repeatedly.

use super::*;
use crate::packet::{AtomicEth, Bth, Packet, PacketBuilder, Psn, Reth, Template, op};

/// Returns a request from queue pair 100 to queue pair 200 with an extended header.
fn request(pool: &Pool, template: &Template, opcode: u8, psn: u32, header: &[u8]) -> Packet {
    let bth = Bth {
        opcode,
        dest_qpn: 200,
        pkey: 0xffff,
        psn: Psn::new(psn),
        ..Bth::default()
    };
    let mut builder = PacketBuilder::new(pool, template, bth, 0);
    builder.put(header);
    builder.finish()
}

#[test]
pub(super) fn queued_responses_are_bounded() {
    const LENGTH: u32 = 64 * 1024;
    let packets = LENGTH.div_ceil(1024);
    for opcode in [op::FETCH_ADD, op::SEND_ONLY] {
        let mut world = pair(LinkKind::Ib, LENGTH as usize, 1, &QpConfig::default());
        let template = Template::new(&world.hcas[0].path_to(1));
        let pool = Pool::new();
        let hca = &mut world.hcas[1];
        // The response to this read is sent first, and takes long.
        let read = Reth {
            va: VA,
            rkey: RKEY,
            length: LENGTH,
        };
        let read = request(&pool, &template, op::READ_REQUEST, 0, &read.bytes());
        hca.transport.receive(&mut hca.host, 0, read);
        let atomic = AtomicEth {
            va: VA,
            rkey: RKEY,
            swap_add: 1,
            compare: 0,
        };
        for n in 0..10_000 {
            // Atomics are executed; for sends, no receive is posted.
            let packet = match opcode {
                op::FETCH_ADD => request(&pool, &template, opcode, packets + n, &atomic.bytes()),
                _ => request(&pool, &template, opcode, packets, &[]),
            };
            hca.transport.receive(&mut hca.host, 0, packet);
        }
        let mut responses = 0;
        while hca.transport.run(&mut hca.host, 0, 64) {}
        while hca.transport.pop().is_some() {
            responses += 1;
        }
        let limit = packets as usize + 64 + 2 * 16;
        assert!(responses > packets as usize, "{opcode:#x}");
        assert!(responses <= limit, "{opcode:#x}: {responses}");
    }
}

#[test]
fn rescheduled_timers_are_bounded() {
    // A peer that is never ready, and a long acknowledgement timeout.
    let config = QpConfig {
        ack_timeout: 22,
        rnr_retry: 7,
        min_rnr_timer: 1,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 64, 1, &config);
    world.hcas[0].post_send(100, work(1, Operation::Send, 0, 8, 0));
    world.settle(100 * MS);
    let transport = &world.hcas[0].transport;
    assert!(transport.counters().rnr_naks > 5000);
    assert!(transport.timers.len() < 100, "{}", transport.timers.len());
}
