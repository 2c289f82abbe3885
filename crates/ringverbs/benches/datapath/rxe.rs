//! rdma_rxe: the device's part, bare loops over its rings, and the table.

use ringverbs::raw::Flags;
use uverbs::discovery::DriverId;

use crate::rows::{
    Device, LENGTH, POLLS, Row, Setup, Step, barrier, idle, raw_inline, raw_poll, raw_recv,
    raw_send, row, safe_inline, safe_poll, safe_recv, safe_send, taken_back,
};
use crate::rxe_ring::{Kind, Ring, StandIn};

/// The queues of a world.
pub struct Rxe {
    standin: StandIn,
    sends: Ring,
    receives: Ring,
    completions: Ring,
    ids: Vec<u64>,
}

type Steps = (Step<Rxe>, Step<Rxe>, Option<Step<Rxe>>);

impl Device for Rxe {
    const DRIVER: DriverId = DriverId::RXE;
    const STAND_IN: &'static str = "standin.so";
    const SENDS: u32 = 63;
    const RECEIVES: u32 = 127;
    const ROWS: &'static [Row<Self>] = ROWS;

    fn is_loaded() -> bool {
        StandIn::find().is_some()
    }

    fn from_newest_queues() -> Self {
        let standin = StandIn::find().expect("the stand-in");
        let completions = standin.newest(Kind::Completions);
        // As the C program's: each entry of the ring has a completion.
        for at in 0..completions.slots() {
            completions.write_completion(at, 1000 + u64::from(at), 64 + at);
        }
        Self {
            standin,
            sends: standin.newest(Kind::Sends),
            receives: standin.newest(Kind::Receives),
            completions,
            ids: Vec::new(),
        }
    }

    fn check(row: &Row<Self>, setup: &mut Setup<Self>) -> Result<(), &'static str> {
        check(row, setup)
    }
}

/// What was posted completes.
fn complete(setup: &mut Setup<Rxe>, posted: Ring) {
    let device = &mut setup.device;
    posted.consume(&mut device.ids);
    device.completions.complete(&device.ids);
}

// What goes on around a round.

fn filled(setup: &mut Setup<Rxe>) {
    setup.device.completions.fill(setup.total());
}

fn sends_drained(setup: &mut Setup<Rxe>) {
    setup.device.sends.drain();
}

fn receives_drained(setup: &mut Setup<Rxe>) {
    setup.device.receives.drain();
}

/// Posts what the round polls.
fn sent(setup: &mut Setup<Rxe>) {
    safe_send(setup);
    complete(setup, setup.device.sends);
}

/// Completes and polls the sends that the round has posted.
fn sends_polled(setup: &mut Setup<Rxe>) {
    complete(setup, setup.device.sends);
    safe_poll(setup);
    taken_back(setup);
}

fn inline_polled(setup: &mut Setup<Rxe>) {
    complete(setup, setup.device.sends);
    safe_poll(setup);
}

fn receives_polled(setup: &mut Setup<Rxe>) {
    complete(setup, setup.device.receives);
    safe_poll(setup);
    taken_back(setup);
}

// Floors: bare loops for what the raw layer does.

#[inline(never)]
fn bare_poll(setup: &mut Setup<Rxe>) {
    let ring = setup.device.completions;
    let (mut sum, mut lengths, mut found) = (0, 0, 0);
    for _ in 0..setup.calls {
        let mut at = ring.consumer();
        let ready = ring.distance(at, ring.producer()).min(setup.batch);
        for _ in 0..ready {
            let entry = ring.entry_of::<128>(at);
            // SAFETY: identifier, status and length of an entry.
            unsafe {
                sum += entry.read() + u64::from(entry.add(1).cast::<u32>().read());
                lengths += u64::from(entry.add(2).cast::<u32>().add(1).read());
            }
            at = ring.after(at);
        }
        found += ready as usize;
        ring.set_consumer(at);
        barrier();
    }
    setup.found = found;
    setup.sum += sum;
    setup.lengths += lengths;
}

#[inline(never)]
fn bare_send(setup: &mut Setup<Rxe>) {
    let (ring, sge) = (setup.device.sends, setup.sge);
    for _ in 0..setup.calls {
        let mut at = ring.producer();
        for id in 0..u64::from(setup.batch) {
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

// The table.

/// As [`POLLS`], of a shorter queue.
const SENDS: [(u32, u32); 2] = [(1, 48), (16, 3)];

const BARE_POLL: Steps = (filled, bare_poll, None);
const BARE_SEND: Steps = (sends_drained, bare_send, None);
const RAW_POLL: Steps = (filled, raw_poll, None);
const RAW_SEND: Steps = (sends_drained, raw_send, None);
const RAW_INLINE: Steps = (sends_drained, raw_inline, None);
const RAW_RECV: Steps = (receives_drained, raw_recv, None);
const SAFE_POLL: Steps = (sent, safe_poll, Some(taken_back));
const SAFE_SEND: Steps = (idle, safe_send, Some(sends_polled));
const SAFE_INLINE: Steps = (idle, safe_inline, Some(inline_polled));
const SAFE_RECV: Steps = (idle, safe_recv, Some(receives_polled));

const ROWS: &[Row<Rxe>] = &[
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
fn check(row: &Row<Rxe>, setup: &mut Setup<Rxe>) -> Result<(), &'static str> {
    let (sends, receives) = (setup.device.sends, setup.device.receives);
    (row.before)(setup);
    let before = (
        setup.device.standin.doorbells(),
        sends.producer(),
        receives.producer(),
    );
    (setup.found, setup.sum, setup.lengths) = (0, 0, 0);
    (row.run)(setup);
    let doorbells = if row.doorbell { row.calls } else { 0 };
    if setup.device.standin.doorbells() - before.0 != u64::from(doorbells) {
        return Err("not one doorbell a call");
    }
    let total = row.batch * row.calls;
    let operation = row.name.split(['-', '/']).nth(1).unwrap_or_default();
    match operation {
        "poll" => {
            let want = if row.name.contains("empty") { 0 } else { total };
            if setup.found != want as usize {
                return Err("another number of completions");
            }
            // Of the layers that do not look whose a completion is: all that
            // was in the entries, which a round has from the first on.
            let sum = |from: u64| (from..).take(want as usize).sum::<u64>();
            let read = (setup.sum, setup.lengths);
            if !row.name.starts_with("safe-") && read != (sum(1000), sum(64)) {
                return Err("other fields than the device's");
            }
        }
        "send" => {
            if sends.producer() != (before.1 + total) % sends.slots() {
                return Err("another producer index");
            }
            let inline = row.name.contains("inline");
            check_send(setup, sends.producer().wrapping_sub(1), inline)?;
        }
        _ => {
            if receives.producer() != (before.2 + total) % receives.slots() {
                return Err("another producer index");
            }
            check_data(setup, receives, receives.producer().wrapping_sub(1), 2)?;
        }
    }
    if let Some(after) = row.after {
        after(setup);
    }
    Ok(())
}

/// What rdma_rxe reads of a send entry.
fn check_send(setup: &Setup<Rxe>, at: u32, inline: bool) -> Result<(), &'static str> {
    let entry = setup.device.sends.entry(at);
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
        return check_data(setup, setup.device.sends, at, 23);
    }
    if data == setup.bytes {
        Ok(())
    } else {
        Err("a send entry has other inline data")
    }
}

/// The progress through the data, and the one element, of either queue's.
fn check_data(setup: &Setup<Rxe>, ring: Ring, at: u32, first: usize) -> Result<(), &'static str> {
    let length = LENGTH as u64;
    let (sge, two) = (setup.sge, length | length << 32);
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
