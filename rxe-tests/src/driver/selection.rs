//! Which provider serves a device that both support: with ours named in the environment
//! and stock configured, with ours installed as users install it, and after its removal.
//!
//! Both libraries are mapped in such a process, so its memory map does not show the
//! provider. The test programs find it by the functions of the data path.
//!
//! Installations also contain the command `ringverbs`, which must list the device, and
//! must be removed again.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::process::TestProcess;
use super::run::{Runner, failure_reason, last_lines, wait_all};
use crate::record::{self, Outcome, Provider, Record, StockExpectation};

/// The group of these cases.
pub const GROUP: &str = "selection";

/// libibverbs's configuration.
const CONFIG: &str = "/etc/libibverbs.d";

/// Part of the name of stock's library.
const STOCK: &str = "librxe";

/// The command, as both ways of installation place it.
const COMMAND: &str = "/usr/bin/ringverbs";

/// The names of the Debian packages.
const DEB_NAMES: [&str; 2] = ["ringverbs", "ringverbs-utils"];

/// The ways to install ours in this system, as users do.
#[derive(Debug, Clone, Default)]
pub struct Installers {
    /// `cargo xtask` as a program, for `install` and `install --uninstall`.
    pub xtask: Option<PathBuf>,
    /// The Debian packages, which are installed and removed together.
    pub debs: Vec<PathBuf>,
}

/// Runs `probe`, the command line of a test program, in each configuration.
/// `installers` change this system's files temporarily.
pub fn run(runner: &Runner, probe: &str, installers: &Installers) -> Result<()> {
    let Some(plugin) = runner.plugin.clone() else {
        return Ok(());
    };
    let stem = plugin.stem();
    let name = "named in the environment, stock configured";
    run_probe(runner, name, probe, &stem, |c| {
        c.env("RDMAV_DRIVERS", &plugin.path);
    })?;
    unversioned_libibverbs(runner, probe, &plugin.path, &stem)?;
    if let Some(xtask) = &installers.xtask {
        let dist = plugin.path.parent().context("the plugin has no folder")?;
        let install = |last: &[&Path]| {
            let mut command = Command::new(xtask);
            command.arg("install").args(last);
            command
        };
        let install_command = install(&[Path::new("--dist"), dist]);
        let remove_command = install(&[Path::new("--uninstall")]);
        install_and_remove(
            runner,
            "cargo xtask install",
            probe,
            [
                (install_command, "installed", stem.as_str()),
                (remove_command, "removed", STOCK),
            ],
        )?;
    }
    if !installers.debs.is_empty() {
        let dpkg = |action: &str| {
            let mut command = Command::new("dpkg");
            command.arg(action);
            command
        };
        let (mut unpack, mut configure, mut remove) =
            (dpkg("--unpack"), dpkg("--configure"), dpkg("-r"));
        unpack.args(&installers.debs);
        configure.args(DEB_NAMES);
        remove.args(DEB_NAMES);
        install_and_remove(
            runner,
            "dpkg",
            probe,
            [
                // Stock serves while the package is not configured.
                (unpack, "unpacked", STOCK),
                (configure, "installed", stem.as_str()),
                (remove, "removed", STOCK),
            ],
        )?;
    } else if installers.xtask.is_some() {
        let reason = "there is no package: cargo install cargo-deb";
        report(runner, "dpkg", Outcome::Skip, reason.into(), Instant::now())?;
    }
    Ok(())
}

/// The newest private ABI that the plugin supports: a later release may share it.
const NEWEST_ABI: u32 = 65;

/// Runs the probe with libibverbs as a plain file, whose name has no version.
fn unversioned_libibverbs(runner: &Runner, probe: &str, plugin: &Path, stem: &str) -> Result<()> {
    const LIBRARY: &str = "libibverbs.so.1";
    let folder = providers_folder()?;
    let folder = folder.parent().context("the providers' folder has none")?;
    let file = fs::canonicalize(folder.join(LIBRARY))?;
    let version = file.to_string_lossy().rsplit('/').next().map(|name| {
        let mut parts = name.split('.').skip(4);
        parts.next().unwrap_or_default().to_owned()
    });
    let version = version.unwrap_or_default();
    let release: u32 =
        (version.parse()).with_context(|| format!("{} names no release", file.display()))?;
    let plain = runner.scratch.join("plain");
    fs::create_dir_all(&plain)?;
    fs::copy(&file, plain.join(LIBRARY))?;
    let arrange = |command: &mut Command| {
        command.env("LD_LIBRARY_PATH", &plain);
        command.env("RDMAV_DRIVERS", plugin);
    };
    let expect = if release < NEWEST_ABI { stem } else { "librxe" };
    run_probe(runner, "libibverbs as a plain file", probe, expect, arrange)?;
    let name = "libibverbs as a plain file, its release named by the user";
    run_probe(runner, name, probe, stem, |command| {
        arrange(command);
        command.env("RINGVERBS_RDMA_CORE", &version);
    })?;
    let name = "libibverbs as a plain file, named a wrong release by the user";
    run_probe(runner, name, probe, "librxe", |command| {
        arrange(command);
        command.env(
            "RINGVERBS_RDMA_CORE",
            if release == 44 { "45" } else { "44" },
        );
    })
}

