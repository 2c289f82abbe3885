//! Rates of the whole HCA on one thread, with memory in a vector: commands, a doorbell to
//! its completion, and RDMA writes between two HCAs over the in-memory fabric. Times are
//! CPU times of the thread, so that other load matters less.
//!
//! `cargo run --profile shipped -p ringverbs-softhca --features test-utils --example hca_rate`

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use ringverbs_softhca::platform::Memory;
use ringverbs_softhca::testing::driver::{Cq, Driver, Input, Qp, SEND_LOG, remote, segment};
use roce::fabric::Fabric;

const WRITE: u8 = 0x08;
const NOP: u8 = 0x00;
const SIGNALED: u8 = 8;

/// The processor time that this thread has used.
struct CpuTime(Duration);

impl CpuTime {
    fn now() -> CpuTime {
        let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock");
        CpuTime(time.into())
    }
}

fn report(name: &str, count: u64, start: CpuTime) {
    let elapsed = (CpuTime::now().0 - start.0).as_secs_f64();
    println!(
        "{name:52} {:9.3} M/s  {:8.0} ns each",
        count as f64 / elapsed / 1e6,
        elapsed / count as f64 * 1e9
    );
}

fn commands() {
    const COUNT: u64 = 200_000;
    let mut driver = Driver::new("roce");
    let (_cq, qp, _) = driver.pair();
    let query = Input::new(0x50b, 16).or(8, 0, qp.number);
    let start = CpuTime::now();
    for _ in 0..COUNT {
        driver.execute(&query, 0x110);
    }
    report("QUERY_QP", COUNT, start);
    let start = CpuTime::now();
    for _ in 0..COUNT {
        let pd = driver.create(Input::new(0x800, 16));
        driver.execute(&Input::new(0x801, 16).or(8, 0, pd), 16);
    }
    report("ALLOC_PD, DEALLOC_PD", 2 * COUNT, start);
    let pages: Vec<u64> = (0..16).map(|n| 0x8_0000 + n * 4096).collect();
    let start = CpuTime::now();
    for _ in 0..COUNT {
        let key = driver.create_paged_key(0x1000, 16 * 4096, &pages);
        driver.execute(&Input::new(0x202, 16).or(8, 0, key >> 8), 16);
    }
    report("CREATE_MKEY of 16 pages, DESTROY_MKEY", 2 * COUNT, start);
    // Commands through the command queue, whose entry is in memory.
    const QUEUE: u64 = 0x8000;
    driver.hca.write(0x14, &(QUEUE as u32).to_be_bytes());
    let mut entry = [0; 64];
    entry[0] = 7;
    entry[7] = 16;
    entry[16..18].copy_from_slice(&0x80d_u16.to_be_bytes());
    entry[59] = 16;
    entry[63] = 1;
    let start = CpuTime::now();
    for _ in 0..COUNT {
        driver.write(QUEUE, &entry);
        driver.hca.write(0x18, &1_u32.to_be_bytes());
        let mut owner = [0];
        let memory = driver.hca.platform();
        memory.read(QUEUE + 63, &mut owner).expect("memory");
        assert_eq!(owner[0] & 1, 0);
        // Marks all events as consumed.
        let eqn = driver.eqn;
        let count = driver.hca.stats().eqes as u32 & 0xff_ffff;
        let at = u64::from(driver.uar) * 4096 + 0x48;
        driver.hca.write(at, &(eqn << 24 | count).to_be_bytes());
    }
    report("NOP by the command queue, with its event", COUNT, start);
}

/// A queue pair whose ring has been filled with one work request.
struct Sender {
    driver: Driver,
    qp: Qp,
    cq: Cq,
    entry: Vec<u8>,
}

impl Sender {
    /// Writes the WQE with the next index.
    fn write_wqe(&mut self, flags: u8) {
        self.entry[1..3].copy_from_slice(&self.qp.posted.to_be_bytes());
        self.entry[11] = flags;
        let slot = u64::from(self.qp.posted) & ((1 << SEND_LOG) - 1);
        let memory = self.driver.hca.platform();
        memory
            .write(self.qp.send + slot * 64, &self.entry)
            .expect("memory");
        self.qp.posted = self.qp.posted.wrapping_add(1);
    }

