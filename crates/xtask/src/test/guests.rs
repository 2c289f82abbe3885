//! The suites that run in guests.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use rxe_tests::compare::{Results, Verdict};
use rxe_tests::driver::case::chosen;
use rxe_tests::guest::suite::{AARCH64, X86_64};
use rxe_tests::guest::{Architecture, Qemu, Suite, host, tree};

use super::Arguments;
use super::report::{Line, panicked, parts, skipped};
use crate::suite::{self, Request};
use crate::{bare, dist, driver, native, softhca};

/// The lines of the summary, and what is to be said of each machine.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) lines: Vec<Line>,
    pub(super) texts: Vec<String>,
}

impl Outcome {
    pub(super) fn extend(&mut self, other: Outcome) {
        self.lines.extend(other.lines);
        self.texts.extend(other.texts);
    }

    /// Of what has panicked.
    pub(super) fn panicked(what: &str) -> Outcome {
        Outcome {
            lines: vec![panicked(what)],
            ..Outcome::default()
        }
    }
}

/// Runs the cases on this machine.
pub(super) fn on_host(arguments: &Arguments) -> Outcome {
    let (line, text) = machine(
        "host",
        arguments,
        &X86_64,
        arguments.short,
        suite::on_host,
        false,
    );
    Outcome {
        lines: vec![line],
        texts: text.into_iter().collect(),
    }
}

/// The guests that have not begun. Each runner takes one when it has nothing else
/// to do: a guest leaves half a processor unused.
pub(super) struct Queue<'a> {
    arguments: &'a Arguments,
    suites: Mutex<VecDeque<Suite>>,
}

