//! `ringverbs capture`: captures of running programs, and work on those of `ringverbs run
//! --capture`.

mod control;
pub mod merge;
pub mod reader;

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
    /// Capture the frames of running programs, and of those that start later
    #[command(after_help = "\
Example: ringverbs capture start /tmp/net frames.pcapng; sleep 10; ringverbs capture stop /tmp/net")]
    Start(control::Start),
    /// End a capture of start
    Stop(control::Stop),
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
        Action::Start(start) => control::start(start),
        Action::Stop(stop) => control::stop(stop),
        Action::Merge { output, inputs } => {
            merge::merge(output, inputs)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
