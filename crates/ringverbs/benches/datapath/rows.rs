//! The measured calls, which are the same for every device.
//!
//! Each row is a plain function: a loop of calls, so that the same loop around
//! nothing is what has to be subtracted, and no row changes how another is
//! compiled. What the device and the program do around them is each device's.

use std::hint::black_box;
use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, compiler_fence};

use ringverbs::raw::{Flags, SendRequest, Sge};
use ringverbs::{Buffer, Completion, CompletionQueue, Inline, PostError, QueuePair, WorkRequest};
use uverbs::discovery::DriverId;

/// Work requests of the C program's length.
pub const LENGTH: usize = 32;

/// A device's side of a world's queues, which this program plays.
pub trait Device: Sized + 'static {
    /// Its driver, and the stand-in for that.
    const DRIVER: DriverId;
    const STAND_IN: &'static str;
    /// The C program's: one less than the entries of its rings.
    const SENDS: u32;
    /// The same of receives.
    const RECEIVES: u32;
    /// What is measured.
    const ROWS: &'static [Row<Self>];

    /// Whether the stand-in was preloaded.
    fn is_loaded() -> bool;

    /// Of the queues that were made last.
    fn from_newest_queues() -> Self;

    /// Runs a round and says what is wrong with what it left.
    fn check(row: &Row<Self>, setup: &mut Setup<Self>) -> Result<(), &'static str>;
}

/// The queues of one row, which none but it uses: the floors move indices
/// behind the backs of those that own them.
pub struct Setup<D> {
    /// Operations in one call, and calls between two acts of the device.
    pub batch: u32,
    pub calls: u32,
    pub qp: QueuePair,
    pub cq: CompletionQueue,
    pub device: D,
    /// What operations of the safe layer own while they are in flight: as many
    /// as a round has operations.
    pub buffers: Vec<Buffer>,
    /// Completions of a round.
    pub out: Vec<Completion>,
    /// What operations of the raw layer name.
    pub sge: Sge,
    pub bytes: [u8; LENGTH],
    /// The device's file, for the doorbell alone.
    pub fd: RawFd,
    /// How many completions the last round found, and what was read of them.
    pub found: usize,
    pub sum: u64,
    pub lengths: u64,
}

pub type Step<D> = fn(&mut Setup<D>);

/// One row.
pub struct Row<D: 'static> {
    pub name: &'static str,
    pub batch: u32,
    /// As many as the ring holds, as of the C program's rows.
    pub calls: u32,
    /// Before a round of calls.
    pub before: Step<D>,
    pub run: Step<D>,
    /// After a round of calls. Where there is something to do, it and what is
    /// done before take time, and each round is timed by itself.
    pub after: Option<Step<D>>,
    pub doorbell: bool,
}

impl<D: Device> Setup<D> {
    pub fn new(
        row: &Row<D>,
        (qp, cq): (QueuePair, CompletionQueue),
        buffers: Vec<Buffer>,
        fd: RawFd,
    ) -> Self {
        Self {
            batch: row.batch,
            calls: row.calls,
            qp,
            cq,
            device: D::from_newest_queues(),
            out: buffers.iter().map(|_| Completion::default()).collect(),
            sge: buffers[buffers.len() - 1].raw_sge(),
            buffers,
            bytes: [0x5a; LENGTH],
            fd,
            found: 0,
            sum: 0,
            lengths: 0,
        }
    }

    /// Operations of a round.
    pub fn total(&self) -> u32 {
        self.batch * self.calls
    }
}

/// Keeps a loop a loop, and has memory read anew.
#[inline(always)]
pub fn barrier() {
    compiler_fence(Ordering::SeqCst);
}

// What is subtracted.

#[inline(never)]
pub fn nothing<D>(setup: &mut Setup<D>) {
    for _ in 0..black_box(setup.calls) {
        barrier();
    }
}

/// The doorbell's system call alone.
#[inline(never)]
pub fn doorbell<D>(setup: &mut Setup<D>) {
    let command = [0u8; 32];
    for _ in 0..black_box(setup.calls) {
        // SAFETY: the bytes are there; the device is the stand-in.
        let written = unsafe { libc::write(setup.fd, command.as_ptr().cast(), command.len()) };
        setup.found += usize::from(written < 0);
        barrier();
    }
}

/// Nothing goes on around a round.
pub fn idle<D>(_: &mut Setup<D>) {}

/// Takes the buffers back from the completions.
pub fn taken_back<D>(setup: &mut Setup<D>) {
    let back = setup.out.iter_mut().filter_map(Completion::take_buffer);
    setup.buffers.extend(back);
    assert_eq!(setup.buffers.len(), setup.out.len(), "a buffer is lost");
}

