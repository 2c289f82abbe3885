//! Builds the Rust crate's programs for a guest.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rxe_tests::driver::programs::parse_manifest;
use rxe_tests::guest::Architecture;

use crate::driver;

/// The packages, and the test programs that need a device.
const PACKAGES: [&str; 7] = [
    "ringverbs",
    "ringverbs-rdmacm",
    "ringverbs-cli",
    "ringverbs-rpc",
    "ringverbs-hyper",
    "ringverbs-tonic",
    "ringverbs-libfabric",
];
const DEVICE_TESTS: &[&str] = &[
    "completions",
    "device",
    "future",
    "grpc",
    "http",
    "libfabric",
    "lossy",
    "rpc",
    "scale",
    "soak",
    "streams",
    "tokio_streams",
    "vanish",
];

/// The folder of the manifest and the scripts.
const FOLDER: &str = "rxe-tests/native";

/// Returns whether the filters select a case of the manifest.
pub fn has_matching_case(filters: &[String]) -> Result<bool> {
    let path = driver::root().join(FOLDER).join("manifest.txt");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    // None of these cases depends on rdma-core's release.
    let cases = parse_manifest(&text, "0")?;
    Ok(cases.iter().any(|case| case.matches(filters)))
}

fn packages() -> Vec<&'static str> {
    PACKAGES.iter().flat_map(|name| ["-p", name]).collect()
}

/// Builds the programs, without the tests, as static ones, and returns their paths by
/// name.
pub fn programs(architecture: &Architecture) -> Result<BTreeMap<String, PathBuf>> {
    let programs = [&["build", "--bins", "--examples"], &packages()[..]].concat();
    driver::build_static_for(architecture.target, &programs)
}

/// Builds the programs and the tests as static ones, and returns their paths by name.
pub fn build_programs_and_tests(architecture: &Architecture) -> Result<BTreeMap<String, PathBuf>> {
    let tests: Vec<&str> = DEVICE_TESTS.iter().flat_map(|t| ["--test", t]).collect();
    let mut built = programs(architecture)?;
    built.extend(driver::build_static_for(
        architecture.target,
        &[&["test", "--no-run"], &packages()[..], &tests[..]].concat(),
    )?);
    Ok(built)
}

/// Builds the programs and the tests as static ones, and copies them, the scripts and the
/// manifest to `to`.
pub fn build(architecture: &Architecture, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let built = build_programs_and_tests(architecture)?;
    let in_c = driver::root().join("rxe-tests/programs");
    for (name, path) in &built {
        // Both folders are in the PATH of every case.
        ensure!(
            !in_c.join(name).with_extension("c").exists(),
            "{name} is also a C program of rxe-tests: choose another name"
        );
        copy_stripped(architecture, path, &to.join(name))?;
    }
    let sources = driver::root().join(FOLDER);
    for entry in fs::read_dir(&sources)? {
        let path = entry?.path();
        if let Some(name) = path.file_name() {
            fs::copy(&path, to.join(name))?;
        }
    }
    // Scripts from other folders.
    for (script, name) in [
        ("crates/cli/tests/guest.sh", "cli.sh"),
        ("rxe-tests/programs/wire.sh", "wire.sh"),
    ] {
        fs::copy(driver::root().join(script), to.join(name))?;
    }
    Ok(())
}

/// Copies a program without its debug information, which is most of it: an emulated guest
/// takes minutes to read that of all programs. If `strip` is missing, the program is
/// copied as it is.
fn copy_stripped(architecture: &Architecture, program: &Path, to: &Path) -> Result<()> {
    let strip = Command::new(format!("{}strip", architecture.tools))
        .args(["--strip-debug", "-o"])
        .args([to, program])
        .status();
    if !strip.is_ok_and(|status| status.success()) {
        fs::copy(program, to).with_context(|| format!("cannot copy {}", program.display()))?;
    }
    Ok(())
}
