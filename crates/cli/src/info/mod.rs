//! `ringverbs info`: the output of ibv_devinfo, in the same words.

mod model;
pub mod names;
mod text;

use std::process::ExitCode;

use crate::error::Error;
use crate::{device, out};

pub use model::{DeviceInfo, PortInfo};

/// Arguments of `info`.
#[derive(clap::Args)]
pub struct Args {
    /// Show only this device
    #[arg(short, long, visible_alias = "ib-dev", value_name = "DEV")]
    device: Option<String>,
    /// Show only this port (the first is 1)
    #[arg(
        short,
        long,
        visible_short_alias = 'i',
        visible_alias = "ib-port",
        value_parser = clap::value_parser!(u8).range(1..)
    )]
    port: Option<u8>,
    /// Show all attributes and the GID tables
    #[arg(short, long)]
    verbose: bool,
    /// Print JSON, always with all attributes
    #[arg(long)]
    json: bool,
}

/// Queries each device and prints the results. Fails at the first device with an error.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let devices = device::selected(args.device.as_deref())?;
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
