//! A hostile guest: scripts for fuzz targets and a property test. For any script, the
//! HCA returns from commands, becomes idle, and has no objects after a reset.

use roce::fabric::{Fabric, PortConfig, subnet};
use roce::packet::{Bth, DEFAULT_PKEY, Deth, PacketBuilder, Path, Pool, Template};
use roce::transport::hostile::Script;

use super::driver::{Cq, Driver, Input, Qp, SEND_LOG, remote, segment};
use crate::command::opcode;

/// Limit of runs between steps of a script, since retries may be endless.
const MAX_RUNS: usize = 64;
/// The area that scripts write to freely, below the memory that [`Driver`] uses.
const SCRATCH: u64 = 0x8000;

fn run(driver: &mut Driver) {
    for _ in 0..MAX_RUNS {
        if !driver.hca.run() {
            return;
        }
    }
}

/// Resets the HCA and checks that nothing is left.
fn reset(driver: &mut Driver) {
    driver.hca.reset();
    for (kind, count) in driver.hca.objects() {
        assert_eq!(count, 0, "{kind} after a reset");
    }
    assert!(
        (0..MAX_RUNS).any(|_| !driver.hca.run()),
        "work is left after a reset"
    );
}

/// Creates an HCA with some objects of each kind, so that small numbers name
/// existing ones.
fn driver_with_objects(profile: u8) -> (Driver, Cq, [Qp; 2]) {
    let profiles = crate::profiles::PROFILES;
    let mut driver = Driver::new(profiles[usize::from(profile) % profiles.len()].name);
    let compress = profile & 0x10 != 0;
    let cq = driver.create_cq_with(4, profile & 0x20 != 0, |input| {
        input.or(0x10, 14, u32::from(compress))
    });
    let (a, b) = driver.pair_on(&cq);
    (driver, cq, [a, b])
}

/// Executes commands with arbitrary contents, some through the command queue and
/// its mailboxes, and advances the time.
pub fn commands(script: &[u8]) {
    let mut script = Script(script);
    let (mut driver, _cq, _qps) = driver_with_objects(script.byte());
    driver.hca.write(0x14, &(SCRATCH as u32).to_be_bytes());
    let opcodes = opcode::ALL;
    while !script.0.is_empty() {
        let bits = script.byte();
        let code = match bits & 7 {
            0 => script.short(),
            _ => opcodes[usize::from(script.byte()) % opcodes.len()],
        };
        let mut input = vec![0; 16];
        input[..2].copy_from_slice(&code.to_be_bytes());
        if bits & 8 != 0 {
            // The modifier, and a number that may name an object.
            input[7] = script.byte();
            input[11] = script.byte();
            if (0x500..0x510).contains(&code) {
                input[11] |= 0x40;
            }
        }
        let length = usize::from(script.byte()) * 4;
        input.resize(16 + length, 0);
        // Few bytes are nonzero; each comes with its position.
        for _ in 0..script.byte() % 24 {
            let at = usize::from(script.short());
            let bytes = script.bytes(1 + usize::from(bits >> 6));
            for (n, byte) in bytes.iter().enumerate() {
                if let Some(byte_slot) = input.get_mut(at % (16 + length.max(1)) + n) {
                    *byte_slot = *byte;
                }
            }
        }
        let output = usize::from(script.short() % 0x1200);
        if bits & 0x10 != 0 {
            submit_to_queue(&mut driver, &mut script, &input, output);
        } else {
            let response = driver.hca.execute(&input, output);
            assert!(
                response.len() <= output.max(16),
                "more than the output length"
            );
        }
        if bits & 0x20 != 0 {
            let now = &driver.hca.platform().now;
            now.set(now.get() + 1_000_000);
        }
        run(&mut driver);
    }
    reset(&mut driver);
}

