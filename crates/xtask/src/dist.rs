//! Builds `target/dist` and Debian packages with the plugin and the command. The command
//! carries the libraries, so that it runs alone, and writes its completions and man pages.
//!
//! libibverbs appends its private ABI to a provider's name, so the file has a link for
//! each ABI.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use rxe_tests::guest::Architecture;
use rxe_tests::guest::suite::X86_64;

use crate::aarch64;
use crate::driver::{build_static_with, cargo, root, target_dir};
use crate::libmlx5::{self, LIBMLX5};
use crate::steps::{self, Step};

/// The plugin's file, named for the oldest private ABI.
pub const LIBRARY: &str = "libringverbs-rdmav34.so";

/// Links to it for the other private ABIs.
pub const LINKS: &[&str] = &[
    "libringverbs-rdmav57.so",
    "libringverbs-rdmav59.so",
    "libringverbs-rdmav64.so",
    "libringverbs-rdmav65.so",
];

/// Our configuration for libibverbs.
pub const CONFIG: &str = "ringverbs.driver";
pub const CONFIG_TEXT: &str = "\
# libibverbs loads the drivers named in a file from the last to the first, and
# the first one loaded that can drive a device gets it: ringverbs, and if that
# refuses to work with this libibverbs or device, the stock provider.
driver rxe
driver mlx5
driver ringverbs
";

/// The library of embedded devices for unmodified programs; `ringverbs run --embedded`
/// looks for it beside the command.
pub const PRELOAD: &str = "libringverbs_preload.so";

/// The command's file.
pub const COMMAND: &str = "ringverbs";

/// The folder of completions and man pages below a prefix.
pub const SHARE: &str = "share";

/// Returns the earlier result of `build`, or calls it. It runs once per process: steps
/// that run at the same time read the files.
fn build_once<T: Clone>(built: &Mutex<Option<T>>, build: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut built = built.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(built) = &*built {
        return Ok(built.clone());
    }
    Ok(built.insert(build()?).clone())
}

/// Builds the plugin and lays it out in `target/dist`, which is emptied first.
pub fn dist() -> Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    build_once(&BUILT, build_dist)
}

fn build_dist() -> Result<PathBuf> {
    let target = target_dir();
    build_libraries(&[], &target)?;
    let dist = lay_out(&target.join("shipped"), target.join("dist"))?;
    let _step = Step::begin("linking libmlx5.so.1");
    require_old_glibc(&libmlx5::link(&target.join("shipped"), &dist, "cc", false)?)?;
    Ok(dist)
}

/// Builds the plugin, also as a static library for [`libmlx5`], and the library of
/// embedded devices.
fn build_libraries(cross: &[&str], target: &Path) -> Result<()> {
    let plugin = [
        "ringverbs-provider",
        "--lib",
        "--crate-type",
        "cdylib,staticlib",
    ];
    let preload = ["ringverbs-preload"];
    for (step, verb, package) in [
        ("building the plugin", "rustc", &plugin[..]),
        (
            "building the library of embedded devices",
            "build",
            &preload[..],
        ),
    ] {
        let _step = Step::begin(step);
        let mut build = Command::new(cargo());
        if !cross.is_empty() {
            build.env(aarch64::LINKER.0, aarch64::LINKER.1);
        }
        build
            .current_dir(root())
            .arg(verb)
            .args(["--profile", "shipped", "--target-dir"])
            .arg(target)
            .args(cross)
            .arg("-p")
            .args(package);
        let output = steps::run_cargo(&mut build)?;
        ensure!(output.status.success(), "{} does not build", package[0]);
    }
    Ok(())
}

/// Copies the libraries, their links and the configuration to a new folder.
fn lay_out(built: &Path, dist: PathBuf) -> Result<PathBuf> {
    if dist.exists() {
        fs::remove_dir_all(&dist).with_context(|| format!("cannot empty {}", dist.display()))?;
    }
    fs::create_dir_all(&dist).with_context(|| format!("cannot make {}", dist.display()))?;
    for (from, to) in [("libringverbs_provider.so", LIBRARY), (PRELOAD, PRELOAD)] {
        let from = built.join(from);
        fs::copy(&from, dist.join(to))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    for link in LINKS {
        symlink(LIBRARY, dist.join(link)).with_context(|| format!("cannot link {link}"))?;
    }
    for library in [LIBRARY, PRELOAD] {
        require_old_glibc(&dist.join(library))?;
    }
    fs::write(dist.join(CONFIG), CONFIG_TEXT).with_context(|| format!("cannot write {CONFIG}"))?;
    Ok(dist)
}

/// The second number of the oldest glibc 2 on which the libraries are loaded.
const OLDEST_GLIBC: u32 = 34;

/// Refuses a library that needs a later glibc. Whatever is linked in statically may have been
/// compiled for that of this machine.
fn require_old_glibc(library: &Path) -> Result<()> {
    let bytes = fs::read(library).with_context(|| format!("cannot read {}", library.display()))?;
    let needed = newest_glibc(&bytes);
    ensure!(
        needed <= OLDEST_GLIBC,
        "{} needs glibc 2.{needed}; it must load on 2.{OLDEST_GLIBC}",
        library.display()
    );
    Ok(())
}

/// Returns the second number of the latest version of glibc 2 that a library names.
fn newest_glibc(library: &[u8]) -> u32 {
    const NAME: &[u8] = b"\0GLIBC_2.";
    let after = library.windows(NAME.len()).enumerate();
    let after = after.filter(|(_, window)| *window == NAME);
    let number = |(at, _): (usize, &[u8])| {
        let digits = library[at + NAME.len()..].iter();
        let digits = digits.take_while(|byte| byte.is_ascii_digit()).take(4);
        digits.fold(0, |number, digit| 10 * number + u32::from(digit - b'0'))
    };
    after.map(number).max().unwrap_or(0)
}

/// As [`dist`], with the command as a static program.
pub fn dist_with_command() -> Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    build_once(&BUILT, build_with_command)
}

