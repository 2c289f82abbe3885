//! `cargo xtask mutants`: mutation testing. cargo-mutants makes small changes to the code,
//! one at a time, and checks that a test fails.

use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use rxe_tests::guest::host;

use crate::driver;

/// The default packages: those of the data path, and those that parse foreign input. Only
/// their own tests run.
const PACKAGES: [&str; 5] = [
    "ringverbs-ring",
    "ringverbs-rxe",
    "ringverbs-mlx5",
    "ringverbs-uverbs",
    "ringverbs-rdmacm",
];

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only this package; can be repeated
    #[arg(short, long)]
    package: Vec<String>,
    /// Only functions that have changed since the branch left main
    #[arg(long)]
    diff: bool,
    /// More arguments of `cargo mutants`, such as `--list` or `--shard 1/8`
    #[arg(last = true)]
    more: Vec<String>,
}

/// Runs cargo-mutants; its results are in `target/mutants/mutants.out`.
pub fn mutants(arguments: &Arguments) -> Result<ExitCode> {
    ensure!(
        host::which("cargo-mutants").is_some(),
        "cargo-mutants is missing: cargo install --locked cargo-mutants"
    );
    let output = driver::target_dir().join("mutants");
    fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;
    let mut command = Command::new(driver::cargo());
    command.current_dir(driver::root());
    command.args(["mutants", "--output"]).arg(&output);
    // Endless loops are found by this timeout.
    command.args(["--minimum-test-timeout", "60"]);
    let packages: Vec<&str> = match arguments.package.as_slice() {
        [] => PACKAGES.to_vec(),
        packages => packages.iter().map(String::as_str).collect(),
    };
    for package in packages {
        command.args(["--package", package]);
    }
    if arguments.diff {
        let out = Command::new("git")
            .current_dir(driver::root())
            .args(["diff", "--merge-base", "main"])
            .output()
            .context("cannot run git")?;
        ensure!(
            out.status.success(),
            "git diff: {}",
            String::from_utf8_lossy(&out.stderr).trim()
        );
        let diff = output.join("changes.diff");
        fs::write(&diff, out.stdout).with_context(|| format!("cannot write {}", diff.display()))?;
        command.arg("--in-diff").arg(diff);
    }
    let status = command.args(&arguments.more).status()?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