/// Submits a command through the queue; its entry and mailboxes are mostly
/// well-formed.
fn submit_to_queue(driver: &mut Driver, script: &mut Script<'_>, input: &[u8], output: usize) {
    let slot = u64::from(script.byte() & 0x1f);
    let boxes = SCRATCH + 0x1000;
    let mut entry = [0; 64];
    entry[0] = 7;
    entry[4..8].copy_from_slice(&(input.len() as u32).to_be_bytes());
    entry[8..16].copy_from_slice(&boxes.to_be_bytes());
    let inline = input.len().min(16);
    entry[16..16 + inline].copy_from_slice(&input[..inline]);
    entry[48..56].copy_from_slice(&(boxes + 0x8000).to_be_bytes());
    entry[56..60].copy_from_slice(&(output as u32).to_be_bytes());
    entry[63] = 1;
    let rest = &input[inline..];
    for (n, part) in rest.chunks(512).enumerate() {
        let at = boxes + n as u64 * 1024;
        let mut block = [0; 576];
        block[..part.len()].copy_from_slice(part);
        block[560..568].copy_from_slice(&(at + 1024).to_be_bytes());
        block[568..572].copy_from_slice(&(n as u32).to_be_bytes());
        driver.write(at, &block);
    }
    for n in 0..9 {
        let at = boxes + 0x8000 + n * 1024;
        driver.write(at + 560, &(at + 1024).to_be_bytes());
        driver.write(at + 568, &(n as u32).to_be_bytes());
    }
    for _ in 0..script.byte() % 4 {
        let at = usize::from(script.byte() & 0x3f);
        entry[at] = script.byte();
        let at = u64::from(script.short());
        driver.write(boxes + at, script.bytes(1));
    }
    driver.write(SCRATCH + slot * 64, &entry);
    driver.hca.write(0x18, &(1_u32 << slot).to_be_bytes());
}

/// Creates a send queue of the network interface.
fn network_queue(driver: &mut Driver, cq: &Cq) -> Qp {
    let (send, doorbell, pd) = (driver.pages(1), driver.pages(1), driver.pd);
    let create = Input::new(opcode::CREATE_SQ, 0x118)
        .or(0x28, 0, cq.number)
        .or(0x58, 0, pd)
        .put64(0x60, doorbell)
        .or(0x70, 16, 6)
        .or(0x70, 0, SEND_LOG)
        .put64(0x110, send);
    let number = driver.create(create);
    let ready = Input::new(opcode::MODIFY_SQ, 0x110)
        .or(8, 0, number)
        .or(0x20, 20, 1);
    driver.execute(&ready, 16);
    Qp {
        number,
        recv: send,
        send,
        doorbell,
        posted: 0,
        received: 0,
    }
}

