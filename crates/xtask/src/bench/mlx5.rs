//! `cargo xtask bench --device mlx5`: the data path on ConnectX's queues, on the stand-in
//! for its driver. As for rdma_rxe, processes alternate, instruction counts are exact, and
//! times are medians of the ratios of consecutive processes.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::measure::{self, Count, Row, Spread, pairwise, time_of, times_of};
use super::programs::{Native, Output, parse};
use super::{control, limits, mlx5_layers, report};
use crate::driver;
use crate::mlx5::Program;
use crate::standin::Provider;

/// The lines around ConnectX's table on the page of the summary.
const CRATE_BEGIN: &str =
    "<!-- mlx5-crate:begin, written by cargo xtask bench --device mlx5 --write -->";
const CRATE_END: &str = "<!-- mlx5-crate:end -->";
/// Prefix of rows of queues that one thread uses by promise.
const SINGLE: &str = "single-";
/// Prefix of rows of queues that several threads have used.
const SEVERAL: &str = "several-";

/// Returns the targets of a row: our time over the stock provider's, and the number of
/// instructions. `ibv_wr_*` has the targets of lists, receives of a shared queue those of
/// a queue pair's own. With a promise of one thread, the time at batch 1 is a further 0.7
/// of that, except for shared receive queues, which have their lock anyway.
fn required(row: &str) -> (Option<f64>, Option<f64>) {
    if let Some(shared) = row.strip_prefix(SINGLE) {
        let (ratio, _) = required(shared);
        let further = if shared.contains("srq") { 1.0 } else { 0.7 };
        return (
            ratio.filter(|_| row.ends_with("/1")).map(|r| r * further),
            None,
        );
    }
    if let Some(row) = row.strip_prefix(SEVERAL) {
        let sends = ["send", "wr-"].iter().any(|it| row.starts_with(it));
        return (sends.then_some(0.90), None);
    }
    match row.strip_prefix("wr-").unwrap_or(row) {
        "poll-recv/1" | "poll-send/1" | "poll-srq/1" | "poll-many/1" => (Some(0.60), None),
        "poll-recv/16" | "poll-send/16" => (Some(0.50), Some(92.0)),
        "poll-srq/16" | "poll-many/16" => (Some(0.50), None),
        "poll-thousand/1" | "poll-thousand/16" => (Some(0.75), None),
        "poll-empty/1" => (Some(0.50), None),
        "cursor/1" => (Some(0.65), None),
        "cursor/16" => (Some(0.60), None),
        "send/1" | "send-inline/1" | "inline/1" => (Some(0.65), None),
        "send/16" | "send-inline/16" | "inline/16" => (Some(0.90), None),
        "packet/1" | "packet/16" | "poll-packet/1" | "poll-packet/16" => (Some(0.65), None),
        "dc-send/1" | "dc-send/16" => (Some(0.65), None),
        "packet/64" | "poll-packet/64" | "dc-send/64" => (Some(0.75), None),
        "key-configure/1" | "key-list/1" | "key-interleaved/1" => (Some(0.75), None),
        "key-configure/16" | "key-list/16" | "key-interleaved/16" => (Some(0.75), None),
        "recv/1" | "srq-recv/1" => (Some(0.70), None),
        "recv/16" | "srq-recv/16" => (Some(0.90), None),
        _ => (None, None),
    }
}

