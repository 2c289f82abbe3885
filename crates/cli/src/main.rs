//! The `ringverbs` command.
//!
//! Each subcommand is a module: what it is told ([`clap`] arguments), what it
//! finds out, and how it says so, to people and as JSON.

#![forbid(unsafe_code)]

mod device;
mod devices;
mod doctor;
mod error;
mod info;
mod out;
mod perf;
mod pingpong;
mod poller;
mod run;
mod shown;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// RDMA verbs without a C library: look at devices, find out why they do not
/// work, try and measure them.
#[derive(Parser)]
#[command(name = "ringverbs", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List RDMA devices
    Devices(devices::Args),
    /// Show what a device, its ports and GID tables say (as ibv_devinfo does)
    Info(info::Args),
    /// Find out why RDMA does not work here, and what mends it
    Doctor(doctor::Args),
    /// Bounce messages: here in one process, or with another ringverbs or
    /// ibv_*_pingpong
    Pingpong(pingpong::Args),
    /// Measure latency and bandwidth: within this process, or with another
    Perf(perf::Args),
    /// Decode the queues of a running program on rxe, without touching it
    Trace(trace::Args),
    /// Run a program of libibverbs with ringverbs as the provider of its
    /// devices
    Run(run::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            out::complain_of_arguments(&error);
            return ExitCode::from(2);
        }
        Err(help) => help.exit(),
    };
    let result = match cli.command {
        Command::Devices(args) => devices::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Pingpong(args) => pingpong::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Run(args) => run::run(&args),
    };
    match result {
        Ok(code) => code,
        // Whoever read our output has seen enough.
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            out::complain(&error);
            ExitCode::FAILURE
        }
    }
}
