//! `cargo xtask test`: everything that shows whether this project works.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Result;
use rxe_tests::compare::{Results, Verdict};
use rxe_tests::driver::case::chosen;
use rxe_tests::guest::{Qemu, Suite, host, tree};

use crate::suite::{self, Request};
use crate::{bare, bench, bytes, dependencies, dist, driver, mlx5, softhca};

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only the short list of guest cases, in every suite
    #[arg(long, conflicts_with = "long")]
    short: bool,
    /// All guest cases in every suite, not only in trixie
    #[arg(long)]
    long: bool,
    /// Only format, lints, licences, unit and property tests: some minutes
    #[arg(long, conflicts_with_all = ["guest_only", "host", "suite"])]
    quick: bool,
    /// Only what needs neither root nor a guest
    #[arg(long)]
    no_guest: bool,
    /// Only the guest suites, without format, lints, unit and loom tests
    #[arg(long, conflicts_with = "no_guest")]
    guest_only: bool,
    /// Only this suite (can be given more than once): trixie, bookworm, sid
    #[arg(long)]
    suite: Vec<Suite>,
    /// Run the cases on this machine, which must have rdma_rxe, and in no guest
    #[arg(long, conflicts_with_all = ["no_guest", "suite"])]
    host: bool,
    /// Run stock only: what ours is compared with
    #[arg(long)]
    stock_only: bool,
    /// Only guest cases whose group and name contain this (or one of these)
    #[arg(long)]
    filter: Vec<String>,
    /// A kernel package other than linux-image-amd64
    #[arg(long)]
    kernel: Option<String>,
}

/// One line of the summary.
struct Line {
    what: String,
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Of those that passed, not at the first attempt.
    late: usize,
    seconds: u64,
    /// What the time went into, where that is known: parts and seconds.
    parts: Vec<(String, u64)>,
    note: String,
}

impl Line {
    /// Nothing so far.
    fn new(what: &str) -> Self {
        Self {
            what: what.to_owned(),
            passed: 0,
            failed: 0,
            skipped: 0,
            late: 0,
            seconds: 0,
            parts: Vec::new(),
            note: String::new(),
        }
    }
}

