//! What the data path costs: raw layer and safe layer beside bare loops, on
//! queues that a stand-in for the driver fills, the doorbell's system call
//! excluded. `cargo bench -p ringverbs --bench datapath`
//!
//! Each figure is the median of many rounds, in nanoseconds for an operation;
//! the time that it takes to look at the clock is taken off. The machine should
//! have nothing else to do.

extern crate rxe as ringverbs_rxe;
#[path = "../../rxe/tests/common/mod.rs"]
mod common;

use std::ffi::{CStr, c_int, c_void};
use std::hint::black_box;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use common::Driver;
use common::kernel::{CREATE_CQ, CREATE_QP, Machine};
use ring::Mapping;
use ringverbs::qp::{Init, ReadyToReceive, ReadyToSend};
use ringverbs::raw::{Flags, Write};
use ringverbs::{
    AccessFlags, AhAttr, Buffer, Completion, CompletionQueue, Context, QueuePair, RemoteAddr,
    Transport, WorkRequest,
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
    qp.transition(ReadyToReceive::reliable(AhAttr::default(), 1, 0, 3))
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

/// Runs `step` (which returns the nanoseconds that count) often; the median for
/// one of `batch` operations.
fn median(batch: usize, clock: f64, mut step: impl FnMut() -> f64) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| step()).collect();
    rounds.sort_by(f64::total_cmp);
    (rounds[ROUNDS / 2] - clock) / batch as f64
}

fn timed<R>(f: impl FnOnce() -> R) -> (f64, R) {
    let begin = Instant::now();
    let result = black_box(f());
    (begin.elapsed().as_nanos() as f64, result)
}

fn main() {
    let clock = median(1, 0.0, || timed(|| ()).0);
    let at = RemoteAddr::new(0x1000, 7);
    for batch in [1, 16] {
        // Bare loops over the same memory.
        let mut world = world();
        let ids: Vec<u64> = (0..batch as u64).collect();
        let floor_poll = median(batch, clock, || {
            world.completions.complete(&ids);
            let seen = &world.completions;
            let (time, sum) = timed(|| {
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
            time
        });
        let raw_poll = median(batch, clock, || {
            world.completions.complete(&ids);
            let mut sum = 0;
            let (time, count) = timed(|| {
                world.cq.poll_raw(batch, |entry| {
                    sum += entry.wr_id() + u64::from(entry.status().0);
                    sum += u64::from(entry.byte_len());
                })
            });
            assert_eq!(count, batch);
            black_box(sum);
            time
        });
        let sge = world.buffers[0].raw_sge();
        let floor_post = median(batch, clock, || {
            let seen = &world.sends;
            let (time, ()) = timed(|| {
                let mut to = seen.get(PRODUCER);
                for id in 0..batch as u64 {
                    // SAFETY: the fields of a write of one element, in place.
                    unsafe {
                        let entry = seen.entry(to);
                        entry.write(id);
                        entry.add(1).write(0);
                        entry.add(2).write(2);
                        entry.add(3).write(at.addr);
                        entry.add(4).write(u64::from(at.rkey));
                        entry.add(18).write(0);
                        entry.add(19).write(at.addr);
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
            world.sends.set(CONSUMER, world.sends.get(PRODUCER));
            time
        });
        // The bare loop has moved the writer's index behind its back.
        let mut world = self::world();
        let sge = world.buffers[0].raw_sge();
        let raw_post = median(batch, clock, || {
            let half = world.qp.send_half();
            let (time, ()) = timed(|| {
                let mut queue = half.raw();
                for id in 0..batch as u64 {
                    let entry = queue.open::<Write>(id, Flags::SIGNALED);
                    let entry = entry.unwrap().remote(at).sge(sge);
                    entry.unwrap().finish();
                }
                // SAFETY: nobody touches the memory: there is no device.
                unsafe { queue.publish().unwrap() };
            });
            world.sends.set(CONSUMER, world.sends.get(PRODUCER));
            time
        });
        let (mut polls, mut receives) = (Vec::new(), Vec::new());
        let mut out: Vec<Completion> = (0..batch).map(|_| Completion::default()).collect();
        let safe_post = median(batch, clock, || {
            let mut batch_of: Vec<_> = world.buffers.drain(..batch).collect();
            let qp = &mut world.qp;
            let (time, ()) = timed(|| {
                qp.batch(|to| {
                    for buffer in batch_of.drain(..) {
                        to.post(WorkRequest::write(buffer, at)).unwrap();
                    }
                })
                .unwrap();
            });
            world.completions.complete(&world.sends.consume());
            let (poll, count) = timed(|| world.cq.poll(&mut out).unwrap());
            polls.push(poll);
            assert_eq!(count, batch);
            let back = out.iter_mut().filter_map(Completion::take_buffer);
            world.buffers.extend(back);

            let mut batch_of: Vec<_> = world.buffers.drain(..batch).collect();
            let qp = &mut world.qp;
            let (receive, ()) = timed(|| {
                qp.receive_batch(|to| {
                    for buffer in batch_of.drain(..) {
                        to.receive(buffer, 1).unwrap();
                    }
                });
            });
            receives.push(receive);
            world.completions.complete(&world.receives.consume());
            world.cq.poll(&mut out).unwrap();
            let back = out.iter_mut().filter_map(Completion::take_buffer);
            world.buffers.extend(back);
            time
        });
        let mut polls = polls.into_iter();
        let safe_poll = median(batch, clock, || polls.next().unwrap_or_default());
        let mut receives = receives.into_iter();
        let safe_receive = median(batch, clock, || receives.next().unwrap_or_default());
        println!("batch {batch}: ns for an operation");
        println!("  poll       floor {floor_poll:5.2}  raw {raw_poll:5.2}  safe {safe_poll:5.2}");
        println!("  post send  floor {floor_post:5.2}  raw {raw_post:5.2}  safe {safe_post:5.2}");
        println!("  post recv                          safe {safe_receive:5.2}");
    }
}
