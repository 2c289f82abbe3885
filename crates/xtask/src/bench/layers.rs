//! Compares the Rust crate's layers with the providers: their limits, and the tables.

use anyhow::{Context, Result};

use super::limits::ROUNDING;
use super::measure::{Count, Row, Spread, pairwise, times_of};
use super::programs::Output;
use super::report::markdown;

/// The layers' limits of one operation.
struct Limits {
    operation: &'static str,
    /// Instructions of the raw and of the safe layer.
    instructions: [f64; 2],
    /// The raw layer's time over the bare loop's.
    ratio: Option<f64>,
}

const fn limits(operation: &'static str, instructions: [f64; 2], ratio: Option<f64>) -> Limits {
    Limits {
        operation,
        instructions,
        ratio,
    }
}

/// The rows of the tables. Calls of one operation include a few instructions for the
/// dispatch on the device.
const OPERATIONS: [Limits; 9] = [
    limits("poll/1", [49.0, 169.0], None),
    limits("poll/16", [12.0, 118.0], Some(1.2)),
    limits("poll-empty/1", [23.0, 31.0], None),
    limits("send/1", [146.0, 226.0], None),
    limits("send/16", [110.0, 184.0], Some(1.5)),
    limits("send-inline/1", [173.0, 216.0], None),
    limits("send-inline/16", [138.0, 173.0], None),
    limits("recv/1", [63.0, 130.0], None),
    limits("recv/16", [39.0, 86.0], None),
];

/// Maximum time in nanoseconds of an operation of the safe layer beyond the raw one.
const MAX_SAFE_OVERHEAD_NS: f64 = 10.0;

/// One layer's figures of an operation.
pub struct Layer {
    /// Exact counts.
    pub count: Count,
    /// Median over processes, in nanoseconds.
    pub ns: f64,
    /// Over the stock provider, of consecutive processes.
    pub ratio: Spread,
}

/// The figures of one operation.
pub struct Operation {
    /// The C program's name for it.
    pub name: &'static str,
    /// The stock provider's counts and nanoseconds.
    stock: (Count, f64),
    /// The plugin's counts and nanoseconds.
    plugin: (Count, f64),
    plugin_ratio: Spread,
    /// Counts and nanoseconds of the bare loop, if there is one.
    bare: Option<(Count, f64)>,
    /// The raw layer.
    pub raw: Layer,
    /// The safe layer.
    pub safe: Layer,
    /// Raw over bare, and safe less raw, of the same process.
    over_bare: Spread,
    safe_overhead: Spread,
    limits: &'static Limits,
}

/// Combines the crate's figures with those of the providers.
pub fn compare(
    rows: &[Row],
    counts: &Output,
    runs: &[Output],
    stock: &[Output],
) -> Result<Vec<Operation>> {
    let operation = |limits: &'static Limits| {
        let name = limits.operation;
        let row = rows.iter().find(|row| row.name == name);
        let row = row.with_context(|| format!("no provider was measured in {name}"))?;
        let stock = times_of(stock, name)?;
        let times = |layer: &str| times_of(runs, &format!("{layer}-{name}"));
        let layer = |layer: &str| {
            let times = times(layer)?;
            anyhow::Ok(Layer {
                count: counts.count(&format!("{layer}-{name}"))?,
                ratio: Spread::from_values(pairwise(&times, &stock, |ours, stock| ours / stock)),
                ns: Spread::from_values(times).median,
            })
        };
        let (mut bare, mut over_bare) = (None, Spread::default());
        if let Ok(count) = counts.count(&format!("bare-{name}")) {
            let times = times("bare")?;
            let ratio = pairwise(&times_of(runs, &format!("raw-{name}"))?, &times, |r, b| {
                r / b
            });
            (bare, over_bare) = (
                Some((count, Spread::from_values(times).median)),
                Spread::from_values(ratio),
            );
        }
        let safe_overhead = pairwise(&times("safe")?, &times("raw")?, |safe, raw| safe - raw);
        Ok(Operation {
            name,
            stock: (row.stock_count, row.stock_ns),
            plugin: (row.ours_count, row.ours_ns),
            plugin_ratio: row.ratio,
            bare,
            raw: layer("raw")?,
            safe: layer("safe")?,
            over_bare,
            safe_overhead: Spread::from_values(safe_overhead),
            limits,
        })
    };
    OPERATIONS.iter().map(operation).collect()
}

