//! What the benches of both devices do: they differ in the device's part.

use std::hint::black_box;
use std::os::fd::RawFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ringverbs::qp::{Init, Mtu, ReadyToReceive, ReadyToSend};
use ringverbs::{AccessFlags, AhAttr, Context, Transport};
use uverbs::discovery;
use uverbs::kernel::RealKernel;

use crate::rows::{self, Device, LENGTH, Row, Setup};
use crate::stepper;

const ROUNDS: u32 = 64;
const DEFAULT_SAMPLES: usize = 101;
/// The C program's: a ring of 128.
const CQ_ENTRIES: u32 = 127;
const INLINE: u32 = 64;

/// Opens the stand-in's device. Its descriptor goes along.
fn open<D: Device>() -> (Context, RawFd) {
    let devices = discovery::devices(&RealKernel).expect("a list of devices");
    let mut device = devices.into_iter().next().expect("the stand-in's device");
    // Sysfs, which is all that the stand-in has, does not tell.
    device.driver_id = D::DRIVER;
    let context = uverbs::Context::open(Box::new(RealKernel), &device).expect("the device opens");
    let fd = context.fd();
    // SAFETY: the context is given away; the stand-in's files are the kernel's.
    (unsafe { Context::over(context) }.expect("a context"), fd)
}

/// Queues for a row.
fn setup<D: Device>((context, fd): &(Context, RawFd), row: &Row<D>) -> Setup<D> {
    let cq = context.completion_queue().entries(CQ_ENTRIES).build();
    let cq = cq.expect("a completion queue");
    let domain = context.alloc_pd().expect("a protection domain");
    let builder = domain.queue_pair(Transport::Reliable, &cq);
    let builder = builder.send_depth(D::SENDS).recv_depth(D::RECEIVES);
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
    Setup::new(row, (qp, cq), buffers, *fd)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The time of the rounds of one sample, in nanoseconds.
fn sample<D: Device>(row: &Row<D>, setup: &mut Setup<D>) -> f64 {
    let taken = match row.after {
        None => {
            let begin = Instant::now();
            for _ in 0..ROUNDS {
                (row.before)(setup);
                (row.run)(setup);
            }
            begin.elapsed()
        }
        Some(after) => {
            let mut taken = Duration::ZERO;
            for _ in 0..ROUNDS {
                (row.before)(setup);
                let begin = Instant::now();
                (row.run)(setup);
                taken += begin.elapsed();
                after(setup);
            }
            taken
        }
    };
    taken.as_nanos() as f64
}

/// Nanoseconds of one operation.
fn time<D: Device>(row: &Row<D>, setup: &mut Setup<D>, samples: usize) -> f64 {
    let mut of = |before, run, after| {
        let row = Row {
            before,
            run,
            after,
            ..*row
        };
        median((0..samples).map(|_| sample(&row, setup)).collect())
    };
    // In the same way, which includes looking at the clock.
    let after = row.after.map(|_| rows::idle as rows::Step<D>);
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
fn count<D: Device>(row: &Row<D>, setup: &mut Setup<D>, print: bool) -> [f64; 3] {
    let mut count = stepper::Count::default();
    for round in 0..2 {
        (row.before)(setup);
        if round == 1 {
            let empty = stepper::count(false, rows::nothing, setup);
            count = stepper::count(print, row.run, setup);
            count.instructions -= empty.instructions;
        } else {
            (row.run)(setup);
        }
        if let Some(after) = row.after {
            after(setup);
        }
    }
    let operations = f64::from(row.calls * row.batch);
    [count.instructions, count.locked, count.fences].map(|count| count as f64 / operations)
}

/// Pins the process to its current processor.
fn pin_to_current_cpu() {
    // SAFETY: all-zero bytes are an empty set, and the calls take its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if let Ok(cpu) = usize::try_from(libc::sched_getcpu()) {
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set);
        }
    }
}

/// Runs the mode of the command line, if the stand-in for the device is loaded.
pub fn main<D: Device>() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (mode, more) = match arguments[..] {
        [mode @ ("time" | "count" | "trace"), ref more @ ..] => (mode, more.first()),
        _ => {
            println!("this needs the stand-in for the kernel: cargo xtask bench runs it");
            return ExitCode::SUCCESS;
        }
    };
    let samples = more.map_or(DEFAULT_SAMPLES, |word| word.parse().unwrap_or(0));
    if mode == "time" && samples == 0 {
        eprintln!("datapath: not a number of samples");
        return ExitCode::FAILURE;
    }
    if !D::is_loaded() {
        eprintln!("datapath: preload {} (LD_PRELOAD)", D::STAND_IN);
        return ExitCode::FAILURE;
    }
    pin_to_current_cpu();
    measure::<D>(mode, more.copied().unwrap_or_default(), samples)
}

/// Measures all rows, or traces one.
fn measure<D: Device>(mode: &str, traced: &str, samples: usize) -> ExitCode {
    let context = open::<D>();
    for row in D::ROWS {
        if mode == "trace" && traced != row.name {
            continue;
        }
        let mut setup = setup(&context, row);
        if let Err(what) = D::check(row, &mut setup) {
            eprintln!("datapath: row {}: {what}", row.name);
            return ExitCode::FAILURE;
        }
        if mode == "time" {
            println!("time {} {:.4}", row.name, time(row, &mut setup, samples));
        } else {
            let [instructions, locked, fences] = count(row, &mut setup, mode == "trace");
            let name = row.name;
            println!("count {name} {instructions:.3} {locked:.3} {fences:.3}");
        }
        black_box(setup.sum + setup.lengths);
    }
    ExitCode::SUCCESS
}
