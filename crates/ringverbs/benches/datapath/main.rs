//! What the data path costs: raw layer and safe layer beside bare loops, on
//! queues that a stand-in for the driver fills, the doorbell's system call
//! excluded. `cargo bench -p ringverbs --bench datapath`
//!
//! Instructions, and of them locked ones, are exact. A time is the median of
//! many rounds, in nanoseconds for an operation, without that of looking at the
//! clock; the machine should have nothing else to do. With `gate` as its
//! argument it only counts, and fails above the limits; with `trace ROW` it
//! prints where in this program each instruction of a row is.

extern crate rxe as ringverbs_rxe;
#[path = "../../../rxe/tests/common/mod.rs"]
mod common;
mod stepper;

use std::ffi::{CStr, c_int, c_void};
use std::hint::black_box;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use common::Driver;
use common::kernel::{CREATE_CQ, CREATE_QP, Machine};
use ring::Mapping;
use ringverbs::qp::{Init, Mtu, ReadyToReceive, ReadyToSend};
use ringverbs::raw::{Flags, Write};
use ringverbs::{
    AccessFlags, AhAttr, Buffer, Completion, CompletionQueue, Context, Inline, PostError,
    QueuePair, RemoteAddr, Transport, WorkRequest,
};
use uverbs::Errno;
use uverbs::abi::ids::*;
use uverbs::kernel::Kernel;
use uverbs::kernel::fake::{DRIVER, FakeKernel};

const ROUNDS: usize = 20_000;
const SLOTS: u32 = 1024;
const PRODUCER: usize = 128;
const CONSUMER: usize = 256;
const DATA: usize = 384;

/// The fake kernel, with a doorbell that costs next to nothing.
#[derive(Debug)]
struct Quiet(Arc<FakeKernel>);

impl Kernel for Quiet {
    fn open(&self, path: &CStr, flags: c_int) -> Result<RawFd, Errno> {
        self.0.open(path, flags)
    }
    fn close(&self, fd: RawFd) -> Result<(), Errno> {
        self.0.close(fd)
    }
    unsafe fn ioctl(
        &self,
        fd: RawFd,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno> {
        // SAFETY: passed on.
        unsafe { self.0.ioctl(fd, request, argument) }
    }
    fn read(&self, fd: RawFd, buffer: &mut [u8]) -> Result<usize, Errno> {
        self.0.read(fd, buffer)
    }
    unsafe fn write(&self, _fd: RawFd, buffer: &[u8]) -> Result<usize, Errno> {
        Ok(buffer.len())
    }
    fn wait_readable(&self, fd: RawFd, timeout_ms: c_int) -> Result<bool, Errno> {
        self.0.wait_readable(fd, timeout_ms)
    }
    fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<(), Errno> {
        self.0.set_nonblocking(fd, nonblocking)
    }
    fn device_number(&self, path: &CStr) -> Result<libc::dev_t, Errno> {
        self.0.device_number(path)
    }
    fn list_directory(&self, path: &CStr) -> Result<Vec<String>, Errno> {
        self.0.list_directory(path)
    }
    fn netlink(&self, request: &[u8], receive: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), Errno> {
        self.0.netlink(request, receive)
    }
    fn sysfs_path(&self) -> String {
        self.0.sysfs_path()
    }
}

/// A queue's memory, seen from the driver's side without system calls.
struct Seen {
    map: Mapping,
    stride: usize,
}

impl Seen {
    fn new(driver: &Driver) -> Self {
        let map = Mapping::new(driver.file.as_fd(), driver.offset, driver.size() as usize);
        Self {
            map: map.unwrap(),
            stride: driver.stride,
        }
    }

    fn word(&self, at: usize) -> *mut u32 {
        // SAFETY: inside of the mapping, by its layout.
        unsafe { self.map.as_ptr().add(at).cast().as_ptr() }
    }

    fn get(&self, at: usize) -> u32 {
        // SAFETY: as above.
        unsafe { self.word(at).read_volatile() }
    }

