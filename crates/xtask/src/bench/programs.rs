//! The programs that are measured, the stand-in for the kernel that both are run
//! with, and what they print.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::measure::Count;
use crate::driver;
use crate::standin::{Provider, StandIn, printed};

/// What libibverbs reads of sysfs when it has no netlink: one rxe device, whose
/// character device is /dev/null's (1:3).
const DEVICE: &[(&str, &str)] = &[
    ("infiniband_verbs/abi_version", "6\n"),
    ("infiniband_verbs/uverbs0/dev", "1:3\n"),
    ("infiniband_verbs/uverbs0/ibdev", "rxe0\n"),
    ("infiniband_verbs/uverbs0/abi_version", "2\n"),
    ("infiniband/rxe0/node_type", "1: CA\n"),
    ("infiniband/rxe0/node_guid", "0200:00ff:fe00:0001\n"),
];

/// Compiles the stand-in for rdma_rxe.
pub fn stand_in(dir: &Path) -> Result<StandIn> {
    StandIn::build(dir, "standin.c", DEVICE)
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
    /// Of the same, where every call returns at once.
    pub calls: Vec<(String, f64)>,
}

impl Output {
    /// What a row was counted to.
    pub fn count(&self, row: &str) -> Result<Count> {
        let found = self.counts.iter().find(|(name, _)| name == row);
        let (_, count) = found.with_context(|| format!("row {row} was not counted"))?;
        Ok(*count)
    }
}

/// The C program, which uses libibverbs.
pub struct Verbs<'s> {
    stand_in: &'s StandIn,
    path: PathBuf,
}

impl<'s> Verbs<'s> {
    /// Compiles it.
    pub fn build(stand_in: &'s StandIn) -> Result<Self> {
        let path = stand_in.program("datapath", &["datapath.c", "rows.c", "stepper.c"])?;
        Ok(Self { stand_in, path })
    }

    fn run(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        printed(&mut self.stand_in.command(&self.path, provider, arguments))
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
            Provider::Stock | Provider::StockAt(_) => ensure!(
                output.provider.contains("librxe"),
                "the stock provider was asked for and {} served: install ibverbs-providers",
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
    /// Has cargo build the one of that name, for that stand-in.
    pub fn build(stand_in: &'s StandIn, name: &str) -> Result<Self> {
        let path = driver::build_bench("ringverbs", name)?;
        Ok(Self { stand_in, path })
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        // It loads no provider.
        printed(
            &mut self
                .stand_in
                .command(&self.path, Provider::Stock, arguments),
        )
    }

    /// Each instruction of a row, as `step OFFSET FILE` lines.
    pub fn trace(&self, row: &str) -> Result<String> {
        self.run(&["trace", row])
    }

    /// What a run comes to.
    pub fn figures(&self, arguments: &[&str]) -> Result<Output> {
        parse(&self.run(arguments)?)
    }
}

/// Reads what a program of the bench prints.
pub fn parse(text: &str) -> Result<Output> {
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
            ["calls", row, ..] => output.calls.push(((*row).to_owned(), number(2)?)),
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
