//! `cargo xtask programs --frameworks`: the scripts of rxe-tests/frameworks on embedded
//! devices, with rdma-core's libmlx5 and with ours.

use std::env;
use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::list::{FRAMEWORKS, Framework, Source};
use crate::bench::report;
use crate::driver;
use crate::suite::TempDir;

/// The folder of the scripts.
const SCRIPTS: &str = "rxe-tests/frameworks";

/// The page with the table.
const PAGE: &str = "docs/embedded.md";

/// The lines around the table.
const BEGIN: &str =
    "<!-- frameworks:begin, written by cargo xtask programs --frameworks --write -->";
const END: &str = "<!-- frameworks:end -->";

const HEAD: &str = "| program | version | libmlx5 | ringverbs |\n|---|---|---|---|\n";

/// The provider of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Provider {
    Stock,
    Ours,
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stock => "libmlx5",
            Self::Ours => "ringverbs",
        })
    }
}

/// The result of a framework with both providers, on its ports.
struct Row {
    name: &'static str,
    version: String,
    /// Ports that passed and ports that failed, with libmlx5 and with ours.
    results: [[Vec<&'static str>; 2]; 2],
}

/// Which frameworks to run, and what to do with the results.
pub struct Options<'a> {
    pub filter: &'a [String],
    pub large: bool,
    pub write: bool,
}

impl Options<'_> {
    fn select(&self) -> Vec<&'static Framework> {
        let named = |framework: &Framework| {
            let contains = |text: &String| framework.name.contains(&**text);
            self.filter.iter().any(contains)
        };
        let selected = |framework: &&Framework| match self.filter {
            [] => self.large || !framework.large,
            _ => named(framework),
        };
        FRAMEWORKS.iter().filter(selected).collect()
    }
}

/// Prints the list.
pub fn list(options: &Options<'_>) {
    for framework in options.select() {
        let Framework {
            name,
            source,
            ports,
            seconds,
            ..
        } = framework;
        let ports = ports.join(" ");
        println!("{name:<16} {seconds:>4} s  {ports:<12} {source}");
    }
}

/// Runs the selected frameworks; prints their output and each result immediately, and the
/// table at the end. Returns the number of failures.
pub fn run(options: &Options<'_>, dist: &Path) -> Result<usize> {
    let command = dist.join("ringverbs");
    ensure!(
        command.is_file(),
        "there is no {}: cargo xtask dist",
        command.display()
    );
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let mut rows = Vec::new();
    for framework in options.select() {
        let installed = match install(framework) {
            Ok(installed) => installed,
            Err(error) => {
                println!("skipped {}: {error:#}", framework.name);
                skipped += 1;
                continue;
            }
        };
        let mut row = Row {
            name: framework.name,
            version: installed.version.clone(),
            results: Default::default(),
        };
        for &port in framework.ports {
            for (number, provider) in [Provider::Stock, Provider::Ours].into_iter().enumerate() {
                println!("        {} [{provider}, {port}]", framework.name);
                let began = Instant::now();
                let succeeded = run_once(framework, &installed, &command, port, provider)?;
                let outcome = if succeeded { "ok" } else { "FAILED" };
                let seconds = began.elapsed().as_secs_f32();
                println!(
                    "{outcome:<7} {} [{provider}, {port}] {seconds:.1} s",
                    framework.name
                );
                *if succeeded { &mut passed } else { &mut failed } += 1;
                row.results[number][usize::from(!succeeded)].push(port);
            }
        }
        rows.push(row);
        if options.write {
            // After each, so that an interrupted run keeps its results.
            write(&rows)?;
        }
    }
    println!("\n{HEAD}{}", rows.iter().map(line).collect::<String>());
    println!("frameworks: {passed} passed, {failed} failed, {skipped} skipped");
    Ok(failed)
}

/// A framework that can be run.
struct Installed {
    version: String,
    /// Folders that precede `PATH`.
    path: Vec<PathBuf>,
    /// Arguments of the script.
    arguments: Vec<PathBuf>,
}