    fn set(&self, at: usize, value: u32) {
        // SAFETY: as above.
        unsafe { self.word(at).write_volatile(value) };
    }

    fn entry(&self, slot: u32) -> *mut u64 {
        let at = DATA + (slot % SLOTS) as usize * self.stride;
        // SAFETY: as above.
        unsafe { self.map.as_ptr().add(at).cast().as_ptr() }
    }

    /// Takes all that was produced; identifiers.
    fn consume(&self) -> Vec<u64> {
        let (mut at, end) = (self.get(CONSUMER), self.get(PRODUCER));
        let mut ids = Vec::new();
        while at != end {
            // SAFETY: an entry begins with its identifier.
            ids.push(unsafe { self.entry(at).read() });
            at = (at + 1) % SLOTS;
        }
        self.set(CONSUMER, at);
        ids
    }

    /// Completes work requests.
    fn complete(&self, ids: &[u64]) {
        let mut at = self.get(PRODUCER);
        for id in ids {
            // SAFETY: a completion has 48 bytes and begins with the identifier.
            unsafe {
                self.entry(at).write_bytes(0, 6);
                self.entry(at).write(*id);
            }
            at = (at + 1) % SLOTS;
        }
        self.set(PRODUCER, at);
    }
}

struct World {
    qp: QueuePair,
    cq: CompletionQueue,
    sends: Seen,
    receives: Seen,
    completions: Seen,
    buffers: Vec<Buffer>,
    _machine: Machine,
}

fn world() -> World {
    let machine = Machine::new();
    // SAFETY: the file is kept beside the context's objects.
    let context = unsafe {
        let kernel = Box::new(Quiet(Arc::clone(&machine.fake)));
        uverbs::Context::from_borrowed_fd(kernel, machine.memory.as_raw_fd(), DRIVER)
    };
    let context = Context::over(context).unwrap();
    // Distances as the kernel's: 64 for completions would do, 128 is what it
    // takes; 512 for sends with 64 bytes inline; 64 for receives.
    let completions = machine.queue(7, SLOTS);
    let (recv, send) = (machine.queue(6, SLOTS), machine.queue(9, SLOTS));
    let mminfo = completions.mminfo();
    machine.fake.on(CREATE_CQ, move |reply| {
        reply.set_driver_out(&mminfo);
        Ok(())
    });
    let place = [recv.mminfo(), send.mminfo()].concat();
    machine.fake.on(CREATE_QP, move |reply| {
        reply.set(ATTR_CREATE_QP_RESP_CAP, &common::kernel::cap(1, 1, 64));
        reply.set_driver_out(&place);
        Ok(())
    });
    let cq = context.completion_queue().build().unwrap();
    let domain = context.alloc_pd().unwrap();
    let builder = domain.queue_pair(Transport::Reliable, &cq);
    let mut qp = builder.build().unwrap();
    qp.transition(Init::reliable(1, AccessFlags::empty()))
        .unwrap();
    qp.transition(ReadyToReceive::reliable(
        AhAttr::default(),
        1,
        0,
        Mtu::Bytes1024,
    ))
    .unwrap();
    qp.transition(ReadyToSend::reliable(0)).unwrap();
    let region = domain.alloc(64 * 64).unwrap();
    World {
        qp,
        cq,
        sends: Seen::new(&send),
        receives: Seen::new(&recv),
        completions: Seen::new(&completions),
        buffers: region.into_buffers(64).collect(),
        _machine: machine,
    }
}

/// A way to measure what one round of a row takes.
trait Meter {
    fn measure<R>(&self, f: impl FnOnce() -> R) -> (f64, R);
}

/// Nanoseconds.
struct Clock;

impl Meter for Clock {
    #[inline(always)]
    fn measure<R>(&self, f: impl FnOnce() -> R) -> (f64, R) {
        let begin = Instant::now();
        let result = black_box(f());
        (begin.elapsed().as_nanos() as f64, result)
    }
}

/// Instructions, and the locked ones among them as thousandths.
struct Steps {
    trace: bool,
}

const LOCKED: f64 = 1e-3;

impl Meter for Steps {
    fn measure<R>(&self, f: impl FnOnce() -> R) -> (f64, R) {
        let (count, result) = stepper::count(self.trace, || black_box(f()));
        let count = count.instructions as f64 + count.locked as f64 * LOCKED;
        (count, result)
    }
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Row {
    PollFloor,
    PollRaw,
    PollSafe,
    SendFloor,
    SendRaw,
    SendSafe,
    InlineRaw,
    InlineSafe,
    RecvRaw,
    RecvSafe,
}

/// The rows, and how many instructions for an operation they may have, alone
/// and in a batch of 16.
const ROWS: [(Row, &str, [f64; 2]); 10] = [
    (Row::PollFloor, "poll floor", [f64::INFINITY; 2]),
    (Row::PollRaw, "poll raw", [47.0, 17.0]),
    (Row::PollSafe, "poll safe", [175.0, 102.0]),
    (Row::SendFloor, "send floor", [f64::INFINITY; 2]),
    (Row::SendRaw, "send raw", [82.0, 36.0]),
    (Row::SendSafe, "send safe", [191.0, 92.0]),
    (Row::InlineRaw, "inline raw", [70.0, 28.0]),
    (Row::InlineSafe, "inline safe", [118.0, 66.0]),
    (Row::RecvRaw, "recv raw", [52.0, 30.0]),
    (Row::RecvSafe, "recv safe", [146.0, 82.0]),
];

const AT: RemoteAddr = RemoteAddr::new(0x1000, 7);

/// A world for one row, which none but it uses: the floors move indices behind
/// the backs of those that own them.
struct Bench {
    world: World,
    row: Row,
    batch: usize,
    out: Vec<Completion>,
}

impl Bench {
    fn new(row: Row, batch: usize) -> Self {
        Self {
            world: world(),
            row,
            batch,
            out: (0..batch).map(|_| Completion::default()).collect(),
        }
    }