/// Runs the commands of an installation and of its removal. After each one the library that
/// it names must serve, and at last the system's files must be as before.
fn install_and_remove<const STEPS: usize>(
    runner: &Runner,
    by: &str,
    probe: &str,
    steps: [(Command, &str, &str); STEPS],
) -> Result<()> {
    let before = configuration()?;
    for (mut command, state, expect) in steps {
        let began = Instant::now();
        let name = format!("{state} by {by}");
        // dpkg requires programs in root's PATH.
        let out = command
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .output()
            .with_context(|| format!("cannot run {command:?}"))?;
        if out.status.success() {
            run_probe(runner, &name, probe, expect, |_| {})?;
            if state == "installed" {
                check_command(runner, &format!("the command, {name}"))?;
            }
        } else {
            let text = [out.stdout, out.stderr].concat();
            let detail = format!(
                "{command:?}: {}: {}",
                out.status,
                last_lines(&String::from_utf8_lossy(&text), 4)
            );
            report(runner, &name, Outcome::Fail, detail, began)?;
        }
    }
    let after = configuration()?;
    let (outcome, detail) = if before == after {
        (Outcome::Pass, String::new())
    } else {
        (Outcome::Fail, format!("{after:?}, before {before:?}"))
    };
    let name = format!("nothing left by {by}");
    report(runner, &name, outcome, detail, Instant::now())
}

/// Checks that the command lists the device.
fn check_command(runner: &Runner, name: &str) -> Result<()> {
    let began = Instant::now();
    let device = &runner.device.name;
    let (outcome, detail) = match Command::new(COMMAND).arg("devices").output() {
        Err(error) => (Outcome::Fail, format!("{COMMAND}: {error}")),
        Ok(out) => {
            let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
            let listed = text.lines().any(|line| line.starts_with(device.as_str()));
            match out.status.success() && listed {
                true => (Outcome::Pass, String::new()),
                false => (Outcome::Fail, last_lines(&text, 4)),
            }
        }
    };
    report(runner, name, outcome, detail, began)
}

/// Returns the files in libibverbs's folders, dpkg's diversions, and the command if it
/// is installed.
fn configuration() -> Result<BTreeSet<String>> {
    let command = Path::new(COMMAND).exists().then(|| COMMAND.to_owned());
    let mut names = BTreeSet::from_iter(command);
    for folder in [PathBuf::from(CONFIG), providers_folder()?] {
        for entry in fs::read_dir(&folder)? {
            names.insert(entry?.path().to_string_lossy().into_owned());
        }
    }
    let diverted = Command::new("dpkg-divert")
        .args(["--list", "*rxe*"])
        .output()
        .context("cannot run dpkg-divert")?;
    let lines = String::from_utf8_lossy(&diverted.stdout);
    names.extend(lines.lines().map(str::to_owned));
    Ok(names)
}

fn run_probe(
    runner: &Runner,
    name: &str,
    probe: &str,
    expect: &str,
    arrange: impl Fn(&mut Command),
) -> Result<()> {
    let began = Instant::now();
    let mut words = probe.split_whitespace();
    let mut command = Command::new(words.next().context("an empty probe")?);
    command
        .args(words)
        .env_remove("RDMAV_DRIVERS")
        .env_remove("IBV_DRIVERS")
        .current_dir(&runner.scratch);
    runner.set_environment(&mut command);
    command.env("RXE_EXPECT", expect);
    arrange(&mut command);
    let mut running = TestProcess::start(command, &runner.scratch.join("selection.txt"))?;
    wait_all(&mut [&mut running], Duration::from_secs(60), Duration::ZERO)?;
    let good = running.exit_status().is_some_and(|status| status.success());
    let (outcome, detail) = if good {
        (Outcome::Pass, String::new())
    } else {
        (Outcome::Fail, failure_reason(&running.output(), 4))
    };
    report(runner, name, outcome, detail, began)
}

fn report(
    runner: &Runner,
    name: &str,
    outcome: Outcome,
    detail: String,
    began: Instant,
) -> Result<()> {
    runner.report.write(&Record::Case(record::Case {
        group: GROUP.into(),
        name: name.to_owned(),
        provider: Provider::Ours,
        outcome,
        stock: StockExpectation::NotRun,
        attempts: 1,
        seconds: began.elapsed().as_secs_f64(),
        detail,
        earlier: String::new(),
        figures: [].into(),
        cached: false,
    }))
}

/// Returns libibverbs's folder of providers, which has stock's.
fn providers_folder() -> Result<PathBuf> {
    let folders = ["/usr/lib", "/usr/lib64"];
    let mut candidates: Vec<PathBuf> = folders.iter().map(PathBuf::from).collect();
    for folder in folders {
        if let Ok(entries) = fs::read_dir(folder) {
            candidates.extend(entries.flatten().map(|entry| entry.path()));
        }
    }
    candidates
        .into_iter()
        .map(|folder| folder.join("libibverbs"))
        .find(|folder| {
            fs::read_dir(folder).is_ok_and(|mut entries| {
                entries.any(|entry| {
                    entry.is_ok_and(|e| e.file_name().to_string_lossy().starts_with("librxe-"))
                })
            })
        })
        .context("no folder of libibverbs's providers has librxe")
}
