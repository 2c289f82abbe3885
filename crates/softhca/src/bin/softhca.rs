//! `softhca`: serves software ConnectX devices to guests.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use ringverbs_softhca::control::{self, Control};
use ringverbs_softhca::hca::VECTORS;
use ringverbs_softhca::profile::Profile;
use ringverbs_softhca::profiles::PROFILES;
use ringverbs_softhca::vfio::dma::Guest;
use ringverbs_softhca::vfio::server::Server;
use ringverbs_softhca::{Hca, Settings};
use roce::fabric::Fabric;
use roce::packet::Pool;
use roce::pcap::Capture;
use tracing::level_filters::LevelFilter;

#[derive(Parser)]
#[command(name = "softhca", about = "ConnectX devices made of software")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves HCAs to QEMU's vfio-user-pci, one per socket, all on one fabric;
    /// exits when the guests have disconnected
    Serve {
        /// Socket for QEMU to connect to; once for each HCA
        #[arg(long, required = true)]
        socket: Vec<PathBuf>,
        /// Profile of the HCAs (`softhca profiles`): once for all, or once for each
        #[arg(long, default_value = "roce")]
        profile: Vec<String>,
        /// Control socket (`softhca tell`, `softhca stat`)
        #[arg(long)]
        control: Option<PathBuf>,
        /// Report and refuse what hardware might accept
        #[arg(long)]
        strict: bool,
        /// Continue when the guests have disconnected
        #[arg(long)]
        keep: bool,
        /// Capture every frame that is sent to this file, for Wireshark (pcapng)
        #[arg(long)]
        capture: Option<PathBuf>,
        /// Seed of the fabric's faults
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Log level on standard error: error, warn, info, debug, trace
        #[arg(long, default_value = "warn")]
        log: LevelFilter,
    },
    /// Prints counters, objects and queue pairs of a running server
    Stat {
        /// Its control socket
        control: PathBuf,
    },
    /// Sends a command to a running server; `help` lists the commands
    Tell {
        /// Its control socket
        control: PathBuf,
        /// The command
        #[arg(required = true)]
        command: Vec<String>,
    },
    /// Lists the profiles
    Profiles,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Serve {
            socket,
            profile,
            control,
            strict,
            keep,
            capture,
            seed,
            log,
        } => {
            tracing_subscriber::fmt()
                .with_max_level(log)
                .with_writer(std::io::stderr)
                .without_time()
                .with_target(false)
                .init();
            let mut profiles = Vec::new();
            for name in &profile {
                let Some(profile) = Profile::named(name) else {
                    bail!("there is no profile `{name}`; `softhca profiles` lists them");
                };
                profiles.push(profile);
            }
            let fabric = Fabric::new(seed);
            let pool = Pool::new();
            if let Some(path) = capture {
                let capture = std::fs::File::create(&path)
                    .and_then(|file| Capture::new(std::io::BufWriter::new(file)))
                    .with_context(|| format!("cannot write {}", path.display()))?;
                fabric.capture(Some(capture));
            }
            let control = match control {
                Some(path) => {
                    let _ = std::fs::remove_file(&path);
                    let control = Control::new(&path)
                        .with_context(|| format!("cannot listen at {}", path.display()))?;
                    Some(control)
                }
                None => None,
            };
            let mut server = Server::new(control, keep);
            for (number, path) in socket.iter().enumerate() {
                let profile = profiles[number.min(profiles.len() - 1)];
                let settings = Settings {
                    strict,
                    ..Settings::numbered(profile, number as u16)
                };
                let hca = Hca::new(Guest::new(VECTORS), settings, &fabric, pool.clone());
                let _ = std::fs::remove_file(path);
                server
                    .add(hca, path)
                    .with_context(|| format!("cannot listen at {}", path.display()))?;
            }
            server.run().context("cannot wait for guests")?;
            fabric.capture(None);
            for path in &socket {
                let _ = std::fs::remove_file(path);
            }
            Ok(())
        }
        Command::Stat { control } => send_command(&control, "stat"),
        Command::Tell { control, command } => send_command(&control, &command.join(" ")),
        Command::Profiles => {
            for profile in PROFILES {
                println!("{:<10} {}", profile.name, profile.about);
            }
            Ok(())
        }
    }
}

fn send_command(socket: &std::path::Path, command: &str) -> Result<()> {
    let response = control::request(socket, command)
        .with_context(|| format!("no softhca listens at {}", socket.display()))?;
    let response: serde_json::Value =
        serde_json::from_str(&response).context("malformed response")?;
    println!("{response:#}");
    match response.get("error") {
        Some(message) => bail!("{message}"),
        None => Ok(()),
    }
}
