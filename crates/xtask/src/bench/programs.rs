//! The measured programs, their stand-in for the kernel, and the parser of their output.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::measure::Count;
use crate::driver;
use crate::standin::{Provider, StandIn, output_of};

/// The sysfs files of one rxe device, which libibverbs reads without netlink; the
/// character device is /dev/null (1:3).
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

/// The parsed output of one process.
#[derive(Default)]
pub struct Output {
    /// File name of the provider that served.
    pub provider: String,
    /// Whether the provider supports thread domains.
    pub thread_domain: bool,
    /// Counts by row.
    pub counts: Vec<(String, Count)>,
    /// Times by row, in nanoseconds.
    pub times: Vec<(String, f64)>,
    /// Times by row of calls that return immediately, in nanoseconds.
    pub calls: Vec<(String, f64)>,
}

impl Output {
    /// Returns the counts of a row.
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
    /// Compiles the program.
    pub fn build(stand_in: &'s StandIn) -> Result<Self> {
        let floor = stand_in.library("floor_calls.c")?;
        let floor = floor
            .to_str()
            .context("the target directory's path is not UTF-8")?;
        let files = ["datapath.c", "rows.c", "stepper.c", floor];
        let path = stand_in.program("datapath", &files)?;
        Ok(Self { stand_in, path })
    }

    fn run(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        output_of(&mut self.stand_in.command(&self.path, provider, arguments))
    }

    /// Each instruction of a row, as `step OFFSET FILE` lines.
    pub fn trace(&self, provider: Provider, row: &str) -> Result<String> {
        self.run(provider, &["trace", row])
    }

    /// Runs the program and parses its output.
    ///
    /// # Errors
    /// The run failed, or another provider has served.
    pub fn figures(&self, provider: Provider, arguments: &[&str]) -> Result<Output> {
        let output = parse(&self.run(provider, arguments)?)?;
        let is_ours = output.provider.contains("ringverbs");
        match provider {
            Provider::Stock | Provider::StockAt(_) => ensure!(
                output.provider.contains("librxe"),
                "{} served instead of the stock provider: install ibverbs-providers",
                output.provider
            ),
            Provider::Ours(path) => ensure!(
                is_ours,
                "{} served instead of {}: its refusal is on stderr",
                output.provider,
                path.display()
            ),
        }
        Ok(output)
    }
}

/// The program of the Rust crate, which uses no C library.
pub struct Native<'s> {
    stand_in: &'s StandIn,
    path: PathBuf,
}

impl<'s> Native<'s> {
    /// Builds the bench of that name.
    pub fn build(stand_in: &'s StandIn, name: &str) -> Result<Self> {
        let path = driver::build_bench("ringverbs", name)?;
        Ok(Self { stand_in, path })
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        // The program loads no provider.
        output_of(
            &mut self
                .stand_in
                .command(&self.path, Provider::Stock, arguments),
        )
    }

    /// Each instruction of a row, as `step OFFSET FILE` lines.
    pub fn trace(&self, row: &str) -> Result<String> {
        self.run(&["trace", row])
    }

    /// Runs the program and parses its output.
    pub fn figures(&self, arguments: &[&str]) -> Result<Output> {
        parse(&self.run(arguments)?)
    }
}

/// Parses the output of a program of the bench.
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
    fn program_output_is_parsed() {
        let text = "provider /a b/librxe.so\nthread-domain yes\ntime poll/1 7.5\n\
                    doorbell 2\ncount poll/1 64.125 1.000 0.000\n";
        let output = parse(text).unwrap();
        assert_eq!(output.provider, "/a b/librxe.so");
        assert!(output.thread_domain);
        assert_eq!(output.times, [("poll/1".to_owned(), 7.5)]);
        assert_eq!(output.counts[0].1.instructions, 64.125);
    }

    #[test]
    fn an_unknown_line_is_an_error() {
        assert!(parse("count poll/1 64\n").is_err());
        assert!(parse("surprise\n").is_err());
    }
}
