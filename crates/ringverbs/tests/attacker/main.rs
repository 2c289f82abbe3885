//! Random sequences of all safe calls, against a model of who owns which byte.
//!
//! The device is a ConnectX in this process that the test drives itself, so a
//! sequence does the same each time, but for what depends on the clock.
//! `RINGVERBS_ATTACKER_SECONDS` is how long it goes on (10 unless told), and
//! `RINGVERBS_ATTACKER_SEED` where it begins; `RINGVERBS_ATTACKER_ONLY` and
//! `RINGVERBS_ATTACKER_WITHOUT` are names of steps, or parts of names, with
//! commas between them. With `RINGVERBS_ATTACKER_BYTES` set nothing counts but
//! bytes that change. What fails is tried again with fewer steps, for
//! `RINGVERBS_ATTACKER_SHRINK` seconds, and printed.

#![forbid(unsafe_code)]

mod by_hand;
mod more;
mod steps;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use steps::Kind;
use testing::program::run_tests;
use testing::{Rng, setting};
use world::World;

/// A step: its kind, and the numbers that it chooses by.
#[derive(Clone, Copy, Debug)]
struct Step {
    kind: usize,
    numbers: steps::Numbers,
}

/// A sequence, and what it runs on.
#[derive(Clone)]
struct Sequence {
    seed: u64,
    devices: usize,
    profile: &'static str,
    bytes_only: bool,
    steps: Vec<Step>,
}

/// All kinds of steps that are asked for.
fn kinds() -> Vec<Kind> {
    let only: String = setting("RINGVERBS_ATTACKER_ONLY", String::new());
    let without: String = setting("RINGVERBS_ATTACKER_WITHOUT", String::new());
    let named = |list: &str, name: &str| {
        list.split(',')
            .any(|part| !part.is_empty() && name.contains(part))
    };
    (steps::STEPS.iter().chain(more::STEPS))
        .filter(|(name, ..)| only.is_empty() || named(&only, name))
        .filter(|(name, ..)| !named(&without, name))
        .copied()
        .collect()
}

/// What nearly every sequence begins with.
const BEGINNING: &[&str] = &[
    "open a context",
    "allocate a domain",
    "make a completion queue",
    "make a completion queue",
    "make a queue pair",
    "make a queue pair",
    "make a queue pair",
    "make a queue pair",
    "connect two queue pairs",
    "connect two queue pairs",
    "allocate a region",
    "allocate a region",
    "allocate a remote region",
    "allocate a remote region",
    "allocate a window",
];

/// What most of the sequences are about: parts of names of steps.
const THEMES: &[&[&str]] = &[
    &["window", "bind", "remote", "again", "write", "anew", "raw"],
    &[
        "bind",
        "close a remote",
        "again",
        "allocate a remote",
        "anew",
    ],
    &[
        "bind",
        "close a remote",
        "again",
        "raw",
        "error",
        "inline",
        "anew",
    ],
    &["receive", "send", "halves", "anew", "reset", "split"],
    &["receive", "send", "anew", "swap", "poll", "write"],
    &[
        "queue", "shared", "cursor", "reader", "connect", "send", "receive",
    ],
    &["datagram", "a domain", "a context", "a queue pair"],
    &["datagram", "receive"],
    &["pool", "connect", "receive", "write", "error"],
    &["froze", "freeze", "thaw", "receive", "connect", "anew"],
    &["DC", "shared", "a remote region", "bind"],
    &["demand", "write", "read", "a remote region", "bind", "anew"],
];

/// Small numbers most of the time, so that few objects meet often.
fn number(random: &mut Rng) -> u32 {
    let all = random.next() as u32;
    match random.below(4) {
        0 => all & !0xff,
        1 => all & !0xff | 1,
        _ => all,
    }
}

/// A part of a round: how many steps it has at least, how many more there may be,
/// and of which kinds, with the weight of each.
type Part = (usize, usize, &'static [(&'static str, u32)]);

/// A round of a sequence about keys that outlive their region.
const ROUND: &[Part] = &[
    (0, 1, &[("connect two queue pairs anew", 1)]),
    (1, 0, &[("allocate a window", 1)]),
    (1, 2, &[("allocate a remote region", 1)]),
    (1, 2, &[("bind a window", 1)]),
    (1, 1, &[("drive", 1)]),
    (1, 2, &[("poll for one", 2), ("poll for all", 1)]),
    (
        1,
        3,
        &[
            ("bind a window", 4),
            ("a raw bind, dropped", 4),
            ("unbind a window", 1),
            ("invalidate a key", 1),
        ],
    ),
    (0, 2, &[("drive", 1)]),
    (
        1,
        3,
        &[
            ("poll for one", 6),
            ("poll for all", 1),
            ("bind a window", 1),
        ],
    ),
    (1, 3, &[("close a remote region", 1)]),
    (1, 1, &[("allocate until memory comes again", 1)]),
    (1, 2, &[("write to what has come again", 1)]),
    (1, 1, &[("drive", 1)]),
    (0, 1, &[("poll for all", 1)]),
];

