//! Compiling the bench program, running it with either provider, and what the
//! runs have in common.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::driver;

/// Which provider libibverbs is to take.
#[derive(Clone, Copy)]
pub enum Provider<'a> {
    /// The C provider that the system has.
    Stock,
    /// Ours, as `RDMAV_DRIVERS` names it.
    Ours(&'a Path),
}

/// Exact counts of one operation.
#[derive(Clone, Copy, Default)]
pub struct Count {
    /// Retired instructions, without the bench's loop and the doorbell's inside.
    pub instructions: f64,
    /// Locked instructions, xchg with memory included.
    pub locked: f64,
    /// lfence, mfence and sfence.
    pub fences: f64,
}

/// A median and the quartiles around it.
#[derive(Clone, Copy, Default)]
pub struct Spread {
    /// The lower quartile.
    pub low: f64,
    /// The median.
    pub median: f64,
    /// The upper quartile.
    pub high: f64,
}

impl Spread {
    /// Of values in any order; all zero when there is none.
    pub fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let at = |part: usize| values[(values.len() - 1) * part / 4];
        Self {
            low: at(1),
            median: at(2),
            high: at(3),
        }
    }
}

/// What one row came to.
#[derive(Default)]
pub struct Row {
    /// The row's name: operation and batch.
    pub name: String,
    /// Exact counts with the C provider.
    pub stock_count: Count,
    /// Exact counts with ours.
    pub ours_count: Count,
    /// Median over processes, in nanoseconds of one operation.
    pub stock_ns: f64,
    /// The same with ours.
    pub ours_ns: f64,
    /// Ours over stock, of neighbouring processes.
    pub ratio: Spread,
    /// Stock over stock, of neighbouring processes.
    pub noise: Spread,
}

impl Row {
    /// A bare loop for comparison, not a provider's operation.
    pub fn is_floor(&self) -> bool {
        self.name.starts_with("floor-")
    }
}

/// Everything that was measured.
pub struct Results {
    /// The rows in the bench program's order.
    pub rows: Vec<Row>,
    /// How many pairs of processes were timed; 0: none.
    pub pairs: usize,
    /// The file names of the providers that served.
    pub stock_file: String,
    /// Ours.
    pub ours_file: String,
    /// Whether ours gave a thread domain.
    pub thread_domain: bool,
    /// The processor, as the kernel names it.
    pub processor: String,
    /// Other work that the machine had at the start, as the kernel's load
    /// average of a minute: much of it, and the times say little.
    pub load: String,
}

/// The compiled bench program and what it is run with.
pub struct Program {
    dir: PathBuf,
}

/// What one process printed.
#[derive(Default)]
struct Output {
    provider: String,
    thread_domain: bool,
    counts: Vec<(String, Count)>,
    times: Vec<(String, f64)>,
}

impl Program {
    /// Compiles the program and the stand-in, and makes the sysfs tree.
    pub fn build(dir: &Path) -> Result<Self> {
        let source = driver::root().join("provider-plugin/bench");
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        compile(
            &source,
            &["standin.c"],
            &dir.join("standin.so"),
            &["-fPIC", "-shared", "-fvisibility=hidden"],
        )?;
        compile(
            &source,
            &["datapath.c", "rows.c", "stepper.c"],
            &dir.join("datapath"),
            &["-libverbs", "-ldl", "-lpthread"],
        )?;
        sysfs_tree(&dir.join("sys"))?;
        Ok(Self {
            dir: dir.to_owned(),
        })
    }

    fn run(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.dir.join("datapath"));
        command
            .args(arguments)
            .env("LD_PRELOAD", self.dir.join("standin.so"))
            .env("SYSFS_PATH", self.dir.join("sys"))
            .env("LD_BIND_NOW", "1")
            .env_remove("IBV_DRIVERS")
            .env_remove("RDMAV_DRIVERS")
            .env_remove("GLIBC_TUNABLES")
            .stderr(Stdio::inherit());
        if let Provider::Ours(path) = provider {
            command.env("RDMAV_DRIVERS", path);
        }
        let output = command.output().context("cannot run the bench program")?;
        ensure!(
            output.status.success(),
            "the bench program ({}) failed with {}: its reason is above",
            arguments.join(" "),
            output.status
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Each instruction of a row, as `step OFFSET FILE` lines.
    pub fn trace(&self, provider: Provider, row: &str) -> Result<String> {
        self.run(provider, &["trace", row])
    }

    fn figures(&self, provider: Provider, arguments: &[&str]) -> Result<Output> {
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

    /// Counts once with each provider, then times `pairs` pairs of processes.
    pub fn measure(&self, ours: &Path, pairs: usize, samples: usize) -> Result<Results> {
        let load = load();
        eprintln!("counting instructions of both providers");
        let stock_counts = self.figures(Provider::Stock, &["count"])?;
        let ours_counts = self.figures(Provider::Ours(ours), &["count"])?;

        let samples = samples.to_string();
        let mut stock_runs = Vec::new();
        let mut ours_runs = Vec::new();
        for pair in 0..pairs {
            eprint!("\rtiming pair {} of {pairs} ", pair + 1);
            stock_runs.push(self.figures(Provider::Stock, &["time", &samples])?);
            ours_runs.push(self.figures(Provider::Ours(ours), &["time", &samples])?);
        }
        if pairs > 0 {
            eprintln!();
        }

        let mut rows = Vec::new();
        for (i, (name, stock_count)) in stock_counts.counts.iter().enumerate() {
            let Some((_, ours_count)) = ours_counts.counts.get(i).filter(|(n, _)| n == name) else {
                bail!("row {name} was counted with one provider only");
            };
            let stock = times_of(&stock_runs, name)?;
            let ours = times_of(&ours_runs, name)?;
            let ratio = stock.iter().zip(&ours).map(|(s, o)| o / s).collect();
            let noise = stock.windows(2).map(|two| two[1] / two[0]).collect();
            rows.push(Row {
                name: name.clone(),
                stock_count: *stock_count,
                ours_count: *ours_count,
                ratio: Spread::of(ratio),
                noise: Spread::of(noise),
                stock_ns: Spread::of(stock).median,
                ours_ns: Spread::of(ours).median,
            });
        }
        Ok(Results {
            rows,
            pairs,
            stock_file: real_name(&stock_counts.provider),
            ours_file: real_name(&ours_counts.provider),
            thread_domain: ours_counts.thread_domain,
            processor: processor(),
            load,
        })
    }
}

fn times_of(runs: &[Output], name: &str) -> Result<Vec<f64>> {
    runs.iter()
        .map(|run| {
            run.times
                .iter()
                .find(|(row, _)| row == name)
                .map(|(_, ns)| *ns)
                .with_context(|| format!("row {name} was not timed in every process"))
        })
        .collect()
}

fn compile(source: &Path, files: &[&str], output: &Path, options: &[&str]) -> Result<()> {
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

/// The name of the file that a provider's path leads to, without its folder.
pub(super) fn real_name(path: &str) -> String {
    let real = fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path));
    real.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

pub(super) fn load() -> String {
    fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split(' ').next().map(str::to_owned))
        .unwrap_or_else(|| "unknown".to_owned())
}

pub(super) fn processor() -> String {
    fs::read_to_string("/proc/cpuinfo")
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned())
        .unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_the_quartiles() {
        let spread = Spread::of(vec![5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!((spread.low, spread.median, spread.high), (2.0, 3.0, 4.0));
        assert_eq!(Spread::of(Vec::new()).median, 0.0);
    }

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
