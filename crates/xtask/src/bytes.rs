//! `cargo xtask bytes`: compares the bytes that the plugin and the stock provider write
//! for ConnectX, for the same work requests.
//!
//! Both run the same program (`provider-plugin/bench/mlx5_bytes.c`) on a stand-in for the
//! driver. It prints queue entries, doorbell records and doorbell registers. Each
//! difference must have a reason of [`explain`]; docs/internals/mlx5.md lists them.

mod explain;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, ensure};

use crate::mlx5::Program;
use crate::standin::Provider;
use crate::{dist, driver};
use explain::Reason;

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// A provider instead of a fresh build, as RDMAV_DRIVERS names it: the path
    /// without `-rdmav<ABI>.so`
    #[arg(long)]
    provider: Option<PathBuf>,
    /// Print every line that differs, with its reason
    #[arg(long)]
    differences: bool,
}

/// One case: its header, and its lines by key.
struct Case {
    header: String,
    lines: BTreeMap<String, String>,
}

/// The results of the comparison.
#[derive(Default)]
pub struct Outcome {
    cases: usize,
    requests: usize,
    receives: usize,
    completions: usize,
    bytes: usize,
    /// Number of lines that differ, by reason.
    explained: BTreeMap<Reason, usize>,
    /// Descriptions of all lines that differ.
    differences: Vec<String>,
    /// Descriptions of those without a reason.
    pub unexplained: Vec<String>,
}

impl Outcome {
    /// Returns the number of cases without an unexplained difference.
    pub fn passed(&self) -> usize {
        self.cases.saturating_sub(self.unexplained.len())
    }

    /// Returns the counts as text.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{} send work requests, {} receives and {} completions in {} cases, {} bytes of \
             queue entries, doorbell records and registers\n",
            self.requests, self.receives, self.completions, self.cases, self.bytes
        );
        for reason in Reason::ALL {
            let lines = self.explained.get(&reason).copied().unwrap_or_default();
            text.push_str(&format!(
                "{lines:5}  {}: {}\n",
                reason.name(),
                reason.explanation()
            ));
        }
        text.push_str(&format!("{:5}  not explained\n", self.unexplained.len()));
        text
    }
}

/// Runs the program with both providers and compares.
///
/// # Errors
/// A program does not build or run, or the corpus is too small.
pub fn compare(ours: &Path) -> Result<Outcome> {
    let program = Program::build(
        &driver::target_dir().join("bytes"),
        "mlx5_bytes",
        &[
            "mlx5_bytes.c",
            "mlx5_corpus.c",
            "mlx5_device.c",
            "mlx5_own.c",
            "mlx5_tags.c",
        ],
    )?;
    let mut outcome = Outcome::default();
    let runs = [Provider::Stock, Provider::Ours(ours)].map(|provider| program.run(provider, &[]));
    compare_all(runs, &mut outcome)?;
    // Repeated on a device whose work requests contain the headers of raw packets.
    let mut inline = program;
    inline.set("RINGVERBS_MLX5_INLINE_HEADERS", "1");
    let runs =
        [Provider::Stock, Provider::Ours(ours)].map(|provider| inline.run(provider, &["packet"]));
    compare_all(runs, &mut outcome)?;
    let program = Program::build(
        &driver::target_dir().join("bytes"),
        "mlx5_completions",
        &["mlx5_completions.c", "mlx5_device.c"],
    )?;
    for format in CQE_FORMATS {
        let mut program = program.clone();
        program.set("RINGVERBS_MLX5_CQE", format);
        let runs = [Provider::Stock, Provider::Ours(ours)]
            .map(|provider| program.run(provider, &[format]));
        compare_all(runs, &mut outcome)?;
    }
    ensure!(
        outcome.requests >= 500,
        "only {} work requests were compared",
        outcome.requests
    );
    Ok(outcome)
}

/// Formats of CQEs (`RINGVERBS_MLX5_CQE`).
const CQE_FORMATS: [&str; 4] = ["64", "128", "compressed", "128,compressed"];

/// Compares the program's output with the stock provider and with ours.
fn compare_all(runs: [Result<String>; 2], outcome: &mut Outcome) -> Result<()> {
    let [stock, ours] = runs;
    let (stock, ours) = (parse(&stock?), parse(&ours?));
    ensure!(
        stock.len() == ours.len(),
        "{} cases with the stock provider, {} with ours",
        stock.len(),
        ours.len()
    );
    for (stock, ours) in stock.iter().zip(&ours) {
        ensure!(
            stock.header == ours.header,
            "the cases differ: {} and {}",
            stock.header,
            ours.header
        );
        compare_case(stock, ours, outcome);
    }
    Ok(())
}