/// Returns the number of rows, and a description of every count that exceeds its limit.
pub fn exceeded_counts(counts: &Output) -> Result<(usize, Vec<String>)> {
    let mut exceeded = Vec::new();
    for limits in &OPERATIONS {
        for (layer, limit) in ["raw", "safe"].into_iter().zip(limits.instructions) {
            let row = format!("{layer}-{}", limits.operation);
            exceeded.extend(exceeded_count(&row, counts.count(&row)?, limit));
        }
    }
    Ok((2 * OPERATIONS.len(), exceeded))
}

/// Describes a count that exceeds its limit. Neither layer may have locked instructions,
/// since each queue has one owner.
fn exceeded_count(row: &str, count: Count, limit: f64) -> Option<String> {
    let Count {
        instructions,
        locked,
        fences,
    } = count;
    if instructions > limit + ROUNDING {
        return Some(format!(
            "{row}: {instructions:.1} instructions, at most {limit}"
        ));
    }
    if locked + fences > ROUNDING {
        return Some(format!(
            "{row}: {locked:.2} locked operations and {fences:.2} fences, at most 0"
        ));
    }
    None
}

impl Operation {
    /// Describes the counts that exceed their limits.
    pub fn exceeded_counts(&self) -> Vec<String> {
        let layers = [("raw", &self.raw), ("safe", &self.safe)];
        let exceeded = layers.into_iter().zip(self.limits.instructions);
        let exceeded = exceeded.filter_map(|((layer, figures), limit)| {
            exceeded_count(&format!("{layer}-{}", self.name), figures.count, limit)
        });
        exceeded.collect()
    }

    /// Describes the times that exceed their limits.
    pub fn exceeded_times(&self) -> Vec<String> {
        let name = self.name;
        let mut exceeded = Vec::new();
        if let Some(limit) = self.limits.ratio {
            if self.over_bare.median > limit {
                let ratio = self.over_bare.median;
                exceeded.push(format!(
                    "raw-{name}: {ratio:.2} times the bare loop's, at most {limit}"
                ));
            }
        }
        if self.safe_overhead.median > MAX_SAFE_OVERHEAD_NS {
            let ns = self.safe_overhead.median;
            exceeded.push(format!(
                "safe-{name}: {ns:.1} ns more than the raw layer, at most {MAX_SAFE_OVERHEAD_NS}"
            ));
        }
        exceeded
    }
}

const HEADINGS: [&str; 8] = [
    "operation / batch",
    "stock ns (instr.)",
    "plugin",
    "raw",
    "safe",
    "plugin / stock",
    "raw / stock",
    "safe / stock",
];

const LIMIT_HEADINGS: [&str; 9] = [
    "operation / batch",
    "bare loop ns (instr.)",
    "raw / bare loop",
    "at most",
    "safe less raw, ns",
    "at most",
    "raw instr., at most",
    "safe instr., at most",
    "",
];

fn cell(count: Count, ns: f64, timed: bool) -> String {
    format!(
        "{} ({:.1})",
        super::report::ns(ns, timed),
        count.instructions
    )
}

/// Returns the table of the layers and the providers.
pub fn comparison(operations: &[Operation], timed: bool, page: bool) -> String {
    let ratio = |spread: Spread| super::report::ratio(spread, timed, page);
    let rows = operations.iter().map(|operation| {
        vec![
            operation.name.to_owned(),
            cell(operation.stock.0, operation.stock.1, timed),
            cell(operation.plugin.0, operation.plugin.1, timed),
            cell(operation.raw.count, operation.raw.ns, timed),
            cell(operation.safe.count, operation.safe.ns, timed),
            ratio(operation.plugin_ratio),
            ratio(operation.raw.ratio),
            ratio(operation.safe.ratio),
        ]
    });
    markdown(&HEADINGS, &rows.collect::<Vec<_>>())
}

