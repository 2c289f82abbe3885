//! The measured calls, and what the device and the program do around them.
//!
//! Each row is a plain function: a loop of calls, so that the same loop around
//! nothing is what has to be subtracted, and no row changes how another is
//! compiled.

use std::hint::black_box;
use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, compiler_fence};

use ringverbs::raw::{Flags, Send, Sge};
use ringverbs::{Buffer, Completion, CompletionQueue, Inline, PostError, QueuePair, WorkRequest};

use crate::standin::Ring;

/// Work requests of the C program's length.
pub const LENGTH: usize = 32;

/// The queues of one row, which none but it uses: the floors move indices
/// behind the backs of those that own them.
pub struct World {
    /// Operations in one call, and calls between two acts of the device.
    pub batch: u32,
    pub calls: u32,
    pub qp: QueuePair,
    pub cq: CompletionQueue,
    pub sends: Ring,
    pub receives: Ring,
    pub completions: Ring,
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
    ids: Vec<u64>,
}

type Act = fn(&mut World);

/// One row.
pub struct Row {
    pub name: &'static str,
    pub batch: u32,
    /// As many as the ring holds, as of the C program's rows.
    pub calls: u32,
    /// Before a round of calls.
    pub before: Act,
    pub run: Act,
    /// After a round of calls. Where there is something to do, it and what is
    /// done before take time, and each round is timed by itself.
    pub after: Option<Act>,
    pub doorbell: bool,
}

impl World {
    #[allow(clippy::too_many_arguments, reason = "each once, by its name")]
    pub fn new(
        row: &Row,
        qp: QueuePair,
        cq: CompletionQueue,
        [sends, receives, completions]: [Ring; 3],
        buffers: Vec<Buffer>,
        fd: RawFd,
    ) -> Self {
        // As the C program's: each entry of the ring has a completion.
        for at in 0..completions.slots() {
            completions.write_completion(at, 1000 + u64::from(at), 64 + at);
        }
        Self {
            batch: row.batch,
            calls: row.calls,
            qp,
            cq,
            sends,
            receives,
            completions,
            out: buffers.iter().map(|_| Completion::default()).collect(),
            sge: buffers[buffers.len() - 1].raw_sge(),
            buffers,
            bytes: [0x5a; LENGTH],
            fd,
            found: 0,
            sum: 0,
            ids: Vec::new(),
        }
    }

    fn total(&self) -> u32 {
        self.batch * self.calls
    }

    /// What was posted completes.
    fn complete(&mut self, posted: Ring) {
        posted.consume(&mut self.ids);
        self.completions.complete(&self.ids);
    }
}

/// Keeps a loop a loop, and has memory read anew.
#[inline(always)]
fn barrier() {
    compiler_fence(Ordering::SeqCst);
}

// What is subtracted.

#[inline(never)]
pub fn nothing(world: &mut World) {
    for _ in 0..black_box(world.calls) {
        barrier();
    }
}

/// The doorbell's system call alone.
#[inline(never)]
pub fn doorbell(world: &mut World) {
    let command = [0u8; 32];
    for _ in 0..black_box(world.calls) {
        // SAFETY: the bytes are there; the device is the stand-in.
        let written = unsafe { libc::write(world.fd, command.as_ptr().cast(), command.len()) };
        world.found += usize::from(written < 0);
        barrier();
    }
}

// What goes on around a round.

pub fn idle(_: &mut World) {}

fn filled(world: &mut World) {
    world.completions.fill(world.total());
}

fn sends_drained(world: &mut World) {
    world.sends.drain();
}

fn receives_drained(world: &mut World) {
    world.receives.drain();
}

/// Posts what the round polls.
fn sent(world: &mut World) {
    safe_send(world);
    world.complete(world.sends);
}

