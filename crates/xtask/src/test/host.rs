//! The steps that need neither root nor a guest.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::Result;
use rxe_tests::guest::host::{self, lower_priority};
use testing::skip::{INSTALLED, SKIPS};

use super::areas::Areas;
use super::attempts;
use super::report::{Line, is_ci, panicked, skipped, unavailable};
use crate::{aarch64, bench, bytes, dependencies, dist, driver, mlx5, msrv, packages, programs};

pub(super) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(driver::cargo());
    command.current_dir(driver::root()).args(arguments);
    command
}

/// Checks format, licences and packages; runs lints, unit and property tests of the
/// areas.
pub(super) fn quick(areas: &Areas) -> Vec<Line> {
    let selected = areas.packages();
    let mut clippy = cargo(&["clippy", "--quiet", "--all-targets"]);
    clippy.args(&selected).args(["--", "-D", "warnings"]);
    let mut tests = cargo(&["test", "--no-fail-fast"]);
    tests.args(&selected);
    let mut lines = vec![
        run_check("format", &mut cargo(&["fmt", "--all", "--check"])),
        check_syntax(),
        check_licences(),
        check_packages(false),
    ];
    if areas.is_empty() {
        lines.push(skipped("clippy and tests", "no area has changed"));
        return lines;
    }
    let what = format!("unit and property tests of {areas}");
    lines.extend([
        run_check(&format!("clippy of {areas}"), &mut clippy),
        run_tests(&what, &mut tests),
    ]);
    lines
}

/// Runs all steps. Unless `serial`, those after the unit tests run beside these, which wait
/// half of the time, and all but the unit tests, some of which have time limits, have a low
/// priority.
pub(super) fn all(serial: bool) -> Vec<Line> {
    let run = |step: &(dyn Fn() -> Line + Sync)| match serial {
        true => step(),
        false => at_low_priority(step),
    };
    let checked = |what: &str, arguments: &[&str]| run(&|| run_check(what, &mut cargo(arguments)));
    let build = ["test", "--workspace", "--no-run", "--quiet"];
    let mut tests = cargo(&["test", "--workspace", "--no-fail-fast"]);
    install_tools();
    let mut lines = vec![
        checked("format", &["fmt", "--all", "--check"]),
        run(&check_syntax),
        checked("clippy", &CLIPPY),
        run(&check_licences),
        run(&|| check_packages(true)),
        checked("building the tests", &build),
    ];
    let rest = || {
        vec![
            run(&check_advisories),
            run(&|| run_check("documentation", &mut documentation())),
            run(&|| run_tests("loom", &mut loom())),
            run(&|| count_instructions("data path", bench::NATIVE_NEEDS, bench::native_gate)),
            run(&|| count_instructions("data path, mlx5", mlx5::NEEDS, bench::native_mlx5_gate)),
            run(&|| count_instructions("plugin's data path", bench::NEEDS, bench::gate)),
            run(&|| count_instructions("plugin's data path, mlx5", mlx5::NEEDS, bench::mlx5_gate)),
            run(&compare_mlx5_bytes),
            run(&replace_libmlx5),
            run(&one_file),
            run(&|| run_check("fuzz targets", &mut fuzz_targets())),
            run(&on_aarch64),
        ]
    };
    let mut run_unit_tests = || run_tests("unit and property tests", &mut tests);
    if serial {
        lines.push(run_unit_tests());
        lines.extend(rest());
        return lines;
    }
    thread::scope(|scope| {
        let beside = scope.spawn(rest);
        lines.push(run_unit_tests());
        let beside = beside.join();
        lines.extend(beside.unwrap_or_else(|_| vec![panicked("steps beside the tests")]));
    });
    lines
}

/// Installs what the steps need, before tests run, which may look at the system's packages.
fn install_tools() {
    // Tests of missing programs are skipped.
    if let Err(error) = host::require(programs::NEEDS, false) {
        eprintln!("programs on embedded devices: {error:#}");
    }
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    // The steps that need these report failures.
    for needs in [bench::NEEDS, bench::NATIVE_NEEDS, mlx5::NEEDS] {
        let _ = host::require(needs, false);
    }
    let _ = aarch64::require_tools();
}

/// Runs the tests of the data path for aarch64.
fn on_aarch64() -> Line {
    const WHAT: &str = "data path on aarch64";
    if cfg!(target_arch = "aarch64") {
        return skipped(WHAT, "the other steps have run them");
    }
    match aarch64::require_tools() {
        Ok(()) => run_tests(WHAT, &mut aarch64::data_path()),
        Err(error) => unavailable(WHAT, &error),
    }
}

/// Runs a test of what `dist` has made.
fn test_of_dist(what: &'static str, dist: Result<PathBuf>, test: &str) -> Line {
    match dist {
        Ok(dist) => {
            // With `-p` the features of dependencies would be others, which would be built
            // again.
            let mut test = cargo(&["test", "--workspace", "--test", test]);
            run_tests(what, test.env("RINGVERBS_DIST", dist))
        }
        Err(error) => {
            eprintln!("{what}: {error:#}");
            Line {
                failed: 1,
                ..Line::new(what)
            }
        }
    }
}

