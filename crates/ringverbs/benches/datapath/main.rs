//! The data path of the raw and the safe layer, as `cargo xtask bench` measures
//! it: on the stand-in for the kernel that the C program is measured on
//! (`provider-plugin/bench`), on queues of the same geometry, and in the same
//! way. It is preloaded; this program finds the device by sysfs, opens it, and
//! makes its queues through the crate's own system calls.
//!
//!     datapath time [SAMPLES]   nanoseconds of an operation, median of samples
//!     datapath count            exact instructions, locked ones and fences
//!     datapath trace ROW        where each counted instruction of a round is
//!
//! It prints a line for each row, as the C program does:
//!
//!     time ROW NS
//!     count ROW INSTRUCTIONS LOCKED FENCES
//!
//! A figure is of one operation. Time: 64 rounds are timed together; in a round
//! the device acts once and the row's calls follow. Where the safe layer has to
//! be given back what it owns after each round, each round is timed by itself
//! and the times are added up. The same around nothing, and the doorbell's
//! write, are measured alone and subtracted. Each row is checked first.

mod rows;
mod standin;
mod stepper;

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ringverbs::qp::{Init, Mtu, ReadyToReceive, ReadyToSend};
use ringverbs::{AccessFlags, AhAttr, Context, Transport};
use uverbs::discovery::{self, DriverId};
use uverbs::kernel::RealKernel;

use rows::{LENGTH, ROWS, Row, World};
use standin::{Kind, StandIn};

const ROUNDS: u32 = 64;
const DEFAULT_SAMPLES: usize = 101;
/// The C program's: rings of 128, 64 and 128 entries.
const CQ_ENTRIES: u32 = 127;
const SQ_ENTRIES: u32 = 63;
const RQ_ENTRIES: u32 = 127;
const INLINE: u32 = 64;

/// Opens the stand-in's device.
fn open() -> Context {
    let devices = discovery::devices(&RealKernel).expect("a list of devices");
    let mut device = devices.into_iter().next().expect("the stand-in's device");
    // Sysfs, which is all that the stand-in has, does not tell.
    device.driver_id = DriverId::RXE;
    let context = uverbs::Context::open(Box::new(RealKernel), &device).expect("the device opens");
    Context::over(context).expect("a context")
}

/// Queues for a row.
fn world(context: &Context, standin: StandIn, row: &Row) -> World {
    let cq = context.completion_queue().entries(CQ_ENTRIES).build();
    let cq = cq.expect("a completion queue");
    let domain = context.alloc_pd().expect("a protection domain");
    let builder = domain.queue_pair(Transport::Reliable, &cq);
    let builder = builder.send_depth(SQ_ENTRIES).recv_depth(RQ_ENTRIES);
    let mut qp = builder.inline(INLINE).build().expect("a queue pair");
    let path = AhAttr::default();
    for step in [
        Init::reliable(1, AccessFlags::empty()).into(),
        ReadyToReceive::reliable(path, 1, 0, Mtu::Bytes1024).into(),
        ringverbs::qp::Transition::from(ReadyToSend::reliable(0)),
    ] {
        qp.transition(step).expect("a transition");
    }
    let total = (row.batch * row.calls) as usize;
    let region = domain.alloc(total * LENGTH).expect("memory");
    let buffers = region.into_buffers(LENGTH).take(total).collect();
    let rings = [Kind::Sends, Kind::Receives, Kind::Completions];
    let rings = rings.map(|kind| standin.newest(kind));
    World::new(row, qp, cq, rings, buffers, context.as_uverbs().fd())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The time of the rounds of one sample, in nanoseconds.
fn sample(row: &Row, world: &mut World) -> f64 {
    let taken = match row.after {
        None => {
            let begin = Instant::now();
            for _ in 0..ROUNDS {
                (row.before)(world);
                (row.run)(world);
            }
            begin.elapsed()
        }
        Some(after) => {
            let mut taken = Duration::ZERO;
            for _ in 0..ROUNDS {
                (row.before)(world);
                let begin = Instant::now();
                (row.run)(world);
                taken += begin.elapsed();
                after(world);
            }
            taken
        }
    };
    taken.as_nanos() as f64
}

/// Nanoseconds of one operation.
fn time(row: &Row, world: &mut World, samples: usize) -> f64 {
    let mut of = |before, run, after| {
        let row = Row {
            before,
            run,
            after,
            ..*row
        };
        median((0..samples).map(|_| sample(&row, world)).collect())
    };
    // In the same way, which includes looking at the clock.
    let after = row.after.map(|_| rows::idle as fn(&mut World));
    let nothing = of(rows::idle, rows::nothing, after);
    let mut bell = 0.0;
    if row.doorbell {
        bell = of(rows::idle, rows::doorbell, after) - nothing;
    }
    let calls = of(row.before, row.run, row.after);
    (calls - nothing - bell) / f64::from(ROUNDS * row.calls * row.batch)
}

/// Exact counts of one round, after one that reached what is reached for the
/// first time.
fn count(row: &Row, world: &mut World, print: bool) -> [f64; 3] {
    let mut count = stepper::Count::default();
    for round in 0..2 {
        (row.before)(world);
        if round == 1 {
            let empty = stepper::count(false, rows::nothing, world);
            count = stepper::count(print, row.run, world);
            count.instructions -= empty.instructions;
        } else {
            (row.run)(world);
        }
        if let Some(after) = row.after {
            after(world);
        }
    }
    let operations = f64::from(row.calls * row.batch);
    [count.instructions, count.locked, count.fences].map(|count| count as f64 / operations)
}

/// One processor for the whole run; which one does not matter.
fn stay_here() {
    // SAFETY: all-zero bytes are an empty set, and the calls take its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if let Ok(cpu) = usize::try_from(libc::sched_getcpu()) {
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set);
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (mode, more) = match arguments[..] {
        [mode @ ("time" | "count" | "trace"), ref more @ ..] => (mode, more.first()),
        _ => {
            println!("this needs the stand-in for the kernel: cargo xtask bench runs it");
            return ExitCode::SUCCESS;
        }
    };
    let Some(standin) = StandIn::find() else {
        eprintln!("datapath: preload standin.so (LD_PRELOAD)");
        return ExitCode::FAILURE;
    };
    let samples = more.map_or(DEFAULT_SAMPLES, |word| word.parse().unwrap_or(0));
    if mode == "time" && samples == 0 {
        eprintln!("datapath: not a number of samples");
        return ExitCode::FAILURE;
    }
    stay_here();
    let context = open();
    for row in ROWS {
        if mode == "trace" && more != Some(&row.name) {
            continue;
        }
        let mut world = world(&context, standin, row);
        if let Err(what) = rows::check(row, &mut world, || standin.doorbells()) {
            eprintln!("datapath: row {}: {what}", row.name);
            return ExitCode::FAILURE;
        }
        if mode == "time" {
            println!("time {} {:.4}", row.name, time(row, &mut world, samples));
        } else {
            let [instructions, locked, fences] = count(row, &mut world, mode == "trace");
            let name = row.name;
            println!("count {name} {instructions:.3} {locked:.3} {fences:.3}");
        }
        black_box(world.sum);
    }
    ExitCode::SUCCESS
}