/// Returns the maximum of instructions of a row, slightly above the current counts: of
/// shared queues, of those with one owner, and of shared queues that several threads have
/// used. `cargo xtask test` fails above that.
fn max_instructions(row: &str) -> Option<f64> {
    let operation = operation(row);
    let (shared, owned, several) = match operation {
        "poll-recv/1" => (165.0, 152.0, 176.0),
        "poll-recv/16" => (93.0, 92.0, 93.0),
        "poll-send/1" => (155.0, 142.0, 166.0),
        "poll-send/16" => (83.0, 82.0, 83.0),
        "poll-empty/1" => (24.0, 24.0, 24.0),
        "cursor/1" => (155.0, 142.0, 163.0),
        "cursor/16" => (120.0, 119.0, 121.0),
        "send/1" => (184.0, 170.0, 197.0),
        "send/16" => (101.0, 100.0, 102.0),
        "send-inline/1" => (215.0, 201.0, 228.0),
        "send-inline/16" => (131.0, 131.0, 132.0),
        "recv/1" => (84.0, 73.0, 89.0),
        "recv/16" => (44.0, 44.0, 45.0),
        "srq-recv/1" => (99.0, 99.0, 103.0),
        "srq-recv/16" => (52.0, 52.0, 52.0),
        "poll-srq/1" => (204.0, 191.0, 224.0),
        "poll-srq/16" => (132.0, 132.0, 141.0),
        "poll-many/1" => (183.0, 170.0, 194.0),
        "poll-many/16" => (111.0, 110.0, 111.0),
        "wr-send/1" => (184.0, 171.0, 199.0),
        "wr-send/16" => (105.0, 104.0, 106.0),
        "wr-inline/1" => (217.0, 204.0, 232.0),
        "wr-inline/16" => (137.0, 136.0, 138.0),
        // These rows exist only for shared queues that one thread uses.
        "packet/1" => (192.0, 0.0, 0.0),
        "packet/16" => (109.0, 0.0, 0.0),
        "packet/64" => (104.0, 0.0, 0.0),
        "poll-packet/1" => (182.0, 0.0, 0.0),
        "poll-packet/16" => (110.0, 0.0, 0.0),
        "poll-packet/64" => (107.0, 0.0, 0.0),
        "dc-send/1" => (274.0, 0.0, 0.0),
        "dc-send/16" => (130.0, 0.0, 0.0),
        "dc-send/64" => (126.0, 0.0, 0.0),
        "key-configure/1" => (460.0, 0.0, 0.0),
        "key-configure/16" => (302.0, 0.0, 0.0),
        "key-list/1" => (404.0, 0.0, 0.0),
        "key-list/16" => (246.0, 0.0, 0.0),
        "key-interleaved/1" => (478.0, 0.0, 0.0),
        "key-interleaved/16" => (320.0, 0.0, 0.0),
        "poll-thousand/1" => (183.0, 0.0, 0.0),
        "poll-thousand/16" => (111.0, 0.0, 0.0),
        _ => return None,
    };
    Some(if row.starts_with(SINGLE) {
        owned
    } else if row.starts_with(SEVERAL) {
        several
    } else {
        shared
    })
}

/// Returns a row's name without the prefix for the kind of queue.
fn operation(row: &str) -> &str {
    let row = row.strip_prefix(SINGLE).unwrap_or(row);
    row.strip_prefix(SEVERAL).unwrap_or(row)
}

/// Returns whether the row's queue pair shares its doorbell register, which then has a
/// lock.
fn shares_register(row: &str) -> bool {
    ["dc-", "key-", SEVERAL]
        .iter()
        .any(|prefix| row.starts_with(prefix))
}

/// Returns the maximum of locked instructions in one call. If one thread uses the queues:
/// one for a shared doorbell register. If several have used them: one for the queue's
/// lock, another one for the doorbell register of a send, and one for each completion of
/// a shared receive queue.
fn max_locked(row: &str) -> f64 {
    let Some(row) = row.strip_prefix(SEVERAL) else {
        return if shares_register(row) { 1.0 } else { 0.0 };
    };
    match row.split('/').next() {
        Some("poll-empty") => 0.0,
        Some("poll-srq") => 1.0 + limits::batch(row),
        Some("send" | "send-inline" | "wr-send" | "wr-inline") => 2.0,
        _ => 1.0,
    }
}

/// Returns the maximum of fences in one call: one between the doorbell record and the
/// doorbell register, unless the register's lock is taken, and one after the register.
pub(super) fn max_fences(row: &str) -> f64 {
    let posts = ["send", "wr-", "packet", "dc-", "key-"]
        .iter()
        .any(|prefix| operation(row).starts_with(prefix));
    match (posts, shares_register(row)) {
        (false, _) => 0.0,
        (true, false) => 2.0,
        (true, true) => 1.0,
    }
}

