//! `ringverbs info`: what ibv_devinfo says, in the same words.

mod model;
pub mod names;
mod text;

use std::process::ExitCode;

use crate::error::Error;
use crate::{device, out};

pub use model::{DeviceInfo, PortInfo};

/// What `info` is told.
#[derive(clap::Args)]
pub struct Args {
    /// Only this device
    #[arg(short, long, visible_alias = "ib-dev", value_name = "DEV")]
    device: Option<String>,
    /// Only this port (the first is 1)
    #[arg(
        short,
        long,
        visible_short_alias = 'i',
        visible_alias = "ib-port",
        value_parser = clap::value_parser!(u8).range(1..)
    )]
    port: Option<u8>,
    /// All attributes, and the GID tables
    #[arg(short, long)]
    verbose: bool,
    /// Print JSON: always everything
    #[arg(long)]
    json: bool,
}

/// Asks each device, and prints. A device that does not answer ends it.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let devices = device::chosen(args.device.as_deref())?;
    let infos = devices
        .iter()
        .map(|device| DeviceInfo::query(device, args.port))
        .collect::<Result<Vec<_>, Error>>()?;
    if args.json {
        out::json(&infos)?;
    } else {
        text::print(&infos, args.verbose)?;
    }
    Ok(ExitCode::SUCCESS)
}
