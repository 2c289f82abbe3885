//! The project's own commands: `cargo xtask help` lists them.

mod aarch64;
mod bench;
mod bytes;
mod checked;
mod citations;
mod demo;
mod dependencies;
mod dist;
mod driver;
mod guest;
mod install;
mod libmlx5;
mod mlx5;
mod msrv;
mod mutants;
mod native;
mod packages;
mod programs;
mod softhca;
mod standin;
mod static_guest;
mod steps;
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
    /// Runs unmodified programs with ringverbs on a real rdma_rxe, in a guest
    Demo(demo::Arguments),
    /// Runs the tests
    Test(test::Arguments),
    /// Boots a Debian guest with a real rdma_rxe and runs a command in it
    Guest(guest::Arguments),
    /// Boots a Debian guest with a ConnectX in software and runs a command in it
    Softhca(softhca::Arguments),
    /// Builds the plugin and the command ringverbs into target/dist
    Dist {
        /// Build for aarch64, into target/dist-aarch64
        #[arg(long)]
        aarch64: bool,
    },
    /// Installs the plugin, so that rxe devices use it, and the command
    Install {
        /// Prefix of the installed libibverbs
        #[arg(long, default_value = "/usr")]
        prefix: PathBuf,
        /// Remove them, and our libmlx5; the stock provider serves again
        #[arg(long)]
        uninstall: bool,
        /// Install or remove only one of them
        #[arg(long, value_enum)]
        only: Option<install::Component>,
        /// Replace rdma-core's libmlx5.so.1 by ours, and install nothing else; with
        /// --uninstall restore rdma-core's
        #[arg(long, conflicts_with = "only")]
        replace_libmlx5: bool,
        /// Directory built by `dist`, instead of building now
        #[arg(long, conflicts_with = "uninstall")]
        dist: Option<PathBuf>,
    },
    /// Builds two Debian packages: the plugin, and the command
    Deb {
        /// Build for arm64, into target/debian-aarch64
        #[arg(long)]
        aarch64: bool,
    },
    /// Runs programs of the system on embedded devices, with libmlx5 and with ours
    Programs(programs::Arguments),
    /// Compares the data path's cost with the stock provider's
    Bench(bench::Arguments),
    /// Compares the bytes of ConnectX's queues with the stock provider's
    Bytes(bytes::Arguments),
    /// Lists where the code cites the InfiniBand specification
    Citations,
    /// Mutation testing with cargo-mutants
    Mutants(mutants::Arguments),
    /// Builds and tests with the oldest supported compiler, which is Debian 13's
    Msrv,
    /// Runs the tests that need no system calls under Miri
    Miri,
    /// Runs the tests on the embedded device under a sanitizer
    Sanitize(checked::Arguments),
    /// Runs tests built for aarch64, under QEMU
    Aarch64(aarch64::Arguments),
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    if let Command::Dist { .. } | Command::Install { .. } | Command::Deb { .. } = command {
        steps::show();
    }
    let result = match command {
        Command::Demo(arguments) => demo::demo(&arguments),
        Command::Test(arguments) => test::test(&arguments),
        Command::Guest(arguments) => guest::guest(&arguments),
        Command::Softhca(arguments) => softhca::softhca(&arguments),
        Command::Dist { aarch64: true } => {
            dist::dist_for_aarch64().map(|path| print_paths(&[path]))
        }
        Command::Dist { .. } => dist::dist_with_command().map(|path| print_paths(&[path])),
        Command::Install {
            prefix,
            uninstall,
            replace_libmlx5: true,
            dist,
            ..
        } => install::replace_libmlx5(&prefix, uninstall, dist.as_deref())
            .map(|()| ExitCode::SUCCESS),
        Command::Install {
            prefix,
            uninstall,
            only,
            dist,
            ..
        } => {
            install::install(&prefix, uninstall, only, dist.as_deref()).map(|()| ExitCode::SUCCESS)
        }
        Command::Deb { aarch64: true } => dist::dist_for_aarch64()
            .and_then(|_| dist::deb_for_aarch64())
            .map(|packages| print_paths(&packages)),
        Command::Deb { .. } => dist::dist_with_command()
            .and_then(|dist| dist::deb(&dist))
            .map(|packages| print_paths(&packages)),
        Command::Programs(arguments) => programs::programs(&arguments),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::Bytes(arguments) => bytes::bytes(&arguments),
        Command::Citations => citations::citations(),
        Command::Mutants(arguments) => mutants::mutants(&arguments),
        Command::Msrv => msrv::msrv(),
        Command::Miri => checked::miri(),
        Command::Sanitize(arguments) => checked::sanitize(&arguments),
        Command::Aarch64(arguments) => aarch64::aarch64(&arguments),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn print_paths(paths: &[PathBuf]) -> ExitCode {
    for path in paths {
        println!("{}", path.display());
    }
    ExitCode::SUCCESS
}