/// Runs the test of `install --replace-libmlx5`, with our library and programs of the
/// system.
fn replace_libmlx5() -> Line {
    let what = "libmlx5 replaced by ours";
    test_of_dist(what, dist::dist(), "replace_libmlx5")
}

/// Runs the test of the command alone, as it is copied to other hosts.
fn one_file() -> Line {
    let what = "the command in one file";
    test_of_dist(what, dist::dist_with_command(), "one_file")
}

/// Runs a step in a thread with a low priority.
fn at_low_priority(step: &(dyn Fn() -> Line + Sync)) -> Line {
    let run = || {
        lower_priority();
        step()
    };
    let line = thread::scope(|scope| scope.spawn(run).join());
    line.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

const CLIPPY: [&str; 7] = [
    "clippy",
    "--quiet",
    "--workspace",
    "--all-targets",
    "--",
    "-D",
    "warnings",
];

/// Checks that there are no let chains; clippy refuses functions that are too new.
fn check_syntax() -> Line {
    const WHAT: &str = "syntax of the oldest compiler";
    match msrv::syntax() {
        Ok(mut format) => run_check(WHAT, &mut format),
        Err(error) => {
            eprintln!("{WHAT}: {error:#}");
            Line {
                failed: 1,
                ..Line::new(WHAT)
            }
        }
    }
}

fn documentation() -> Command {
    let mut doc = cargo(&["doc", "--quiet", "--no-deps", "--all-features"]);
    doc.arg("--workspace").env("RUSTDOCFLAGS", "-D warnings");
    doc
}

/// Returns the command of the loom tests, optimized for the many interleavings.
fn loom() -> Command {
    let mut loom = cargo(&["test", "-p", "ringverbs-ring", "--release"]);
    loom.args(["--test", "loom", "--target-dir"])
        .arg(driver::target_dir().join("loom"))
        .env("RUSTFLAGS", "--cfg loom");
    loom
}

/// Checks licences and sources of the dependencies; duplicates are only noted.
fn check_licences() -> Line {
    let began = Instant::now();
    let mut line = Line::new("licences and sources");
    eprintln!("== {}", line.what);
    match dependencies::check() {
        Ok(outcome) => {
            for violation in &outcome.violations {
                eprintln!("not allowed by deny.toml: {violation}");
            }
            line.failed = outcome.violations.len();
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

/// Checks the manifests of publishable packages, and packs them; with `build`, compiles
/// the packed sources.
fn check_packages(build: bool) -> Line {
    const WHAT: &str = "packages";
    let began = Instant::now();
    eprintln!("== {WHAT}");
    let mut line = Line::new(WHAT);
    match packages::check(build) {
        Ok(outcome) => {
            for problem in &outcome.problems {
                eprintln!("{problem}");
            }
            line.failed = outcome.problems.len();
            line.passed = outcome.packages.saturating_sub(line.failed);
        }
        Err(error) => {
            eprintln!("{WHAT}: {error:#}");
            line.failed = 1;
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}

/// Checks advisories on the dependencies. A run does not install cargo-deny, so that a lack of
/// it is no failure in CI either.
fn check_advisories() -> Line {
    const WHAT: &str = "advisories";
    match dependencies::advisories() {
        Ok(mut deny) => run_check(WHAT, &mut deny),
        Err(error) => skipped(WHAT, &error.to_string()),
    }
}

/// Compares the instruction counts of a data path with their limits.
fn count_instructions(
    what: &str,
    needs: &'static [(&'static str, &'static str)],
    gate: fn() -> Result<(usize, Vec<String>)>,
) -> Line {
    if !cfg!(target_arch = "x86_64") {
        return skipped(what, "the counts are x86-64's");
    }
    if let Err(error) = host::require(needs, false) {
        return unavailable(what, &error);
    }
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(what);
    match gate() {
        Ok((rows, exceeded)) => {
            for count in &exceeded {
                eprintln!("count above its limit: {count}");
            }
            line.failed = exceeded.len();
            line.passed = rows.saturating_sub(exceeded.len());
        }
        Err(error) => {
            eprintln!("{what}: {error:#}");
            line.failed = 1;
        }
    }
    line.seconds = began.elapsed().as_secs();
    line
}

/// Compares the bytes that the plugin and the stock provider write for ConnectX.
fn compare_mlx5_bytes() -> Line {
    const WHAT: &str = "mlx5's bytes";
    if !cfg!(target_arch = "x86_64") {
        return skipped(WHAT, "the stand-in for the driver is x86-64's");
    }
    if let Err(error) = host::require(mlx5::NEEDS, false) {
        return unavailable(WHAT, &error);
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

/// Returns the command that checks the fuzz targets, which are a workspace of their own.
/// Nothing is linked, so libFuzzer and a C++ compiler are not needed.
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

/// Runs a check that passes or fails as a whole.
fn run_check(what: &str, command: &mut Command) -> Line {
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

/// Packages that a CI job has installed (`host::require`): it skips no test for lack of them.
fn installed_packages() -> String {
    let needs = [
        programs::NEEDS,
        bench::NEEDS,
        bench::NATIVE_NEEDS,
        mlx5::NEEDS,
    ];
    let packages: Vec<_> = needs.concat().iter().map(|(_, package)| *package).collect();
    // Dependencies of these, and a package of the base system.
    packages.join(" ") + " libc6-dev libibverbs1 dpkg"
}

/// Returns what tests of a run of `cargo test` have left out, by `skip!` (the text of its
/// file) or because they are ignored: reason and test.
fn skips(said: &str, output: &str) -> BTreeSet<(String, String)> {
    let reported = said.lines().filter_map(|line| line.split_once('\t'));
    let reported = reported.map(|(test, reason)| (reason.to_owned(), test.to_owned()));
    reported.chain(output.lines().filter_map(ignored)).collect()
}

/// Returns the reason of an ignored test, and its name, unless another test runs it.
fn ignored(line: &str) -> Option<(String, String)> {
    let (test, reason) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    let reason = reason.strip_prefix(", ").unwrap_or("ignored");
    (!reason.starts_with("run by another test")).then(|| (reason.to_owned(), test.to_owned()))
}

/// Runs `cargo test`, and counts the tests by its result lines. A test that leaves out a part
/// counts as skipped.
pub(super) fn run_tests(what: &str, command: &mut Command) -> Line {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(what);
    let name = format!(
        "ringverbs-skips-{}-{}",
        std::process::id(),
        RUNS.fetch_add(1, Ordering::Relaxed)
    );
    let file = env::temp_dir().join(name);
    command.env(SKIPS, &file);
    if is_ci() {
        command.env(INSTALLED, installed_packages());
    }
    match attempts::run(command) {
        Ok(run) => {
            for (passed, failed) in run.text.lines().filter_map(test_result) {
                line.passed += passed;
                line.failed += failed;
            }
            let said = fs::read_to_string(&file).unwrap_or_default();
            let number_of = |skips: &BTreeSet<(String, String)>| {
                let tests: BTreeSet<_> = skips.iter().map(|(_, test)| test).collect();
                tests.len()
            };
            let skips = |output| skips(&said, output);
            // libtest counts what returns as passed.
            line.passed = line.passed.saturating_sub(number_of(&skips("")));
            let all = skips(&run.text);
            line.skipped = number_of(&all);
            line.skips = Vec::from_iter(all);
            if !run.ok {
                print!("{}", run.text);
                if let Some(retried) = run.retry_failed_tests(command) {
                    line.passed += retried.len();
                    line.retried = retried.len();
                    line.failed = line.failed.saturating_sub(retried.len());
                    line.note = format!("at the second attempt: {}", retried.join(", "));
                } else {
                    // A failed build has no result lines.
                    line.failed = line.failed.max(1);
                }
            }
        }
        Err(error) => {
            eprintln!("{what}: {error}");
            line.failed = 1;
        }
    }
    let _ = fs::remove_file(&file);
    line.seconds = began.elapsed().as_secs();
    line
}

/// Returns the numbers of passed and failed tests of a line such as
/// `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
fn test_result(line: &str) -> Option<(usize, usize)> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number_of = |name: &str| {
        counts
            .split("; ")
            .find_map(|part| part.strip_suffix(name)?.trim().parse().ok())
    };
    Some((number_of("passed")?, number_of("failed")?))
}

#[cfg(test)]
mod tests {
    use super::{skips, test_result};

    #[test]
    fn cargo_s_result_lines_are_read() {
        let line = "test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; \
                    0 filtered out; finished in 0.31s";
        assert_eq!(test_result(line), Some((3, 2)));
        assert_eq!(test_result("running 3 tests"), None);
    }

    #[test]
    fn skipped_and_ignored_tests_are_read() {
        let said = "a one\tno root\nb two\tno tshark\na one\tno root\n";
        let output = "test fine ... ok\ntest later ... ignored, needs an RDMA device\n\
                      test child ... ignored, run by another test\n\
                      test src/lib.rs - it (line 3) ... ignored\n";
        let found: Vec<_> = skips(said, output).into_iter().collect();
        let found: Vec<_> = found
            .iter()
            .map(|(a, b)| (a.as_str(), b.as_str()))
            .collect();
        assert_eq!(
            found,
            [
                ("ignored", "src/lib.rs - it (line 3)"),
                ("needs an RDMA device", "later"),
                ("no root", "a one"),
                ("no tshark", "b two"),
            ]
        );
    }
}