fn compare_case(stock: &Case, ours: &Case, outcome: &mut Outcome) {
    outcome.cases += 1;
    for (key, line) in &stock.lines {
        match key.split(' ').next() {
            Some("entry") => outcome.requests += 1,
            Some("receive" | "shared") => outcome.receives += 1,
            // A line has all completions that were read from one place.
            Some("completion") => outcome.completions += line.split('|').count(),
            _ => {}
        }
    }
    let mut keys: Vec<&String> = stock.lines.keys().chain(ours.lines.keys()).collect();
    keys.sort();
    keys.dedup();
    let mut unexplained = Vec::new();
    for key in keys {
        let (old, new) = (stock.lines.get(key), ours.lines.get(key));
        if matches!(
            key.split(' ').next(),
            Some("entry" | "receive" | "shared" | "register" | "armed" | "posted" | "consumed")
        ) {
            let text = old.or(new).map_or("", |line| line.as_str());
            outcome.bytes += text.rsplit(' ').next().unwrap_or_default().len() / 2;
        }
        if old == new {
            continue;
        }
        let (absent, present) = (String::new(), "written".to_owned());
        let text = |line: Option<&'_ String>| match line {
            Some(line) if line.is_empty() => present.clone(),
            Some(line) => line.clone(),
            None => absent.clone(),
        };
        let (old_text, new_text) = (text(old), text(new));
        let start = match key.strip_prefix("entry ").map(str::parse) {
            Some(Ok(place)) => bytes_before(ours, place),
            _ => 0,
        };
        let difference = explain::Difference {
            header: &stock.header,
            key,
            stock: &old_text,
            ours: &new_text,
            entry: ours.lines.get("entry 0").map_or("", |line| line.as_str()),
            start,
        };
        let reasons = explain::reasons(&difference);
        let names: Vec<&str> = reasons.iter().flatten().map(|r| r.name()).collect();
        let words = format!(
            "{}\n  {key}: {}\n    stock {}\n    ours  {}",
            stock.header,
            if reasons.is_some() {
                names.join(", ")
            } else {
                "NOT EXPLAINED".to_owned()
            },
            difference.stock,
            difference.ours
        );
        match reasons {
            Some(reasons) => {
                for reason in reasons {
                    *outcome.explained.entry(reason).or_default() += 1;
                }
            }
            None => unexplained.push(words.clone()),
        }
        outcome.differences.push(words);
    }
    if !unexplained.is_empty() {
        outcome.unexplained.push(unexplained.join("\n"));
    }
}

/// Returns the size of the work requests before one.
fn bytes_before(case: &Case, place: usize) -> usize {
    (0..place)
        .filter_map(|i| case.lines.get(&format!("entry {i}")))
        .map(|line| line.len() / 2)
        .sum()
}

/// Parses the program's output. The key of a line is its first word, and for some kinds
/// also its second.
fn parse(text: &str) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for line in text.lines() {
        if line.starts_with("case ") {
            cases.push(Case {
                header: line.to_owned(),
                lines: BTreeMap::new(),
            });
        } else if let Some(case) = cases.last_mut() {
            let words = match line.split(' ').next() {
                Some(
                    "entry" | "receive" | "shared" | "register" | "stray" | "completion" | "from"
                    | "command" | "key",
                ) => 2,
                _ => 1,
            };
            let at = line
                .match_indices(' ')
                .nth(words - 1)
                .map_or(line.len(), |(at, _)| at);
            let (key, rest) = line.split_at(at);
            case.lines
                .entry(key.to_owned())
                .and_modify(|all| {
                    all.push('|');
                    all.push_str(rest);
                })
                .or_insert_with(|| rest.trim_start().to_owned());
        }
    }
    cases
}

/// Compares and reports.
///
/// # Errors
/// As [`compare`].
pub fn bytes(arguments: &Arguments) -> Result<ExitCode> {
    let ours = match &arguments.provider {
        Some(path) => path.clone(),
        None => dist::dist()?.join("libringverbs"),
    };
    let outcome = compare(&ours)?;
    if arguments.differences {
        for line in &outcome.differences {
            println!("{line}");
        }
    }
    for line in &outcome.unexplained {
        eprintln!("{line}");
    }
    print!("{}", outcome.text());
    Ok(if outcome.unexplained.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: &str = "case rc-1 3 post send/1\nposted 0 -1 1 00000004\nentry 0 0000030a\n";

    fn outcome(old: &str, new: &str) -> Outcome {
        let mut outcome = Outcome::default();
        compare_case(&parse(old)[0], &parse(new)[0], &mut outcome);
        outcome
    }

    #[test]
    fn equal_texts_have_no_difference() {
        let same = outcome(CASE, CASE);
        assert_eq!((same.cases, same.requests, same.passed()), (1, 1, 1));
        assert!(same.differences.is_empty());
    }

    #[test]
    fn unexplained_differences_fail() {
        for (from, to) in [
            ("0000030a", "0000030b"),
            ("0000030a", "--------"),
            ("00000004", "00000005"),
            ("entry 0 0000030a\n", ""),
            ("entry 0", "stray 0 x\nentry 0"),
        ] {
            let outcome = outcome(CASE, &CASE.replace(from, to));
            assert_eq!((outcome.unexplained.len(), outcome.passed()), (1, 0));
        }
    }
}
