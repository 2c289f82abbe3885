//! The `ringverbs` command.
//!
//! Each subcommand is a module: its arguments ([`clap`]), its work, and its
//! output as text and as JSON.

#![forbid(unsafe_code)]

mod capture;
mod device;
mod devices;
mod doctor;
mod error;
mod escape;
mod fault;
mod info;
mod link;
mod out;
#[cfg(any(feature = "packaging", test))]
mod packaging;
mod perf;
mod pingpong;
mod poller;
mod replay;
mod run;
mod running;
mod side;
mod temporary;
mod timeline;
mod top;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// RDMA verbs without a C library: show devices, diagnose problems, test and
/// measure.
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
    /// Show the attributes of a device, its ports and GID tables (as ibv_devinfo)
    Info(info::Args),
    /// Find out why RDMA does not work on this host, and how to fix it
    Doctor(doctor::Args),
    /// Exchange messages: within this process, or with another ringverbs or
    /// ibv_*_pingpong
    Pingpong(pingpong::Args),
    /// Measure latency and bandwidth: within this process, or with another one
    Perf(perf::Args),
    /// List a program's verbs calls, or decode the queues of a running one on rxe, read-only
    Trace(trace::Args),
    /// Replay records of run --record on an embedded device, and compare
    Replay(replay::Args),
    /// Run a program that uses libibverbs with ringverbs as the provider of its
    /// devices
    Run(run::Args),
    /// Run a program on embedded devices, and report its errors that no device reports
    Check(run::check::Args),
    /// Print the environment with which run would start a program, for eval, CI or containers
    Env(run::environment::Args),
    /// Capture the frames of running programs, and join captures
    Capture(capture::Args),
    /// Write a page with a sequence diagram of captures, records and explanations
    Timeline(timeline::Args),
    /// Inject faults into running programs on embedded devices
    Fault(fault::Args),
    /// Show the objects, rates and errors of running programs on embedded devices, and the
    /// counters of devices of the host
    Top(top::Args),
    /// Set the link of an embedded device up or down
    Link(link::Args),
}

fn main() -> ExitCode {
    #[cfg(feature = "packaging")]
    if let Some(code) = packaging::run() {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            out::print_usage_error(&error);
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
        Command::Replay(args) => replay::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Check(args) => run::check::run(&args),
        Command::Env(args) => run::environment::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Timeline(args) => timeline::run(&args),
        Command::Fault(args) => fault::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Link(args) => link::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            out::print_error(&error);
            ExitCode::FAILURE
        }
    }
}
