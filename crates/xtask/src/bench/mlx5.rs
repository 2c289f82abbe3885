//! `cargo xtask bench --device mlx5`: the data path on ConnectX's queues, on the
//! stand-in for its driver. As for rdma_rxe: processes alternate, instructions
//! are counted exactly, and the figure is the median of the ratios of
//! neighbours.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::measure::{self, Count, Row, Spread, pairwise, times_of};
use super::programs::parse;
use super::report;
use crate::driver;
use crate::mlx5::Program;
use crate::standin::Provider;

const BEGIN: &str = "<!-- mlx5:begin, written by cargo xtask bench --device mlx5 --write -->";
const END: &str = "<!-- mlx5:end -->";
/// Rows of queues that one thread uses by promise.
const SINGLE: &str = "single-";

/// What is required of a row: our time over the C provider's, and how many
/// instructions. With a promise of one thread at batch 1 another 0.7 of that.
fn limits(row: &str) -> (Option<f64>, Option<f64>) {
    if let Some(shared) = row.strip_prefix(SINGLE) {
        let (ratio, _) = limits(shared);
        return (ratio.filter(|_| row.ends_with("/1")).map(|r| r * 0.7), None);
    }
    match row {
        "poll-recv/1" | "poll-send/1" => (Some(0.60), None),
        "poll-recv/16" | "poll-send/16" => (Some(0.50), Some(70.0)),
        "poll-empty/1" => (Some(0.50), None),
        "cursor/1" => (Some(0.65), None),
        "cursor/16" => (Some(0.60), None),
        "send/1" | "send-inline/1" => (Some(0.65), None),
        "send/16" | "send-inline/16" => (Some(0.90), None),
        "recv/1" => (Some(0.70), None),
        "recv/16" => (Some(0.90), None),
        _ => (None, None),
    }
}

/// What of a row is above its limit, in a word or two.
fn verdict(row: &Row, timed: bool) -> &'static str {
    let (ratio, instructions) = limits(&row.name);
    let time = timed && ratio.is_some_and(|limit| row.ratio.median > limit);
    let count = instructions.is_some_and(|limit| row.ours_count.instructions > limit);
    let nothing = ratio.filter(|_| timed).is_none() && instructions.is_none();
    match (nothing, count, time) {
        (true, ..) => "-",
        (_, false, false) => "met",
        (_, true, false) => "MISSED: count",
        (_, false, true) => "MISSED: time",
        (_, true, true) => "MISSED: count, time",
    }
}

/// A row's figures as words, one for each column.
fn cells(row: &Row, timed: bool) -> Vec<String> {
    let (ratio, instructions) = limits(&row.name);
    let limit = |limit: Option<f64>, digits: usize| {
        limit.map_or("-".to_owned(), |limit| format!("{limit:.digits$}"))
    };
    let (stock, ours) = (row.stock_count, row.ours_count);
    vec![
        row.name.clone(),
        report::ns(row.stock_ns, timed),
        report::ns(row.ours_ns, timed),
        report::around(row.ratio, timed),
        report::between(row.noise, timed),
        limit(ratio, 2),
        format!("{:.1}", stock.instructions),
        format!("{:.1}", ours.instructions),
        limit(instructions, 0),
        format!("{:.2} / {:.2}", stock.locked, ours.locked),
        format!("{:.2} / {:.2}", stock.fences, ours.fences),
        verdict(row, timed).to_owned(),
    ]
}

const HEADINGS: [&str; 12] = [
    "operation / batch",
    "stock ns",
    "ours ns",
    "ratio (quartiles)",
    "stock against itself",
    "at most",
    "stock instr.",
    "ours instr.",
    "at most",
    "locked, stock / ours",
    "fences, stock / ours",
    "",
];

