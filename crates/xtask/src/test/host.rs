//! What needs neither root nor a guest.

use std::process::Command;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use rxe_tests::guest::host::{self, step_back};

use super::areas::Areas;
use super::attempts;
use super::report::{Line, skipped};
use crate::{aarch64, bench, bytes, dependencies, dist, driver, mlx5, msrv, packages, programs};

pub(super) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(driver::cargo());
    command.current_dir(driver::root()).args(arguments);
    command
}

/// Format, licences, packages; lints, unit and property tests of the areas.
pub(super) fn quick(areas: &Areas) -> Vec<Line> {
    let selected = areas.packages();
    let mut clippy = cargo(&["clippy", "--quiet", "--all-targets"]);
    clippy.args(&selected).args(["--", "-D", "warnings"]);
    let mut tests = cargo(&["test", "--no-fail-fast"]);
    tests.args(&selected);
    let mut lines = vec![
        check("format", &mut cargo(&["fmt", "--all", "--check"])),
        syntax(),
        licences(),
        packaged(false),
    ];
    if areas.is_none() {
        lines.push(skipped("clippy and tests", "no area has changed"));
        return lines;
    }
    let what = format!("unit and property tests of {areas}");
    lines.extend([
        check(&format!("clippy of {areas}"), &mut clippy),
        counted(&what, &mut tests),
    ]);
    lines
}

/// Everything. With `low`, at a lower priority than other processes but for the
/// unit tests, some of which have time limits.
pub(super) fn all(low: bool) -> Vec<Line> {
    let run = |step: &(dyn Fn() -> Line + Sync)| if low { lowered(step) } else { step() };
    let checked = |what: &str, arguments: &[&str]| run(&|| check(what, &mut cargo(arguments)));
    let build = ["test", "--workspace", "--no-run", "--quiet"];
    let mut tests = cargo(&["test", "--workspace", "--no-fail-fast"]);
    // Its tests skip what is not there, and say so.
    if let Err(error) = host::require(programs::NEEDS, false) {
        eprintln!("programs on embedded devices: {error:#}");
    }
    vec![
        checked("format", &["fmt", "--all", "--check"]),
        run(&syntax),
        checked("clippy", &CLIPPY),
        run(&licences),
        run(&|| packaged(true)),
        checked("building the tests", &build),
        counted("unit and property tests", &mut tests),
        run(&advisories),
        run(&|| check("documentation", &mut documentation())),
        run(&|| counted("loom", &mut loom())),
        run(&|| counts("data path", bench::NATIVE_NEEDS, bench::native_gate)),
        run(&|| counts("data path, mlx5", mlx5::NEEDS, bench::native_mlx5_gate)),
        run(&|| counts("plugin's data path", bench::NEEDS, bench::gate)),
        run(&|| counts("plugin's data path, mlx5", mlx5::NEEDS, bench::mlx5_gate)),
        run(&mlx5_bytes),
        run(&libmlx5_replaced),
        run(&|| check("fuzz targets", &mut fuzz_targets())),
        run(&on_aarch64),
    ]
}

/// The tests of the data path for the other architecture.
fn on_aarch64() -> Line {
    const WHAT: &str = "data path on aarch64";
    if cfg!(target_arch = "aarch64") {
        return skipped(WHAT, "the other steps have run them");
    }
    match aarch64::needs() {
        Ok(()) => counted(WHAT, &mut aarch64::data_path()),
        Err(error) => skipped(WHAT, &error.to_string()),
    }
}

/// The test of `install --replace-libmlx5`, with our library and programs of the system.
fn libmlx5_replaced() -> Line {
    const WHAT: &str = "libmlx5 replaced by ours";
    match dist::dist() {
        Ok(dist) => {
            let mut test = cargo(&["test", "-p", "xtask", "--test", "replace_libmlx5"]);
            counted(WHAT, test.env("RINGVERBS_DIST", dist))
        }
        Err(error) => {
            eprintln!("{WHAT}: {error:#}");
            Line {
                failed: 1,
                ..Line::new(WHAT)
            }
        }
    }
}

/// Runs a step in a thread of its own, at a lower priority.
fn lowered(step: &(dyn Fn() -> Line + Sync)) -> Line {
    let run = || {
        step_back();
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

/// No let chains; clippy looks for functions that are too new.
fn syntax() -> Line {
    const WHAT: &str = "syntax of the oldest compiler";
    match msrv::syntax() {
        Ok(mut format) => check(WHAT, &mut format),
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

/// Optimized, for the many interleavings.
fn loom() -> Command {
    let mut loom = cargo(&["test", "-p", "ringverbs-ring", "--release"]);
    loom.args(["--test", "loom", "--target-dir"])
        .arg(driver::target_dir().join("loom"))
        .env("RUSTFLAGS", "--cfg loom");
    loom
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

/// That each package which can be published is described, and can be packed; with
/// `build`, compiled from what was packed.
fn packaged(build: bool) -> Line {
    const WHAT: &str = "packages";
    let began = Instant::now();
    eprintln!("== {WHAT}");
    let mut line = Line::new(WHAT);
    match packages::check(build) {
        Ok(outcome) => {
            for lacking in &outcome.lacking {
                eprintln!("{lacking}");
            }
            line.failed = outcome.lacking.len();
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

/// Compares the bytes that the plugin and the stock provider write for ConnectX.
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
pub(super) fn counted(what: &str, command: &mut Command) -> Line {
    let began = Instant::now();
    eprintln!("== {what}");
    let mut line = Line::new(what);
    match attempts::run(command) {
        Ok(run) => {
            for (passed, failed, ignored) in run.text.lines().filter_map(test_result) {
                line.passed += passed;
                line.failed += failed;
                line.skipped += ignored;
            }
            if !run.ok {
                print!("{}", run.text);
                if let Some(late) = run.again(command) {
                    line.passed += late.len();
                    line.late = late.len();
                    line.failed = line.failed.saturating_sub(late.len());
                    line.note = format!("at the second attempt: {}", late.join(", "));
                } else {
                    // It may not even have been built.
                    line.failed = line.failed.max(1);
                }
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
    use super::test_result;

    #[test]
    fn cargo_s_result_lines_are_read() {
        let line = "test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; \
                    0 filtered out; finished in 0.31s";
        assert_eq!(test_result(line), Some((3, 2, 1)));
        assert_eq!(test_result("running 3 tests"), None);
    }
}
