//! The Rust crate's programs, built for a guest.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::driver;

/// What is built: packages, and the test programs that want a device.
const PACKAGES: [&str; 4] = [
    "ringverbs",
    "ringverbs-rdmacm",
    "ringverbs-cli",
    "ringverbs-stream-examples",
];
const DEVICE_TESTS: &[&str] = &["completions", "device", "programs", "streams"];

/// Builds the programs as static ones and puts them, the scripts and the
/// manifest in `to`.
pub fn build(to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let mut programs = cargo(&["build", "--bins", "--examples"])?;
    let mut test = vec!["test", "--no-run"];
    for name in DEVICE_TESTS {
        test.extend(["--test", name]);
    }
    programs.extend(cargo(&test)?);
    for (name, path) in &programs {
        fs::copy(path, to.join(name)).with_context(|| format!("cannot copy {}", path.display()))?;
    }
    let sources = driver::root().join("rxe-tests/native");
    for entry in fs::read_dir(&sources)? {
        let path = entry?.path();
        if let Some(name) = path.file_name() {
            fs::copy(&path, to.join(name))?;
        }
    }
    fs::copy(
        driver::root().join("crates/cli/tests/guest.sh"),
        to.join("cli.sh"),
    )?;
    Ok(())
}

/// Runs cargo and says which programs it has made, by name.
fn cargo(arguments: &[&str]) -> Result<BTreeMap<String, PathBuf>> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let mut command = Command::new(driver::cargo());
    command
        .current_dir(driver::root())
        .args(arguments)
        .args(["--quiet", "--message-format", "json", "--target", TARGET])
        .arg("--target-dir")
        .arg(driver::target_dir().join("guest-driver"))
        .env_remove("RUSTFLAGS")
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static")
        .stderr(Stdio::inherit());
    for package in PACKAGES {
        command.args(["-p", package]);
    }
    let out = command.output().context("cannot run cargo")?;
    ensure!(
        out.status.success(),
        "the Rust crate's programs do not build: cargo {}",
        arguments.join(" ")
    );
    let mut programs = BTreeMap::new();
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        if let (Some(path), Some(name)) = (
            message["executable"].as_str(),
            message["target"]["name"].as_str(),
        ) {
            programs.insert(name.to_owned(), path.into());
        }
    }
    Ok(programs)
}