/// Counts once with each provider, then times `pairs` pairs of processes; the
/// tables, in Markdown.
fn measure(program: &Program, ours: &Path, pairs: usize, samples: usize) -> Result<String> {
    let load = measure::load();
    let run = |provider, arguments: &[&str]| parse(&program.run(provider, arguments)?);
    eprintln!("counting instructions of both providers");
    let stock_counts = run(Provider::Stock, &["count"])?;
    let our_counts = run(Provider::Ours(ours), &["count"])?;
    let samples = samples.to_string();
    let (mut stock, mut our) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        eprint!("\rtiming pair {} of {pairs} ", pair + 1);
        stock.push(run(Provider::Stock, &["time", &samples])?);
        our.push(run(Provider::Ours(ours), &["time", &samples])?);
    }
    if pairs > 0 {
        eprintln!();
    }
    let row = |(name, counted): &(String, Count)| {
        // Ours of one owner against stock's of any.
        let against = name.strip_prefix(SINGLE).unwrap_or(name);
        let (old, new) = (times_of(&stock, against)?, times_of(&our, name)?);
        Ok(Row {
            name: name.clone(),
            stock_count: *counted,
            ours_count: our_counts.count(name)?,
            ratio: Spread::of(pairwise(&old, &new, |old, new| new / old)),
            noise: Spread::of(old.windows(2).map(|two| two[1] / two[0]).collect()),
            stock_ns: Spread::of(times_of(&stock, name)?).median,
            ours_ns: Spread::of(new).median,
        })
    };
    let rows = stock_counts.counts.iter().map(row);
    let rows: Vec<Row> = rows.collect::<Result<_>>()?;
    let (single, shared): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| row.name.starts_with(SINGLE));
    let table = |rows: &[&Row]| {
        let cells: Vec<_> = rows.iter().map(|row| cells(row, pairs > 0)).collect();
        report::markdown(&HEADINGS, &cells)
    };
    let mut text = String::new();
    let _ = write!(
        text,
        "{pairs} pairs of processes on {}, load average before {load}; stock is {}, ours {}.\n\n\
         Thread-safe queues, used by one thread:\n\n{}\n\
         Queues owned by one thread by promise; the ratio is to the C provider's thread-safe \
         queues, the nanoseconds and counts of stock are of its own single-threaded ones:\n\n{}",
        measure::processor(),
        measure::real_name(&stock_counts.provider),
        measure::real_name(&our_counts.provider),
        table(&shared),
        table(&single),
    );
    Ok(text)
}

/// Builds, measures, prints, and writes docs/performance.md if asked to.
///
/// # Errors
/// A program that does not build or run; a page without the markers.
pub fn bench(ours: &Path, pairs: usize, samples: usize, write: bool) -> Result<()> {
    let program = program()?;
    let text = measure(&program, ours, pairs, samples)?;
    print!("{text}");
    if write {
        let page = driver::root().join("docs/performance.md");
        let old =
            fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
        let new = report::replace_between(&old, BEGIN, END, &text)
            .with_context(|| format!("{} lacks {BEGIN} or {END}", page.display()))?;
        fs::write(&page, new).with_context(|| format!("cannot write {}", page.display()))?;
    }
    Ok(())
}

fn program() -> Result<Program> {
    Program::build(
        &driver::target_dir().join("bench-mlx5"),
        "mlx5_datapath",
        &[
            "mlx5_datapath.c",
            "mlx5_rows.c",
            "mlx5_device.c",
            "stepper.c",
        ],
    )
}

/// Each instruction of a row, of both providers.
///
/// # Errors
/// A program that does not build or run.
pub fn trace(ours: &Path, row: &str) -> Result<()> {
    let program = program()?;
    for provider in [Provider::Stock, Provider::Ours(ours)] {
        print!("{}", program.run(provider, &["trace", row])?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_owner_is_required_a_further_part_at_batch_1() {
        assert_eq!(limits("poll-send/16"), (Some(0.50), Some(70.0)));
        assert_eq!(limits("single-poll-send/16"), (None, None));
        let (ratio, _) = limits("single-recv/1");
        assert!(ratio.is_some_and(|ratio| (ratio - 0.49).abs() < 1e-9));
        assert_eq!(limits("wr-send/1"), (None, None));
    }

    #[test]
    fn what_is_above_its_limit_is_missed() {
        let mut row = Row {
            name: "poll-recv/16".to_owned(),
            ..Row::default()
        };
        row.ours_count.instructions = 71.0;
        row.ratio.median = 0.51;
        assert_eq!(verdict(&row, true), "MISSED: count, time");
        assert_eq!(verdict(&row, false), "MISSED: count");
        row.ours_count.instructions = 70.0;
        assert_eq!(verdict(&row, false), "met");
    }
}
