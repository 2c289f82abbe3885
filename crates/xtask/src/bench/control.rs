//! The control path on ConnectX's stand-in: creating and destroying queues, and loading
//! the provider. Only times are compared: instruction counts do not show the cost of
//! system calls and page faults.

use std::path::Path;

use anyhow::{Context, Result};

use super::measure::{Spread, pairwise, times_of};
use super::programs::{Output, parse};
use super::report;
use crate::driver;
use crate::mlx5::{self, Program};
use crate::standin::{Provider, output_of};

/// Returns the maximum of our time over the stock provider's. Loading should take 0.5 MB at
/// most; the ratio varies, as both sizes depend on the addresses that the loader chooses.
fn max_ratio(row: &str) -> f64 {
    match row {
        "load-resident" => 3.5,
        "contend-p90" | "contend-p99" => 1.5,
        _ => 2.0,
    }
}

const HEADINGS: [&str; 6] = [
    "verb / objects at once",
    "stock ns",
    "ours ns",
    "ratio (quartiles)",
    "at most",
    "",
];

/// Times both providers in `pairs` processes each. Returns the table, and the limits that
/// ours exceeds.
///
/// # Errors
/// A program that does not build or run.
pub fn bench(
    ours: &Path,
    c_provider: Provider,
    pairs: usize,
    samples: usize,
) -> Result<(String, Vec<String>)> {
    let dir = driver::target_dir().join("bench-mlx5");
    let program = Program::build(&dir, "mlx5_control", &["mlx5_control.c", "mlx5_device.c"])?;
    let stand_in = mlx5::stand_in(&dir)?;
    let load = stand_in.program("load", &["load.c"])?;
    let contend = contention_program(&dir)?;
    let samples = samples.to_string();
    let run = |provider| -> Result<Output> {
        let mut output = parse(&program.run(provider, &["time", &samples])?)?;
        let file = std::fs::canonicalize(&output.provider)
            .with_context(|| format!("cannot find {}", output.provider))?;
        let file = file.display().to_string();
        let mut command = stand_in.command(&load, Provider::Stock, &[&file]);
        let loaded = parse(&output_of(command.env_remove("RINGVERBS_DEVICES"))?)?;
        output.times.extend(loaded.times);
        output
            .times
            .extend(parse(&contend.run(provider, &[])?)?.times);
        Ok(output)
    };
    let (mut stock, mut our) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        eprint!("\rcontrol path, pair {} of {pairs} ", pair + 1);
        stock.push(run(c_provider)?);
        our.push(run(Provider::Ours(ours))?);
    }
    eprintln!();
    table(&stock, &our)
}

fn contention_program(dir: &Path) -> Result<Program> {
    Program::build(dir, "mlx5_contend", &["mlx5_contend.c", "mlx5_device.c"])
}

/// Has two threads post to one queue pair of ours.
///
/// # Errors
/// The threads slowed each other down too much, or the program does not build.
pub fn check_contention(ours: &Path) -> Result<()> {
    let dir = driver::target_dir().join("bench-mlx5");
    contention_program(&dir)?.run(Provider::Ours(ours), &[])?;
    Ok(())
}

fn table(stock: &[Output], our: &[Output]) -> Result<(String, Vec<String>)> {
    let rows = our.first().map_or(&[][..], |output| &output.times);
    let (mut cells, mut exceeded) = (Vec::new(), Vec::new());
    for (row, _) in rows {
        let (old, new) = (times_of(stock, row)?, times_of(our, row)?);
        let ratio = Spread::from_values(pairwise(&old, &new, |old, new| new / old));
        let missed = ratio.median > max_ratio(row);
        if missed {
            let (ratio, limit) = (ratio.median, max_ratio(row));
            exceeded.push(format!(
                "mlx5 {row}: {ratio:.2} of stock's time, at most {limit}"
            ));
        }
        cells.push(vec![
            row.clone(),
            report::ns(Spread::from_values(old).median, true),
            report::ns(Spread::from_values(new).median, true),
            report::median_and_quartiles(ratio, true),
            format!("{:.2}", max_ratio(row)),
            if missed { "MISSED" } else { "met" }.to_owned(),
        ]);
    }
    Ok((report::markdown(&HEADINGS, &cells), exceeded))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_above_its_limit_is_exceeded() {
        let output = |ns: f64| Output {
            times: vec![("create-cq/1".to_owned(), ns)],
            ..Output::default()
        };
        let stock = [output(100.0), output(100.0)];
        let exceeded = |ns| table(&stock, &[output(ns), output(ns)]).unwrap().1.len();
        assert_eq!((exceeded(200.0), exceeded(201.0)), (0, 1));
        assert!(table(&stock, &[Output::default()]).unwrap().1.is_empty());
        assert!(table(&[Output::default()], &[output(1.0)]).is_err());
    }
}