/// Returns the table of the layers' limits.
pub fn requirements(operations: &[Operation], timed: bool) -> String {
    let spread = |spread: Spread| super::report::median_and_quartiles(spread, timed);
    let rows = operations.iter().map(|operation| {
        let bare = operation.bare;
        let (counts, times) = (operation.exceeded_counts(), operation.exceeded_times());
        let verdict = match (counts.is_empty(), !timed || times.is_empty()) {
            (true, true) => "pass",
            (false, true) => "FAIL: count",
            (true, false) => "FAIL: time",
            (false, false) => "FAIL: count, time",
        };
        let limit = operation.limits.ratio;
        vec![
            operation.name.to_owned(),
            bare.map_or("-".to_owned(), |bare| cell(bare.0, bare.1, timed)),
            bare.map_or("-".to_owned(), |_| spread(operation.over_bare)),
            limit.map_or("-".to_owned(), |limit| limit.to_string()),
            spread(operation.safe_overhead),
            MAX_SAFE_OVERHEAD_NS.to_string(),
            operation.limits.instructions[0].to_string(),
            operation.limits.instructions[1].to_string(),
            verdict.to_owned(),
        ]
    });
    markdown(&LIMIT_HEADINGS, &rows.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output_with_counts(of: impl Fn(&str, f64) -> Count) -> Output {
        let rows = OPERATIONS.iter().flat_map(|limits| {
            let layers = ["raw", "safe"].into_iter().zip(limits.instructions);
            layers.map(|(layer, limit)| (format!("{layer}-{}", limits.operation), limit))
        });
        Output {
            counts: rows
                .map(|(row, limit)| (row.clone(), of(&row, limit)))
                .collect(),
            ..Output::default()
        }
    }

    fn count(instructions: f64, locked: f64, fences: f64) -> Count {
        Count {
            instructions,
            locked,
            fences,
        }
    }

    #[test]
    fn a_count_at_its_limit_passes_and_above_it_fails() {
        let (rows, exceeded) =
            exceeded_counts(&output_with_counts(|_, limit| count(limit, 0.0, 0.0))).unwrap();
        assert_eq!((rows, exceeded.len()), (18, 0));
        let more = output_with_counts(|row, limit| match row {
            "raw-poll/16" => count(limit + 0.1, 0.0, 0.0),
            "safe-send/1" => count(limit, 1.0, 0.0),
            "raw-recv/16" => count(limit, 0.0, 0.0625),
            _ => count(limit, 0.0, 0.0),
        });
        assert_eq!(exceeded_counts(&more).unwrap().1.len(), 3);
    }

    #[test]
    fn a_row_that_was_not_counted_is_an_error() {
        assert!(exceeded_counts(&Output::default()).is_err());
    }

    #[test]
    fn ratios_are_of_consecutive_processes() {
        let run = |bare: f64, raw: f64, safe: f64| {
            let times = OPERATIONS.iter().flat_map(|limits| {
                let layers = [("bare", bare), ("raw", raw), ("safe", safe)];
                layers.map(|(layer, ns)| (format!("{layer}-{}", limits.operation), ns))
            });
            Output {
                times: times.collect(),
                ..Output::default()
            }
        };
        let stock = |ns: f64| Output {
            times: OPERATIONS
                .iter()
                .map(|l| (l.operation.to_owned(), ns))
                .collect(),
            ..Output::default()
        };
        let row = |limits: &Limits| Row {
            name: limits.operation.to_owned(),
            ..Row::default()
        };
        let rows: Vec<Row> = OPERATIONS.iter().map(row).collect();
        let mut counts = output_with_counts(|_, limit| count(limit, 0.0, 0.0));
        counts
            .counts
            .push(("bare-poll/16".to_owned(), Count::default()));
        // The second process was slow, and so was that of stock after it.
        let runs = [
            run(1.0, 1.3, 12.0),
            run(2.0, 2.2, 22.0),
            run(1.0, 1.3, 11.0),
        ];
        let stocks = [stock(2.6), stock(4.4), stock(2.6)];
        let operations = compare(&rows, &counts, &runs, &stocks).unwrap();
        let poll = operations.iter().find(|o| o.name == "poll/16").unwrap();
        assert_eq!(poll.raw.ratio.median, 0.5);
        assert!((poll.over_bare.median - 1.3).abs() < 1e-9);
        assert!((poll.safe_overhead.median - 10.7).abs() < 1e-9);
        assert_eq!(poll.exceeded_times().len(), 2);
        assert!(poll.exceeded_counts().is_empty());
    }
}
