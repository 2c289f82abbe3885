//! ConnectX: the device's part, on the stand-in for its driver
//! (`provider-plugin/bench/mlx5_standin.h`), and the table.
//!
//! A completion is of a work request that is outstanding, so what a round polls
//! is posted before it, and what it posted completes after it. Each round is
//! timed by itself.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use uverbs::discovery::DriverId;

use crate::rows::{
    Device, LENGTH, POLLS, Row, Setup, Step, barrier, idle, raw_inline, raw_poll, raw_recv,
    raw_send, row, safe_inline, safe_poll, safe_recv, safe_send, taken_back,
};
use crate::standin::symbol;

/// `enum mlx5_kind`.
#[derive(Clone, Copy)]
enum Kind {
    Completions,
    QueuePair,
}

/// `struct mlx5_object`: a queue, as it was made.
#[repr(C)]
struct Object {
    kind: c_int,
    handle: u32,
    number: u32,
    buffer: *mut u8,
    records: *const AtomicU32,
    entries: u32,
    cqe_bytes: u32,
    compresses: u8,
    channel: c_int,
    user_handle: u64,
    sends: *mut u8,
    send_blocks: u32,
    recv_entries: u32,
    recv_shift: u32,
    srq_shift: u32,
    user_index: u32,
    flags: u32,
    registers: *mut u8,
    blue_flame: *mut u8,
}

type Find = unsafe extern "C" fn(c_int, u32) -> *const Object;

fn find() -> Option<Find> {
    let find = symbol(c"mlx5_object")?;
    // SAFETY: the stand-in's function, declared so in its header.
    Some(unsafe { std::mem::transmute::<NonNull<c_void>, Find>(find) })
}

impl Object {
    /// The one of the kind that was made last.
    fn newest(kind: Kind) -> &'static Self {
        let find = find().expect("the stand-in");
        // SAFETY: it has no preconditions, and what it finds never changes and
        // stays.
        unsafe { find(kind as c_int, 0).as_ref() }.expect("a queue of this kind")
    }

    /// One of the two doorbell records: of receives and sends, or what was
    /// taken out of a completion queue.
    fn record(&self, at: usize) -> u32 {
        // SAFETY: two words of the process's memory, for as long as the queue is
        // there, which outlives what uses this.
        let record = unsafe { &*self.records.add(at) };
        u32::from_be(record.load(Ordering::Acquire))
    }

    fn recv_entry(&self, at: u32) -> *mut u8 {
        let at = (at & (self.recv_entries - 1)) as usize;
        // SAFETY: the queue has so many entries.
        unsafe { self.buffer.add(at << self.recv_shift) }
    }

    fn send_block(&self, at: u32) -> *mut u8 {
        let at = (at & (self.send_blocks - 1)) as usize;
        // SAFETY: the queue has so many blocks.
        unsafe { self.sends.add(at * BLOCK) }
    }
}

const BLOCK: usize = 64;
const RECEIVES: usize = 0;
const SENDS: usize = 1;

/// `struct mlx5_cqe64`: where its fields are.
mod cqe {
    pub const USER_INDEX: usize = 32;
    pub const IMMEDIATE: usize = 36;
    pub const BYTES: usize = 44;
    pub const OPCODE_AND_NUMBER: usize = 56;
    pub const COUNTER: usize = 60;
    pub const OWNER: usize = 63;
    /// Of requests; of receives by a send with immediate data.
    pub const REQUEST: u8 = 0;
    pub const RECEIVED_IMMEDIATE: u8 = 3;
}

/// `MLX5_OPCODE_SEND`.
const SEND: u32 = 10;
const IMMEDIATE: u32 = 0x0102_0304;

/// The queues of a world.
pub struct ConnectX {
    cq: &'static Object,
    qp: &'static Object,
    written: u32,
    sent: u32,
    received: u32,
    /// The bytes of all that was received.
    lengths: u64,
}

type Steps = (Step<ConnectX>, Step<ConnectX>, Option<Step<ConnectX>>);

impl Device for ConnectX {
    const DRIVER: DriverId = DriverId::MLX5;
    const STAND_IN: &'static str = "mlx5_standin.so";
    const SENDS: u32 = 127;
    const RECEIVES: u32 = 127;
    const ROWS: &'static [Row<Self>] = ROWS;

