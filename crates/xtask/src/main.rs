//! The project's own commands: `cargo xtask help` lists them.

mod bare;
mod bench;
mod bytes;
mod demo;
mod dist;
mod driver;
mod guest;
mod mlx5;
mod native;
mod softhca;
mod suite;
mod test;

use std::path::PathBuf;
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
    /// Shows unmodified programs served by ringverbs on a real rdma_rxe
    Demo(demo::Arguments),
    /// Runs every test; the last line counts them
    Test(test::Arguments),
    /// Boots a Debian guest with a real rdma_rxe and runs a command in it
    Guest(guest::Arguments),
    /// Boots a Debian guest with a ConnectX in software and runs a command in it
    Softhca(softhca::Arguments),
    /// Builds the plugin into target/dist, under the names libibverbs wants
    Dist,
    /// Installs the plugin, so that rxe devices use it
    Install {
        /// Where libibverbs is installed
        #[arg(long, default_value = "/usr")]
        prefix: PathBuf,
        /// Take the plugin away again; stock serves as before
        #[arg(long)]
        uninstall: bool,
        /// What `dist` has made, instead of making it now
        #[arg(long, conflicts_with = "uninstall")]
        dist: Option<PathBuf>,
    },
    /// Makes a Debian package of the plugin
    Deb,
    /// Measures the data path beside the C provider's
    Bench(bench::Arguments),
    /// Compares the bytes of ConnectX's queues with the C provider's
    Bytes(bytes::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo(arguments) => demo::demo(&arguments),
        Command::Test(arguments) => test::test(&arguments),
        Command::Guest(arguments) => guest::guest(&arguments),
        Command::Softhca(arguments) => softhca::softhca(&arguments),
        Command::Dist => dist::dist().map(shown),
        Command::Install {
            prefix,
            uninstall,
            dist,
        } => dist::install(&prefix, uninstall, dist.as_deref()).map(|()| ExitCode::SUCCESS),
        Command::Deb => dist::deb().map(shown),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::Bytes(arguments) => bytes::bytes(&arguments),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn shown(path: PathBuf) -> ExitCode {
    println!("{}", path.display());
    ExitCode::SUCCESS
}
