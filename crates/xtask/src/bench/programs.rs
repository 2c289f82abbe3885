//! The programs that are measured, the stand-in for the kernel that both are run
//! with, and what they print.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::measure::Count;
use crate::driver;

/// Which provider libibverbs is to take.
#[derive(Clone, Copy)]
pub enum Provider<'a> {
    /// The C provider that the system has.
    Stock,
    /// Ours, as `RDMAV_DRIVERS` names it.
    Ours(&'a Path),
}

/// The compiled stand-in and the sysfs tree that goes with it, in a folder.
pub struct StandIn {
    dir: PathBuf,
}

impl StandIn {
    /// Compiles it.
    pub fn build(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let options = ["-fPIC", "-shared", "-fvisibility=hidden"];
        compile(&["standin.c"], &dir.join("standin.so"), &options)?;
        sysfs_tree(&dir.join("sys"))?;
        Ok(Self {
            dir: dir.to_owned(),
        })
    }

    fn run(&self, program: &Path, provider: Option<&Path>, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("LD_PRELOAD", self.dir.join("standin.so"))
            .env("SYSFS_PATH", self.dir.join("sys"))
            .env("LD_BIND_NOW", "1")
            .env_remove("IBV_DRIVERS")
            .env_remove("RDMAV_DRIVERS")
            .env_remove("GLIBC_TUNABLES")
            .stderr(Stdio::inherit());
        if let Some(path) = provider {
            command.env("RDMAV_DRIVERS", path);
        }
        let output = command.output();
        let output = output.with_context(|| format!("cannot run {}", program.display()))?;
        ensure!(
            output.status.success(),
            "{} {} failed with {}: its reason is above",
            program.display(),
            arguments.join(" "),
            output.status
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// What one process printed.
#[derive(Default)]
pub struct Output {
    /// The file that served.
    pub provider: String,
    /// Whether it gave a thread domain.
    pub thread_domain: bool,
    /// Of each row that was counted.
    pub counts: Vec<(String, Count)>,
    /// Of each row that was timed, in nanoseconds.
    pub times: Vec<(String, f64)>,
}

/// The C program, which uses libibverbs.
pub struct Verbs<'s> {
    stand_in: &'s StandIn,
    path: PathBuf,
}

impl<'s> Verbs<'s> {
    /// Compiles it.
    pub fn build(stand_in: &'s StandIn) -> Result<Self> {
        let path = stand_in.dir.join("datapath");
        let options = ["-libverbs", "-ldl", "-lpthread"];
        compile(&["datapath.c", "rows.c", "stepper.c"], &path, &options)?;
        Ok(Self { stand_in, path })
    }

    fn run(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        let ours = match provider {
            Provider::Stock => None,
            Provider::Ours(path) => Some(path),
        };
        self.stand_in.run(&self.path, ours, arguments)
    }

    /// Each instruction of a row, as `step OFFSET FILE` lines.
    pub fn trace(&self, provider: Provider, row: &str) -> Result<String> {
        self.run(provider, &["trace", row])
    }

    /// What a run comes to, if the provider that was asked for has served.
    pub fn figures(&self, provider: Provider, arguments: &[&str]) -> Result<Output> {
        let output = parse(&self.run(provider, arguments)?)?;
        let is_ours = output.provider.contains("ringverbs");
        match provider {
            Provider::Stock => ensure!(
                output.provider.contains("librxe"),
                "the C provider was asked for and {} served: install ibverbs-providers",
                output.provider
            ),
            Provider::Ours(path) => ensure!(
                is_ours,
                "{} was asked for and {} served: its refusal is on stderr",
                path.display(),
                output.provider
            ),
        }
        Ok(output)
    }
}

/// The program of the Rust crate, in which no C library is.
pub struct Native<'s> {
    stand_in: &'s StandIn,
    path: PathBuf,
}

impl<'s> Native<'s> {
    /// Has cargo build it.
    pub fn build(stand_in: &'s StandIn) -> Result<Self> {
        let path = driver::build_bench("ringverbs", "datapath")?;
        Ok(Self { stand_in, path })
    }

    /// Each instruction of a row, as `step OFFSET FILE` lines.
    pub fn trace(&self, row: &str) -> Result<String> {
        self.stand_in.run(&self.path, None, &["trace", row])
    }

    /// What a run comes to.
    pub fn figures(&self, arguments: &[&str]) -> Result<Output> {
        parse(&self.stand_in.run(&self.path, None, arguments)?)
    }
}

fn compile(files: &[&str], output: &Path, options: &[&str]) -> Result<()> {
    let source = driver::root().join("provider-plugin/bench");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(&compiler)
        .current_dir(source)
        .args(["-O2", "-g", "-std=gnu11", "-Wall", "-Wextra"])
        .args(files)
        .arg("-o")
        .arg(output)
        .args(options)
        .status()
        .with_context(|| format!("cannot run {compiler}: install a C compiler (gcc)"))?;
    ensure!(
        status.success(),
        "{compiler} could not compile {}: the bench needs the headers of \
         libibverbs-dev and linux-libc-dev (apt-get install libibverbs-dev \
         ibverbs-providers)",
        files.join(", ")
    );
    Ok(())
}

/// What libibverbs reads of sysfs when it has no netlink: one rxe device, whose
/// character device is /dev/null's (1:3).
fn sysfs_tree(root: &Path) -> Result<()> {
    let class = root.join("class");
    for (file, content) in [
        ("infiniband_verbs/abi_version", "6\n"),
        ("infiniband_verbs/uverbs0/dev", "1:3\n"),
        ("infiniband_verbs/uverbs0/ibdev", "rxe0\n"),
        ("infiniband_verbs/uverbs0/abi_version", "2\n"),
        ("infiniband/rxe0/node_type", "1: CA\n"),
        ("infiniband/rxe0/node_guid", "0200:00ff:fe00:0001\n"),
    ] {
        let path = class.join(file);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn parse(text: &str) -> Result<Output> {
    let mut output = Output::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |i: usize| -> Result<f64> {
            words
                .get(i)
                .and_then(|word| word.parse().ok())
                .with_context(|| format!("the bench program printed: {line}"))
        };
        match words.as_slice() {
            ["provider", ..] => output.provider = line["provider ".len()..].to_owned(),
            ["thread-domain", answer] => output.thread_domain = *answer == "yes",
            ["time", row, ..] => output.times.push(((*row).to_owned(), number(2)?)),
            ["count", row, ..] => output.counts.push((
                (*row).to_owned(),
                Count {
                    instructions: number(2)?,
                    locked: number(3)?,
                    fences: number(4)?,
                },
            )),
            ["doorbell", ..] | [] => {}
            _ => bail!("the bench program printed: {line}"),
        }
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_program_prints_is_read() {
        let text = "provider /a b/librxe.so\nthread-domain yes\ntime poll/1 7.5\n\
                    doorbell 2\ncount poll/1 64.125 1.000 0.000\n";
        let output = parse(text).unwrap();
        assert_eq!(output.provider, "/a b/librxe.so");
        assert!(output.thread_domain);
        assert_eq!(output.times, [("poll/1".to_owned(), 7.5)]);
        assert_eq!(output.counts[0].1.instructions, 64.125);
    }

    #[test]
    fn a_line_that_is_not_known_is_an_error() {
        assert!(parse("count poll/1 64\n").is_err());
        assert!(parse("surprise\n").is_err());
    }
}
