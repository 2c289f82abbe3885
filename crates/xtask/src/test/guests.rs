//! Runs the guest suites.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use rxe_tests::compare::{Results, Verdict};
use rxe_tests::driver::case::matches_filter;
use rxe_tests::guest::suite::{AARCH64, X86_64};
use rxe_tests::guest::{Architecture, Qemu, Suite, host, tree};

use super::Arguments;
use super::report::{Line, panicked, parts, skipped};
use crate::suite::{self, Request};
use crate::{dist, driver, native, softhca, static_guest};

/// Lines of the summary, and a text for each machine.
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

    /// Returns the outcome of a step that panicked.
    pub(super) fn panicked(what: &str) -> Outcome {
        Outcome {
            lines: vec![panicked(what)],
            ..Outcome::default()
        }
    }
}

/// Runs the cases on this machine.
pub(super) fn on_host(arguments: &Arguments) -> Outcome {
    let (line, text) = run_cases(
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

/// The guests that have not started. Each runner takes the next one when it is idle.
pub(super) struct Queue<'a> {
    arguments: &'a Arguments,
    suites: Mutex<VecDeque<Suite>>,
}

impl<'a> Queue<'a> {
    pub(super) fn new(arguments: &'a Arguments) -> Queue<'a> {
        let suites = Mutex::new(suites(arguments).into());
        Queue { arguments, suites }
    }

    /// Runs guests until the queue is empty.
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

/// Runs the guest of `suite`, and after those of trixie the static guest and softhca's.
fn guest(suite: Suite, arguments: &Arguments) -> Outcome {
    let mut outcome = Outcome::default();
    // All cases run in the default suite, and in suites selected by options.
    let brief = suite == Suite::TrixieArm64 || (suite != Suite::Trixie && !arguments.full);
    let short = arguments.short || (brief && arguments.suite.is_empty());
    if let Some(reason) = unavailable_reason(suite, arguments.kernel.as_deref()) {
        eprintln!("{suite}: no guest: {reason}");
        outcome
            .lines
            .push(skipped(&format!("guest {suite}"), &reason));
        return outcome;
    }
    let run = |request: &Request| suite::in_guest(suite, request);
    let what = format!("guest {suite}");
    let architecture = suite.architecture();
    let (line, text) = run_cases(
        &what,
        arguments,
        architecture,
        short,
        run,
        suite.is_rolling(),
    );
    outcome.lines.push(line);
    outcome.texts.extend(text);
    if matches!(suite, Suite::Trixie | Suite::TrixieArm64) && !arguments.stock_only {
        outcome.lines.extend(run_static_guest(suite, arguments));
    }
    if suite == Suite::Trixie && !arguments.stock_only {
        outcome.lines.extend(run_softhca(arguments));
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

/// Builds the programs of the guests, while their trees are built. A failed build is
/// repeated, and reported, when its result is needed.
pub(super) fn build(arguments: &Arguments) {
    let kernel = arguments.kernel.as_deref();
    let suites = suites(arguments);
    for architecture in [&X86_64, &AARCH64] {
        let mut of_it = suites.iter().filter(|it| it.architecture() == architecture);
        if of_it.all(|suite| unavailable_reason(*suite, kernel).is_some()) {
            continue;
        }
        eprintln!("== building for the guests ({})", architecture.debian);
        if !arguments.stock_only {
            let _ = dist::dist_for(architecture);
        }
        let _ = driver::build_for(architecture);
        let _ = native::build_programs_and_tests(architecture);
        let _ = suite::build_installer(architecture);
    }
}

/// Builds the guests that are needed later, while the first one runs. A failed build is
/// repeated, and reported, when the guest is needed.
pub(super) fn prepare(arguments: &Arguments) {
    if arguments.host {
        return;
    }
    let kernel = arguments.kernel.as_deref();
    let suites = suites(arguments);
    let softhca = suites.contains(&Suite::Trixie) && !arguments.stock_only;
    let is_available = |suite: Suite| unavailable_reason(suite, kernel).is_none();
    if softhca && matches_filter(&arguments.filter, SOFTHCA) && is_available(Suite::Trixie) {
        let _ = Qemu::get();
    }
    // The first guest is built by its runner.
    for suite in suites.into_iter().skip(1).filter(|it| is_available(*it)) {
        if let Err(error) = tree::image(suite, kernel) {
            eprintln!("{suite}: {error:#}");
        }
    }
}

/// Runs the cases of one machine and counts the verdicts.
///
/// If the plugin refuses the machine's rdma-core as unknown, that is a failure unless the
/// suite is updated daily (`is_rolling`).
fn run_cases(
    what: &str,
    arguments: &Arguments,
    architecture: &Architecture,
    short: bool,
    run: impl Fn(&Request) -> Result<Results>,
    is_rolling: bool,
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
            for (case, verdict, reason) in results.verdicts() {
                match verdict {
                    Verdict::Pass => line.passed += 1,
                    Verdict::Fail => line.failed += 1,
                    Verdict::Skip => {
                        line.skipped += 1;
                        // Most of rdma-core's tests are for other devices.
                        if !case.name.starts_with("tests.") {
                            let name = format!("{} {} [{}]", case.group, case.name, case.provider);
                            line.skips.push((reason.replace('\n', " / "), name));
                        }
                    }
                }
            }
            line.retried = results.retried().len();
            line.parts = parts(&results.times);
            line.note = format!("kernel {}, rdma-core {}", results.kernel, results.rdma_core);
            if results.cached() > 0 {
                let cached = format!("; {} of stock's verdicts cached", results.cached());
                line.note.push_str(&cached);
            }
            if results.lacks_pyverbs() && !is_rolling {
                line.failed += 1;
                line.note.push_str("; rdma-core's tests are missing");
            }
            line.failed += results.unreadable;
            if !results.complete {
                line.failed += 1;
                line.note.push_str("; did not finish");
            }
            if results.plugin_refusal.is_some() {
                line.note
                    .push_str("; this rdma-core is unknown to the plugin, which refused it");
                if is_rolling {
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

/// Time that the static guest should take. More is noted, but is not a failure: the
/// machine may be slow.
const STATIC_TARGET_TIME: Duration = Duration::from_secs(30);

/// Runs the short suite of the static guest; `None` if the filters leave it out.
fn run_static_guest(suite: Suite, arguments: &Arguments) -> Option<Line> {
    let what = match suite {
        Suite::Trixie => "static guest".to_owned(),
        _ => format!("static guest {suite}"),
    };
    if !matches_filter(&arguments.filter, &what) {
        return None;
    }
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(&what);
    match static_guest::short_suite(suite, arguments.kernel.as_deref()) {
        Ok(outcome) => {
            line.passed = outcome.passed;
            line.failed = outcome.failed.len();
            let slow = if outcome.time > STATIC_TARGET_TIME {
                ", more than the intended 30 s"
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

/// The name of softhca's step.
const SOFTHCA: &str = "softhca guest";

/// Runs softhca with Linux's drivers; `None` if the filters leave it out.
fn run_softhca(arguments: &Arguments) -> Option<Line> {
    const WHAT: &str = SOFTHCA;
    if !matches_filter(&arguments.filter, WHAT) {
        return None;
    }
    // Locks the tree, which is opened again below.
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
            line.parts = parts(&outcome.times);
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

/// Returns why a guest of `suite` cannot be built or run here; `None` if it can.
pub(super) fn unavailable_reason(suite: Suite, kernel: Option<&str>) -> Option<String> {
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
        return Some("building it needs root; run the same command as root".into());
    }
    host::archive_unreachable()
}
