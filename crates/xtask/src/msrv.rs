//! `cargo xtask msrv`: the oldest supported compiler, which is Debian 13's.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use rxe_tests::guest::Compiler;
use serde_json::Value;

use crate::driver;

/// The tests that run in the tree: first those of the crate with default features, then
/// all unit tests.
const TESTS: [&[&str]; 2] = [
    &["-p", "ringverbs", "--lib"],
    &["--workspace", "--all-features", "--lib", "--bins"],
];

/// Builds the workspace with Debian 13's rustc and cargo, tests and examples
/// included, and runs the unit tests.
pub fn msrv() -> Result<ExitCode> {
    let compiler = Compiler::get()?;
    let target = driver::target_dir().join("msrv");
    std::fs::create_dir_all(target.join("cargo"))?;
    // The tree's cargo has no network.
    let mut fetch = Command::new(driver::cargo());
    fetch.current_dir(driver::root());
    fetch.args(["fetch", "--quiet", "--locked", "--target"]);
    fetch.arg("x86_64-unknown-linux-gnu");
    run(fetch.env("CARGO_HOME", target.join("cargo")))?;
    let check: &[&str] = &["--workspace", "--all-features", "--all-targets"];
    for (verb, arguments) in [("check", check)]
        .into_iter()
        .chain(TESTS.map(|it| ("test", it)))
    {
        let mut command = compiler.command(driver::root(), &target);
        command.args(["cargo", verb, "--offline", "--locked", "--quiet"]);
        run(command.args(arguments))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a command that checks for let chains, which the oldest compiler lacks, without
/// that compiler. clippy's `incompatible_msrv` finds newer functions.
///
/// rustfmt refuses let chains in edition 2021, and accepts the rest of edition 2024.
pub fn syntax() -> Result<Command> {
    let out = Command::new(driver::cargo())
        .current_dir(driver::root())
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(out.status.success(), "cargo metadata: {}", out.status);
    let metadata: Value = serde_json::from_slice(&out.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let targets = packages
        .iter()
        .filter_map(|it| it["targets"].as_array())
        .flatten();
    let mut format = Command::new("rustfmt");
    format
        .current_dir(driver::root())
        .args(["--check", "--edition", "2021"])
        .args(["--config", "style_edition=2024"])
        .args(targets.filter_map(|it| it["src_path"].as_str().map(PathBuf::from)));
    Ok(format)
}

fn run(command: &mut Command) -> Result<()> {
    eprintln!("== {command:?}");
    let status = command.status().context("cannot start the command")?;
    ensure!(status.success(), "{status}");
    Ok(())
}
