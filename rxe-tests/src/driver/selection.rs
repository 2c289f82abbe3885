//! Which provider gets the device where both could: ours named in the
//! environment with stock configured as usual, ours installed, and ours
//! removed again.
//!
//! Both libraries are mapped in such a process, so its map does not tell.
//! The test programs do: they look up whose function serves the data path.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::process::Running;
use super::run::{Runner, reason, wait_all};
use crate::record::{self, Outcome, Provider, Record, Stock};

/// The group that the results are reported in.
pub const GROUP: &str = "selection";

/// libibverbs's configuration, and the files in it for stock and ours.
const CONFIG: &str = "/etc/libibverbs.d";
const STOCK: &str = "rxe.driver";
const OURS: &str = "ringverbs.driver";

/// Runs `probe`, a test program's command line, in each arrangement.
/// `install` allows those that change this system's files for a while.
pub fn run(runner: &Runner, probe: &str, install: bool) -> Result<()> {
    let Some(plugin) = runner.plugin.clone() else {
        return Ok(());
    };
    let stem = plugin.stem();
    try_one(
        runner,
        "named in the environment, stock configured",
        probe,
        &stem,
        |c| {
            c.env("RDMAV_DRIVERS", &plugin.0);
        },
    )?;
    if install {
        let from = plugin.0.parent().context("the plugin has no folder")?;
        let mut installed = Installed::put(from, &stem)?;
        try_one(runner, "installed", probe, &stem, |_| {})?;
        installed.remove()?;
        try_one(runner, "removed again", probe, "librxe", |_| {})?;
    }
    Ok(())
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
    runner.report.put(&Record::Case(record::Case {
        group: GROUP.into(),
        name: name.to_owned(),
        provider: Provider::Ours,
        outcome: if good { Outcome::Pass } else { Outcome::Fail },
        stock: Stock::NotRun,
        attempts: 1,
        seconds: began.elapsed().as_secs_f64(),
        detail: if good {
            String::new()
        } else {
            reason(&running.output(), 4)
        },
        earlier: String::new(),
        figures: [].into(),
    }))
}

/// Our files in libibverbs's folders; taken away when dropped.
struct Installed {
    files: Vec<PathBuf>,
}

impl Installed {
    fn put(from: &Path, stem: &str) -> Result<Installed> {
        let providers = providers_folder()?;
        let mut installed = Installed { files: Vec::new() };
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let name = entry.file_name();
            let text = name.to_string_lossy();
            let to = if text.starts_with(stem) && text.ends_with(".so") {
                providers.join(&name)
            } else if text == OURS {
                Path::new(CONFIG).join(&name)
            } else {
                continue;
            };
            fs::copy(entry.path(), &to).with_context(|| format!("cannot make {}", to.display()))?;
            installed.files.push(to);
        }
        fs::rename(Path::new(CONFIG).join(STOCK), aside())?;
        Ok(installed)
    }

    fn remove(&mut self) -> Result<()> {
        for file in self.files.drain(..) {
            fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
        }
        if aside().exists() {
            fs::rename(aside(), Path::new(CONFIG).join(STOCK))?;
        }
        Ok(())
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

fn aside() -> PathBuf {
    Path::new("/etc").join("rxe.driver.aside")
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
