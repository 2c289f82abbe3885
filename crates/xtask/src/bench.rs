//! `cargo xtask bench`: compares the data path of the plugin with that of the stock
//! provider, and the Rust crate with both.
//!
//! The providers run the same program (`provider-plugin/bench`), the crate one of its own
//! (`crates/ringverbs/benches`), on queues of a stand-in for the kernel, in alternating
//! processes. Instruction counts are exact. Times are medians of ratios; the stock
//! provider compared with itself shows their noise.

mod busy;
mod control;
mod embedded;
mod embedded_writes;
mod layers;
mod limits;
mod measure;
mod mlx5;
mod mlx5_layers;
mod plot;
mod programs;
pub mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::standin::{Provider, StandIn};
use crate::{dist, driver};
use programs::{Native, Verbs};

/// The device whose queues are measured.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// rdma_rxe's
    Rxe,
    /// ConnectX's; no JSON
    Mlx5,
    /// Those of the embedded device, end to end: writes beside memcpy, latency and
    /// rate of sends in one process, and between two; no gate and no JSON
    Embedded,
}

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// The device whose queues are measured
    #[arg(long, value_enum, default_value = "rxe")]
    device: Device,
    /// Time whole programs on the embedded device, on an idle machine and beside busy
    /// loops, `--rounds` times each
    #[arg(long)]
    busy: bool,
    /// Rounds of processes: the stock provider's, ours, the Rust crate's
    #[arg(long, default_value_t = 21)]
    rounds: usize,
    /// Timed samples of each row in a process
    #[arg(long, default_value_t = 51)]
    samples: usize,
    /// Count instructions only: seconds instead of a minute
    #[arg(long)]
    counts_only: bool,
    /// Write the tables and the plot into docs/
    #[arg(long, conflicts_with = "counts_only")]
    write: bool,
    /// Fail if a count, or a time of the Rust crate, exceeds its limit
    #[arg(long)]
    gate: bool,
    /// Print JSON in place of the table
    #[arg(long)]
    json: bool,
    /// A provider to measure instead of a fresh build, as RDMAV_DRIVERS names
    /// it: the path without `-rdmav<ABI>.so`
    #[arg(long)]
    provider: Option<PathBuf>,
    /// Another build of the stock provider for the comparison on ConnectX's queues, as
    /// RDMAV_DRIVERS names it: the path without `-rdmav<ABI>.so`
    #[arg(long)]
    stock: Option<PathBuf>,
    /// Print the address of each instruction of a row's operations, for both
    /// providers or (raw-, safe-, bare-) the Rust crate, and measure nothing
    #[arg(long, value_name = "ROW")]
    trace: Option<String>,
}

/// The packages that the bench needs.
pub const NEEDS: &[(&str, &str)] = &[
    ("cc", "build-essential"),
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    // A file of the package that no installation of ours moves.
    ("/etc/libibverbs.d/mlx4.driver", "ibverbs-providers"),
];

/// The packages that the Rust crate's bench needs.
pub const NATIVE_NEEDS: &[(&str, &str)] = &[
    ("cc", "build-essential"),
    ("/usr/include/rdma/rdma_user_rxe.h", "linux-libc-dev"),
];

fn stand_in() -> Result<StandIn> {
    programs::stand_in(&driver::target_dir().join("bench"))
}

/// Counts the instructions of ours. Returns the number of rows, and the counts that exceed
/// their limits.
pub fn gate() -> Result<(usize, Vec<String>)> {
    let ours = dist::dist()?.join("libringverbs");
    let stand_in = stand_in()?;
    let verbs = Verbs::build(&stand_in)?;
    let rows = measure::measure(&verbs, None, &ours, 0, 1)?.rows;
    Ok((rows.len(), limits::exceeded_counts(&rows)))
}

/// As [`gate`], on ConnectX's queues.
pub fn mlx5_gate() -> Result<(usize, Vec<String>)> {
    mlx5::gate(&dist::dist()?.join("libringverbs"))
}

/// As [`gate`], for the Rust crate's layers on ConnectX's queues.
pub fn native_mlx5_gate() -> Result<(usize, Vec<String>)> {
    mlx5_layers::gate()
}

/// As [`gate`], for the Rust crate's layers.
pub fn native_gate() -> Result<(usize, Vec<String>)> {
    let stand_in = stand_in()?;
    let native = Native::build(&stand_in, "datapath")?;
    layers::exceeded_counts(&native.figures(&["count"])?)
}

/// Builds, measures, reports.
pub fn bench(arguments: &Arguments) -> Result<ExitCode> {
    let rounds = if arguments.counts_only {
        0
    } else {
        arguments.rounds.max(2)
    };
    let ours = || match &arguments.provider {
        Some(path) => Ok(path.clone()),
        None => anyhow::Ok(dist::dist()?.join("libringverbs")),
    };
    if arguments.busy {
        return Ok(outcome(&busy::bench(rounds)?, arguments.gate));
    }
    if arguments.device == Device::Embedded {
        embedded::bench(arguments.write)?;
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.device == Device::Mlx5 {
        if let Some(row) = &arguments.trace {
            mlx5::trace(&ours()?, row)?;
            return Ok(ExitCode::SUCCESS);
        }
        let stock = arguments.stock.as_deref();
        let exceeded = mlx5::bench(&ours()?, stock, rounds, arguments.samples, arguments.write)?;
        return Ok(outcome(&exceeded, arguments.gate));
    }
    let stand_in = stand_in()?;
    let native = Native::build(&stand_in, "datapath")?;
    if let Some(row) = &arguments.trace {
        if ["raw-", "safe-", "bare-"]
            .iter()
            .any(|layer| row.starts_with(layer))
        {
            print!("{}", native.trace(row)?);
            return Ok(ExitCode::SUCCESS);
        }
        let (verbs, ours) = (Verbs::build(&stand_in)?, ours()?);
        for provider in [Provider::Stock, Provider::Ours(&ours)] {
            print!("{}", verbs.trace(provider, row)?);
        }
        return Ok(ExitCode::SUCCESS);
    }

    let (verbs, ours) = (Verbs::build(&stand_in)?, ours()?);
    let results = measure::measure(&verbs, Some(&native), &ours, rounds, arguments.samples)?;
    if arguments.json {
        print!("{}", report::json(&results));
    } else {
        let tables = report::terminal(&results);
        print!("{tables}");
        report::save("rxe", &tables)?;
    }
    if arguments.write {
        let root = driver::root();
        report::write(root, &results)?;
        let plot = root.join("docs/performance.svg");
        std::fs::write(&plot, plot::svg(&results))
            .with_context(|| format!("cannot write {}", plot.display()))?;
    }

    let mut exceeded = limits::exceeded_counts(&results.rows);
    for operation in &results.layers {
        exceeded.extend(operation.exceeded_counts());
        if rounds > 0 {
            exceeded.extend(operation.exceeded_times());
        }
    }
    Ok(outcome(&exceeded, arguments.gate))
}

/// Prints exceeded limits, which are a failure if there is a gate.
fn outcome(exceeded: &[String], gate: bool) -> ExitCode {
    for line in exceeded {
        eprintln!("above its limit: {line}");
    }
    if gate && !exceeded.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