/// Runs the tests and prints a summary. Its last line counts what passed,
/// failed and was skipped; the exit status says whether anything failed.
pub fn test(arguments: &Arguments) -> Result<ExitCode> {
    let mut lines = Vec::new();
    let mut texts = Vec::new();
    if !arguments.guest_only {
        lines.extend(without_a_guest(arguments.quick));
    }
    if arguments.host {
        let (line, text) = machine("host", arguments, arguments.short, suite::on_host, false);
        lines.push(line);
        texts.extend(text);
    } else if arguments.quick || arguments.no_guest {
        let asked = if arguments.quick {
            "--quick"
        } else {
            "--no-guest"
        };
        lines.push(skipped("guest suites", asked));
    } else {
        let suites = match arguments.suite.as_slice() {
            [] => Suite::ALL.to_vec(),
            chosen => chosen.to_vec(),
        };
        for suite in suites {
            let name = suite.name();
            // In full where it is the default, or asked for.
            let short = arguments.short
                || (suite != Suite::Trixie && !arguments.long && arguments.suite.is_empty());
            if let Some(why) = no_guest(suite, arguments.kernel.as_deref()) {
                eprintln!("{suite}: no guest: {why}");
                lines.push(skipped(&format!("guest {name}"), &why));
                continue;
            }
            let run = |request: &Request| suite::in_guest(suite, request);
            let what = format!("guest {suite}");
            let (line, text) = machine(&what, arguments, short, run, suite.moves());
            lines.push(line);
            texts.extend(text);
            if suite == Suite::Trixie && !arguments.stock_only {
                lines.extend(without_libraries(arguments));
                lines.extend(on_softhca(arguments));
            }
        }
    }

    println!();
    for text in texts {
        println!("{text}");
    }
    let width = lines.iter().map(|l| l.what.len()).max().unwrap_or(0);
    println!(
        "{:width$}  {:>6} {:>6} {:>6} {:>7} {:>6}",
        "", "passed", "(late)", "failed", "skipped", "s"
    );
    for l in &lines {
        println!(
            "{:width$}  {:>6} {:>6} {:>6} {:>7} {:>6}  {}",
            l.what, l.passed, l.late, l.failed, l.skipped, l.seconds, l.note
        );
    }
    slowest(&lines);
    let sum = |field: fn(&Line) -> usize| lines.iter().map(field).sum::<usize>();
    let failed = sum(|l| l.failed);
    println!(
        "{} passed, {failed} failed, {} skipped",
        sum(|l| l.passed),
        sum(|l| l.skipped)
    );
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Prints where the time went, slowest first.
fn slowest(lines: &[Line]) {
    let total: u64 = lines.iter().map(|line| line.seconds).sum();
    println!("\nTime, slowest first: {total} s");
    for (seconds, what) in times(lines) {
        let share = seconds * 100 / total.max(1);
        println!("{seconds:>6} s {share:>3}%  {what}");
    }
    println!();
}

/// The time of each step, or of its parts and what is left, slowest first.
fn times(lines: &[Line]) -> Vec<(u64, String)> {
    let mut times = Vec::new();
    for line in lines {
        let known: u64 = line.parts.iter().map(|(_, seconds)| seconds).sum();
        let part = |(part, seconds): &(String, u64)| (*seconds, format!("{}: {part}", line.what));
        times.extend(line.parts.iter().map(part));
        let rest = if line.parts.is_empty() { "" } else { ": other" };
        times.push((
            line.seconds.saturating_sub(known),
            format!("{}{rest}", line.what),
        ));
    }
    times.retain(|(seconds, _)| *seconds > 0);
    times.sort_by(|a, b| b.cmp(a));
    times
}

/// The parts of a guest's time.
fn parts(spent: &BTreeMap<String, Duration>) -> Vec<(String, u64)> {
    spent
        .iter()
        .map(|(part, time)| (part.clone(), time.as_secs_f64().round() as u64))
        .collect()
}

/// Runs the cases of one machine and weighs the results.
///
/// A plugin that refuses a libibverbs which it does not know is a failure
/// where the release is a known one, and is only reported where it moves.
fn machine(
    what: &str,
    arguments: &Arguments,
    short: bool,
    run: impl Fn(&Request) -> Result<Results>,
    moves: bool,
) -> (Line, Option<String>) {
    let began = Instant::now();
    eprintln!("== {what}{}", if short { " (short list)" } else { "" });
    let plugin: Result<Option<PathBuf>> = if arguments.stock_only {
        Ok(None)
    } else {
        dist::dist().map(Some)
    };
    let results = plugin.and_then(|plugin| {
        run(&Request {
            plugin,
            short,
            filter: arguments.filter.clone(),
            kernel: arguments.kernel.clone(),
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
fn without_libraries(arguments: &Arguments) -> Option<Line> {
    const WHAT: &str = "static guest";
    if !chosen(&arguments.filter, WHAT) {
        return None;
    }
    let began = Instant::now();
    eprintln!("== {WHAT}");
    let mut line = Line::new(WHAT);
    match bare::short_suite(arguments.kernel.as_deref()) {
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
            eprintln!("{WHAT}: {error:#}");
            line.failed = 1;
            line.note = error.to_string().lines().next().unwrap_or_default().into();
        }
    }
    line.seconds = began.elapsed().as_secs();
    Some(line)
}

/// The ConnectX in software under Linux's own drivers; nothing if the filters
/// leave it out.
fn on_softhca(arguments: &Arguments) -> Option<Line> {
    const WHAT: &str = "softhca guest";
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
fn no_guest(suite: Suite, kernel: Option<&str>) -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("the guests are x86-64".into());
    }
    if !host::is_root() && host::which("qemu-system-x86_64").is_none() {
        return Some("qemu-system-x86 is not installed, and only root can install it".into());
    }
    if matches!(tree::cached(suite, kernel), Ok(Some(_))) {
        return None;
    }
    if !host::is_root() {
        return Some("making it needs root; run the same command as root".into());
    }
    host::archive_out_of_reach()
}

fn skipped(what: &str, why: &str) -> Line {
    Line {
        skipped: 1,
        note: why.to_owned(),
        ..Line::new(what)
    }
}

/// What needs neither root nor a guest; with `quick`, only format, lints,
/// licences, unit and property tests.
fn without_a_guest(quick: bool) -> Vec<Line> {
    let cargo = |arguments: &[&str]| {
        let mut command = Command::new(driver::cargo());
        command.current_dir(driver::root()).args(arguments);
        command
    };
    let loom_dir = driver::target_dir().join("loom");
    let mut loom = cargo(&["test", "-p", "ringverbs-ring", "--profile", "shipped"]);
    loom.args(["--test", "loom", "--target-dir"])
        .arg(&loom_dir)
        .env("RUSTFLAGS", "--cfg loom")
        // Optimized, for the many interleavings; link-time optimization only
        // costs time here.
        .env("CARGO_PROFILE_SHIPPED_LTO", "off")
        .env("CARGO_PROFILE_SHIPPED_CODEGEN_UNITS", "16");
    let mut doc = cargo(&[
        "doc",
        "--quiet",
        "--workspace",
        "--no-deps",
        "--all-features",
    ]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    let mut tests = cargo(&["test", "--workspace", "--no-fail-fast"]);
    let mut lines = vec![
        check("format", &mut cargo(&["fmt", "--all", "--check"])),
        check(
            "clippy",
            &mut cargo(&[
                "clippy",
                "--quiet",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ]),
        ),
        licences(),
        counted("unit and property tests", &mut tests),
    ];
    if quick {
        return lines;
    }
    lines.extend([
        advisories(),
        check("documentation", &mut doc),
        counted("loom", &mut loom),
        counts("data path", bench::NATIVE_NEEDS, bench::native_gate),
        counts("data path, mlx5", mlx5::NEEDS, bench::native_mlx5_gate),
        counts("plugin's data path", bench::NEEDS, bench::gate),
        counts("plugin's data path, mlx5", mlx5::NEEDS, bench::mlx5_gate),
        mlx5_bytes(),
        check("fuzz targets", &mut fuzz_targets()),
    ]);
    lines
}

/// Licences and sources of the dependencies; their duplicates are only shown.
fn licences() -> Line {
    let began = Instant::now();
    let mut line = Line::new("licences and sources");
    eprintln!("== {}", line.what);
    match dependencies::check() {
        Ok(outcome) => {
            for refused in &outcome.refused {
                eprintln!("not allowed by deny.toml: {refused}");
            }
            line.failed = outcome.refused.len();
            line.passed = outcome.packages.saturating_sub(line.failed);
            if !outcome.duplicates.is_empty() {
                line.note = format!("in several versions: {}", outcome.duplicates.join("; "));
            }
        }
        Err(error) => {
            eprintln!("{}: {error:#}", line.what);
            line.failed = 1;
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}

/// Advisories on the dependencies.
fn advisories() -> Line {
    const WHAT: &str = "advisories";
    match dependencies::advisories() {
        Ok(mut deny) => check(WHAT, &mut deny),
        Err(error) => skipped(WHAT, &error.to_string()),
    }
}

/// The instructions of a data path, against their limits.
fn counts(
    what: &str,
    needs: &'static [(&'static str, &'static str)],
    gate: fn() -> Result<(usize, Vec<String>)>,
) -> Line {
    if !cfg!(target_arch = "x86_64") {
        return skipped(what, "the counts are x86-64's");
    }
    if let Err(error) = host::require(needs, false) {
        return skipped(what, &error.to_string());
    }
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(what);
    match gate() {
        Ok((rows, broken)) => {
            for count in &broken {
                eprintln!("count above its limit: {count}");
            }
            line.failed = broken.len();
            line.passed = rows.saturating_sub(broken.len());
        }
        Err(error) => {
            eprintln!("{what}: {error:#}");
            line.failed = 1;
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}

/// What the plugin writes for ConnectX, beside what the C provider writes.
fn mlx5_bytes() -> Line {
    const WHAT: &str = "mlx5's bytes";
    if !cfg!(target_arch = "x86_64") {
        return skipped(WHAT, "the stand-in for the driver is x86-64's");
    }
    if let Err(error) = host::require(mlx5::NEEDS, false) {
        return skipped(WHAT, &error.to_string());
    }
    let began = Instant::now();
    eprintln!("== {WHAT}");
    let mut line = Line::new(WHAT);
    let outcome = dist::dist().and_then(|ours| bytes::compare(&ours.join("libringverbs")));
    match outcome {
        Ok(outcome) => {
            for difference in &outcome.unexplained {
                eprintln!("{difference}");
            }
            line.failed = outcome.unexplained.len();
            line.passed = outcome.passed();
        }
        Err(error) => {
            eprintln!("{WHAT}: {error:#}");
            line.failed = 1;
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}

/// Compiles the fuzz targets, which are a workspace of their own. libFuzzer is
/// not built, and so needs no C++ compiler, since nothing is linked.
fn fuzz_targets() -> Command {
    let mut command = Command::new(driver::cargo());
    command
        .current_dir(driver::root().join("fuzz"))
        .args(["check", "--quiet", "--target-dir"])
        .arg(driver::target_dir().join("fuzz"))
        .env("RUSTFLAGS", "--cfg fuzzing -D warnings")
        .env("CUSTOM_LIBFUZZER_PATH", "/nowhere/libfuzzer.a");
    command
}

/// A check that passes or fails as a whole; its output is shown.
fn check(what: &str, command: &mut Command) -> Line {
    let began = Instant::now();
    eprintln!("== {what}");
    let ok = match command.status() {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("{what}: {error}");
            false
        }
    };
    Line {
        passed: usize::from(ok),
        failed: usize::from(!ok),
        seconds: began.elapsed().as_secs(),
        ..Line::new(what)
    }
}

/// A run of `cargo test`, counted by its result lines.
fn counted(what: &str, command: &mut Command) -> Line {
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(what);
    match command.stderr(std::process::Stdio::inherit()).output() {
        Ok(out) => {
            let text = String::from_utf8_lossy(&out.stdout);
            for (passed, failed, ignored) in text.lines().filter_map(test_result) {
                line.passed += passed;
                line.failed += failed;
                line.skipped += ignored;
            }
            if !out.status.success() {
                print!("{text}");
                // It may not even have been built.
                line.failed = line.failed.max(1);
            }
        }
        Err(error) => {
            eprintln!("{what}: {error}");
            line.failed = 1;
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}

/// Passed, failed and ignored of a line such as
/// `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
fn test_result(line: &str) -> Option<(usize, usize, usize)> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let of = |name: &str| {
        counts
            .split("; ")
            .find_map(|part| part.strip_suffix(name)?.trim().parse().ok())
    };
    Some((of("passed")?, of("failed")?, of("ignored")?))
}

#[cfg(test)]
mod tests {
    use super::{Line, test_result, times};

    #[test]
    fn times_are_sorted_and_split_into_parts() {
        let mut guest = Line::new("guest");
        guest.seconds = 100;
        guest.parts = vec![("boot".to_owned(), 8), ("pyverbs [stock]".to_owned(), 60)];
        let mut doc = Line::new("doc");
        doc.seconds = 40;
        let none = Line::new("none");
        let times = times(&[guest, none, doc]);
        let times: Vec<_> = times.iter().map(|(s, what)| (*s, what.as_str())).collect();
        assert_eq!(
            times,
            [
                (60, "guest: pyverbs [stock]"),
                (40, "doc"),
                (32, "guest: other"),
                (8, "guest: boot"),
            ]
        );
    }

    #[test]
    fn cargo_s_result_lines_are_read() {
        let line = "test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; \
                    0 filtered out; finished in 0.31s";
        assert_eq!(test_result(line), Some((3, 2, 1)));
        assert_eq!(test_result("running 3 tests"), None);
    }
}
