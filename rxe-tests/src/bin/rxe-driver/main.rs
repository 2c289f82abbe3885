//! The driver of the test cases, on a kernel with rdma_rxe: in a guest, or on this
//! machine (`cargo xtask test --host`).

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use rxe_tests::driver::process;
use rxe_tests::driver::setup::{self, Wiring};
use rxe_tests::driver::suite::{self, Plan};

#[derive(Parser)]
#[command(
    name = "rxe-driver",
    about = "Runs test cases of verbs programs on rxe"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Creates rxe0 and prints its name and address as shell assignments
    Setup {
        /// Create rxe0 and rxe1 on the two ends of a veth pair
        #[arg(long)]
        veth: bool,
        /// MTU of the network devices in bytes
        #[arg(long, default_value_t = 4200)]
        mtu: u32,
    },
    /// Runs the cases and reports each as a line of JSON
    Suite(Box<Plan>),
    /// Runs a command with libibverbs's configured providers hidden
    #[command(hide = true)]
    Alone {
        #[arg(last = true, required = true)]
        argv: Vec<String>,
    },
    /// Runs a command with a libmlx5.so.1 in the place of rdma-core's
    #[command(hide = true)]
    InPlace {
        library: PathBuf,
        #[arg(last = true, required = true)]
        argv: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("rxe-driver: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Setup { veth, mtu } => {
            let wiring = if veth { Wiring::Veth } else { Wiring::Loopback };
            for (number, device) in setup::devices(wiring, mtu)?.iter().enumerate() {
                let suffix = if number == 0 {
                    String::new()
                } else {
                    number.to_string()
                };
                println!(
                    "export RXE_DEV{suffix}={} RXE_GID{suffix}={} RXE_ADDR{suffix}={}",
                    device.name, device.gid, device.address
                );
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Suite(plan) => suite::run(&plan).map(|()| ExitCode::SUCCESS),
        Command::InPlace { library, argv } => {
            process::exec_with_libmlx5(&library, &argv).map(|()| ExitCode::FAILURE)
        }
        Command::Alone { argv } => {
            process::exec_without_providers(&argv).map(|()| ExitCode::FAILURE)
        }
    }
}
