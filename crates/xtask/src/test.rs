//! `cargo xtask test`: runs all tests of the project.

mod areas;
mod attempts;
mod full;
mod guests;
mod host;
mod report;

use std::fs;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};
use rxe_tests::guest::Suite;

use crate::driver;

use areas::Areas;
use guests::Outcome;
use report::{Line, panicked, report, skipped};

/// The command line.
#[derive(Clone, clap::Args)]
pub struct Arguments {
    /// Only the short list of guest cases, in every suite
    #[arg(long, conflicts_with = "full")]
    short: bool,
    /// All guest cases in every suite and on softhca, the long forms, Miri and
    /// the sanitizers: several hours
    #[arg(long, visible_alias = "long", conflicts_with_all = ["no_guest", "host"])]
    full: bool,
    /// Only format, licences, lints, unit and property tests, of the areas that
    /// have changed: at most 5 minutes
    #[arg(long, conflicts_with_all = ["full", "guest_only", "host", "no_guest", "suite"])]
    quick: bool,
    /// The areas of --quick, instead of those changed according to git: names of
    /// packages, with or without `ringverbs-`, or `all`
    #[arg(long, requires = "quick")]
    area: Vec<String>,
    /// Only the steps that need neither root nor a guest
    #[arg(long)]
    no_guest: bool,
    /// Only the guest suites, without format, lints, unit and loom tests
    #[arg(long, conflicts_with = "no_guest")]
    guest_only: bool,
    /// One step at a time: guests one after another, after all other steps
    #[arg(long)]
    serial: bool,
    /// Only this suite (can be given more than once): trixie, bookworm, sid, trixie-arm64
    #[arg(long)]
    suite: Vec<Suite>,
    /// Run the cases on this machine, which must have rdma_rxe, and in no guest
    #[arg(long, conflicts_with_all = ["no_guest", "suite"])]
    host: bool,
    /// Run every case with stock, without cached verdicts; otherwise that runs where ours
    /// does not pass, and in trixie the programs in C
    #[arg(long)]
    fresh_stock: bool,
    /// Run only stock, with which ours is compared
    #[arg(long)]
    stock_only: bool,
    /// Only guest cases whose group and name contain this (or one of these)
    #[arg(long)]
    filter: Vec<String>,
    /// A kernel package other than linux-image-amd64
    #[arg(long)]
    kernel: Option<String>,
}

/// Runs the tests and prints a summary. Its last line counts passed, failed and skipped
/// tests; the exit status is a failure if any failed.
///
/// # Errors
/// The disk has less free space than the run needs.
pub fn test(arguments: &Arguments) -> Result<ExitCode> {
    require_disk_space(arguments)?;
    let began = Instant::now();
    let mut lines = Vec::new();
    let mut texts = Vec::new();
    if arguments.quick {
        lines.extend(host::quick(&Areas::choose(&arguments.area)?));
        lines.push(skipped("guest suites", "--quick"));
    } else if arguments.no_guest {
        lines.extend(host::all(arguments.serial));
        lines.push(skipped("guest suites", "--no-guest"));
    } else {
        let steps = || match arguments.guest_only {
            true => Vec::new(),
            false => host::all(arguments.serial),
        };
        let (host, outcome) = if arguments.host {
            (steps(), guests::on_host(arguments))
        } else if arguments.serial {
            (steps(), guests::Queue::new(arguments).run())
        } else {
            guests_and_host(arguments, steps)
        };
        lines.extend(host);
        lines.extend(outcome.lines);
        texts = outcome.texts;
        if arguments.full {
            lines.extend(full::all(arguments));
        }
    }
    println!();
    for text in texts {
        println!("{text}");
    }
    Ok(report(&lines, began.elapsed()))
}

/// GB that a run writes to an empty target directory.
const DISK_SPACE_GB: u64 = 16;
/// The same with `--quick` or `--guest-only`, or of a second run.
const SMALL_DISK_SPACE_GB: u64 = 4;

fn require_disk_space(arguments: &Arguments) -> Result<()> {
    let target = driver::target_dir();
    let is_small = arguments.quick || arguments.guest_only || target.join("debug").exists();
    let needed = if is_small {
        SMALL_DISK_SPACE_GB
    } else {
        DISK_SPACE_GB
    };
    fs::create_dir_all(&target)?;
    let mut df = Command::new("df");
    let output = df
        .args(["--output=avail", "--block-size=1GB"])
        .arg(&target)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let free = text
        .lines()
        .nth(1)
        .and_then(|line| line.trim().parse::<u64>().ok());
    ensure!(
        free.is_none_or(|free| free >= needed),
        "{} has {} GB free, and this run may write {needed} GB: free some, or set \
         CARGO_TARGET_DIR to another directory",
        target.display(),
        free.unwrap_or(0)
    );
    Ok(())
}

/// Runs two guests and the other steps at the same time, and a third guest when the
/// latter have finished: a guest is idle half of the time. Guests, and the builds for them,
/// have a higher priority than most of the host's steps (`host::all`): they take longest, and
/// their cases have time limits.
fn guests_and_host(
    arguments: &Arguments,
    steps: impl FnOnce() -> Vec<Line> + Send,
) -> (Vec<Line>, Outcome) {
    let queue = guests::Queue::new(arguments);
    thread::scope(|scope| {
        let guests = [(); 2].map(|()| scope.spawn(|| queue.run()));
        scope.spawn(|| guests::prepare(arguments));
        if !arguments.guest_only {
            scope.spawn(|| guests::build(arguments));
        }
        let host = scope.spawn(steps).join();
        let host = host.unwrap_or_else(|_| vec![panicked("host steps")]);
        let third = scope.spawn(|| queue.run());
        let mut outcome = Outcome::default();
        for runner in guests.into_iter().chain([third]) {
            let runner_outcome = runner.join();
            outcome.extend(runner_outcome.unwrap_or_else(|_| Outcome::panicked("guests")));
        }
        (host, outcome)
    })
}
