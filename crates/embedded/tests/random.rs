//! Random commands: a driver with random commands beside a correct one. Every sequence of
//! commands is generated from a seed.
//!
//! `RINGVERBS_SEQUENCES` is the number of sequences (with it, progress is printed),
//! `RINGVERBS_SEED` the first seed.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use device_testing::embedded::random::{COMMANDS, Random, sequence};

/// Default number of sequences.
const DEFAULT_SEQUENCES: u64 = 150;

/// Ends the process if a sequence hangs.
fn exit_on_hang(at: &'static AtomicU64) {
    std::thread::spawn(move || {
        let mut last = (at.load(Ordering::Relaxed), Instant::now());
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let now = at.load(Ordering::Relaxed);
            if now != last.0 {
                last = (now, Instant::now());
            } else if last.1.elapsed() > Duration::from_secs(120) {
                let _ = writeln!(std::io::stderr(), "the sequence of seed {now} hangs");
                std::process::exit(1);
            }
        }
    });
}

fn number_from_environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {value}")),
    )
}

#[test]
fn random_driver_commands() {
    static AT: AtomicU64 = AtomicU64::new(0);
    struct PrintSeed;
    impl Drop for PrintSeed {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("RINGVERBS_SEED={} repeats it", AT.load(Ordering::Relaxed));
            }
        }
    }
    let (first, requested) = (
        number_from_environment("RINGVERBS_SEED").unwrap_or(1),
        number_from_environment("RINGVERBS_SEQUENCES"),
    );
    let count = requested.unwrap_or(DEFAULT_SEQUENCES);
    let _print_seed = PrintSeed;
    let (mut accepted, began) = (0, Instant::now());
    exit_on_hang(&AT);
    for done in 0..count {
        AT.store(first + done, Ordering::Relaxed);
        accepted += sequence(Random::seeded(first + done));
        if requested.is_some() && (done % 500 == 499 || done + 1 == count) {
            let seconds = began.elapsed().as_secs();
            let of = (done + 1) * u64::from(COMMANDS);
            let _ = writeln!(
                std::io::stderr(),
                "{} of {count} sequences, {accepted} of {of} commands accepted, {seconds} s",
                done + 1
            );
        }
    }
    // A sufficient part of the commands succeeds.
    assert!(
        accepted > count * u64::from(COMMANDS) / 5,
        "{accepted} commands were accepted"
    );
}