/// The kind that a number chooses by the kinds' weights.
fn weighted(random: &mut Rng, weights: &[u32]) -> Option<usize> {
    let total: u32 = weights.iter().sum();
    let mut at = random.below(total.max(1) as usize) as u32;
    weights.iter().position(|weight| {
        let here = at < *weight;
        at = at.wrapping_sub(*weight);
        here
    })
}

/// Rounds about keys, with a step of any kind in between now and then.
fn rounds(random: &mut Rng, kinds: &[Kind]) -> Vec<Step> {
    let mut steps = Vec::new();
    // Some do without the raw layer's binds, which nothing lets go of.
    let raw = random.one_in(2);
    for _ in 0..random.below(3) + 1 {
        for (least, more, listed) in ROUND {
            let weight = |name: &str| {
                let (_, weight) = listed.iter().find(|(of, _)| *of == name)?;
                Some(if name.contains("raw") && !raw {
                    0
                } else {
                    *weight
                })
            };
            let weights: Vec<_> = (kinds.iter())
                .map(|(name, ..)| weight(name).unwrap_or_default())
                .collect();
            for _ in 0..least + random.below(more + 1) {
                let kind = match random.one_in(40) {
                    true => Some(random.below(kinds.len())),
                    false => weighted(random, &weights),
                };
                // Of windows there are few, and small numbers are binds that are not
                // signaled.
                let numbers = [0; 4].map(|_| random.next() as u32);
                steps.extend(kind.map(|kind| Step { kind, numbers }));
            }
        }
    }
    steps
}

/// Steps of all kinds, most of them about one theme.
fn mixture(random: &mut Rng, kinds: &[Kind]) -> Vec<Step> {
    // Each sequence has its favourites, and kinds that it does without.
    let theme = match random.below(4) {
        0 => None,
        _ => Some(THEMES[random.below(THEMES.len())]),
    };
    let weights: Vec<_> = (kinds.iter())
        .map(|(name, weight, _)| {
            let usual = ["drive", "poll for all"].contains(name);
            let fits = theme.is_none_or(|theme| theme.iter().any(|part| name.contains(part)));
            if !fits && !usual && !random.one_in(12) {
                return 0;
            }
            match random.below(8) {
                0 | 1 if !usual && theme.is_none() => 0,
                2..=4 => weight * 2,
                5 | 6 => weight * 6,
                7 => weight * 20,
                _ => weight * 2,
            }
        })
        .collect();
    (0..random.below(160) + 20)
        .filter_map(|_| {
            let kind = weighted(random, &weights)?;
            let numbers = [0; 4].map(|_| number(random));
            Some(Step { kind, numbers })
        })
        .collect()
}

fn sequence(seed: u64, kinds: &[Kind]) -> Sequence {
    let mut random = Rng(seed);
    let keys = random.one_in(3);
    let find = |wanted: &str| kinds.iter().position(|(name, ..)| *name == wanted);
    let mut steps = Vec::new();
    for name in BEGINNING {
        // A reader's queue now and then, or queue pairs are hardly ever on one.
        let name = match *name {
            "make a completion queue" if random.one_in(4) => "make a reader",
            name => name,
        };
        if let Some(kind) = find(name) {
            if keys || !random.one_in(24) {
                let mut numbers = [0; 4].map(|_| number(&mut random));
                // A reliable connection on whichever queues, mostly.
                if name == "make a queue pair" && (keys || !random.one_in(6)) {
                    numbers[1] = 0;
                    numbers[3] = 1;
                }
                if name == "make a queue pair" && keys {
                    numbers[2] = random.next() as u32;
                }
                steps.push(Step { kind, numbers });
            }
        }
    }
    if keys {
        steps.extend(rounds(&mut random, kinds));
    } else {
        steps.extend(mixture(&mut random, kinds));
    }
    Sequence {
        seed,
        devices: if random.one_in(6) { 2 } else { 1 },
        profile: if random.one_in(4) { "ib" } else { "roce" },
        bytes_only: setting("RINGVERBS_ATTACKER_BYTES", 0) != 0,
        steps,
    }
}

