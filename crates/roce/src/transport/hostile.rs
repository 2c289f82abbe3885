//! A hostile peer: the script of a fuzz target and of a property test.

use super::model::{Range, Region, World};
use super::{Datagram, Fence, Operation, QpConfig, QpState, Service};
use crate::fabric::Faults;
use crate::packet::{BTH_BYTES, Bth, LinkKind, Mtu, PacketBuilder, Pool, Psn, Template};

const QPN: u32 = 200;
const MEMORY: usize = 64 * 1024;
const RKEY: u32 = 1;

/// A script, consumed piece by piece; it yields zeros when it is used up.
pub struct Script<'a>(pub &'a [u8]);

impl<'a> Script<'a> {
    /// Takes a byte.
    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// Takes a little-endian number of two bytes.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Takes a byte.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

fn operation(code: u8) -> Operation {
    match code % 9 {
        0 => Operation::Send,
        1 => Operation::SendImm,
        2 => Operation::SendInvalidate,
        3 => Operation::Write,
        4 => Operation::WriteImm,
        5 => Operation::Read,
        6 => Operation::FetchAdd { add: 1 },
        7 => Operation::CompareSwap {
            compare: 0,
            swap: 1,
        },
        _ => Operation::Local,
    }
}

/// Plays a script: an HCA with one queue pair receives packets with arbitrary headers
/// (whose lengths and ICRC are valid) and frames of arbitrary bytes, among posted work
/// requests, state changes and time.
///
/// # Panics
/// If a work request completes twice or out of order, or bytes that no peer may write
/// are changed.
pub fn play(script: &[u8]) {
    let mut script = Script(script);
    let first = script.byte();
    let flags = script.byte();
    let kind = match (first & 1, flags & 0x40) {
        (0, _) => LinkKind::Ib,
        (_, 0) => LinkKind::Ethernet,
        _ => LinkKind::Ip,
    };
    let service = match first >> 1 & 7 {
        0 | 1 => Service::Rc,
        2 => Service::Uc,
        3 => Service::Ud,
        4 => Service::XrcInitiator,
        5 => Service::XrcTarget,
        6 => Service::DcTarget,
        _ => Service::DcInitiator,
    };
    let mut world = World::new(2, kind, MEMORY, u64::from(flags));
    for hca in &mut world.hcas {
        hca.transport.set_lossy(first & 0x40 != 0);
    }
    let config = QpConfig {
        service,
        mtu: Mtu::from_code(first >> 4 & 3).unwrap_or_default(),
        ack_timeout: 4,
        retry_count: flags & 7,
        rnr_retry: flags >> 3 & 7,
        min_rnr_timer: 1,
        max_rd_atomic: 2,
        max_dest_rd_atomic: 2,
        log_errored_streams: 1,
        send_psn: 0xff_fff0,
        recv_psn: 0xff_fff0,
        ..QpConfig::default()
    };
    world.connect((1, QPN), (0, 100), &config);
    let hca = &mut world.hcas[1];
    // No region contains the second half of the memory.
    let (length, access) = (MEMORY as u32 / 2, [true; 3]);
    hca.host.regions.push(Region {
        rkey: RKEY,
        va: 0,
        start: 0,
        length,
        access,
    });
    hca.host.memory[MEMORY / 2..].fill(0x5a);
    let template = Template::new(&world.hcas[0].path_to(1));
    let pool = Pool::new();
    let (mut sends, mut recvs) = (0, 0);
    while !script.0.is_empty() {
        match script.byte() % 8 {
            0 => {
                let length = usize::from(script.byte());
                if let Some(packet) = pool.copy_of(kind, script.bytes(length)) {
                    world.hcas[0].port.send(world.now, packet);
                }
            }
            // A packet with a PSN near the expected one, or near those sent.
            1..=3 => {
                let (opcode, bits, delta) = (script.byte(), script.byte(), script.byte());
                let Some(view) = world.hcas[1].transport.query(QPN) else {
                    return;
                };
                let base = if bits & 1 == 0 {
                    view.recv_psn
                } else {
                    view.send_psn
                };
                let mut bth = Bth::read(&[0; BTH_BYTES]);
                bth.opcode = opcode;
                bth.solicited = bits & 2 != 0;
                bth.ack_request = bits & 4 != 0;
                bth.pkey = if bits & 0xf0 == 0xf0 { 0x1234 } else { 0xffff };
                bth.dest_qpn = if bits & 8 != 0 {
                    QPN
                } else {
                    u32::from(script.byte())
                };
                bth.psn = Psn::new(base.wrapping_add(delta as i8 as u32));
                let mut length = usize::from(script.byte());
                let extended =
                    crate::packet::Opcode::decode(opcode).map_or(0, |o| o.extended_length());
                if bits & 0x40 != 0 {
                    length = extended + config.mtu.bytes() as usize;
                }
                let given = script.bytes(length.min(64));
                let payload = length.saturating_sub(extended.min(length));
                let mut builder = PacketBuilder::new(&pool, &template, bth, payload);
                let space = builder.space(length);
                space.fill(0);
                space[..given.len()].copy_from_slice(given);
                world.hcas[0].port.send(world.now, builder.finish());
            }
            4 => {
                let mut work = super::SendWork::new(
                    sends,
                    operation(script.byte()),
                    u32::from(script.short() % 9000),
                    Range {
                        start: 0,
                        length: 8192,
                    },
                );
                let bits = script.byte();
                work.rkey = RKEY;
                work.stream = u16::from(bits >> 2 & 3);
                work.fence = [Fence::None, Fence::Reads, Fence::All][usize::from(bits % 3)];
                if bits & 0x80 != 0 {
                    let path = world.hcas[1].path_to(0);
                    work.datagram = Some(Box::new(Datagram {
                        path,
                        qpn: 100,
                        qkey: 0,
                        dc_key: 0,
                    }));
                }
                world.hcas[1].post_send(QPN, work);
                sends += 1;
            }
            5 => {
                let length = u32::from(script.short() % 9000);
                world.hcas[1].post_recv(QPN, recvs, usize::from(script.byte()), length);
                recvs += 1;
            }
            6 => world.now += u64::from(script.short()) * 100,
            _ => {
                let bits = script.byte();
                let to = match bits & 7 {
                    0 => QpState::Error,
                    1 => QpState::SendQueueDrain,
                    2 | 3 => QpState::ReadyToSend,
                    _ => {
                        let loss = f64::from(bits >> 4) / 64.0;
                        world.fabric.set_faults(Faults {
                            loss,
                            ..Faults::default()
                        });
                        continue;
                    }
                };
                let hca = &mut world.hcas[1];
                let config = QpConfig {
                    path: Some(hca.path_to(0)),
                    ..config.clone()
                };
                let now = world.now;
                let _ = hca.transport.modify(&mut hca.host, now, QPN, to, config);
            }
        }
        for _ in 0..4 {
            world.turn();
        }
    }
    world.settle(5_000_000);
    let hca = &mut world.hcas[1];
    let queues = hca.host.queues(QPN);
    let sent = queues.sent.iter().map(|(id, _)| *id);
    assert!(
        sent.eq(0..queues.sent.len() as u64),
        "sends end once, in order"
    );
    assert!(queues.sent.len() as u64 <= sends);
    let mut received: Vec<_> = queues.received.iter().map(|(id, _)| *id).collect();
    if service == Service::DcTarget {
        // A receive whose connection was given up serves a later message.
        received.sort_unstable();
        received.dedup();
        assert_eq!(received.len(), queues.received.len(), "receives end once");
    }
    assert!(
        service == Service::DcTarget || received.into_iter().eq(0..queues.received.len() as u64),
        "receives end once, in order"
    );
    assert!(
        hca.host.memory[MEMORY / 2..].iter().all(|b| *b == 0x5a),
        "memory of nobody"
    );
}
