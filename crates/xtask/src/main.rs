//! The project's own commands: `cargo xtask help` lists them.

mod bare;
mod bench;
mod bytes;
mod checked;
mod demo;
mod dependencies;
mod dist;
mod driver;
mod guest;
mod install;
mod mlx5;
mod mutants;
mod native;
mod softhca;
mod standin;
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
    /// Builds the plugin, under the names libibverbs wants, and the command
    /// ringverbs into target/dist
    Dist,
    /// Installs the plugin, so that rxe devices use it, and the command
    Install {
        /// Where libibverbs is installed
        #[arg(long, default_value = "/usr")]
        prefix: PathBuf,
        /// Take both away again; stock serves as before
        #[arg(long)]
        uninstall: bool,
        /// Only this of the two
        #[arg(long, value_enum)]
        only: Option<install::Component>,
        /// What `dist` has made, instead of making it now
        #[arg(long, conflicts_with = "uninstall")]
        dist: Option<PathBuf>,
    },
    /// Makes two Debian packages: the plugin, and the command
    Deb,
    /// Measures the data path beside the stock provider's
    Bench(bench::Arguments),
    /// Compares the bytes of ConnectX's queues with the stock provider's
    Bytes(bytes::Arguments),
    /// Changes the code in small ways and sees whether a test fails
    Mutants(mutants::Arguments),
    /// Runs the tests that need no system calls under Miri
    Miri,
    /// Runs what uses the embedded device under a sanitizer
    Sanitize(checked::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo(arguments) => demo::demo(&arguments),
        Command::Test(arguments) => test::test(&arguments),
        Command::Guest(arguments) => guest::guest(&arguments),
        Command::Softhca(arguments) => softhca::softhca(&arguments),
        Command::Dist => dist::whole().map(|path| shown(&[path])),
        Command::Install {
            prefix,
            uninstall,
            only,
            dist,
        } => {
            install::install(&prefix, uninstall, only, dist.as_deref()).map(|()| ExitCode::SUCCESS)
        }
        Command::Deb => dist::whole()
            .and_then(|dist| dist::deb(&dist))
            .map(|packages| shown(&packages)),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::Bytes(arguments) => bytes::bytes(&arguments),
        Command::Mutants(arguments) => mutants::mutants(&arguments),
        Command::Miri => checked::miri(),
        Command::Sanitize(arguments) => checked::sanitize(&arguments),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn shown(paths: &[PathBuf]) -> ExitCode {
    for path in paths {
        println!("{}", path.display());
    }
    ExitCode::SUCCESS
}