/// Posts work requests of arbitrary bytes, mostly with a well-formed control
/// segment, to queue pairs of all services; and receives, doorbell records and
/// memory with arbitrary contents.
pub fn work_requests(script: &[u8]) {
    let mut script = Script(script);
    let (mut driver, mut cq, [mut a, mut b]) = driver_with_objects(script.byte());
    let mut c = match script.byte() & 7 {
        service @ 0..4 => {
            let c = driver.create_qp(service.into(), &cq, None);
            driver.connect(c.number, c.number, 1);
            c
        }
        _ => network_queue(&mut driver, &cq),
    };
    let (key, memory) = (driver.key, driver.pages(4));
    let paged_key =
        driver.create_paged_key(memory, 3 * 4096, &[memory + 8192, memory, memory + 4096]);
    while !script.0.is_empty() {
        let bits = script.byte();
        let qp = match bits & 3 {
            0 => &mut b,
            1 => &mut a,
            _ => &mut c,
        };
        let length = u32::from(script.short());
        let key = if bits & 4 == 0 { key } else { paged_key };
        let va = memory + u64::from(script.byte()) * 32;
        match bits >> 5 {
            0 => {
                let count = usize::from(script.byte());
                driver.post_recv(qp, script.bytes(count.min(64)));
            }
            1 => driver.post_recv(qp, &segment(length, key, va)),
            2 => {
                let at = u64::from(script.byte() % 2) * 4;
                driver.write(qp.doorbell + at, script.bytes(4));
            }
            3 => {
                let count = usize::from(script.byte());
                driver.write(memory + u64::from(length % 8192), script.bytes(count));
            }
            kind => {
                let opcode = script.byte() & 0x3f;
                let flags = script.byte();
                let mut segments = match kind {
                    4 => Vec::new(),
                    5 => segment(length, key, va),
                    6 => {
                        let mut segments = remote(va, key);
                        segments.extend(segment(length, key, memory));
                        segments
                    }
                    _ => {
                        let mut segments = remote(va & !7, key);
                        segments.extend(script.bytes(16));
                        segments.resize(32, 0);
                        segments.extend(segment(8, key, memory));
                        segments
                    }
                };
                let count = usize::from(script.byte());
                segments.extend(script.bytes(count));
                segments.truncate(240);
                let mut entry = driver.write_wqe(qp, opcode, flags, &segments);
                if bits & 8 != 0 {
                    // The control segment is malformed as well.
                    let at = usize::from(script.byte()) % entry.len();
                    entry[at] = script.byte();
                    let slot = u64::from(qp.posted.wrapping_sub(1) & 15);
                    driver.write(qp.send + slot * 64, &entry[..16]);
                }
                if bits & 16 == 0 {
                    driver
                        .hca
                        .write(u64::from(driver.uar) * 4096 + 0x800, &entry[..8]);
                    driver.hca.flush_blue_flame();
                    run(&mut driver);
                }
            }
        }
        if bits & 0x18 == 0x18 {
            let now = &driver.hca.platform().now;
            now.set(now.get() + 50_000_000);
            run(&mut driver);
        }
        while bits & 0x10 != 0 && driver.poll(&mut cq).is_some() {}
    }
    run(&mut driver);
    reset(&mut driver);
}

/// Reads and writes registers at any offset and of any length: doorbells, BlueFlame
/// buffers, arming, the command queue's registers, device memory.
pub fn registers(script: &[u8]) {
    let mut script = Script(script);
    let (mut driver, mut cq, [mut a, mut b]) = driver_with_objects(script.byte());
    let uar = u64::from(driver.uar) * 4096;
    let (key, memory) = (driver.key, driver.pages(1));
    let mut last = driver.write_wqe(&mut a, 0, 8, &[]);
    while !script.0.is_empty() {
        let bits = script.byte();
        let count = usize::from(script.byte());
        match bits & 7 {
            0 => {
                let offset = u64::from(script.short()) << 9 | u64::from(script.short());
                let mut out = vec![0; count];
                driver.hca.read(offset, &mut out);
            }
            1 => {
                let offset = u64::from(script.short()) << 9 | u64::from(script.short());
                driver.hca.write(offset, script.bytes(count));
            }
            // A doorbell page.
            2 => {
                let offset = u64::from(script.short() & 0xfff);
                driver.hca.write(uar + offset, script.bytes(count.min(64)));
            }
            3 => {
                let mut arm = script.bytes(4).to_vec();
                arm.resize(4, 0);
                arm.extend((cq.number + u32::from(script.byte() & 1)).to_be_bytes());
                driver.hca.write(uar + 0x20, &arm);
            }
            4 => {
                let mut word = script.bytes(3).to_vec();
                word.resize(3, 0);
                word.insert(0, driver.eqn as u8);
                let at = if bits & 8 == 0 { 0x40 } else { 0x48 };
                driver.hca.write(uar + at, &word);
            }
            // A work request, then parts of it by BlueFlame.
            5 => {
                driver.post_recv(&mut b, &segment(64, key, memory));
                last = driver.write_wqe(&mut a, script.byte() & 0x3f, 8, &segment(8, key, memory));
            }
            6 => {
                let at = uar + 0x800 + u64::from(bits >> 6) * 256;
                let from = (usize::from(script.byte()) % last.len()) & !7;
                let to = (from + count.max(8)).min(last.len());
                driver.hca.write(at + from as u64, &last[from..to]);
            }
            _ => driver.write(SCRATCH + u64::from(script.short()), script.bytes(count)),
        }
        if bits & 0x10 != 0 {
            driver.hca.flush_blue_flame();
        }
        if bits & 0x20 != 0 {
            run(&mut driver);
            while driver.poll(&mut cq).is_some() {}
        }
    }
    driver.hca.flush_blue_flame();
    run(&mut driver);
    reset(&mut driver);
}

