//! `ringverbs capture`: works on captures of `ringverbs run --capture`.

mod merge;

use std::path::PathBuf;
use std::process::ExitCode;

use crate::error::Error;

/// Arguments of `capture`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Join the captures of several processes or hosts, and those of a ring, by time
    #[command(after_help = "Example: ringverbs capture merge all.pcapng frames-*.pcapng")]
    Merge {
        /// The file to write
        #[arg(value_name = "OUT")]
        output: PathBuf,
        /// The captures to join
        #[arg(value_name = "IN", required = true)]
        inputs: Vec<PathBuf>,
    },
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    match &args.action {
        Action::Merge { output, inputs } => merge::merge(output, inputs)?,
    }
    Ok(ExitCode::SUCCESS)
}