/// Describes the counts of ours that exceed their limits.
fn exceeded_counts(counts: &[(String, Count)]) -> Vec<String> {
    let mut exceeded = Vec::new();
    for (row, count) in counts {
        let calls = limits::batch(row);
        let mut check = |what: &str, is: f64, limit: f64| {
            if is > limit + limits::ROUNDING * calls {
                exceeded.push(format!("mlx5 {row}: {is:.2} {what}, at most {limit}"));
            }
        };
        // A row without a limit is an error.
        check(
            "instructions",
            count.instructions,
            max_instructions(row).unwrap_or(0.0),
        );
        check("fences a call", count.fences * calls, max_fences(row));
        check(
            "locked instructions a call",
            count.locked * calls,
            max_locked(row),
        );
    }
    exceeded
}

/// Counts the instructions of ours. Returns the number of rows, and the counts that
/// exceed their limits.
///
/// # Errors
/// A program does not build or run, or two threads slowed each other down too much.
pub fn gate(ours: &Path) -> Result<(usize, Vec<String>)> {
    control::check_contention(ours)?;
    let counts = parse(&program()?.run(Provider::Ours(ours), &["count"])?)?.counts;
    Ok((counts.len(), exceeded_counts(&counts)))
}

/// Returns which targets of a row were missed.
fn verdict(row: &Row, timed: bool) -> &'static str {
    let (ratio, instructions) = required(&row.name);
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

/// The columns of [`HEADINGS`] that are times.
const TIME_COLUMNS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 12];
const TIME_HEADINGS: [&str; 8] = {
    let mut headings = [""; 8];
    let mut at = 0;
    while at < TIME_COLUMNS.len() {
        headings[at] = HEADINGS[TIME_COLUMNS[at]];
        at += 1;
    }
    headings
};

/// Returns a row's cells for these columns. Counts do not depend on where the program is
/// mapped.
fn time_cells(row: &Row, timed: bool) -> Vec<String> {
    let cells = cells(row, timed);
    TIME_COLUMNS.map(|at| cells[at].clone()).into()
}

/// Returns a row's cells, one per column.
fn cells(row: &Row, timed: bool) -> Vec<String> {
    let (ratio, instructions) = required(&row.name);
    let limit = |limit: Option<f64>, digits: usize| {
        limit.map_or("-".to_owned(), |limit| format!("{limit:.digits$}"))
    };
    let (stock, ours) = (row.stock_count, row.ours_count);
    vec![
        row.name.clone(),
        report::ns(row.stock_ns, timed),
        report::ns(row.ours_ns, timed),
        report::ns(row.calls_ns, timed),
        report::median_and_quartiles(row.ratio, timed),
        report::quartiles(row.noise, timed),
        limit(ratio, 2),
        format!("{:.1}", stock.instructions),
        format!("{:.1}", ours.instructions),
        limit(instructions, 0),
        format!("{:.2} / {:.2}", stock.locked, ours.locked),
        format!("{:.2} / {:.2}", stock.fences, ours.fences),
        verdict(row, timed).to_owned(),
    ]
}

