//! `cargo xtask miri` and `cargo xtask sanitize`: tests under Miri and sanitizers.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};

use crate::driver;

/// Tests under Miri: those without system calls that Miri lacks.
const MIRI: [&[&str]; 3] = [
    &["-p", "ringverbs-ring", "--lib"],
    &[
        "-p",
        "ringverbs",
        "--lib",
        "--",
        "inflight",
        "memory::bytes",
    ],
    // Encoders and decoders of queue entries.
    &[
        "-p",
        "ringverbs-mlx5",
        "--lib",
        "--",
        "plan::",
        "ah::",
        "tests::decode",
        "tests::keys",
        "tests::send",
    ],
];

/// Checks that Miri is installed.
///
/// # Errors
/// Miri is missing; the error says how to install it.
pub fn miri_is_installed() -> Result<()> {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "miri", "--version"]);
    let installed = command.output().is_ok_and(|out| out.status.success());
    ensure!(installed, "Miri is missing: {INSTALL_MIRI}");
    Ok(())
}

const INSTALL_MIRI: &str = "rustup toolchain install nightly --component miri,rust-src";

/// Runs the tests under Miri.
pub fn miri() -> Result<ExitCode> {
    let mut passed = true;
    for tests in MIRI {
        let mut command = Command::new("rustup");
        command
            .current_dir(driver::root())
            .args(["run", "nightly", "cargo", "miri", "test", "--target-dir"])
            .arg(driver::target_dir().join("miri"))
            .args(tests)
            // Rings and queue entries have addresses as integers. proptest reads the
            // current directory, which isolation forbids.
            .env(
                "MIRIFLAGS",
                "-Zmiri-permissive-provenance -Zmiri-disable-isolation",
            )
            .env("PROPTEST_CASES", "4");
        passed &= run(&mut command)
            .with_context(|| format!("Miri is part of the nightly toolchain: {INSTALL_MIRI}"))?;
    }
    Ok(exit_code(passed))
}

/// A sanitizer.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Sanitizer {
    /// Accesses outside of allocations
    Address,
    /// Data races
    Thread,
}

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    #[arg(value_enum)]
    sanitizer: Sanitizer,
    /// Only this suite; can be repeated
    #[arg(long, value_parser = SUITES.map(|(name, _)| name))]
    suite: Vec<String>,
    /// Only tests whose names contain this
    #[arg(long)]
    filter: Option<String>,
}

impl Arguments {
    /// Returns arguments for all suites under a sanitizer.
    pub fn all(sanitizer: Sanitizer) -> Arguments {
        Arguments {
            sanitizer,
            suite: Vec::new(),
            filter: None,
        }
    }
}

/// The suites: tests on the embedded device, and of the device itself.
const SUITES: [(&str, &[&str]); 6] = [
    (
        "softhca",
        &["-p", "ringverbs-roce", "-p", "ringverbs-softhca", "--lib"],
    ),
    (
        "embedded",
        &["-p", "ringverbs-embedded", "--lib", "--tests"],
    ),
    ("device", &["-p", "ringverbs", "--test", "device"]),
    ("completions", &["-p", "ringverbs", "--test", "completions"]),
    ("streams", &["-p", "ringverbs", "--test", "streams"]),
    ("processes", &["-p", "ringverbs", "--test", "embedded"]),
];

/// Patterns of false reports, each with the reason.
const THREAD_SUPPRESSIONS: &str = "crates/xtask/src/thread-suppressions.txt";

/// Builds the suites with a sanitizer, and runs them.
pub fn sanitize(arguments: &Arguments) -> Result<ExitCode> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let name = match arguments.sanitizer {
        Sanitizer::Address => "address",
        Sanitizer::Thread => "thread",
    };
    let mut passed = true;
    for (suite, tests) in SUITES {
        if !arguments.suite.is_empty() && !arguments.suite.iter().any(|name| name == suite) {
            continue;
        }
        eprintln!("== {suite}");
        let mut command = Command::new(driver::cargo());
        command.current_dir(driver::root());
        command.args(["test", "--no-fail-fast", "--target", &target]);
        if let Sanitizer::Thread = arguments.sanitizer {
            // ThreadSanitizer must see the standard library's synchronization.
            library_source_is_installed()?;
            command.arg("-Zbuild-std");
        }
        command
            .arg("--target-dir")
            .arg(driver::target_dir().join(format!("sanitize-{name}")))
            .args(tests)
            .arg("--")
            .args(&arguments.filter)
            // Lets the stable compiler accept the nightly option for sanitizers.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", format!("-Zsanitizer={name}"))
            // Tests leak handles on purpose.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .env("TSAN_OPTIONS", thread_options())
            // Fewer sequences of random driver commands: each takes up to ten times as long.
            .env("RINGVERBS_SEQUENCES", "30");
        passed &= run(&mut command)?;
    }
    Ok(exit_code(passed))
}

fn thread_options() -> String {
    let file = driver::root().join(THREAD_SUPPRESSIONS);
    format!("halt_on_error=0 suppressions={}", file.display())
}

/// Checks that the standard library's source is installed.
///
/// # Errors
/// The source is missing; the error says how to install it.
pub fn library_source_is_installed() -> Result<()> {
    let output = Command::new("rustc")
        .args(["--print", "sysroot"])
        .output()?;
    let sysroot = String::from_utf8(output.stdout)?;
    let source = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    ensure!(
        source.is_dir(),
        "the standard library's source is missing: rustup component add rust-src"
    );
    Ok(())
}

fn run(command: &mut Command) -> Result<bool> {
    let Ok(status) = command.status() else {
        bail!("{:?} cannot be run", command.get_program());
    };
    Ok(status.success())
}

fn exit_code(passed: bool) -> ExitCode {
    if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
