//! `ringverbs replay`: replays records of `ringverbs run --record` on an embedded device.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use embedded::softhca::chaos::Chaos;
use embedded::softhca::fault::Faults;
use embedded::{CaptureOptions, Drive, Network};
use replay::{Outcome, Record, RecordError, ReplayError};

use crate::error::Error;
use crate::out::{self, paint};
use crate::run::faults;

/// Arguments of `replay`.
#[derive(clap::Args)]
#[command(after_help = "\
Exit status 1 if something differs from the records. What is replayed: docs/trace.md.
Example: ringverbs replay --explain record-*.jsonl")]
pub struct Args {
    /// The records, one of each process
    #[arg(required = true, value_name = "FILE")]
    records: Vec<PathBuf>,
    /// The device: roce or ib [default: what the recorded paths are of]
    #[arg(long, value_name = "DEVICE", value_parser = ["roce", "ib"])]
    embedded: Option<String>,
    /// Print why work requests have failed
    #[arg(long)]
    explain: bool,
    /// Let the device do what the specification allows and fast ones rarely do, as this seed says
    #[arg(long, value_name = "SEED")]
    chaos: Option<u64>,
    /// Inject the faults of a file, as docs/faults.md describes
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// Capture the frames of the device for Wireshark, in a file FILE with the number of this process
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// How long a recorded completion is waited for
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u32,
}

/// The reason why nothing is replayed.
#[derive(Debug)]
enum ReplayFailure {
    /// A record cannot be read.
    Record(PathBuf, RecordError),
    /// The device cannot be made.
    Replay(ReplayError),
    /// The file of faults cannot be used, for this reason.
    Faults(PathBuf, String),
    /// The capture cannot be written.
    Capture(PathBuf, std::io::Error),
}

impl fmt::Display for ReplayFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Record(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Replay(error) => write!(f, "{error}"),
            Self::Faults(path, reason) => write!(f, "--faults: {}:{reason}", path.display()),
            Self::Capture(path, error) => write!(f, "--capture: {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for ReplayFailure {}

/// Reads the records, and replays them.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let mut records = Vec::new();
    for path in &args.records {
        let refused = |error| Error::subcommand(ReplayFailure::Record(path.clone(), error));
        let file = File::open(path).map_err(|error| refused(RecordError::Read(error)))?;
        records.push(Record::read(BufReader::new(file)).map_err(refused)?);
    }
    let network = network(args)?;
    let options = replay::Options {
        profile: args.embedded.clone(),
        patience: Duration::from_secs(args.timeout.into()),
    };
    let outcome = replay::replay(&records, &network, &options);
    let outcome = outcome.map_err(|error| Error::subcommand(ReplayFailure::Replay(error)))?;
    print(&outcome, args.explain)?;
    Ok(match outcome.differences.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Returns the network of the replay.
fn network(args: &Args) -> Result<Network, Error> {
    let network =
        Network::new(Drive::Thread).map_err(|error| Error::verb("the network")(error.into()))?;
    if let Some(seed) = args.chaos {
        network.set_chaos(Chaos::new(seed));
    }
    if let Some(path) = &args.faults {
        let refused = |reason| Error::subcommand(ReplayFailure::Faults(path.clone(), reason));
        let text = faults::read(path).map_err(|error| refused(format!(" {error}")))?;
        let faults = Faults::parse(&text).map_err(|error| refused(error.to_string()))?;
        network.inject(&faults, None);
    }
    if let Some(path) = &args.capture {
        let refused = |error| Error::subcommand(ReplayFailure::Capture(path.clone(), error));
        network
            .capture(&CaptureOptions::new(path), None)
            .map_err(refused)?;
    }
    Ok(network)
}

/// Prints what a replay has found.
fn print(outcome: &Outcome, explains: bool) -> Result<(), Error> {
    let mut out = out::stdout();
    for difference in &outcome.differences {
        writeln!(out, "{} {difference}", paint(out::BAD, "differs:"))?;
    }
    if explains {
        for failure in &outcome.failures {
            writeln!(out, "{} {failure}", paint(out::WARN, "failed:"))?;
        }
    }
    for (what, count) in &outcome.left_out {
        writeln!(out, "{} {what}: {count}", paint(out::DIM, "not replayed:"))?;
    }
    if outcome.unpolled != 0 {
        let name = paint(out::DIM, "not polled by the programs:");
        writeln!(out, "{name} completions: {}", outcome.unpolled)?;
    }
    let Outcome {
        calls,
        posts,
        completions,
        differences,
        ..
    } = outcome;
    writeln!(
        out,
        "replayed {calls} calls, {posts} posts and {completions} completions: differences: {}",
        differences.len()
    )?;
    Ok(out.flush()?)
}