// The raw layer.

#[inline(never)]
pub fn raw_poll<D>(setup: &mut Setup<D>) {
    let (cq, batch) = (&mut setup.cq, setup.batch as usize);
    let (mut sum, mut lengths, mut found) = (0, 0, 0);
    for _ in 0..setup.calls {
        found += cq.poll_raw(batch, |entry| {
            sum += entry.wr_id() + u64::from(entry.status().0);
            lengths += u64::from(entry.byte_len());
        });
        barrier();
    }
    setup.found = found;
    setup.sum += sum;
    setup.lengths += lengths;
}

#[inline(never)]
pub fn raw_send<D>(setup: &mut Setup<D>) {
    let (sge, batch) = (setup.sge, u64::from(setup.batch));
    for _ in 0..setup.calls {
        let mut queue = setup.qp.raw_send();
        for id in 0..batch {
            let send = SendRequest::send(id).flags(Flags::SIGNALED);
            queue.push(&send.sges(&[sge])).unwrap();
        }
        // SAFETY: nobody touches the memory: there is no device.
        unsafe { queue.publish().unwrap() };
        barrier();
    }
}

#[inline(never)]
pub fn raw_inline<D>(setup: &mut Setup<D>) {
    let (bytes, batch) = (&setup.bytes, u64::from(setup.batch));
    for _ in 0..setup.calls {
        let mut queue = setup.qp.raw_send();
        for id in 0..batch {
            let send = SendRequest::send(id).flags(Flags::SIGNALED);
            queue.push(&send.inline(bytes)).unwrap();
        }
        // SAFETY: no memory is named.
        unsafe { queue.publish().unwrap() };
        barrier();
    }
}

#[inline(never)]
pub fn raw_recv<D>(setup: &mut Setup<D>) {
    let (sge, batch) = (setup.sge, u64::from(setup.batch));
    for _ in 0..setup.calls {
        let mut queue = setup.qp.raw_receive().unwrap();
        for id in 0..batch {
            queue.push(id, &[sge]).unwrap();
        }
        // SAFETY: nobody touches the memory: there is no device.
        unsafe { queue.publish() };
        barrier();
    }
}

// The safe layer.

#[inline(never)]
pub fn safe_poll<D>(setup: &mut Setup<D>) {
    let (cq, batch) = (&mut setup.cq, setup.batch as usize);
    let mut found = 0;
    for out in setup.out.chunks_exact_mut(batch) {
        found += cq.poll(out).unwrap();
        barrier();
    }
    setup.found = found;
}

#[inline(never)]
pub fn safe_send<D>(setup: &mut Setup<D>) {
    let (qp, batch) = (&mut setup.qp, setup.batch as usize);
    let mut buffers = setup.buffers.drain(..);
    for _ in 0..setup.calls {
        qp.batch(|to| {
            for buffer in buffers.by_ref().take(batch) {
                to.post(WorkRequest::send(buffer))?;
            }
            Ok::<_, PostError<_>>(())
        })
        .unwrap();
        barrier();
    }
}

#[inline(never)]
pub fn safe_inline<D>(setup: &mut Setup<D>) {
    let (qp, bytes) = (&mut setup.qp, &setup.bytes);
    for _ in 0..setup.calls {
        qp.batch(|to| {
            for _ in 0..setup.batch {
                let request = WorkRequest::send(Inline(bytes));
                to.post(request).map_err(|refused| refused.error)?;
            }
            Ok::<_, ringverbs::Error>(())
        })
        .unwrap();
        barrier();
    }
}

#[inline(never)]
pub fn safe_recv<D>(setup: &mut Setup<D>) {
    let (qp, batch) = (&mut setup.qp, setup.batch as usize);
    let mut buffers = setup.buffers.drain(..);
    for _ in 0..setup.calls {
        qp.receive_batch(|to| {
            for buffer in buffers.by_ref().take(batch) {
                to.receive(buffer, 1)?;
            }
            Ok::<_, PostError<_>>(())
        })
        .unwrap();
        barrier();
    }
}

// Of the tables.

/// How many operations and calls: of one call, of a batch.
pub const POLLS: [(u32, u32); 2] = [(1, 112), (16, 7)];

pub const fn row<D: Device>(
    name: &'static str,
    (batch, calls): (u32, u32),
    (before, run, after): (Step<D>, Step<D>, Option<Step<D>>),
    doorbell: bool,
) -> Row<D> {
    Row {
        name,
        batch,
        calls,
        before,
        run,
        after,
        doorbell,
    }
}