const HEADINGS: [&str; 13] = [
    "operation / batch",
    "stock ns",
    "ours ns",
    "calls alone ns",
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

/// Counts instructions once with each provider and the Rust crate, then times `pairs`
/// rounds of processes. Returns the tables of the providers and the crate, in Markdown, and
/// the counts of ours that exceed their limits.
fn measure(
    program: &Program,
    native: &Native,
    c_provider: Provider,
    ours: &Path,
    pairs: usize,
    samples: usize,
) -> Result<([String; 3], Vec<String>)> {
    let load = measure::load();
    let run = |provider, arguments: &[&str]| parse(&program.run(provider, arguments)?);
    let run_among_libraries =
        |provider, arguments: &[&str]| parse(&program.run_among_libraries(provider, arguments)?);
    eprintln!("counting instructions of both providers");
    let stock_counts = run(c_provider, &["count"])?;
    let our_counts = run(Provider::Ours(ours), &["count"])?;
    let native_counts = mlx5_layers::figures(native, &["count"])?;
    let samples = samples.to_string();
    let (mut stock, mut our, mut layers) = (Vec::new(), Vec::new(), Vec::new());
    let (mut library_stock, mut library_our) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        eprint!("\rtiming pair {} of {pairs} ", pair + 1);
        stock.push(run(c_provider, &["time", &samples])?);
        our.push(run(Provider::Ours(ours), &["time", &samples])?);
        layers.push(mlx5_layers::figures(native, &["time", &samples])?);
        library_stock.push(run_among_libraries(c_provider, &["time", &samples])?);
        library_our.push(run_among_libraries(
            Provider::Ours(ours),
            &["time", &samples],
        )?);
    }
    if pairs > 0 {
        eprintln!();
    }
    let rows_of = |stock: &[Output], our: &[Output]| {
        let row = |(name, counted): &(String, Count)| {
            // Ours with one owner is compared with stock's thread-safe queues.
            let against = name.strip_prefix(SINGLE).unwrap_or(name);
            let (old, new) = (times_of(stock, against)?, times_of(our, name)?);
            Ok(Row {
                name: name.clone(),
                stock_count: *counted,
                ours_count: our_counts.count(name)?,
                ratio: Spread::from_values(pairwise(&old, &new, |old, new| new / old)),
                noise: Spread::from_values(old.windows(2).map(|two| two[1] / two[0]).collect()),
                stock_ns: Spread::from_values(times_of(stock, name)?).median,
                ours_ns: Spread::from_values(new).median,
                calls_ns: calls_of(our, name)?,
            })
        };
        stock_counts
            .counts
            .iter()
            .map(row)
            .collect::<Result<Vec<Row>>>()
    };
    let rows = rows_of(&stock, &our)?;
    let library_rows = rows_of(&library_stock, &library_our)?;
    let time_cells: Vec<_> = library_rows
        .iter()
        .map(|row| time_cells(row, pairs > 0))
        .collect();
    let (single, others): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| row.name.starts_with(SINGLE));
    let (several, shared): (Vec<_>, Vec<_>) = others
        .into_iter()
        .partition(|row| row.name.starts_with(SEVERAL));
    let table = |rows: &[&Row]| {
        let cells: Vec<_> = rows.iter().map(|row| cells(row, pairs > 0)).collect();
        report::markdown(&HEADINGS, &cells)
    };
    let mut text = String::new();
    let _ = write!(
        text,
        "{pairs} pairs of processes on {}, load average before {load}; stock is {}, ours {}.\n\n\
         Thread-safe queues, used by one thread:\n\n{}\n\
         Queues owned by one thread by promise; the ratio is to the stock provider's thread-safe \
         queues, the nanoseconds and counts of stock are of its own single-threaded ones:\n\n{}\n\
         Thread-safe queues that several threads have used:\n\n{}\n\
         The same program mapped among the libraries:\n\n{}",
        measure::processor(),
        measure::real_name(&stock_counts.provider),
        measure::real_name(&our_counts.provider),
        table(&shared),
        table(&single),
        table(&several),
        report::markdown(&TIME_HEADINGS, &time_cells),
    );
    let tables =
        [false, true].map(|page| mlx5_layers::table(&rows, &native_counts, &layers, &stock, page));
    let [layers, summary] = tables;
    let mut exceeded = exceeded_counts(&our_counts.counts);
    exceeded.extend(mlx5_layers::exceeded_counts(&native_counts)?);
    Ok(([text, layers?, summary?], exceeded))
}

/// Returns the time of a row's calls alone: the median of all processes.
fn calls_of(runs: &[Output], name: &str) -> Result<f64> {
    let calls = runs.iter().map(|run| time_of(&run.calls, name));
    Ok(Spread::from_values(calls.collect::<Result<_>>()?).median)
}

/// Builds, measures, prints, and optionally writes the tables into docs/; returns the
/// counts and times of ours that exceed their limits.
///
/// # Errors
/// A program that does not build or run; a page without the markers.
pub fn bench(
    ours: &Path,
    stock: Option<&Path>,
    pairs: usize,
    samples: usize,
    write: bool,
) -> Result<Vec<String>> {
    let program = program()?;
    let (provider, name) = match stock {
        None => (Provider::Stock, "mlx5"),
        Some(path) => (Provider::StockAt(path), "mlx5-other-stock"),
    };
    let stand_in = mlx5_layers::stand_in()?;
    let native = Native::build(&stand_in, mlx5_layers::PROGRAM)?;
    let ([mut text, layers, summary], mut exceeded) =
        measure(&program, &native, provider, ours, pairs, samples)?;
    if pairs > 0 {
        let (control, above) = control::bench(ours, provider, pairs, samples)?;
        let _ = write!(
            text,
            "\nThe control path without the kernel's part; of `load-resident`, bytes:\n\n{control}"
        );
        exceeded.extend(above);
    }
    print!("{text}\nThe Rust crate's layers, ns (instructions):\n\n{layers}");
    report::save(name, &format!("{text}\n{layers}"))?;
    // The summary compares with the system's stock provider.
    if write && stock.is_none() {
        let page = driver::root().join(report::SUMMARY);
        report::replace_in(&page, CRATE_BEGIN, CRATE_END, &summary)?;
    }
    Ok(exceeded)
}

