//! `ringverbs devices`.

use std::io::Write;
use std::process::ExitCode;

use ringverbs::Device;
use serde::Serialize;

use crate::error::Error;
use crate::info::names;
use crate::{device, out};

/// Arguments of `devices`.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A row of the list.
#[derive(Serialize)]
struct DeviceRow {
    name: String,
    transport: &'static str,
    node_guid: Option<String>,
    ports: Option<u32>,
    driver: String,
    char_device: String,
}

impl From<Device> for DeviceRow {
    fn from(device: Device) -> Self {
        let driver = match device.is_embedded() {
            true => "in this process".to_owned(),
            false => device::driver_name(device.found().driver_id),
        };
        let device = device.found();
        Self {
            transport: names::transport(device.node_type).0,
            node_guid: device.node_guid.map(|guid| names::guid(guid.to_be_bytes())),
            ports: device.num_ports,
            driver,
            char_device: match device.uverbs_name.is_empty() {
                true => "-".to_owned(),
                false => device.device_path(),
            },
            name: device.name.clone(),
        }
    }
}

/// Lists the devices, the embedded one last.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let mut devices = device::all()?;
    devices.push(device::embedded()?);
    let devices: Vec<DeviceRow> = devices.into_iter().map(DeviceRow::from).collect();
    if args.json {
        out::json(&devices)?;
        return Ok(ExitCode::SUCCESS);
    }
    let heading = [
        "device",
        "transport",
        "node GUID",
        "ports",
        "driver",
        "character device",
    ];
    let mut rows = vec![heading.map(String::from).to_vec()];
    rows.extend(devices.into_iter().map(|device| {
        vec![
            device.name,
            device.transport.to_owned(),
            device.node_guid.unwrap_or_else(|| "?".into()),
            device
                .ports
                .map_or_else(|| "?".into(), |ports| ports.to_string()),
            device.driver,
            device.char_device,
        ]
    }));
    let mut out = out::stdout();
    out::table(&mut out, &rows)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}
