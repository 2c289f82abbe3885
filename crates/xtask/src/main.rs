//! The project's own commands: `cargo xtask help` lists them.

mod driver;
mod guest;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The commands of the ringverbs project")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Boots a Debian guest with a real rdma_rxe and runs a command in it
    Guest(guest::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Guest(arguments) => guest::guest(&arguments),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