fn program() -> Result<Program> {
    Program::build(
        &driver::target_dir().join("bench-mlx5"),
        "mlx5_datapath",
        &[
            "mlx5_datapath.c",
            "mlx5_rows.c",
            "mlx5_dv_rows.c",
            "mlx5_device.c",
            "stepper.c",
        ],
    )
}

/// Prints each instruction of a row, of both providers or of the Rust crate.
///
/// # Errors
/// A program that does not build or run.
pub fn trace(ours: &Path, row: &str) -> Result<()> {
    if row.starts_with("raw-") || row.starts_with("safe-") {
        let stand_in = mlx5_layers::stand_in()?;
        let native = Native::build(&stand_in, mlx5_layers::PROGRAM)?;
        print!("{}", native.trace(row)?);
        return Ok(());
    }
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
    fn the_pages_have_the_markers() {
        assert!(report::has_markers(report::SUMMARY, CRATE_BEGIN, CRATE_END));
    }

    #[test]
    fn a_single_owner_has_a_lower_target_at_batch_1() {
        assert_eq!(required("poll-send/16"), (Some(0.50), Some(92.0)));
        assert_eq!(required("single-poll-send/16"), (None, None));
        let (ratio, _) = required("single-recv/1");
        assert!(ratio.is_some_and(|ratio| (ratio - 0.49).abs() < 1e-9));
        assert_eq!(required("srq-recv/16"), required("recv/16"));
        assert_eq!(required("single-poll-srq/1"), (Some(0.60), None));
        assert_eq!(required("wr-send/1"), (Some(0.65), None));
        assert_eq!(required("wr-inline/16"), (Some(0.90), None));
        assert_eq!(required("several-send/1"), (Some(0.90), None));
        assert_eq!(required("several-recv/1"), (None, None));
    }

    #[test]
    fn a_count_above_its_limit_or_without_one_is_an_error() {
        let row = |name: &str, instructions, locked, fences| {
            let count = Count {
                instructions,
                locked,
                fences,
            };
            exceeded_counts(&[(name.to_owned(), count)]).len()
        };
        assert_eq!(row("recv/16", 44.0, 0.0, 0.0), 0);
        assert_eq!(row("recv/16", 44.1, 0.0, 0.0), 1);
        assert_eq!(row("single-send/16", 1.0, 0.0, 0.125), 0);
        assert_eq!(row("single-send/16", 1.0, 0.0625, 0.1875), 2);
        assert_eq!(row("poll-send/1", 1.0, 0.0, 1.0), 1);
        assert_eq!(row("poll-srq/16", 1.0, 0.0625, 0.0), 1);
        assert_eq!(row("several-poll-srq/16", 1.0, 1.0625, 0.0), 0);
        assert_eq!(row("several-send/1", 1.0, 2.0, 1.0), 0);
        assert_eq!(row("several-send/1", 1.0, 3.0, 1.0), 1);
        assert_eq!(row("several-send/1", 1.0, 2.0, 2.0), 1);
        assert_eq!(row("several-recv/1", 108.0, 2.0, 0.0), 2);
        assert_eq!(row("dc-send/16", 1.0, 0.0625, 0.0625), 0);
        assert_eq!(row("key-list/1", 1.0, 2.0, 2.0), 2);
        assert_eq!(row("surprise/1", 1.0, 0.0, 0.0), 1);
    }

    #[test]
    fn counts_above_their_limit_are_missed() {
        let mut row = Row {
            name: "poll-recv/16".to_owned(),
            ..Row::default()
        };
        row.ours_count.instructions = 93.0;
        row.ratio.median = 0.51;
        assert_eq!(verdict(&row, true), "MISSED: count, time");
        assert_eq!(verdict(&row, false), "MISSED: count");
        row.ours_count.instructions = 92.0;
        assert_eq!(verdict(&row, false), "met");
    }
}
