//! Which provider gets the device where both could: ours named in the
//! environment with stock configured as usual, ours installed as users install
//! it, and ours removed again.
//!
//! Both libraries are mapped in such a process, so its map does not tell.
//! The test programs do: they look up whose function serves the data path.
//!
//! What is installed has the command `ringverbs` as well, which must be there
//! and list the device, and be gone afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::process::Running;
use super::run::{Runner, last_lines, reason, wait_all};
use crate::record::{self, Outcome, Provider, Record, Stock};

/// The group that the results are reported in.
pub const GROUP: &str = "selection";

/// libibverbs's configuration.
const CONFIG: &str = "/etc/libibverbs.d";

/// The command, where all that installs it puts it.
const COMMAND: &str = "/usr/bin/ringverbs";

/// What the Debian packages are called.
const DEB_NAMES: [&str; 2] = ["ringverbs", "ringverbs-utils"];

/// What installs ours in this system, as users do.
#[derive(Debug, Clone, Default)]
pub struct Installers {
    /// `cargo xtask` as a program: its `install` and `install --uninstall`.
    pub xtask: Option<PathBuf>,
    /// The Debian packages: all are installed, and removed, together.
    pub debs: Vec<PathBuf>,
}

/// Runs `probe`, a test program's command line, in each arrangement. Those of
/// `installers` change this system's files for a while.
pub fn run(runner: &Runner, probe: &str, installers: &Installers) -> Result<()> {
    let Some(plugin) = runner.plugin.clone() else {
        return Ok(());
    };
    let stem = plugin.stem();
    let name = "named in the environment, stock configured";
    try_one(runner, name, probe, &stem, |c| {
        c.env("RDMAV_DRIVERS", &plugin.path);
    })?;
    plain_file(runner, probe, &plugin.path, &stem)?;
    if let Some(xtask) = &installers.xtask {
        let dist = plugin.path.parent().context("the plugin has no folder")?;
        let install = |last: &[&Path]| {
            let mut command = Command::new(xtask);
            command.arg("install").args(last);
            command
        };
        let put = install(&[Path::new("--dist"), dist]);
        let take = install(&[Path::new("--uninstall")]);
        there_and_gone(runner, "cargo xtask install", probe, &stem, put, take)?;
    }
    if !installers.debs.is_empty() {
        let (mut put, mut take) = (Command::new("dpkg"), Command::new("dpkg"));
        put.arg("-i").args(&installers.debs);
        take.arg("-r").args(DEB_NAMES);
        there_and_gone(runner, "dpkg", probe, &stem, put, take)?;
    } else if installers.xtask.is_some() {
        let why = "there is no package: cargo install cargo-deb";
        report(runner, "dpkg", Outcome::Skip, why.into(), Instant::now())?;
    }
    Ok(())
}

/// The newest private ABI that the plugin knows: a later release may share it.
const NEWEST: u32 = 65;

/// With libibverbs as a plain file, whose name tells no version.
fn plain_file(runner: &Runner, probe: &str, plugin: &Path, stem: &str) -> Result<()> {
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
    let expect = if release < NEWEST { stem } else { "librxe" };
    try_one(runner, "libibverbs as a plain file", probe, expect, arrange)?;
    let name = "libibverbs as a plain file, its release named by the user";
    try_one(runner, name, probe, stem, |command| {
        arrange(command);
        command.env("RINGVERBS_RDMA_CORE", &version);
    })?;
    let name = "libibverbs as a plain file, named a wrong release by the user";
    try_one(runner, name, probe, "librxe", |command| {
        arrange(command);
        command.env(
            "RINGVERBS_RDMA_CORE",
            if release == 44 { "45" } else { "44" },
        );
    })
}

/// Installs ours, which must be served then, and removes it, after which stock
/// must be, with its files as they were.
fn there_and_gone(
    runner: &Runner,
    by: &str,
    probe: &str,
    stem: &str,
    mut put: Command,
    mut take: Command,
) -> Result<()> {
    let before = configuration()?;
    let steps = [
        (&mut put, "installed", stem),
        (&mut take, "removed", "librxe"),
    ];
    for (command, state, expect) in steps {
        let began = Instant::now();
        let name = format!("{state} by {by}");
        // dpkg wants what only root's shell finds.
        let out = command
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .output()
            .with_context(|| format!("cannot run {command:?}"))?;
        if out.status.success() {
            try_one(runner, &name, probe, expect, |_| {})?;
            if state == "installed" {
                list(runner, &format!("the command, {name}"))?;
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

/// The command lists the device.
fn list(runner: &Runner, name: &str) -> Result<()> {
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

/// The names in libibverbs's folders, what dpkg has been told to divert, and
/// whether the command is there.
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

fn try_one(
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
    runner.surround(&mut command);
    command.env("RXE_EXPECT", expect);
    arrange(&mut command);
    let mut running = Running::start(command, &runner.scratch.join("selection.txt"))?;
    wait_all(&mut [&mut running], Duration::from_secs(60), Duration::ZERO)?;
    let good = running.ended().is_some_and(|status| status.success());
    let (outcome, detail) = if good {
        (Outcome::Pass, String::new())
    } else {
        (Outcome::Fail, reason(&running.output(), 4))
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
    runner.report.put(&Record::Case(record::Case {
        group: GROUP.into(),
        name: name.to_owned(),
        provider: Provider::Ours,
        outcome,
        stock: Stock::NotRun,
        attempts: 1,
        seconds: began.elapsed().as_secs_f64(),
        detail,
        earlier: String::new(),
        figures: [].into(),
        cached: false,
    }))
}

/// Where libibverbs keeps its providers: where stock's is.
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
