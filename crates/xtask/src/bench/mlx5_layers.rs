//! Compares the Rust crate's layers on ConnectX's queues with the two providers: their
//! limits, and the table.

use anyhow::{Result, ensure};

use super::limits::{self, ROUNDING};
use super::measure::{Count, Row, Spread, pairwise, times_of};
use super::programs::{Native, Output};
use super::report;
use crate::standin::StandIn;
use crate::{driver, mlx5};

/// The crate's program, by cargo's name for it.
pub const PROGRAM: &str = "datapath-mlx5";

/// Compiles the stand-in for the driver.
///
/// # Errors
/// No compiler, missing headers, a folder that cannot be written.
pub fn stand_in() -> Result<StandIn> {
    mlx5::stand_in(&driver::target_dir().join("bench-mlx5"))
}

/// Runs the program and parses its output.
///
/// # Errors
/// The program failed, or its rows are not those of the table.
pub fn figures(native: &Native, arguments: &[&str]) -> Result<Output> {
    let output = native.figures(arguments)?;
    let rows = output.counts.len().max(output.times.len());
    ensure!(
        rows == 2 * OPERATIONS.len(),
        "{PROGRAM} has {rows} rows, not those of the table"
    );
    Ok(output)
}

/// The rows, and the maximum instructions of an operation of the raw and of the safe
/// layer: slightly above the current counts. `cargo xtask test` fails above that.
const OPERATIONS: [(&str, [f64; 2]); 13] = [
    ("poll-recv/1", [137.0, 276.0]),
    ("poll-recv/16", [106.0, 221.0]),
    ("poll-send/1", [128.0, 254.0]),
    ("poll-send/16", [97.0, 199.0]),
    ("poll-empty/1", [38.0, 48.0]),
    ("cursor/1", [145.0, 397.0]),
    ("cursor/16", [111.0, 325.0]),
    ("send/1", [138.0, 217.0]),
    ("send/16", [73.0, 142.0]),
    ("send-inline/1", [147.0, 185.0]),
    ("send-inline/16", [82.0, 114.0]),
    ("recv/1", [70.0, 128.0]),
    ("recv/16", [45.0, 94.0]),
];
const LAYERS: [&str; 2] = ["raw", "safe"];

/// Counts the layers' instructions. Returns the number of rows, and descriptions of
/// exceeded limits. No instruction may be locked: each queue has one owner.
///
/// # Errors
/// A program that does not build or run.
pub fn gate() -> Result<(usize, Vec<String>)> {
    let stand_in = stand_in()?;
    let counts = figures(&Native::build(&stand_in, PROGRAM)?, &["count"])?;
    Ok((2 * OPERATIONS.len(), exceeded_counts(&counts)?))
}

/// Describes the counts that exceed their limits.
///
/// # Errors
/// A row was not counted.
pub fn exceeded_counts(counts: &Output) -> Result<Vec<String>> {
    let mut exceeded = Vec::new();
    for (operation, most) in OPERATIONS {
        for (layer, limit) in LAYERS.into_iter().zip(most) {
            let row = format!("{layer}-{operation}");
            let count = counts.count(&row)?;
            let Count {
                instructions,
                locked,
                fences,
            } = count;
            let calls = limits::batch(&row);
            let mut check = |what: &str, is: f64, limit: f64| {
                if is > limit + ROUNDING * calls {
                    exceeded.push(format!("mlx5 {row}: {is:.2} {what}, at most {limit}"));
                }
            };
            check("instructions", instructions, limit);
            check("locked instructions a call", locked * calls, 0.0);
            check(
                "fences a call",
                fences * calls,
                super::mlx5::max_fences(operation),
            );
        }
    }
    Ok(exceeded)
}

const HEADINGS: [&str; 8] = [
    "operation / batch",
    "stock ns (instr.)",
    "plugin, one owner",
    "raw",
    "safe",
    "plugin / stock",
    "raw / stock",
    "safe / stock",
];

/// Returns the table of the layers and both providers. `rows` are those of the C program.
/// Stock's queues are thread-safe, those of the plugin and the crate have one owner.
///
/// # Errors
/// A row that one of the programs lacks.
pub fn table(
    rows: &[Row],
    counts: &Output,
    runs: &[Output],
    stock: &[Output],
    page: bool,
) -> Result<String> {
    let timed = !runs.is_empty();
    let cell = |ns: f64, count: Count| {
        let ns = if timed {
            format!("{ns:.2}")
        } else {
            "-".to_owned()
        };
        format!("{ns} ({:.1})", count.instructions)
    };
    let mut cells = Vec::new();
    for (operation, _) in OPERATIONS {
        let find = |name: &str| rows.iter().find(|row| row.name == name);
        let (Some(shared), Some(owned)) = (find(operation), find(&format!("single-{operation}")))
        else {
            anyhow::bail!("no provider was measured in {operation}");
        };
        let old = times_of(stock, operation)?;
        let mut line = vec![
            operation.to_owned(),
            cell(shared.stock_ns, shared.stock_count),
            cell(owned.ours_ns, owned.ours_count),
        ];
        let mut ratios = vec![report::ratio(owned.ratio, timed, page)];
        for layer in LAYERS {
            let name = format!("{layer}-{operation}");
            let new = times_of(runs, &name)?;
            let ratio = Spread::from_values(pairwise(&old, &new, |old, new| new / old));
            ratios.push(report::ratio(ratio, timed, page));
            line.push(cell(Spread::from_values(new).median, counts.count(&name)?));
        }
        line.extend(ratios);
        cells.push(line);
    }
    Ok(report::markdown(&HEADINGS, &cells))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output_with_counts(of: impl Fn(f64) -> Count) -> Output {
        let rows = OPERATIONS.iter().flat_map(|(operation, most)| {
            let of = &of;
            LAYERS
                .into_iter()
                .zip(*most)
                .map(move |(layer, most)| (format!("{layer}-{operation}"), of(most)))
        });
        Output {
            counts: rows.collect(),
            ..Output::default()
        }
    }

    #[test]
    fn a_count_above_its_limit_is_exceeded() {
        let count = |instructions, locked| Count {
            instructions,
            locked,
            fences: 0.0,
        };
        let exceeded_by = |more: f64, locked| {
            let counts = output_with_counts(|most| count(most + more, locked));
            exceeded_counts(&counts).unwrap().len()
        };
        assert_eq!(exceeded_by(0.0, 0.0), 0);
        assert_eq!(exceeded_by(1.0, 0.0), 2 * OPERATIONS.len());
        assert_eq!(exceeded_by(0.0, 1.0), 2 * OPERATIONS.len());
    }

    #[test]
    fn a_row_that_was_not_counted_is_an_error() {
        assert!(exceeded_counts(&Output::default()).is_err());
    }
}