/// How often each kind was tried, and did what it is there for.
#[derive(Clone, Default)]
struct Counts {
    kinds: Vec<(u64, u64)>,
    /// Operations that were done, and that were not.
    ends: BTreeMap<String, (u64, u64)>,
    steps: u64,
}

/// The running sequence and its step, for the watchdog.
#[derive(Default)]
struct Progress {
    seed: AtomicU64,
    step: AtomicU64,
    beats: AtomicU64,
}

/// Time limit of a step, after which the sequence is considered to hang.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Ends the process if a sequence hangs.
fn watch(now: Arc<Progress>) {
    std::thread::spawn(move || {
        let mut last = (0, Instant::now());
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let beat = now.beats.load(Ordering::Relaxed);
            if beat != last.0 {
                last = (beat, Instant::now());
            } else if last.1.elapsed() > TIME_LIMIT {
                let seed = now.seed.load(Ordering::Relaxed);
                let step = now.step.load(Ordering::Relaxed);
                eprintln!("HANG: sequence {seed} at its step {step}");
                std::process::abort();
            }
        }
    });
}

/// Runs a sequence: what was wrong, and after which step.
fn run(
    sequence: &Sequence,
    kinds: &[Kind],
    counts: &mut Counts,
    now: &Progress,
) -> Result<(), (usize, String)> {
    counts.kinds.resize(kinds.len(), (0, 0));
    now.seed.store(sequence.seed, Ordering::Relaxed);
    let mut at = 0;
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(sequence.devices, sequence.profile);
        world.taken_away = sequence.bytes_only;
        for (number, step) in sequence.steps.iter().enumerate() {
            at = number;
            now.step.store(number as u64, Ordering::Relaxed);
            now.beats.fetch_add(1, Ordering::Relaxed);
            world.clock += 1;
            let (_, _, take) = kinds[step.kind];
            let done = match take(&mut world, step.numbers) {
                Ok(done) => done,
                Err(wrong) => {
                    std::mem::forget(world);
                    return Err(wrong);
                }
            };
            counts.steps += 1;
            counts.kinds[step.kind].0 += 1;
            counts.kinds[step.kind].1 += u64::from(done);
            if let Err(wrong) = world.check(number % 4 == 0) {
                std::mem::forget(world);
                return Err(wrong);
            }
        }
        at = sequence.steps.len();
        for (operation, (done, failed)) in world.finish()? {
            let ends = counts.ends.entry(operation).or_default();
            ends.0 += done;
            ends.1 += failed;
        }
        Ok(())
    }));
    match ran {
        Ok(Ok(())) => Ok(()),
        Ok(Err(wrong)) => Err((at, wrong)),
        Err(panic) => {
            let text = (panic.downcast_ref::<String>().cloned())
                .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err((at, format!("PANIC: {}", text.unwrap_or_default())))
        }
    }
}

