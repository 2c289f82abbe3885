//! `cargo xtask aarch64`: tests built for aarch64, which run in QEMU's user mode.

pub mod programs;

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use rxe_tests::guest::host;
use rxe_tests::guest::suite::AARCH64;

use crate::driver;

pub const TARGET: &str = AARCH64.target;

/// The cross compiler, its C library, and QEMU for user programs.
const TOOLS: &[(&str, &str)] = &[
    ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    ("/usr/aarch64-linux-gnu/lib/crt1.o", "libc6-dev-arm64-cross"),
    ("qemu-aarch64", "qemu-user"),
];

/// Cargo's variable for the linker, and the linker.
pub const LINKER: (&str, &str) = (
    "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
    "aarch64-linux-gnu-gcc",
);

/// The root of the cross compiler's C library and loader.
const SYSROOT: &str = "/usr/aarch64-linux-gnu";

/// Unit and property tests of the data path: barriers, rings, encoders and decoders.
/// They take a minute besides the build.
const DATA_PATH: &[&str] = &[
    "-p",
    "ringverbs-ring",
    "-p",
    "ringverbs-rxe",
    "-p",
    "ringverbs-mlx5",
    "-p",
    "ringverbs-mlx5-abi",
    "-p",
    "ringverbs-uverbs",
];

/// Tests of the embedded device and of the preload library, except those that need features
/// missing in QEMU's user mode: child processes for aarch64, socket filters, populated mappings
/// (also the tests `random` and `strict`), process_vm_readv(2), /proc/self/stat beyond its 44th
/// field.
const DEVICE: &[&str] = &[
    "-p",
    "ringverbs-roce",
    "-p",
    "ringverbs-softhca",
    "-p",
    "ringverbs-embedded",
    "-p",
    "ringverbs-preload",
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
    "directory",
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
    "packets_arrive_at_the_owner_of_the_queue_pair",
    "--skip",
    "only_mapped_memory_with_the_right_access_is_accepted",
    "--skip",
    "unmapped_memory_is_not_registered",
    "--skip",
    "attributes_of_a_queue_pair_are_kept",
    "--skip",
    "completion_queues_are_followed",
    "--skip",
    "the_start_of_the_data_segment",
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
    /// Arguments of `cargo test`, in place of the crates of the data path: `-- -p ringverbs`
    #[arg(last = true)]
    tests: Vec<String>,
}

/// Runs tests.
pub fn aarch64(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.programs {
        return programs::run();
    }
    require_tools()?;
    let mut command = match arguments.tests.as_slice() {
        [] if arguments.device => device(),
        [] => data_path(),
        tests => cargo_test(tests),
    };
    let status = command.status().context("cannot run cargo")?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Installs missing tools; an error names them.
pub fn require_tools() -> Result<()> {
    host::require(TOOLS, false)?;
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

/// Returns the command of the data path's tests.
pub fn data_path() -> Command {
    cargo_test(DATA_PATH)
}

/// Returns the command of the embedded device's tests.
pub fn device() -> Command {
    cargo_test(DEVICE)
}

/// Returns the command of the plugin's unit tests, which compare structures with the
/// headers.
pub fn plugin() -> Command {
    cargo_test(&["-p", "ringverbs-provider", "--lib"])
}

fn cargo_test<Text: AsRef<std::ffi::OsStr>>(tests: &[Text]) -> Command {
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
        // Emulation is slow: few cases of each property.
        .env("PROPTEST_CASES", "8");
    command
}
