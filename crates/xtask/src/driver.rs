//! Building the program that runs in the guest.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Builds `rxe-driver` as a static program, so that it runs in any guest.
pub fn build() -> Result<PathBuf> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let target_dir = target_dir().join("guest-driver");
    let status = Command::new(cargo())
        .current_dir(root())
        .args(["build", "--quiet", "-p", "ringverbs-rxe-tests"])
        .args(["--bin", "rxe-driver", "--target", TARGET, "--target-dir"])
        .arg(&target_dir)
        .env_remove("RUSTFLAGS")
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static")
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "rxe-driver does not build");
    let program = target_dir.join(TARGET).join("debug/rxe-driver");
    if !program.exists() {
        bail!("cargo left no {}", program.display());
    }
    Ok(program)
}

/// The repository's top.
pub fn root() -> &'static Path {
    // This crate lies two folders below it.
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

/// Where cargo puts what it builds.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => std::path::absolute(&dir).unwrap_or_else(|_| dir.into()),
        None => root().join("target"),
    }
}

/// The cargo that runs this program.
pub fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from)
}
