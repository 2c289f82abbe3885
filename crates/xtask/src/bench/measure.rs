//! Runs the programs in turn, and combines their results.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::programs::{Native, Output, Verbs};
use super::{layers, limits};
use crate::standin::Provider;

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
    /// Returns the quartiles of values in any order; all zero if there are none.
    pub fn from_values(mut values: Vec<f64>) -> Self {
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

/// The results of one row.
#[derive(Default)]
pub struct Row {
    /// The row's name: operation and batch.
    pub name: String,
    /// Exact counts with the stock provider.
    pub stock_count: Count,
    /// Exact counts with ours.
    pub ours_count: Count,
    /// Median over processes with the stock provider, in nanoseconds per operation.
    pub stock_ns: f64,
    /// Median over processes with ours, in nanoseconds per operation.
    pub ours_ns: f64,
    /// Ours over stock, of consecutive processes.
    pub ratio: Spread,
    /// Stock over stock, of consecutive processes.
    pub noise: Spread,
    /// Time of a bare loop with the same calls, if it was measured; else 0.
    pub calls_ns: f64,
}

impl Row {
    /// Returns whether the row is a bare loop for comparison, not a provider's operation.
    pub fn is_floor(&self) -> bool {
        self.name.starts_with("floor-")
    }
}

/// Everything that was measured.
#[derive(Default)]
pub struct Results {
    /// The rows in the bench program's order.
    pub rows: Vec<Row>,
    /// The Rust crate's layers; empty if they were not measured.
    pub layers: Vec<layers::Operation>,
    /// Number of timed rounds of processes.
    pub rounds: usize,
    /// File name of the stock provider that served.
    pub stock_file: String,
    /// File name of our provider that served.
    pub ours_file: String,
    /// Whether ours supports thread domains.
    pub thread_domain: bool,
    /// The processor, as the kernel names it.
    pub processor: String,
    /// Load average of one minute at the start. Times measured under load are unreliable.
    pub load: String,
}

/// Counts instructions once with each program, then times `rounds` rounds of processes:
/// the C program with each provider, and the Rust crate's if it is given.
pub fn measure(
    verbs: &Verbs,
    native: Option<&Native>,
    ours: &Path,
    rounds: usize,
    samples: usize,
) -> Result<Results> {
    let load = load();
    eprintln!("counting instructions");
    let stock_counts = verbs.figures(Provider::Stock, &["count"])?;
    let ours_counts = verbs.figures(Provider::Ours(ours), &["count"])?;
    let native_counts = native.map(|native| native.figures(&["count"]));
    let native_counts = native_counts.transpose()?.unwrap_or_default();

    let samples = samples.to_string();
    let arguments = ["time", &samples];
    let (mut stock_runs, mut ours_runs, mut native_runs) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        eprint!("\rtiming round {} of {rounds} ", round + 1);
        stock_runs.push(verbs.figures(Provider::Stock, &arguments)?);
        ours_runs.push(verbs.figures(Provider::Ours(ours), &arguments)?);
        if let Some(native) = native {
            native_runs.push(native.figures(&arguments)?);
        }
    }
    if rounds > 0 {
        eprintln!();
    }

    let mut rows = Vec::new();
    for (i, (name, stock_count)) in stock_counts.counts.iter().enumerate() {
        let Some((_, ours_count)) = ours_counts.counts.get(i).filter(|(n, _)| n == name) else {
            bail!("row {name} was counted with one provider only");
        };
        let stock = times_of(&stock_runs, name)?;
        let ours = times_of(&ours_runs, name)?;
        let noise = stock.windows(2).map(|two| two[1] / two[0]).collect();
        let calls_ns = match limits::floor_of(name) {
            Some(floor) => Spread::from_values(times_of(&ours_runs, &floor)?).median,
            None => 0.0,
        };
        rows.push(Row {
            name: name.clone(),
            stock_count: *stock_count,
            ours_count: *ours_count,
            ratio: Spread::from_values(pairwise(&ours, &stock, |ours, stock| ours / stock)),
            noise: Spread::from_values(noise),
            stock_ns: Spread::from_values(stock).median,
            ours_ns: Spread::from_values(ours).median,
            calls_ns,
        });
    }
    let layers = match native {
        Some(_) => layers::compare(&rows, &native_counts, &native_runs, &stock_runs)?,
        None => Vec::new(),
    };
    Ok(Results {
        rows,
        layers,
        rounds,
        stock_file: real_name(&stock_counts.provider),
        ours_file: real_name(&ours_counts.provider),
        thread_domain: ours_counts.thread_domain,
        processor: processor(),
        load,
    })
}

/// Combines the figures of consecutive processes.
pub fn pairwise(left: &[f64], right: &[f64], combine: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    left.iter()
        .zip(right)
        .map(|(l, r)| combine(*l, *r))
        .collect()
}

/// Returns the times of a row, one per process.
pub fn times_of(runs: &[Output], name: &str) -> Result<Vec<f64>> {
    runs.iter().map(|run| time_of(&run.times, name)).collect()
}

/// Returns the time of a row.
pub fn time_of(times: &[(String, f64)], name: &str) -> Result<f64> {
    let found = times.iter().find(|(row, _)| row == name);
    found
        .map(|(_, ns)| *ns)
        .with_context(|| format!("row {name} was not timed in every process"))
}

/// Returns the name of the file behind a provider's path, without its folder.
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
        let spread = Spread::from_values(vec![5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!((spread.low, spread.median, spread.high), (2.0, 3.0, 4.0));
        assert_eq!(Spread::from_values(Vec::new()).median, 0.0);
    }
}
