//! Builds the programs for guests, and benches; finds cargo and its folders.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rxe_tests::guest::Architecture;
use rxe_tests::guest::suite::X86_64;

use crate::aarch64;
use crate::steps;

/// Builds `rxe-driver`.
pub fn build() -> Result<PathBuf> {
    build_for(&X86_64)
}

/// Builds `rxe-driver` for guests of an architecture.
pub fn build_for(architecture: &Architecture) -> Result<PathBuf> {
    const NAME: &str = "rxe-driver";
    let driver = ["build", "-p", "ringverbs-rxe-tests", "--bin", NAME];
    build_static_for(architecture.target, &driver)?
        .remove(NAME)
        .with_context(|| format!("cargo has not built {NAME}"))
}

/// Builds static programs for a target, which run in any guest, and returns their paths by
/// name. `arguments` are cargo's command and targets.
pub fn build_static_for(target: &str, arguments: &[&str]) -> Result<BTreeMap<String, PathBuf>> {
    build_static_with(target, arguments, &[])
}

/// As [`build_static_for`], with variables for build scripts.
pub fn build_static_with(
    target: &str,
    arguments: &[&str],
    variables: &[(&str, &Path)],
) -> Result<BTreeMap<String, PathBuf>> {
    if target == aarch64::TARGET {
        aarch64::require_tools()?;
    }
    let mut build = Command::new(cargo());
    build
        .current_dir(root())
        .args(arguments)
        .args(["--message-format", "json-render-diagnostics"])
        .args(["--target", target, "--target-dir"])
        .arg(target_dir().join("guest-driver"))
        .env(aarch64::LINKER.0, aarch64::LINKER.1)
        .env_remove("RUSTFLAGS")
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static")
        // Guests get the programs without debug information (`native::build`).
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .envs(variables.iter().copied());
    let out = steps::run_cargo(&mut build)?;
    ensure!(
        out.status.success(),
        "a static program does not build: cargo {}",
        arguments.join(" ")
    );
    Ok(programs(&out.stdout))
}

/// Builds a bench of a package and returns its path.
pub fn build_bench(package: &str, name: &str) -> Result<PathBuf> {
    let out = Command::new(cargo())
        .current_dir(root())
        .args(["bench", "--no-run", "-p", package, "--bench", name])
        .args(["--quiet", "--message-format", "json-render-diagnostics"])
        .arg("--target-dir")
        .arg(target_dir())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(
        out.status.success(),
        "bench {name} of {package} does not build"
    );
    programs(&out.stdout)
        .remove(name)
        .with_context(|| format!("cargo has not built bench {name} of {package}"))
}

/// Returns the built programs of cargo's messages, by name.
fn programs(messages: &[u8]) -> BTreeMap<String, PathBuf> {
    let mut programs = BTreeMap::new();
    for line in String::from_utf8_lossy(messages).lines() {
        let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        if let (Some(path), Some(name)) = (
            message["executable"].as_str(),
            message["target"]["name"].as_str(),
        ) {
            programs.insert(name.to_owned(), path.into());
        }
    }
    programs
}

/// Returns the root of the repository.
pub fn root() -> &'static Path {
    // This crate is two folders below it.
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

/// Returns cargo's target directory.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => std::path::absolute(&dir).unwrap_or_else(|_| dir.into()),
        None => root().join("target"),
    }
}

/// Returns the cargo that runs this program.
pub fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from)
}

/// Runs a command with inherited output.
///
/// # Errors
/// The command cannot be run, or failed.
pub fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command
        .status()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}