    fn ring(&mut self) {
        let tail = u32::from(self.qp.posted).to_be_bytes();
        self.driver.write(self.qp.doorbell + 4, &tail);
        let at = u64::from(self.driver.uar) * 4096 + 0x800;
        self.driver.hca.write(at, &self.entry[..8]);
        self.driver.hca.flush_blue_flame();
    }

    /// Polls a completion as a provider does.
    fn poll(&mut self) -> bool {
        let memory = self.driver.hca.platform();
        let at = self.cq.entry(self.cq.index) + 63;
        let mut last = [0];
        memory.read(at, &mut last).expect("memory");
        if last[0] & 1 != self.cq.owner(self.cq.index) || last[0] >> 4 == 15 {
            return false;
        }
        assert_eq!(last[0] >> 4, 0, "a success");
        self.cq.index += 1;
        let index = (self.cq.index & 0xff_ffff).to_be_bytes();
        memory.write(self.cq.doorbell, &index).expect("memory");
        true
    }
}

/// Two HCAs with connected queue pairs; the first sends `opcode`.
fn pair(profile: &str, opcode: u8, length: u32) -> (Sender, Driver) {
    let fabric = Fabric::new(1);
    let mut driver = Driver::with(profile, 0, &fabric, false);
    let mut peer = Driver::with(profile, 1, &fabric, false);
    let cq = driver.create_cq(5);
    let peers = peer.create_cq(5);
    let mut qp = driver.create_qp(0, &cq, None);
    let other = peer.create_qp(0, &peers, None);
    driver.connect(qp.number, other.number, 2);
    peer.connect(other.number, qp.number, 1);
    let (local, remote_va) = (driver.pages(4), peer.pages(4));
    let mut segments = Vec::new();
    if opcode == WRITE {
        segments = remote(remote_va, peer.key);
        segments.extend(segment(length, driver.key, local));
    }
    let entry = driver.write_wqe(&mut qp, opcode, 0, &segments);
    qp.posted = 0;
    let sender = Sender {
        driver,
        qp,
        cq,
        entry,
    };
    (sender, peer)
}

fn latency(name: &str, opcode: u8) {
    const COUNT: u64 = 500_000;
    let (mut sender, mut peer) = pair("ib", opcode, 64);
    let start = CpuTime::now();
    for _ in 0..COUNT {
        sender.write_wqe(SIGNALED);
        sender.ring();
        while !sender.poll() {
            sender.driver.hca.run();
            if opcode == WRITE {
                peer.hca.run();
            }
        }
    }
    report(name, COUNT, start);
}

fn rate(name: &str, length: u32, signal_each: bool, count: u64) {
    let (mut sender, mut peer) = pair("ib", WRITE, length);
    let batch = 1 << SEND_LOG;
    let start = CpuTime::now();
    for _ in 0..count / batch {
        for n in 0..batch {
            let last = n == batch - 1;
            sender.write_wqe(if signal_each || last { SIGNALED } else { 0 });
        }
        sender.ring();
        let mut remaining = if signal_each { batch } else { 1 };
        while remaining > 0 {
            sender.driver.hca.run();
            peer.hca.run();
            while sender.poll() {
                remaining -= 1;
            }
        }
    }
    report(name, count, start);
    assert_eq!(sender.driver.hca.transport_counters().retransmitted, 0);
}

fn main() {
    commands();
    latency("doorbell to completion, no operation", NOP);
    latency("doorbell to completion, write of 64 bytes", WRITE);
    rate("write of 64 bytes, each completes", 64, true, 2_000_000);
    rate(
        "write of 64 bytes, one in 16 completes",
        64,
        false,
        2_000_000,
    );
    rate("write of 4096 bytes, each completes", 4096, true, 500_000);
}
