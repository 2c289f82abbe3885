//! `ringverbs link`: sets the link of an embedded device's port up or down.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use embedded::Network;

use crate::error::Error;
use crate::out;

/// Arguments of `link`.
#[derive(clap::Args)]
#[command(after_help = "\
Programs receive PORT_ERR and PORT_ACTIVE, and packets are lost meanwhile. Programs that start \
later find the link as it was set. Devices on an interface (roce:eth0) follow that: `ip link \
set eth0 down`.
Example: ringverbs link /tmp/net mlx5_0 down; sleep 2; ringverbs link /tmp/net mlx5_0 up")]
pub struct Args {
    /// Directory of the devices' network (--directory of ringverbs run)
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
    /// The device: mlx5_0, mlx5_1 ...
    #[arg(value_name = "DEVICE", value_parser = index)]
    device: u16,
    /// The state
    #[arg(value_enum)]
    state: LinkState,
    /// Only in the process with this number; otherwise in all
    #[arg(long, value_name = "PID")]
    process: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum LinkState {
    Down,
    Up,
}

/// Returns the index of a device.
fn index(name: &str) -> Result<u16, String> {
    let number = name.strip_prefix("mlx5_").and_then(|it| it.parse().ok());
    number.ok_or_else(|| "the devices are named mlx5_0, mlx5_1 and so on".to_owned())
}

/// Sets the link.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let up = args.state == LinkState::Up;
    let told = Network::set_link(&args.directory, args.device, args.process, up);
    let told = told.map_err(Error::subcommand)?;
    let mut out = out::stdout();
    writeln!(out, "{told} processes in the network")?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_an_index() {
        assert_eq!(index("mlx5_12"), Ok(12));
        for wrong in ["mlx5_", "mlx5_-1", "mlx5_x", "eth0", "0"] {
            assert!(index(wrong).is_err(), "{wrong}");
        }
    }
}