    /// One round: what was measured of it.
    fn round<M: Meter>(&mut self, meter: &M) -> f64 {
        match self.row {
            Row::PollFloor => self.poll_floor(meter),
            Row::PollRaw => self.poll_raw(meter),
            Row::PollSafe => self.send_safe(&Nothing, meter),
            Row::SendFloor => self.send_floor(meter),
            Row::SendRaw => self.send_raw(meter),
            Row::SendSafe => self.send_safe(meter, &Nothing),
            Row::InlineRaw => self.inline_raw(meter),
            Row::InlineSafe => self.inline_safe(meter),
            Row::RecvRaw => self.recv_raw(meter),
            Row::RecvSafe => self.recv_safe(meter),
        }
    }

    fn complete_all(&self) {
        let ids: Vec<u64> = (0..self.batch as u64).collect();
        self.world.completions.complete(&ids);
    }

    fn poll_floor(&mut self, meter: &impl Meter) -> f64 {
        self.complete_all();
        let seen = &self.world.completions;
        let (taken, sum) = meter.measure(|| {
            let (mut at, end) = (seen.get(CONSUMER), seen.get(PRODUCER));
            let mut sum = 0;
            while at != end {
                // SAFETY: an entry of 48 bytes.
                let entry = unsafe { seen.entry(at).cast::<[u64; 6]>().read() };
                sum += entry[0] + entry[1] + entry[2];
                at = (at + 1) % SLOTS;
            }
            seen.set(CONSUMER, at);
            sum
        });
        black_box(sum);
        taken
    }

    fn poll_raw(&mut self, meter: &impl Meter) -> f64 {
        self.complete_all();
        let (cq, batch) = (&mut self.world.cq, self.batch);
        let (taken, (count, sum)) = meter.measure(|| {
            let mut sum = 0;
            let count = cq.poll_raw(batch, |entry| {
                sum += entry.wr_id() + u64::from(entry.status().0);
                sum += u64::from(entry.byte_len());
            });
            (count, sum)
        });
        assert_eq!(count, batch);
        black_box(sum);
        taken
    }