/// Builds the plugin for guests of an architecture.
pub fn dist_for(architecture: &Architecture) -> Result<PathBuf> {
    match architecture.target {
        aarch64::TARGET => dist_for_aarch64(),
        _ => dist(),
    }
}

/// Adds the command to the folder of [`dist_for`], and builds Debian packages of both if
/// cargo-deb is installed.
pub fn packages_for(architecture: &Architecture) -> Result<Vec<PathBuf>> {
    let cross = architecture.target == aarch64::TARGET;
    let dist = if cross {
        dist_for_aarch64()
    } else {
        dist_with_command()
    }?;
    if !has_cargo_deb() {
        return Ok(Vec::new());
    }
    if cross { deb_for_aarch64() } else { deb(&dist) }
}

/// Cargo's arguments for the command.
const BUILD_COMMAND: [&str; 9] = [
    "build",
    "--profile",
    "shipped",
    "-p",
    "ringverbs-cli",
    "--features",
    "packaging",
    "--bin",
    COMMAND,
];

const COMMAND_STEP: &str = "building the command ringverbs";

fn build_with_command() -> Result<PathBuf> {
    let dist = dist()?;
    let _step = Step::begin(COMMAND_STEP);
    let carried = carry(&dist, &target_dir().join("carried"), "strip")?;
    add_command(&build_command(X86_64.target, &carried)?, &dist)?;
    add_share(Command::new(dist.join(COMMAND)), &dist)?;
    Ok(dist)
}

/// Builds the command, which carries the libraries of a folder.
fn build_command(target: &str, carried: &Path) -> Result<BTreeMap<String, PathBuf>> {
    build_static_with(target, &BUILD_COMMAND, &[("RINGVERBS_CARRIED", carried)])
}

/// Copies the libraries that the command carries, without debug information, and their links.
/// Files that are equal keep their times, by which cargo decides whether to build.
fn carry(dist: &Path, folder: &Path, strip: &str) -> Result<PathBuf> {
    let cannot = || format!("cannot write {}", folder.display());
    fs::create_dir_all(folder).with_context(cannot)?;
    for name in [PRELOAD, LIBRARY] {
        let (from, to) = (dist.join(name), folder.join(name));
        let new = folder.with_extension("new");
        let mut command = Command::new(strip);
        let command = command.args(["--strip-unneeded", "-o"]).args([&new, &from]);
        if !command.output().is_ok_and(|output| output.status.success()) {
            // Without binutils the command is larger.
            fs::copy(&from, &new).with_context(cannot)?;
        }
        let bytes = fs::read(&new).with_context(cannot)?;
        if fs::read(&to).ok().is_none_or(|old| old != bytes) {
            fs::write(&to, bytes).with_context(cannot)?;
        }
        fs::remove_file(&new).with_context(cannot)?;
    }
    for link in LINKS {
        let link = folder.join(link);
        if !link.is_symlink() {
            symlink(LIBRARY, &link).with_context(cannot)?;
        }
    }
    Ok(folder.to_owned())
}

fn add_command(built: &BTreeMap<String, PathBuf>, dist: &Path) -> Result<()> {
    let built = built
        .get(COMMAND)
        .context("cargo has not built the command")?;
    fs::copy(built, dist.join(COMMAND))
        .with_context(|| format!("cannot copy {}", built.display()))?;
    Ok(())
}

/// Adds completions and man pages, which the command writes.
fn add_share(mut command: Command, dist: &Path) -> Result<()> {
    let status = command
        .arg("packaging")
        .arg(dist.join(SHARE))
        .status()
        .context("cannot run the command")?;
    ensure!(status.success(), "completions and man pages: {status}");
    Ok(())
}