/// Installs a framework: Debian's packages only if this is root, all else in the target
/// directory.
fn install(framework: &Framework) -> Result<Installed> {
    rxe_tests::guest::host::require(framework.packages, false)?;
    let folder = driver::target_dir()
        .join("frameworks")
        .join(framework.name.replace(' ', "-"));
    let mut installed = Installed {
        version: String::new(),
        path: Vec::new(),
        arguments: Vec::new(),
    };
    match framework.source {
        Source::Debian(package) => installed.version = debian_version(package)?,
        Source::PyPi(requirements) => {
            let bin = folder.join("bin");
            if !bin.join("pip").exists() {
                output(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
            }
            output(
                Command::new(bin.join("pip"))
                    .args(["install", "--quiet", "--disable-pip-version-check"])
                    .args(requirements),
            )?;
            let first = requirements.first().context("no requirement")?;
            let (_, version) = first.split_once("==").unwrap_or((first, ""));
            installed.version = version.to_owned();
            installed.path.push(bin);
        }
        Source::CratesIo(name, version) => {
            installed.version = version.to_owned();
            installed
                .arguments
                .push(unpack_crate(&folder, name, version)?);
        }
    }
    Ok(installed)
}

/// Returns the upstream version of an installed package.
fn debian_version(package: &str) -> Result<String> {
    let version = output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", package]))?;
    Ok(upstream_version(&version).to_owned())
}

/// Returns `4.0.2` of `1:4.0.2+dfsg-3+b1`.
fn upstream_version(version: &str) -> &str {
    let version = version.split_once(':').map_or(version, |(_, rest)| rest);
    let version = version.rsplit_once('-').map_or(version, |(rest, _)| rest);
    let version = version.strip_prefix("0.0~").unwrap_or(version);
    version.split_once('+').map_or(version, |(start, _)| start)
}

/// Copies the source of a crate from cargo's registry.
fn unpack_crate(folder: &Path, name: &str, version: &str) -> Result<PathBuf> {
    let source = folder.join(format!("{name}-{version}"));
    if source.is_dir() {
        return Ok(source);
    }
    let manifest = folder.join("fetch/Cargo.toml");
    fs::create_dir_all(folder.join("fetch/src"))?;
    fs::write(folder.join("fetch/src/lib.rs"), "")?;
    fs::write(
        &manifest,
        format!(
            "[workspace]\n[package]\nname = \"fetch\"\nedition = \"2024\"\n\
             [dependencies]\n{name} = \"={version}\"\n"
        ),
    )?;
    let metadata = output(
        Command::new("cargo")
            .args(["metadata", "--format-version", "1", "--manifest-path"])
            .arg(&manifest),
    )?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let package = packages.iter().find(|package| package["name"] == *name);
    let path = package.and_then(|package| package["manifest_path"].as_str());
    let path = Path::new(path.context("the crate is not among its packages")?);
    let path = path.parent().context("a manifest without folder")?;
    output(Command::new("cp").arg("-r").args([path, &source]))?;
    // Keeps cargo from looking for a workspace further up.
    let mut manifest = fs::OpenOptions::new()
        .append(true)
        .open(source.join("Cargo.toml"))?;
    manifest.write_all(b"\n[workspace]\n")?;
    Ok(source)
}

/// Runs a command and returns its output.
fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.lines().rfind(|line| !line.trim().is_empty());
        bail!("{name}: {}", last.unwrap_or("failed without a word"));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a script once, prints its output, and returns whether it succeeded.
fn run_once(
    framework: &Framework,
    installed: &Installed,
    command: &Path,
    port: &str,
    provider: Provider,
) -> Result<bool> {
    let network = TempDir::new("frameworks")?;
    let path = env::var_os("PATH").unwrap_or_default();
    let path = installed
        .path
        .iter()
        .cloned()
        .chain(env::split_paths(&path));
    // An own process group, which `timeout` ends as a whole.
    let mut run = Command::new("timeout");
    run.arg("--kill-after=5")
        // A busy machine, and a script's own builds.
        .arg((framework.seconds * 10 + 60).to_string())
        .arg(command)
        .arg("run")
        .arg(format!("--embedded={port}"))
        .arg("--directory")
        .arg(network.0.join("network"))
        .arg(format!("--require-rdma={}", framework.bytes));
    if provider == Provider::Ours {
        run.args(["--devices", "mlx5"]);
    }
    let script = driver::root().join(SCRIPTS).join(framework.script);
    run.arg("--")
        .arg(script)
        .args(&installed.arguments)
        .args(framework.arguments)
        .env("PATH", env::join_paths(path)?)
        .env(
            "CARGO_TARGET_DIR",
            driver::target_dir().join("frameworks/target"),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = run.spawn().context("cannot run timeout")?;
    let out = child.stdout.take().context("no output")?;
    for line in BufReader::new(out).lines().map_while(Result::ok) {
        println!("        {line}");
    }
    Ok(child.wait()?.success())
}

/// The row's line of the table.
fn line(row: &Row) -> String {
    let cells = row.results.each_ref().map(|[passed, failed]| {
        let failed = failed.iter().map(|port| format!("{port} fails"));
        let passed = passed.iter().map(|port| (*port).to_owned());
        passed.chain(failed).collect::<Vec<_>>().join(", ")
    });
    let [stock, ours] = cells;
    format!("| {} | {} | {stock} | {ours} |\n", row.name, row.version)
}

/// Replaces the rows of these frameworks in the table.
fn write(rows: &[Row]) -> Result<()> {
    let page = driver::root().join(PAGE);
    let text = fs::read_to_string(&page)?;
    let old = text
        .split_once(BEGIN)
        .and_then(|(_, rest)| rest.split_once(END));
    let (old, _) = old.with_context(|| format!("{PAGE} lacks the lines of the table"))?;
    report::replace_in(&page, BEGIN, END, &merged(old, rows))
}

/// Returns the table in the order of the list, with new rows in place of old ones.
fn merged(old: &str, rows: &[Row]) -> String {
    let lines = FRAMEWORKS.iter().filter_map(|framework| {
        let new = rows.iter().find(|row| row.name == framework.name);
        let start = format!("| {} |", framework.name);
        let old = old.lines().find(|line| line.starts_with(&start));
        new.map(line)
            .or_else(|| old.map(|line| format!("{line}\n")))
    });
    format!("{HEAD}{}", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_script_is_in_the_list() {
        let folder = driver::root().join(SCRIPTS);
        let mut scripts: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut listed: Vec<_> = FRAMEWORKS
            .iter()
            .map(|framework| framework.script)
            .collect();
        scripts.retain(|name| !super::super::list::BY_HAND.contains(&name.as_str()));
        scripts.sort();
        listed.sort_unstable();
        listed.dedup();
        assert_eq!(scripts, listed);
        let names = FRAMEWORKS.iter().map(|framework| framework.name);
        assert!(
            names
                .clone()
                .all(|name| names.clone().filter(|n| *n == name).count() == 1)
        );
        assert!(report::has_markers(PAGE, BEGIN, END));
    }

    #[test]
    fn versions_without_epoch_and_revision() {
        for (version, upstream) in [
            ("1:1.0.85-1+deb12u1", "1.0.85"),
            ("4.0.2-3+b1", "4.0.2"),
            ("0.0~git20220518.5b14351-3", "git20220518.5b14351"),
            ("1:7.2+dfsg-7+deb12u18", "7.2"),
        ] {
            assert_eq!(upstream_version(version), upstream);
        }
    }

    #[test]
    fn new_rows_replace_old_ones() {
        let [first, second, third] = [0, 1, 2].map(|index| FRAMEWORKS[index].name);
        let old =
            format!("| {second} | 1 | roce | roce |\n| {first} | 1 | roce | |\n| gone | 1 |\n");
        let row = |name, passed: &[&'static str], failed: &[&'static str]| Row {
            name,
            version: "2".to_owned(),
            results: [
                [passed.to_vec(), vec![]],
                [passed.to_vec(), failed.to_vec()],
            ],
        };
        let new = [
            row(third, &["roce"], &["ib"]),
            row(first, &["roce", "ib"], &[]),
        ];
        let expected = format!(
            "{HEAD}| {first} | 2 | roce, ib | roce, ib |\n| {second} | 1 | roce | roce |\n\
             | {third} | 2 | roce | roce, ib fails |\n"
        );
        assert_eq!(merged(&old, &new), expected);
    }
}