    fn is_loaded() -> bool {
        find().is_some()
    }

    fn from_newest_queues() -> Self {
        Self {
            cq: Object::newest(Kind::Completions),
            qp: Object::newest(Kind::QueuePair),
            written: 0,
            sent: 0,
            received: 0,
            lengths: 0,
        }
    }

    fn check(row: &Row<Self>, setup: &mut Setup<Self>) -> Result<(), &'static str> {
        check(row, setup)
    }
}

impl ConnectX {
    /// What was posted to a queue and has not completed.
    fn outstanding(&self, record: usize, completed: u32) -> u32 {
        self.qp.record(record).wrapping_sub(completed) & 0xffff
    }

    /// Writes a completion, its owner last.
    fn complete(&mut self, opcode: u8, fields: &[(usize, u32)], counter: u16) {
        let mut bytes = [0; BLOCK];
        let index = (cqe::USER_INDEX, self.qp.user_index);
        for (at, value) in fields.iter().chain([&index]) {
            bytes[*at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        bytes[cqe::COUNTER..cqe::COUNTER + 2].copy_from_slice(&counter.to_be_bytes());
        let entries = self.cq.entries;
        let slot = (self.written & (entries - 1)) as usize;
        let turn = (self.written >> entries.trailing_zeros() & 1) as u8;
        // SAFETY: an entry of the queue, whose fields are the last of it.
        unsafe {
            let end = self.cq.buffer.add((slot + 1) * self.cq.cqe_bytes as usize);
            let entry = end.sub(BLOCK);
            entry.copy_from_nonoverlapping(bytes.as_ptr(), cqe::OWNER);
            let owner = AtomicU8::from_ptr(entry.add(cqe::OWNER));
            owner.store(opcode << 4 | turn, Ordering::Release);
        }
        self.written += 1;
    }

    /// All receives that are outstanding complete.
    fn receive(&mut self) {
        for _ in 0..self.outstanding(RECEIVES, self.received) {
            let length = 64 + self.received % 8;
            let fields = [
                (cqe::IMMEDIATE, IMMEDIATE),
                (cqe::BYTES, length),
                (cqe::OPCODE_AND_NUMBER, self.qp.number),
            ];
            self.complete(cqe::RECEIVED_IMMEDIATE, &fields, self.received as u16);
            self.received += 1;
            self.lengths += u64::from(length);
        }
    }

    fn send_one(&mut self) {
        let fields = [(cqe::OPCODE_AND_NUMBER, SEND << 24 | self.qp.number)];
        self.complete(cqe::REQUEST, &fields, self.sent as u16);
        self.sent += 1;
    }

    /// All sends that are outstanding complete, each by itself. All have one
    /// block.
    fn send(&mut self) {
        for _ in 0..self.outstanding(SENDS, self.sent) {
            self.send_one();
        }
    }

    /// The same, by the last of them.
    fn send_at_once(&mut self) {
        let count = self.outstanding(SENDS, self.sent);
        if count > 0 {
            self.sent += count - 1;
            self.send_one();
        }
    }
}

// What goes on around a round.

fn received(setup: &mut Setup<ConnectX>) {
    raw_recv(setup);
    setup.device.lengths = 0;
    setup.device.receive();
}

fn sent(setup: &mut Setup<ConnectX>) {
    raw_send(setup);
    setup.device.send();
}

fn safe_received(setup: &mut Setup<ConnectX>) {
    safe_recv(setup);
    setup.device.lengths = 0;
    setup.device.receive();
}

fn safe_sent(setup: &mut Setup<ConnectX>) {
    safe_send(setup);
    setup.device.send();
}

/// Takes out all completions.
fn drain(setup: &mut Setup<ConnectX>) {
    while setup.cq.poll_raw(64, |_| {}) > 0 {}
}

fn sends_drained(setup: &mut Setup<ConnectX>) {
    setup.device.send_at_once();
    drain(setup);
}

fn receives_drained(setup: &mut Setup<ConnectX>) {
    setup.device.receive();
    drain(setup);
}

fn sends_polled(setup: &mut Setup<ConnectX>) {
    setup.device.send();
    safe_poll(setup);
    taken_back(setup);
}

fn inline_polled(setup: &mut Setup<ConnectX>) {
    setup.device.send();
    safe_poll(setup);
}

fn receives_polled(setup: &mut Setup<ConnectX>) {
    setup.device.receive();
    safe_poll(setup);
    taken_back(setup);
}

/// The five fields that the C program's cursor asks for.
#[inline(never)]
fn raw_cursor(setup: &mut Setup<ConnectX>) {
    let (cq, batch) = (&mut setup.cq, setup.batch as usize);
    let (mut sum, mut lengths, mut found) = (0, 0, 0);
    for _ in 0..setup.calls {
        found += cq.poll_raw(batch, |entry| {
            lengths += u64::from(entry.byte_len());
            sum += u64::from(entry.opcode()) + u64::from(entry.ex());
            sum += u64::from(entry.qp_num()) + u64::from(entry.wc_flags());
        });
        barrier();
    }
    setup.found = found;
    setup.sum += sum;
    setup.lengths += lengths;
}

/// What the C program's cursor asks for, as far as there is no type for it, and
/// the token in place of the operation.
#[inline(never)]
fn safe_cursor(setup: &mut Setup<ConnectX>) {
    let (cq, batch) = (&mut setup.cq, setup.batch as usize);
    let (mut sum, mut lengths, mut found) = (0, 0, 0);
    for _ in 0..setup.calls {
        let mut cursor = cq.cursor();
        for _ in 0..batch {
            let Some(mut entry) = cursor.next_entry().unwrap() else {
                break;
            };
            let fields = entry.result().unwrap();
            lengths += u64::from(fields.byte_len());
            sum += u64::from(fields.immediate().unwrap_or_default());
            sum += entry.token() + u64::from(entry.qp_num());
            setup.buffers.extend(entry.take_payload().into_buffer());
            found += 1;
        }
        drop(cursor);
        barrier();
    }
    setup.found = found;
    setup.sum += sum;
    setup.lengths += lengths;
}

// The table.

const fn alone(before: Step<ConnectX>, run: Step<ConnectX>) -> Steps {
    (before, run, Some(idle))
}

const RAW_RECEIVED: Steps = alone(received, raw_poll);
const RAW_SENT: Steps = alone(sent, raw_poll);
const RAW_CURSOR: Steps = alone(received, raw_cursor);
const RAW_SEND: Steps = alone(sends_drained, raw_send);
const RAW_INLINE: Steps = alone(sends_drained, raw_inline);
const RAW_RECV: Steps = alone(receives_drained, raw_recv);
const SAFE_RECEIVED: Steps = (safe_received, safe_poll, Some(taken_back));
const SAFE_SENT: Steps = (safe_sent, safe_poll, Some(taken_back));
const SAFE_CURSOR: Steps = alone(safe_received, safe_cursor);
const SAFE_SEND: Steps = (idle, safe_send, Some(sends_polled));
const SAFE_INLINE: Steps = (idle, safe_inline, Some(inline_polled));
const SAFE_RECV: Steps = (idle, safe_recv, Some(receives_polled));

macro_rules! rows {
    ($($one:literal, $batch:literal, $acts:expr;)+) => {
        &[
            row("raw-poll-empty/1", POLLS[0], alone(idle, raw_poll), false),
            row("safe-poll-empty/1", POLLS[0], alone(idle, safe_poll), false),
            $(
                row($one, POLLS[0], $acts, false),
                row($batch, POLLS[1], $acts, false),
            )+
        ]
    };
}

const ROWS: &[Row<ConnectX>] = rows! {
    "raw-poll-recv/1", "raw-poll-recv/16", RAW_RECEIVED;
    "raw-poll-send/1", "raw-poll-send/16", RAW_SENT;
    "raw-cursor/1", "raw-cursor/16", RAW_CURSOR;
    "raw-send/1", "raw-send/16", RAW_SEND;
    "raw-send-inline/1", "raw-send-inline/16", RAW_INLINE;
    "raw-recv/1", "raw-recv/16", RAW_RECV;
    "safe-poll-recv/1", "safe-poll-recv/16", SAFE_RECEIVED;
    "safe-poll-send/1", "safe-poll-send/16", SAFE_SENT;
    "safe-cursor/1", "safe-cursor/16", SAFE_CURSOR;
    "safe-send/1", "safe-send/16", SAFE_SEND;
    "safe-send-inline/1", "safe-send-inline/16", SAFE_INLINE;
    "safe-recv/1", "safe-recv/16", SAFE_RECV;
};

fn check(row: &Row<ConnectX>, setup: &mut Setup<ConnectX>) -> Result<(), &'static str> {
    (row.before)(setup);
    (setup.found, setup.sum, setup.lengths) = (0, 0, 0);
    (row.run)(setup);
    let total = setup.total();
    let operation = row.name.split_once('-').map_or("", |(_, rest)| rest);
    let safe = row.name.starts_with("safe-");
    let device = &setup.device;
    match operation.split('/').next().unwrap_or_default() {
        "poll-empty" if setup.found > 0 => return Err("a completion that nobody wrote"),
        "poll-empty" => {}
        "poll-recv" | "poll-send" | "cursor" => {
            if setup.found != total as usize {
                return Err("another number of completions");
            }
            if device.cq.record(0) & 0xff_ffff != device.written {
                return Err("another consumer index");
            }
            let cursor = operation.starts_with("cursor");
            let receives = cursor || operation.starts_with("poll-recv");
            if receives && (cursor || !safe) && setup.lengths != device.lengths {
                return Err("other lengths than the device's");
            }
            let ids = (0..setup.batch).sum::<u32>() * setup.calls;
            if !safe && !cursor && setup.sum != u64::from(ids) {
                return Err("other identifiers than those posted");
            }
            if cursor && setup.sum != of_a_receive(setup, safe) * u64::from(total) {
                return Err("other fields than the device's");
            }
        }
        "recv" => {
            if device.outstanding(RECEIVES, device.received) != total {
                return Err("another doorbell record");
            }
            let entry = device.qp.recv_entry(device.received);
            check_element(setup, entry, safe)?;
        }
        _ => {
            if device.outstanding(SENDS, device.sent) != total {
                return Err("another doorbell record");
            }
            check_send(setup, operation.contains("inline"), safe)?;
        }
    }
    if let Some(after) = row.after {
        after(setup);
    }
    Ok(())
}

/// What the cursor adds up of one completion.
fn of_a_receive(setup: &Setup<ConnectX>, safe: bool) -> u64 {
    let number = u64::from(setup.device.qp.number);
    if safe {
        // Token and immediate data, in the host's order.
        return 1 + u64::from(IMMEDIATE) + number;
    }
    // `IBV_WC_RECV` and `IBV_WC_WITH_IMM`; the data as they came.
    128 + u64::from(IMMEDIATE.to_be()) + number + 2
}

/// What the device reads of the first send of a round.
fn check_send(setup: &Setup<ConnectX>, inline: bool, safe: bool) -> Result<(), &'static str> {
    let device = &setup.device;
    let block = device.qp.send_block(device.sent);
    // SAFETY: a block has 64 bytes.
    let [index_and_opcode, number_and_size, flags, _] =
        unsafe { block.cast::<[u32; 4]>().read() }.map(u32::from_be);
    let segments = if inline { 4 } else { 2 };
    if index_and_opcode != (device.sent & 0xffff) << 8 | SEND
        || number_and_size != device.qp.number << 8 | segments
        || flags & 0xff != 8
    {
        return Err("a send entry has another control segment");
    }
    // SAFETY: as above.
    let data = unsafe { block.add(16) };
    if !inline {
        return check_element(setup, data, safe);
    }
    // SAFETY: as above; the length and 32 bytes.
    let (length, bytes) = unsafe {
        (
            u32::from_be(data.cast::<u32>().read()),
            data.add(4).cast::<[u8; LENGTH]>().read(),
        )
    };
    if length == LENGTH as u32 | 1 << 31 && bytes == setup.bytes {
        Ok(())
    } else {
        Err("a send entry has other inline data")
    }
}

/// An element of data. The safe layer's is of another buffer each.
fn check_element(
    setup: &Setup<ConnectX>,
    element: *const u8,
    safe: bool,
) -> Result<(), &'static str> {
    // SAFETY: an element within an entry: length, key, address.
    let (length, lkey, addr) = unsafe {
        (
            u32::from_be(element.cast::<u32>().read()),
            u32::from_be(element.add(4).cast::<u32>().read()),
            u64::from_be(element.add(8).cast::<u64>().read()),
        )
    };
    let sge = setup.sge;
    if (length, lkey) != (sge.length, sge.lkey) || !safe && addr != sge.addr {
        return Err("an entry has another element");
    }
    Ok(())
}
