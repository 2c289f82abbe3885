//! `cargo xtask bench`: the data path of the provider beside the C provider's.
//!
//! Both run the same program (`provider-plugin/bench`), on queues that a
//! stand-in for the kernel made, in processes that alternate. Counts of
//! instructions are exact and make the gate; times are ratios of medians, and
//! the C provider against itself says how far those stray.

mod limits;
mod measure;
mod mlx5;
mod plot;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{dist, driver};

/// Whose queues are measured.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// rdma_rxe's
    Rxe,
    /// ConnectX's; no gate and no JSON
    Mlx5,
}

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// Whose queues are measured
    #[arg(long, value_enum, default_value = "rxe")]
    device: Device,
    /// Pairs of processes, the C provider's and ours in turn
    #[arg(long, default_value_t = 21)]
    pairs: usize,
    /// Timed samples of each row in a process
    #[arg(long, default_value_t = 51)]
    samples: usize,
    /// Count instructions only: seconds instead of a minute
    #[arg(long)]
    counts_only: bool,
    /// Write the table and the plot into docs/
    #[arg(long, conflicts_with = "counts_only")]
    write: bool,
    /// Exit with an error when a count is above its limit
    #[arg(long)]
    gate: bool,
    /// Print JSON in place of the table
    #[arg(long)]
    json: bool,
    /// A provider to measure instead of a fresh build, as RDMAV_DRIVERS names
    /// it: the path without `-rdmav<ABI>.so`
    #[arg(long)]
    provider: Option<PathBuf>,
    /// Print where each instruction of a row's operations is, for both
    /// providers, and measure nothing
    #[arg(long, value_name = "ROW")]
    trace: Option<String>,
}

/// What the bench is compiled and compared with.
pub const NEEDS: &[(&str, &str)] = &[
    ("cc", "build-essential"),
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    // A file of the package that no installation of ours moves.
    ("/etc/libibverbs.d/mlx5.driver", "ibverbs-providers"),
];

/// Counts the instructions of ours: how many rows there are, and which counts
/// are above their limits.
pub fn gate() -> Result<(usize, Vec<String>)> {
    let ours = dist::dist()?.join("libringverbs");
    let program = measure::Program::build(&driver::target_dir().join("bench"))?;
    let rows = program.measure(&ours, 0, 1)?.rows;
    Ok((rows.len(), limits::broken_counts(&rows)))
}

/// Builds, measures, reports.
pub fn bench(arguments: &Arguments) -> Result<ExitCode> {
    let ours = match &arguments.provider {
        Some(path) => path.clone(),
        None => dist::dist()?.join("libringverbs"),
    };
    if arguments.device == Device::Mlx5 {
        if let Some(row) = &arguments.trace {
            mlx5::trace(&ours, row)?;
        } else {
            let pairs = if arguments.counts_only {
                0
            } else {
                arguments.pairs.max(2)
            };
            mlx5::bench(&ours, pairs, arguments.samples, arguments.write)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let program = measure::Program::build(&driver::target_dir().join("bench"))?;
    if let Some(row) = &arguments.trace {
        for provider in [measure::Provider::Stock, measure::Provider::Ours(&ours)] {
            print!("{}", program.trace(provider, row)?);
        }
        return Ok(ExitCode::SUCCESS);
    }

    let pairs = if arguments.counts_only {
        0
    } else {
        arguments.pairs.max(2)
    };
    let results = program.measure(&ours, pairs, arguments.samples)?;
    if arguments.json {
        print!("{}", report::json(&results));
    } else {
        print!("{}", report::terminal(&results));
    }
    if arguments.write {
        let docs = driver::root().join("docs");
        report::write(&docs.join("performance.md"), &results)?;
        let plot = docs.join("performance.svg");
        std::fs::write(&plot, plot::svg(&results))
            .with_context(|| format!("cannot write {}", plot.display()))?;
    }

    let broken = limits::broken_counts(&results.rows);
    for line in &broken {
        eprintln!("count above its limit: {line}");
    }
    Ok(if arguments.gate && !broken.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
