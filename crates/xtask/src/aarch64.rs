//! `cargo xtask aarch64`: tests of the machine's other architecture, which QEMU runs
//! as user programs.

pub mod programs;

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use rxe_tests::guest::host;
use rxe_tests::guest::suite::AARCH64;

use crate::driver;

pub const TARGET: &str = AARCH64.target;

/// The cross compiler's linker, what it links with, and QEMU for user programs.
const NEEDS: &[(&str, &str)] = &[
    ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    ("/usr/aarch64-linux-gnu/lib/crt1.o", "libc6-dev-arm64-cross"),
    ("qemu-aarch64", "qemu-user"),
];

/// The linker, as cargo is told of it.
pub const LINKER: (&str, &str) = (
    "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
    "aarch64-linux-gnu-gcc",
);

/// Where the package of the cross compiler's C library has its loader.
const SYSROOT: &str = "/usr/aarch64-linux-gnu";

/// Unit and property tests of what drives devices: barriers, rings, encoders and
/// decoders. They take a minute beside the build.
const DATA_PATH: &[&str] = &[
    "-p",
    "ringverbs-ring",
    "-p",
    "ringverbs-rxe",
    "-p",
    "ringverbs-mlx5",
    "-p",
    "ringverbs-uverbs",
];

/// The embedded device's, without what QEMU does not emulate for user programs: it
/// starts no child of the other architecture, has no packet filters of sockets, and
/// populates no memory (also: the tests `random` and `strict`).
const DEVICE: &[&str] = &[
    "-p",
    "ringverbs-softhca",
    "-p",
    "ringverbs-embedded",
    "--lib",
    "--test",
    "connected",
    "--test",
    "dynamic",
    "--test",
    "events",
    "--test",
    "joined",
    "--test",
    "meeting",
    "--test",
    "objects",
    "--test",
    "rings",
    "--test",
    "roce",
    "--test",
    "xrc",
    "--",
    "--skip",
    "only_processes_of_this_user_are_admitted",
    "--skip",
    "a_killed_process_does_not_affect_others",
    "--skip",
    "packets_arrive_at_the_member_that_they_are_for",
    "--skip",
    "only_mapped_memory_with_the_right_access_is_accepted",
    "--skip",
    "unmapped_memory_is_not_registered",
];

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// The embedded device in place of the crates of the data path
    #[arg(long, conflicts_with = "tests")]
    device: bool,
    /// Debian's programs for arm64 on an embedded device, with libmlx5 and the plugin
    #[arg(long, conflicts_with_all = ["tests", "device"])]
    programs: bool,
    /// What cargo tests, in place of the crates of the data path: `-- -p ringverbs`
    #[arg(last = true)]
    tests: Vec<String>,
}

/// Runs tests.
pub fn aarch64(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.programs {
        return programs::run();
    }
    needs()?;
    let mut command = match arguments.tests.as_slice() {
        [] if arguments.device => device(),
        [] => data_path(),
        tests => tested(tests),
    };
    let status = command.status().context("cannot run cargo")?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Installs what is missing; the error names it.
pub fn needs() -> Result<()> {
    host::require(NEEDS, false)?;
    let rustc = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", TARGET])
        .output();
    let folder = rustc.context("cannot run rustc")?.stdout;
    let folder = String::from_utf8_lossy(&folder);
    if std::path::Path::new(folder.trim()).exists() {
        return Ok(());
    }
    let mut rustup = Command::new("rustup");
    match rustup.args(["target", "add", TARGET]).status() {
        Ok(status) if status.success() => Ok(()),
        _ => bail!("Rust's library for {TARGET} is missing: rustup target add {TARGET}"),
    }
}

/// The tests of the data path.
pub fn data_path() -> Command {
    tested(DATA_PATH)
}

/// The tests of the embedded device that QEMU can run.
pub fn device() -> Command {
    tested(DEVICE)
}

/// The plugin's unit tests, among them that its structures are those of the headers.
pub fn plugin() -> Command {
    tested(&["-p", "ringverbs-provider", "--lib"])
}

fn tested<Text: AsRef<std::ffi::OsStr>>(tests: &[Text]) -> Command {
    let mut command = Command::new(driver::cargo());
    command
        .current_dir(driver::root())
        .args(["test", "--no-fail-fast", "--target", TARGET, "--target-dir"])
        .arg(driver::target_dir().join("aarch64"))
        .args(tests)
        .env(LINKER.0, LINKER.1)
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("qemu-aarch64 -L {SYSROOT}"),
        )
        // QEMU interprets: few cases of each property.
        .env("PROPTEST_CASES", "8");
    command
}