/// The kind of what is wrong, without its numbers.
fn sort_of(wrong: &str) -> String {
    let words = wrong.split(|c: char| !c.is_alphabetic());
    words
        .filter(|word| word.len() > 3 && !word.chars().all(|c| c.is_ascii_hexdigit()))
        .take(8)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Leaves out what a failure does not need.
fn shrink(sequence: &Sequence, kinds: &[Kind], wrong: &str, now: &Progress) -> (Sequence, String) {
    let (mut best, mut text) = (sequence.clone(), wrong.to_owned());
    let mut counts = Counts::default();
    let sort = sort_of(wrong);
    let end = Instant::now() + Duration::from_secs(setting("RINGVERBS_ATTACKER_SHRINK", 60));
    let mut size = best.steps.len().div_ceil(2).max(1);
    loop {
        let mut begin = 0;
        let mut fewer = false;
        while begin < best.steps.len() && Instant::now() < end {
            let mut candidate = best.clone();
            let stop = (begin + size).min(candidate.steps.len());
            candidate.steps.drain(begin..stop);
            match run(&candidate, kinds, &mut counts, now) {
                Err((at, again)) if sort_of(&again) == sort => {
                    candidate.steps.truncate(at + 1);
                    best = candidate;
                    text = again;
                    fewer = true;
                }
                _ => begin += size,
            }
        }
        if Instant::now() >= end || size == 1 && !fewer {
            return (best, text);
        }
        size = (size / 2).max(1);
    }
}

fn show(sequence: &Sequence, kinds: &[Kind]) -> String {
    let mut text = format!("{} devices of {}\n", sequence.devices, sequence.profile);
    for Step { kind, numbers } in &sequence.steps {
        text += &format!("    {} {numbers:?}\n", kinds[*kind].0);
    }
    text
}

fn report(counts: &Counts, kinds: &[Kind]) -> String {
    let mut text = String::new();
    for ((tried, done), (name, ..)) in counts.kinds.iter().zip(kinds) {
        text += &format!("    {done:>9} of {tried:>9}  {name}\n");
    }
    for (operation, (done, failed)) in &counts.ends {
        text += &format!("    {done:>9} done, {failed:>9} not: {operation}\n");
    }
    text
}

/// So many sequences there are on a machine that has much else to do, too: they
/// have each kind of step.
const LEAST: u64 = 400;

/// Sequences of the long form that one process runs: what they forget on purpose
/// stays until its end.
const PART: u64 = 4000;

/// Runs the sequences from `first` on for that long, each part in a process.
fn in_parts(first: u64, seconds: Duration) {
    let begun = Instant::now();
    let mut seed = first;
    while let Some(left) = seconds.checked_sub(begun.elapsed()) {
        let mut part = Command::new(std::env::current_exe().unwrap());
        part.args(["safe_calls_keep_every_byte", "--exact", "--nocapture"])
            .env("RINGVERBS_ATTACKER_PART", "1")
            .env("RINGVERBS_ATTACKER_SEED", seed.to_string())
            .env("RINGVERBS_ATTACKER_SEQUENCES", PART.to_string())
            .env(
                "RINGVERBS_ATTACKER_SECONDS",
                (left.as_secs() + 1).to_string(),
            );
        run_tests(1, &mut part);
        seed += PART;
        println!("{:?}: sequences from {first} to {seed}", begun.elapsed());
    }
}

#[test]
fn safe_calls_keep_every_byte() {
    let kinds = kinds();
    let seconds = Duration::from_secs(setting("RINGVERBS_ATTACKER_SECONDS", 10));
    if seconds > Duration::from_secs(60) && setting("RINGVERBS_ATTACKER_PART", 0) == 0 {
        return in_parts(setting("RINGVERBS_ATTACKER_SEED", 1), seconds);
    }
    let most: u64 = setting("RINGVERBS_ATTACKER_SEQUENCES", u64::MAX);
    let first: u64 = setting("RINGVERBS_ATTACKER_SEED", 1);
    let now = Arc::new(Progress::default());
    watch(Arc::clone(&now));
    let begun = Instant::now();
    let mut said = Duration::ZERO;
    let mut counts = Counts::default();
    let mut done = 0;
    let some = ["ONLY", "WITHOUT", "SEED", "SEQUENCES"]
        .iter()
        .any(|name| std::env::var(format!("RINGVERBS_ATTACKER_{name}")).is_ok());
    // Some kinds succeed once in a thousand tries, which a busy machine does not come
    // to in that time: it is not over before each kind has succeeded, within reason.
    let missing = |counts: &Counts| counts.kinds.iter().any(|(_, done)| *done == 0);
    while done < most
        && (begun.elapsed() < seconds
            || done < LEAST
            || !some && missing(&counts) && begun.elapsed() < 30 * seconds)
    {
        let seed = first + done;
        let sequence = sequence(seed, &kinds);
        if let Err((at, wrong)) = run(&sequence, &kinds, &mut counts, &now) {
            println!(
                "sequence {seed}, the {}th, after {:?}, at step {at} of {}: {wrong}",
                done + 1,
                begun.elapsed(),
                sequence.steps.len()
            );
            let (small, again) = shrink(&sequence, &kinds, &wrong, &now);
            panic!("sequence {seed}: {again}\n{}", show(&small, &kinds));
        }
        done += 1;
        if begun.elapsed() - said > Duration::from_secs(60) {
            said = begun.elapsed();
            println!(
                "{said:?}: {done} sequences, {} steps\n{}",
                counts.steps,
                report(&counts, &kinds)
            );
        }
    }
    println!("{done} sequences, {} steps", counts.steps);
    println!("{}", report(&counts, &kinds));
    // What never succeeds tests nothing.
    let never: Vec<_> = (counts.kinds.iter().zip(&kinds))
        .filter(|((_, done), _)| *done == 0)
        .map(|(_, (name, ..))| *name)
        .collect();
    assert!(
        some || never.is_empty(),
        "steps that never succeed: {never:?}"
    );
}
