//! Tests `cargo xtask install --replace-libmlx5` on overlays of this system's folders, in a
//! mount namespace. Without root the test is skipped.
//!
//! `RINGVERBS_DIST` is a folder built by `cargo xtask dist`, with which programs are run;
//! otherwise a stand-in replaces our library.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-libmlx5-{name}-{}", std::process::id());
        let path = env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Compiles a stand-in for our library; `None` without a compiler.
fn stand_in(folder: &Path) -> Option<()> {
    let source = folder.join("ringverbs.c");
    fs::write(&source, "int mlx5dv_query_device(void) { return 0; }\n").unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libmlx5.so.1", "-o"])
        .arg(folder.join("libmlx5.so.1"))
        .arg(&source)
        .status();
    status.is_ok_and(|status| status.success()).then_some(())
}

fn run(method: &str) {
    let unshared = Command::new("unshare").args(["-m", "true"]).output();
    if !unshared.is_ok_and(|output| output.status.success()) {
        return testing::skip!("a mount namespace needs root");
    }
    let library = format!("/usr/lib/{}-linux-gnu/libmlx5.so.1", env::consts::ARCH);
    if !Path::new(&library).exists() {
        return testing::skip!(missing: "ibverbs-providers", "there is no {library}");
    }
    let built = Scratch::new(&format!("{method}-built"));
    let dist = match env::var_os("RINGVERBS_DIST") {
        Some(dist) => std::path::absolute(dist).unwrap(),
        None if stand_in(&built.0).is_some() => built.0.clone(),
        None => {
            return testing::skip!(missing: "gcc", "cc is missing, and RINGVERBS_DIST is not set");
        }
    };
    let scratch = Scratch::new(method);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/replace_libmlx5.sh");
    let output: Output = Command::new("unshare")
        .args(["-m", "sh", script, method, env!("CARGO_BIN_EXE_xtask")])
        .args([&dist, &scratch.0])
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) {
        return testing::skip!("overlays cannot be mounted: {stderr}");
    }
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.ends_with(&format!("{method}: passed\n")), "{stdout}");
}

#[test]
fn libmlx5_is_diverted_and_restored() {
    run("dpkg");
}

#[test]
fn libmlx5_is_in_a_folder_that_comes_first() {
    run("folder");
}