/// Sends requests with arbitrary contents to the subnet manager, and messages that
/// are no requests.
///
/// # Panics
/// If a port that sent no request receives a response, or if a valid join receives none.
pub fn management(script: &[u8]) {
    const METHODS: [u8; 8] = [0x01, 0x02, 0x12, 0x13, 0x14, 0x15, 0x81, 0x06];
    const ATTRIBUTES: [u8; 6] = [0x01, 0x11, 0x31, 0x35, 0x38, 0x39];
    let mut script = Script(script);
    let (fabric, pool) = (Fabric::new(1), Pool::new());
    let ports = [1, 2].map(|lid| fabric.port(PortConfig::ib(lid)));
    let _uplink = (script.byte() & 1 != 0).then(|| fabric.uplink());
    let send = |payload: &[u8]| {
        let template = Template::new(&Path::ib(1, subnet::LID));
        let bth = Bth {
            // An unreliable datagram of one packet.
            opcode: 0x64,
            pkey: DEFAULT_PKEY,
            dest_qpn: 1,
            ..Bth::default()
        };
        let deth = Deth {
            qkey: 0x8001_0000,
            source_qpn: 1,
        };
        let mut builder = PacketBuilder::new(&pool, &template, bth, payload.len());
        builder.put(&deth.bytes());
        builder.put(payload);
        ports[0].send(0, builder.finish());
        let mut count = 0;
        while ports[0].recv(0).is_some() {
            count += 1;
        }
        count
    };
    let port = subnet::gid(subnet::guid(1));
    while !script.0.is_empty() {
        let bits = script.byte();
        if bits & 1 != 0 {
            let length = usize::from(script.short()) % 600;
            send(script.bytes(length));
            continue;
        }
        let mut mad = [0; 256];
        let method = METHODS[usize::from(script.byte()) % METHODS.len()];
        mad[..4].copy_from_slice(&[1, 3, 2, method]);
        mad[17] = ATTRIBUTES[usize::from(script.byte()) % ATTRIBUTES.len()];
        let bytes = script.bytes(8);
        mad[48..48 + bytes.len()].copy_from_slice(bytes);
        let length = usize::from(script.byte()) % 201;
        let bytes = script.bytes(length);
        mad[56..56 + bytes.len()].copy_from_slice(bytes);
        // An existing port: in a member record, in a path record.
        if bits & 2 != 0 {
            mad[72..88].copy_from_slice(&port);
        }
        if bits & 4 != 0 {
            mad[64..80].copy_from_slice(&port);
        }
        send(&mad);
    }
    assert!(
        ports[1].recv(0).is_none(),
        "a response to a port that sent no request"
    );
    // A join of the broadcast group still works: MGID, port, partition, full
    // member.
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 3, 2, 0x02]);
    mad[17] = 0x38;
    mad[48..56].copy_from_slice(&(1_u64 | 1 << 1 | 1 << 7 | 1 << 16).to_be_bytes());
    mad[56..62].copy_from_slice(&[0xff, 0x12, 0x40, 0x1b, 0xff, 0xff]);
    mad[68..72].fill(0xff);
    mad[72..88].copy_from_slice(&port);
    mad[96..98].fill(0xff);
    mad[104] = 1;
    assert_eq!(send(&mad), 1, "no response to a join");
}