/// Takes the buffers back from the completions.
fn taken_back(world: &mut World) {
    let back = world.out.iter_mut().filter_map(Completion::take_buffer);
    world.buffers.extend(back);
    assert_eq!(world.buffers.len(), world.out.len(), "a buffer is lost");
}

/// Completes and polls the sends that the round has posted.
fn sends_polled(world: &mut World) {
    world.complete(world.sends);
    safe_poll(world);
    taken_back(world);
}

fn inline_polled(world: &mut World) {
    world.complete(world.sends);
    safe_poll(world);
}

fn receives_polled(world: &mut World) {
    world.complete(world.receives);
    safe_poll(world);
    taken_back(world);
}

// Floors: bare loops for what the raw layer does.

#[inline(never)]
fn bare_poll(world: &mut World) {
    let ring = world.completions;
    let (mut sum, mut found) = (0, 0);
    for _ in 0..world.calls {
        let mut at = ring.consumer();
        let ready = ring.distance(at, ring.producer()).min(world.batch);
        for _ in 0..ready {
            let entry = ring.entry_of::<128>(at);
            // SAFETY: identifier, status and length of an entry.
            unsafe {
                sum += entry.read() + u64::from(entry.add(1).cast::<u32>().read());
                sum += u64::from(entry.add(2).cast::<u32>().add(1).read());
            }
            at = ring.after(at);
        }
        found += ready as usize;
        ring.set_consumer(at);
        barrier();
    }
    world.found = found;
    world.sum += sum;
}

#[inline(never)]
fn bare_send(world: &mut World) {
    let (ring, sge) = (world.sends, world.sge);
    for _ in 0..world.calls {
        let mut at = ring.producer();
        for id in 0..u64::from(world.batch) {
            // SAFETY: the fields of a send of one element, in place and in the
            // order of their addresses.
            unsafe {
                let entry = ring.entry_of::<512>(at);
                entry.write(id);
                entry.add(1).write(SEND << 32);
                entry.add(2).write(Flags::SIGNALED.bits().into());
                entry.add(18).write(0);
                let length = u64::from(sge.length);
                entry.add(23).write(length | length << 32);
                entry.add(24).write(1 << 32);
                entry.add(25).write(0);
                entry.add(26).write(sge.addr);
                entry.add(27).write(length | u64::from(sge.lkey) << 32);
            }
            at = ring.after(at);
        }
        ring.set_producer(at);
        barrier();
    }
}

// The raw layer.

#[inline(never)]
fn raw_poll(world: &mut World) {
    let (cq, batch) = (&mut world.cq, world.batch as usize);
    let (mut sum, mut found) = (0, 0);
    for _ in 0..world.calls {
        found += cq.poll_raw(batch, |entry| {
            sum += entry.wr_id() + u64::from(entry.status().0);
            sum += u64::from(entry.byte_len());
        });
        barrier();
    }
    world.found = found;
    world.sum += sum;
}

#[inline(never)]
fn raw_send(world: &mut World) {
    let (sge, batch) = (world.sge, u64::from(world.batch));
    let half = world.qp.send_half();
    for _ in 0..world.calls {
        let mut queue = half.raw();
        for id in 0..batch {
            let entry = queue.open::<Send>(id, Flags::SIGNALED).unwrap();
            entry.sge(sge).unwrap().finish();
        }
        // SAFETY: nobody touches the memory: there is no device.
        unsafe { queue.publish().unwrap() };
        barrier();
    }
}

#[inline(never)]
fn raw_inline(world: &mut World) {
    let (bytes, batch) = (&world.bytes, u64::from(world.batch));
    let half = world.qp.send_half();
    for _ in 0..world.calls {
        let mut queue = half.raw();
        for id in 0..batch {
            let entry = queue.open::<Send>(id, Flags::SIGNALED).unwrap();
            entry.inline(bytes).unwrap().finish();
        }
        // SAFETY: no memory is named.
        unsafe { queue.publish().unwrap() };
        barrier();
    }
}