    fn send_floor(&mut self, meter: &impl Meter) -> f64 {
        let sge = self.world.buffers[0].raw_sge();
        let (seen, batch) = (&self.world.sends, self.batch);
        let (taken, ()) = meter.measure(|| {
            let mut to = seen.get(PRODUCER);
            for id in 0..batch as u64 {
                // SAFETY: the fields of a write of one element, in place.
                unsafe {
                    let entry = seen.entry(to);
                    entry.write(id);
                    entry.add(1).write(0);
                    entry.add(2).write(2);
                    entry.add(3).write(AT.addr);
                    entry.add(4).write(u64::from(AT.rkey));
                    entry.add(18).write(0);
                    entry.add(19).write(AT.addr);
                    entry.add(23).write(64 | 64 << 32);
                    entry.add(24).write(1 << 32);
                    entry.add(25).write(0);
                    entry.add(26).write(sge.addr);
                    entry
                        .add(27)
                        .write(u64::from(sge.length) | u64::from(sge.lkey) << 32);
                }
                to = (to + 1) % SLOTS;
            }
            seen.set(PRODUCER, to);
        });
        seen.set(CONSUMER, seen.get(PRODUCER));
        taken
    }

    fn send_raw(&mut self, meter: &impl Meter) -> f64 {
        let World {
            qp, buffers, sends, ..
        } = &mut self.world;
        let (sge, batch) = (buffers[0].raw_sge(), self.batch as u64);
        let half = qp.send_half();
        let (taken, ()) = meter.measure(|| {
            let mut queue = half.raw();
            for id in 0..batch {
                let entry = queue.open::<Write>(id, Flags::SIGNALED);
                let entry = entry.unwrap().remote(AT).sge(sge);
                entry.unwrap().finish();
            }
            // SAFETY: nobody touches the memory: there is no device.
            unsafe { queue.publish().unwrap() };
        });
        sends.set(CONSUMER, sends.get(PRODUCER));
        taken
    }

    /// Posts and polls; either may be what is measured.
    fn send_safe(&mut self, post: &impl Meter, poll: &impl Meter) -> f64 {
        let World { qp, buffers, .. } = &mut self.world;
        let mut batch_of: Vec<_> = buffers.drain(..self.batch).collect();
        let (posting, ()) = post.measure(|| {
            qp.batch(|to| {
                for buffer in batch_of.drain(..) {
                    to.post(WorkRequest::write(buffer, AT))?;
                }
                Ok::<_, PostError<_>>(())
            })
            .unwrap();
        });
        let ids = self.world.sends.consume();
        self.world.completions.complete(&ids);
        posting + self.poll_safe(poll)
    }

    fn inline_raw(&mut self, meter: &impl Meter) -> f64 {
        let World { qp, sends, .. } = &mut self.world;
        let (half, batch) = (qp.send_half(), self.batch as u64);
        let (taken, ()) = meter.measure(|| {
            let mut queue = half.raw();
            for id in 0..batch {
                let entry = queue.open::<Write>(id, Flags::SIGNALED).unwrap();
                let entry = entry.remote(AT).inline(&id.to_ne_bytes());
                entry.unwrap().finish();
            }
            // SAFETY: no memory is named.
            unsafe { queue.publish().unwrap() };
        });
        sends.set(CONSUMER, sends.get(PRODUCER));
        taken
    }

    fn inline_safe(&mut self, meter: &impl Meter) -> f64 {
        let (qp, batch) = (&mut self.world.qp, self.batch as u64);
        let (taken, ()) = meter.measure(|| {
            qp.batch(|to| {
                for id in 0..batch {
                    let bytes = id.to_ne_bytes();
                    let request = WorkRequest::write(Inline(&bytes), AT);
                    to.post(request).map_err(|refused| refused.error)?;
                }
                Ok::<_, ringverbs::Error>(())
            })
            .unwrap();
        });
        let ids = self.world.sends.consume();
        self.world.completions.complete(&ids);
        taken + self.poll_safe(&Nothing)
    }