/// As [`dist_with_command`], for aarch64, in `target/dist-aarch64`.
pub fn dist_for_aarch64() -> Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    build_once(&BUILT, build_for_aarch64)
}

fn build_for_aarch64() -> Result<PathBuf> {
    aarch64::require_tools()?;
    let target = target_dir();
    build_libraries(&["--target", aarch64::TARGET], &target)?;
    let built = target.join(aarch64::TARGET).join("shipped");
    let dist = lay_out(&built, target.join("dist-aarch64"))?;
    libmlx5::link(&built, &dist, aarch64::LINKER.1, true)?;
    let _step = Step::begin(COMMAND_STEP);
    let carried = target.join("carried-aarch64");
    let carried = carry(&dist, &carried, "aarch64-linux-gnu-strip")?;
    add_command(&build_command(aarch64::TARGET, &carried)?, &dist)?;
    let mut command = Command::new("qemu-aarch64");
    command.arg(dist.join(COMMAND));
    add_share(command, &dist)?;
    Ok(dist)
}

/// The crates that describe the Debian packages.
const PACKAGES: [&str; 2] = ["ringverbs-provider", "ringverbs-cli"];

/// Returns whether cargo-deb is installed.
pub fn has_cargo_deb() -> bool {
    let have = Command::new(cargo()).args(["deb", "--version"]).output();
    have.is_ok_and(|output| output.status.success())
}

/// Builds the Debian packages of the plugin and of the command from the folder of
/// [`dist_with_command`]; returns their paths.
pub fn deb(dist: &Path) -> Result<Vec<PathBuf>> {
    static BUILT: Mutex<Option<Vec<PathBuf>>> = Mutex::new(None);
    build_once(&BUILT, || make_deb(dist))
}

/// Builds the packages for arm64 from the folder of [`dist_for_aarch64`].
pub fn deb_for_aarch64() -> Result<Vec<PathBuf>> {
    let staged = root().join("target/dist-aarch64");
    let dist = target_dir().join("dist-aarch64");
    if dist != staged {
        copy_dist(&dist, &staged)?;
    }
    let variant = ["--variant", "arm64", "--target", aarch64::TARGET];
    run_cargo_deb(target_dir().join("debian-aarch64"), &variant)
}

fn make_deb(dist: &Path) -> Result<Vec<PathBuf>> {
    // cargo-deb takes its files from here, independently of the target directory.
    let staged = root().join("target/dist");
    if dist != staged {
        copy_dist(dist, &staged)?;
    }
    run_cargo_deb(target_dir().join("debian"), &[])
}

fn run_cargo_deb(out: PathBuf, options: &[&str]) -> Result<Vec<PathBuf>> {
    ensure!(
        has_cargo_deb(),
        "cargo-deb is missing: cargo install cargo-deb"
    );
    // Packages of another version would be mistaken for these.
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("cannot empty {}", out.display()))?;
    }
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let _step = Step::begin("making the packages");
    for package in PACKAGES {
        let output = Command::new(cargo())
            .current_dir(root())
            .args(["deb", "--quiet", "--no-build", "-p", package])
            .args(options)
            .arg("--output")
            .arg(&out)
            .output()
            .context("cannot run cargo deb")?;
        ensure!(
            output.status.success(),
            "cargo deb: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let entries = fs::read_dir(&out).with_context(|| format!("cannot read {}", out.display()))?;
    let mut packages: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "deb"))
        .collect();
    packages.sort();
    ensure!(
        packages.len() == PACKAGES.len(),
        "cargo deb has built {packages:?}"
    );
    Ok(packages)
}

fn copy_dist(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        fs::remove_dir_all(to).with_context(|| format!("cannot empty {}", to.display()))?;
    }
    let cannot = || format!("cannot write {}", to.display());
    fs::create_dir_all(to).with_context(cannot)?;
    for name in [LIBRARY, PRELOAD, LIBMLX5, CONFIG, COMMAND] {
        fs::copy(from.join(name), to.join(name)).with_context(cannot)?;
    }
    for link in LINKS {
        symlink(LIBRARY, to.join(link)).with_context(cannot)?;
    }
    let share = from.join(SHARE);
    for file in files_below(&share)? {
        let to = to.join(SHARE).join(&file);
        fs::create_dir_all(to.parent().unwrap_or(&to)).with_context(cannot)?;
        fs::copy(share.join(&file), to).with_context(cannot)?;
    }
    Ok(())
}

/// Returns the sorted files below a folder, relative to it.
pub fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot = || format!("cannot read {}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(cannot)? {
        let entry = entry.with_context(cannot)?;
        let name = PathBuf::from(entry.file_name());
        match entry.file_type().with_context(cannot)?.is_dir() {
            true => found.extend(files_below(&entry.path())?.iter().map(|it| name.join(it))),
            false => found.push(name),
        }
    }
    found.sort();
    Ok(found)
}
