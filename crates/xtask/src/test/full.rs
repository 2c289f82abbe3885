//! The steps that only `--full` runs, for hours.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;

use rxe_tests::driver::case::matches_filter;
use rxe_tests::guest::{Suite, host as guest_host};

use super::report::{Line, parts, skipped};
use super::{Arguments, guests, host};
use crate::{aarch64, checked, guest, programs, softhca};

/// The long forms of cases of the group `native`: name, command, limit in seconds.
const LONG_FORMS: [(&str, &str, u64); 3] = [
    (
        "scale, long form",
        "QPS=10000 CQS=1000 scale --nocapture",
        1800,
    ),
    (
        "soak, long form",
        "SOAK_SECONDS=1800 soak --nocapture",
        3600,
    ),
    (
        "lossy, long form",
        "MESSAGES=5000 BYTES=20000000 sh lossy.sh",
        3600,
    ),
];

/// The long forms of tests on the embedded device: name, variable, its value, and
/// cargo's arguments.
const LONG_TESTS: [(&str, &str, &str, &[&str]); 2] = [
    (
        "random commands, long form",
        "RINGVERBS_SEQUENCES",
        "20000",
        &["-p", "ringverbs-embedded", "--test", "random"],
    ),
    (
        "random safe calls, long form",
        "RINGVERBS_ATTACKER_SECONDS",
        "3600",
        &["-p", "ringverbs", "--test", "attacker", "safe_calls"],
    ),
];

/// Runs the steps that other runs of `cargo xtask test` leave out.
pub(super) fn all(arguments: &Arguments) -> Vec<Line> {
    let mut lines = Vec::new();
    if !arguments.stock_only && arguments.suite.is_empty() {
        for profile in ["roce", "ib"] {
            for native in [false, true] {
                lines.push(on_softhca(profile, native, arguments));
            }
        }
    }
    if !arguments.stock_only && arguments.suite.is_empty() {
        for (what, command, limit) in LONG_FORMS {
            if !matches_filter(&arguments.filter, what) {
                continue;
            }
            let run = guest::Arguments::native(command, arguments.kernel.as_deref(), limit);
            lines.push(run_tool(what, Ok(()), || guest::guest(&run)));
        }
    }
    if arguments.guest_only {
        return lines;
    }
    for (suite, port) in [
        (None, "roce"),
        (None, "ib"),
        (Some(Suite::TrixieArm64), "roce"),
    ] {
        lines.push(on_embedded(suite, port, arguments));
    }
    for (what, variable, value, tests) in LONG_TESTS {
        let mut test = host::cargo(&["test", "--release"]);
        test.args(tests).env(variable, value);
        lines.push(host::run_tests(what, &mut test));
    }
    for (what, mut tests) in [
        ("embedded device on aarch64", aarch64::device()),
        ("plugin on aarch64", aarch64::plugin()),
    ] {
        lines.push(match aarch64::require_tools() {
            Ok(()) => host::run_tests(what, &mut tests),
            Err(error) => skipped(what, &error.to_string()),
        });
    }
    let what = "Debian's programs for arm64";
    lines.push(run_tool(
        what,
        aarch64::require_tools(),
        aarch64::programs::run,
    ));
    lines.push(run_tool(
        "Miri",
        checked::miri_is_installed(),
        checked::miri,
    ));
    for (what, sanitizer) in [
        ("address sanitizer", checked::Sanitizer::Address),
        ("thread sanitizer", checked::Sanitizer::Thread),
    ] {
        let run = || checked::sanitize(&checked::Arguments::all(sanitizer));
        lines.push(run_tool(what, checked::library_source_is_installed(), run));
    }
    lines
}

/// Runs programs of the system on embedded devices.
fn on_embedded(suite: Option<Suite>, port: &str, arguments: &Arguments) -> Line {
    let mut what = format!("programs on embedded {port}");
    let unavailable = match suite {
        None => guest_host::require(programs::NEEDS, false)
            .err()
            .map(|error| error.to_string()),
        Some(suite) => {
            what += &format!(", {suite}");
            guests::unavailable_reason(suite, None)
        }
    };
    if let Some(reason) = unavailable {
        return skipped(&what, &reason);
    }
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(&what);
    match programs::full(suite, port, &arguments.filter) {
        Ok(outcomes) => {
            line.passed = outcomes.passed;
            line.failed = outcomes.failed;
            line.skipped = outcomes.skipped;
            line.parts = parts(&outcomes.times);
        }
        Err(error) => {
            eprintln!("{what}: {error:#}");
            line.failed = 1;
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}

fn on_softhca(profile: &str, native: bool, arguments: &Arguments) -> Line {
    let list = if native { " native" } else { "" };
    let what = format!("softhca {profile}{list}, all cases");
    let began = Instant::now();
    let mut line = Line::new(&what);
    match softhca::check::full(
        profile,
        native,
        arguments.kernel.as_deref(),
        &arguments.filter,
    ) {
        Ok(outcome) => {
            line.passed = outcome.passed;
            line.failed = outcome.failed;
            line.skipped = outcome.skipped;
            line.parts = parts(&outcome.times);
            line.note = outcome.system;
        }
        Err(error) => {
            eprintln!("{what}: {error:#}");
            line.failed = 1;
            line.note = error.to_string().lines().next().unwrap_or_default().into();
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}

/// Runs a step that passes or fails as a whole, if its tool is installed.
fn run_tool(what: &str, installed: Result<()>, run: impl FnOnce() -> Result<ExitCode>) -> Line {
    if let Err(error) = installed {
        return skipped(what, &error.to_string());
    }
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(what);
    match run() {
        Ok(code) if code == ExitCode::SUCCESS => line.passed = 1,
        Ok(_) => line.failed = 1,
        Err(error) => {
            eprintln!("{what}: {error:#}");
            line.failed = 1;
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}