    fn recv_raw(&mut self, meter: &impl Meter) -> f64 {
        let World {
            qp,
            buffers,
            receives,
            ..
        } = &mut self.world;
        let (sge, batch) = (buffers[0].raw_sge(), self.batch as u64);
        let half = qp.recv_half();
        let (taken, ()) = meter.measure(|| {
            let mut queue = half.raw().unwrap();
            for id in 0..batch {
                queue.push(id, &[sge]).unwrap();
            }
            // SAFETY: nobody touches the memory: there is no device.
            unsafe { queue.publish() };
        });
        receives.consume();
        taken
    }

    fn recv_safe(&mut self, meter: &impl Meter) -> f64 {
        let World { qp, buffers, .. } = &mut self.world;
        let mut batch_of: Vec<_> = buffers.drain(..self.batch).collect();
        let (taken, ()) = meter.measure(|| {
            qp.receive_batch(|to| {
                for buffer in batch_of.drain(..) {
                    to.receive(buffer, 1)?;
                }
                Ok::<_, PostError<_>>(())
            })
            .unwrap();
        });
        let ids = self.world.receives.consume();
        self.world.completions.complete(&ids);
        self.poll_safe(&Nothing);
        taken
    }

    fn poll_safe(&mut self, meter: &impl Meter) -> f64 {
        let Self {
            world, out, batch, ..
        } = self;
        let (taken, count) = meter.measure(|| world.cq.poll(out).unwrap());
        assert_eq!(count, *batch);
        let back = out.iter_mut().filter_map(Completion::take_buffer);
        world.buffers.extend(back);
        taken
    }
}

/// Does what is not measured.
struct Nothing;

impl Meter for Nothing {
    fn measure<R>(&self, f: impl FnOnce() -> R) -> (f64, R) {
        (0.0, f())
    }
}

/// The median of many rounds.
fn time(bench: &mut Bench, clock: f64) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| bench.round(&Clock)).collect();
    rounds.sort_by(f64::total_cmp);
    (rounds[ROUNDS / 2] - clock) / bench.batch as f64
}

/// Exact counts: of a round in the middle of the queue, when all that is
/// reached for the first time has been.
fn count(bench: &mut Bench) -> (f64, f64) {
    let steps = Steps { trace: false };
    let mut counted = 0.0;
    for _ in 0..8 {
        counted = bench.round(&steps);
    }
    let instructions = counted.floor();
    let locked = (counted - instructions) / LOCKED;
    (
        instructions / bench.batch as f64,
        locked.round() / bench.batch as f64,
    )
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["trace", name, batch] = arguments[..] {
        let found = ROWS.iter().find(|row| row.1 == name);
        let (row, ..) = found.expect("a row's name");
        let mut bench = Bench::new(*row, batch.parse().expect("a number"));
        for round in 0..8 {
            bench.round(&Steps { trace: round == 7 });
        }
        return ExitCode::SUCCESS;
    }
    let gate = arguments.first() == Some(&"gate");
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| Clock.measure(|| ()).0).collect();
    rounds.sort_by(f64::total_cmp);
    let clock = rounds[ROUNDS / 2];
    let mut good = true;
    println!(
        "{:<12} {:>5} {:>14} {:>8} {:>8}",
        "", "batch", "instructions", "locked", "ns"
    );
    for (row, name, limits) in ROWS {
        for (batch, limit) in [1, 16].into_iter().zip(limits) {
            let (instructions, locked) = count(&mut Bench::new(row, batch));
            print!("{name:<12} {batch:>5} {instructions:>14.1} {locked:>8.2}");
            if !gate {
                print!(" {:>8.2}", time(&mut Bench::new(row, batch), clock));
            }
            if gate && (instructions > limit || locked > 0.0) {
                good = false;
                print!("  over the limit: {limit} instructions, none locked");
            }
            println!();
        }
    }
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
