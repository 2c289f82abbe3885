//! The Rust crate's programs, built for a guest.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rxe_tests::driver::programs::manifest;
use rxe_tests::guest::Architecture;

use crate::driver;

/// What is built: packages, and the test programs that want a device.
const PACKAGES: [&str; 6] = [
    "ringverbs",
    "ringverbs-rdmacm",
    "ringverbs-cli",
    "ringverbs-rpc",
    "ringverbs-hyper",
    "ringverbs-tonic",
];
const DEVICE_TESTS: &[&str] = &[
    "completions",
    "device",
    "future",
    "grpc",
    "http",
    "lossy",
    "rpc",
    "scale",
    "soak",
    "streams",
    "tokio_streams",
    "vanish",
];

/// Where the manifest and the scripts are.
const FOLDER: &str = "rxe-tests/native";

/// Whether a case of the manifest is chosen by the filters.
pub fn chosen_by(filters: &[String]) -> Result<bool> {
    let path = driver::root().join(FOLDER).join("manifest.txt");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    // No case of these depends on rdma-core's release.
    let cases = manifest(&text, "0")?;
    Ok(cases.iter().any(|case| case.chosen_by(filters)))
}

fn packages() -> Vec<&'static str> {
    PACKAGES.iter().flat_map(|name| ["-p", name]).collect()
}

/// Builds the programs, but not the tests, as static ones, and says where they
/// are, by name.
pub fn programs(architecture: &Architecture) -> Result<BTreeMap<String, PathBuf>> {
    let programs = [&["build", "--bins", "--examples"], &packages()[..]].concat();
    driver::build_static_for(architecture.target, &programs)
}

/// Builds the programs and the tests as static ones, and says where they are, by
/// name.
pub fn built(architecture: &Architecture) -> Result<BTreeMap<String, PathBuf>> {
    let tests: Vec<&str> = DEVICE_TESTS.iter().flat_map(|t| ["--test", t]).collect();
    let mut built = programs(architecture)?;
    built.extend(driver::build_static_for(
        architecture.target,
        &[&["test", "--no-run"], &packages()[..], &tests[..]].concat(),
    )?);
    Ok(built)
}

/// Builds the programs as static ones and puts them, the scripts and the
/// manifest in `to`.
pub fn build(architecture: &Architecture, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let built = built(architecture)?;
    let in_c = driver::root().join("rxe-tests/programs");
    for (name, path) in &built {
        // Both folders are in the PATH of every case.
        ensure!(
            !in_c.join(name).with_extension("c").exists(),
            "{name} is a C program of rxe-tests as well: another name is wanted"
        );
        copy_without_lines(architecture, path, &to.join(name))?;
    }
    let sources = driver::root().join(FOLDER);
    for entry in fs::read_dir(&sources)? {
        let path = entry?.path();
        if let Some(name) = path.file_name() {
            fs::copy(&path, to.join(name))?;
        }
    }
    // Others' scripts that these use as well.
    for (script, name) in [
        ("crates/cli/tests/guest.sh", "cli.sh"),
        ("rxe-tests/programs/wire.sh", "wire.sh"),
    ] {
        fs::copy(driver::root().join(script), to.join(name))?;
    }
    Ok(())
}

/// Copies a program without the tables of its source's lines, most of it: an
/// emulated guest takes minutes to read those of all. By `strip`, which comes with
/// the linker; where it is missing, as it is.
fn copy_without_lines(architecture: &Architecture, program: &Path, to: &Path) -> Result<()> {
    let strip = Command::new(format!("{}strip", architecture.tools))
        .args(["--strip-debug", "-o"])
        .args([to, program])
        .status();
    if !strip.is_ok_and(|status| status.success()) {
        fs::copy(program, to).with_context(|| format!("cannot copy {}", program.display()))?;
    }
    Ok(())
}