impl<'a> Queue<'a> {
    pub(super) fn new(arguments: &'a Arguments) -> Queue<'a> {
        let suites = Mutex::new(suites(arguments).into());
        Queue { arguments, suites }
    }

    /// Runs guests until none is left.
    pub(super) fn run(&self) -> Outcome {
        let mut outcome = Outcome::default();
        while let Some(suite) = self.next() {
            outcome.extend(guest(suite, self.arguments));
        }
        outcome
    }

    fn next(&self) -> Option<Suite> {
        let mut suites = self.suites.lock().unwrap_or_else(PoisonError::into_inner);
        suites.pop_front()
    }
}

/// Runs the guest of `suite`, and with the first one those that belong to no
/// distribution.
fn guest(suite: Suite, arguments: &Arguments) -> Outcome {
    let mut outcome = Outcome::default();
    // In full where it is the default, or asked for.
    let brief = suite == Suite::TrixieArm64 || (suite != Suite::Trixie && !arguments.full);
    let short = arguments.short || (brief && arguments.suite.is_empty());
    if let Some(why) = no_guest(suite, arguments.kernel.as_deref()) {
        eprintln!("{suite}: no guest: {why}");
        outcome.lines.push(skipped(&format!("guest {suite}"), &why));
        return outcome;
    }
    let run = |request: &Request| suite::in_guest(suite, request);
    let what = format!("guest {suite}");
    let architecture = suite.architecture();
    let (line, text) = machine(&what, arguments, architecture, short, run, suite.moves());
    outcome.lines.push(line);
    outcome.texts.extend(text);
    if matches!(suite, Suite::Trixie | Suite::TrixieArm64) && !arguments.stock_only {
        outcome.lines.extend(without_libraries(suite, arguments));
    }
    if suite == Suite::Trixie && !arguments.stock_only {
        outcome.lines.extend(on_softhca(arguments));
    }
    outcome
}

fn suites(arguments: &Arguments) -> Vec<Suite> {
    match arguments.suite.as_slice() {
        [] if arguments.full && arguments.kernel.is_none() => {
            [&Suite::ALL[..], &[Suite::TrixieArm64]].concat()
        }
        [] => Suite::ALL.to_vec(),
        chosen => chosen.to_vec(),
    }
}

/// Builds what runs in the guests, while their trees are made. What fails is tried
/// again when it is needed, and reported then.
pub(super) fn build(arguments: &Arguments) {
    let kernel = arguments.kernel.as_deref();
    let suites = suites(arguments);
    for architecture in [&X86_64, &AARCH64] {
        let mut of_it = suites.iter().filter(|it| it.architecture() == architecture);
        if of_it.all(|suite| no_guest(*suite, kernel).is_some()) {
            continue;
        }
        eprintln!("== building for the guests ({})", architecture.debian);
        if !arguments.stock_only {
            let _ = dist::dist_for(architecture);
        }
        let _ = driver::build_for(architecture);
        let _ = native::built(architecture);
        let _ = suite::build_installer(architecture);
    }
}

/// Makes the guests that are needed later, while the first one runs. What fails
/// is tried again when its turn comes, and reported then.
pub(super) fn prepare(arguments: &Arguments) {
    if arguments.host {
        return;
    }
    let kernel = arguments.kernel.as_deref();
    let suites = suites(arguments);
    let softhca = suites.contains(&Suite::Trixie) && !arguments.stock_only;
    let can_be_made = |suite: Suite| no_guest(suite, kernel).is_none();
    if softhca && chosen(&arguments.filter, SOFTHCA) && can_be_made(Suite::Trixie) {
        let _ = Qemu::get();
    }
    // The first one is made by whoever waits for it.
    for suite in suites.into_iter().skip(1).filter(|it| can_be_made(*it)) {
        if let Err(error) = tree::image(suite, kernel) {
            eprintln!("{suite}: {error:#}");
        }
    }
}

/// Runs the cases of one machine and weighs the results.
///
/// A plugin that refuses a libibverbs which it does not know is a failure
/// where the release is a known one, and is only reported where it moves.
fn machine(
    what: &str,
    arguments: &Arguments,
    architecture: &Architecture,
    short: bool,
    run: impl Fn(&Request) -> Result<Results>,
    moves: bool,
) -> (Line, Option<String>) {
    let began = Instant::now();
    eprintln!("== {what}{}", if short { " (short list)" } else { "" });
    let plugin: Result<Option<PathBuf>> = if arguments.stock_only {
        Ok(None)
    } else {
        dist::dist_for(architecture).map(Some)
    };
    let results = plugin.and_then(|plugin| {
        run(&Request {
            plugin,
            short,
            filter: arguments.filter.clone(),
            kernel: arguments.kernel.clone(),
            fresh_stock: arguments.full || arguments.fresh_stock,
        })
    });
    let mut line = Line::new(what);
    let text = match &results {
        Ok(results) => {
            for (_, verdict, _) in results.verdicts() {
                match verdict {
                    Verdict::Pass => line.passed += 1,
                    Verdict::Fail => line.failed += 1,
                    Verdict::Skip => line.skipped += 1,
                }
            }
            line.late = results.repeated().len();
            line.parts = parts(&results.spent);
            line.note = format!("kernel {}, rdma-core {}", results.kernel, results.rdma_core);
            if results.cached() > 0 {
                let cached = format!("; {} of stock's verdicts cached", results.cached());
                line.note.push_str(&cached);
            }
            if results.without_pyverbs() && !moves {
                line.failed += 1;
                line.note.push_str("; rdma-core's own tests are missing");
            }
            line.failed += results.unreadable;
            if !results.complete {
                line.failed += 1;
                line.note.push_str("; did not come to its end");
            }
            if results.refused.is_some() {
                line.note
                    .push_str("; this rdma-core is unknown to the plugin, which refused it");
                if moves {
                    line.passed += 1;
                } else {
                    line.failed += 1;
                }
            }
            Some(results.text(what))
        }
        Err(error) => {
            eprintln!("{what}: {error:#}");
            line.failed += 1;
            line.note = error
                .to_string()
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned();
            None
        }
    };
    line.seconds = began.elapsed().as_secs();
    (line, text)
}

/// How long the guest without a distribution is meant to take. More is said,
/// and no failure: the machine may be slow.
const STATIC_AIM: Duration = Duration::from_secs(30);

/// The short suite where there is no shared library; nothing if the filters
/// leave it out.
fn without_libraries(suite: Suite, arguments: &Arguments) -> Option<Line> {
    let what = match suite {
        Suite::Trixie => "static guest".to_owned(),
        _ => format!("static guest {suite}"),
    };
    if !chosen(&arguments.filter, &what) {
        return None;
    }
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(&what);
    match bare::short_suite(suite, arguments.kernel.as_deref()) {
        Ok(outcome) => {
            line.passed = outcome.passed;
            line.failed = outcome.failed.len();
            let slow = if outcome.time > STATIC_AIM {
                ", more than the 30 s that it is meant to take"
            } else {
                ""
            };
            line.note = format!(
                "no shared library; boot and suite {:.1} s{slow}",
                outcome.time.as_secs_f64()
            );
        }
        Err(error) => {
            eprintln!("{what}: {error:#}");
            line.failed = 1;
            line.note = error.to_string().lines().next().unwrap_or_default().into();
        }
    }
    line.seconds = began.elapsed().as_secs();
    Some(line)
}

/// The step's name.
const SOFTHCA: &str = "softhca guest";

/// The ConnectX in software under Linux's own drivers; nothing if the filters
/// leave it out.
fn on_softhca(arguments: &Arguments) -> Option<Line> {
    const WHAT: &str = SOFTHCA;
    if !chosen(&arguments.filter, WHAT) {
        return None;
    }
    // Kept until the end: it is looked for again.
    let _qemu = match Qemu::get() {
        Ok(qemu) => qemu,
        Err(error) => return Some(skipped(WHAT, &format!("no QEMU 11.1: {error:#}"))),
    };
    let began = Instant::now();
    eprintln!("== {WHAT}");
    let mut line = Line::new(WHAT);
    match softhca::check::brief(arguments.kernel.as_deref()) {
        Ok(outcome) => {
            line.passed = outcome.passed;
            line.failed = outcome.failed;
            line.skipped = outcome.skipped;
            line.parts = parts(&outcome.spent);
            line.note = outcome.system;
        }
        Err(error) => {
            eprintln!("{WHAT}: {error:#}");
            line.failed = 1;
            line.note = error.to_string().lines().next().unwrap_or_default().into();
        }
    }
    line.seconds = began.elapsed().as_secs();
    Some(line)
}

/// Why no guest of `suite` can be made or run here; `None` if one can.
pub(super) fn no_guest(suite: Suite, kernel: Option<&str>) -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("guests run on x86-64".into());
    }
    let (qemu, package) = suite.architecture().qemu;
    if !host::is_root() && host::which(qemu).is_none() {
        return Some(format!(
            "{package} is not installed, and only root can install it"
        ));
    }
    if matches!(tree::cached(suite, kernel), Ok(Some(_))) {
        return None;
    }
    if !host::is_root() {
        return Some("making it needs root; run the same command as root".into());
    }
    host::archive_out_of_reach()
}