#[inline(never)]
fn raw_recv(world: &mut World) {
    let (sge, batch) = (world.sge, u64::from(world.batch));
    let half = world.qp.recv_half();
    for _ in 0..world.calls {
        let mut queue = half.raw().unwrap();
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
fn safe_poll(world: &mut World) {
    let (cq, batch) = (&mut world.cq, world.batch as usize);
    let mut found = 0;
    for out in world.out.chunks_exact_mut(batch) {
        found += cq.poll(out).unwrap();
        barrier();
    }
    world.found = found;
}

#[inline(never)]
fn safe_send(world: &mut World) {
    let (qp, batch) = (&mut world.qp, world.batch as usize);
    let mut buffers = world.buffers.drain(..);
    for _ in 0..world.calls {
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
fn safe_inline(world: &mut World) {
    let (qp, bytes) = (&mut world.qp, &world.bytes);
    for _ in 0..world.calls {
        qp.batch(|to| {
            for _ in 0..world.batch {
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
fn safe_recv(world: &mut World) {
    let (qp, batch) = (&mut world.qp, world.batch as usize);
    let mut buffers = world.buffers.drain(..);
    for _ in 0..world.calls {
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

// The table.

/// Rows of one call and of a batch: how many operations and calls each.
const POLLS: [(u32, u32); 2] = [(1, 112), (16, 7)];
const SENDS: [(u32, u32); 2] = [(1, 48), (16, 3)];

const fn row(
    name: &'static str,
    (batch, calls): (u32, u32),
    (before, run, after): (Act, Act, Option<Act>),
    doorbell: bool,
) -> Row {
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

const BARE_POLL: (Act, Act, Option<Act>) = (filled, bare_poll, None);
const BARE_SEND: (Act, Act, Option<Act>) = (sends_drained, bare_send, None);
const RAW_POLL: (Act, Act, Option<Act>) = (filled, raw_poll, None);
const RAW_SEND: (Act, Act, Option<Act>) = (sends_drained, raw_send, None);
const RAW_INLINE: (Act, Act, Option<Act>) = (sends_drained, raw_inline, None);
const RAW_RECV: (Act, Act, Option<Act>) = (receives_drained, raw_recv, None);
const SAFE_POLL: (Act, Act, Option<Act>) = (sent, safe_poll, Some(taken_back));
const SAFE_SEND: (Act, Act, Option<Act>) = (idle, safe_send, Some(sends_polled));
const SAFE_INLINE: (Act, Act, Option<Act>) = (idle, safe_inline, Some(inline_polled));
const SAFE_RECV: (Act, Act, Option<Act>) = (idle, safe_recv, Some(receives_polled));

pub const ROWS: &[Row] = &[
    row("bare-poll/1", POLLS[0], BARE_POLL, false),
    row("bare-poll/16", POLLS[1], BARE_POLL, false),
    row("bare-send/1", SENDS[0], BARE_SEND, false),
    row("bare-send/16", SENDS[1], BARE_SEND, false),
    row("raw-poll/1", POLLS[0], RAW_POLL, false),
    row("raw-poll/16", POLLS[1], RAW_POLL, false),
    row("raw-poll-empty/1", POLLS[0], (idle, raw_poll, None), false),
    row("raw-send/1", SENDS[0], RAW_SEND, true),
    row("raw-send/16", SENDS[1], RAW_SEND, true),
    row("raw-send-inline/1", SENDS[0], RAW_INLINE, true),
    row("raw-send-inline/16", SENDS[1], RAW_INLINE, true),
    row("raw-recv/1", POLLS[0], RAW_RECV, false),
    row("raw-recv/16", POLLS[1], RAW_RECV, false),
    // What is polled was sent, and so no more than there are sends.
    row("safe-poll/1", SENDS[0], SAFE_POLL, false),
    row("safe-poll/16", SENDS[1], SAFE_POLL, false),
    row(
        "safe-poll-empty/1",
        POLLS[0],
        (idle, safe_poll, None),
        false,
    ),
    row("safe-send/1", SENDS[0], SAFE_SEND, true),
    row("safe-send/16", SENDS[1], SAFE_SEND, true),
    row("safe-send-inline/1", SENDS[0], SAFE_INLINE, true),
    row("safe-send-inline/16", SENDS[1], SAFE_INLINE, true),
    row("safe-recv/1", POLLS[0], SAFE_RECV, false),
    row("safe-recv/16", POLLS[1], SAFE_RECV, false),
];

/// `IBV_WR_SEND`.
const SEND: u64 = 2;

/// Runs a round and says what is wrong with what it left.
pub fn check(row: &Row, world: &mut World, rung: impl Fn() -> u64) -> Result<(), &'static str> {
    let (sends, receives) = (world.sends, world.receives);
    (row.before)(world);
    let before = (rung(), sends.producer(), receives.producer());
    (world.found, world.sum) = (0, 0);
    (row.run)(world);
    let doorbells = if row.doorbell { row.calls } else { 0 };
    if rung() - before.0 != u64::from(doorbells) {
        return Err("not one doorbell a call");
    }
    let total = row.batch * row.calls;
    let operation = row.name.split(['-', '/']).nth(1).unwrap_or_default();
    match operation {
        "poll" => {
            let want = if row.name.contains("empty") { 0 } else { total };
            if world.found != want as usize {
                return Err("another number of completions");
            }
            // Of the layers that do not look whose a completion is: all that
            // was in the entries, which a round has from the first on.
            let sum: u64 = (0..u64::from(want)).map(|at| 1000 + at + 64 + at).sum();
            if !row.name.starts_with("safe-") && world.sum != sum {
                return Err("other fields than the device's");
            }
        }
        "send" => {
            if sends.producer() != (before.1 + total) % sends.slots() {
                return Err("another producer index");
            }
            let inline = row.name.contains("inline");
            check_send(world, sends.producer().wrapping_sub(1), inline)?;
        }
        _ => {
            if receives.producer() != (before.2 + total) % receives.slots() {
                return Err("another producer index");
            }
            check_data(world, receives, receives.producer().wrapping_sub(1), 2)?;
        }
    }
    if let Some(after) = row.after {
        after(world);
    }
    Ok(())
}

/// What rdma_rxe reads of a send entry.
fn check_send(world: &World, at: u32, inline: bool) -> Result<(), &'static str> {
    let entry = world.sends.entry(at);
    // SAFETY: an entry of a send queue: 208 bytes and the data.
    let (opcode, flags, state, data) = unsafe {
        (
            entry.add(1).read() >> 32,
            entry.add(2).read() as u32,
            entry.add(18).read(),
            entry.add(26).cast::<[u8; LENGTH]>().read(),
        )
    };
    let mut wanted = Flags::SIGNALED;
    if inline {
        wanted |= Flags::INLINE;
    }
    if opcode != SEND || flags != wanted.bits() || state != 0 {
        return Err("a send entry has other fields than asked for");
    }
    if !inline {
        return check_data(world, world.sends, at, 23);
    }
    if data == world.bytes {
        Ok(())
    } else {
        Err("a send entry has other inline data")
    }
}

/// The progress through the data, and the one element, of either queue's.
fn check_data(world: &World, ring: Ring, at: u32, first: usize) -> Result<(), &'static str> {
    let length = LENGTH as u64;
    let (sge, two) = (world.sge, length | length << 32);
    let wanted = [
        two,
        1 << 32,
        0,
        sge.addr,
        length | u64::from(sge.lkey) << 32,
    ];
    // SAFETY: within an entry of either queue.
    let is = unsafe { ring.entry(at).add(first).cast::<[u64; 5]>().read() };
    if is == wanted {
        Ok(())
    } else {
        Err("an entry has another scatter list")
    }
}
