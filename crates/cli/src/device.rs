//! Selecting and opening devices.

use std::fmt;

use ringverbs::query::{DriverId, Inspector, PORT_ACTIVE};
use ringverbs::{Context, Device};

use crate::error::Error;

/// Returns all devices, sorted by name.
pub fn all() -> Result<Vec<Device>, Error> {
    let mut devices = ringverbs::devices().map_err(Error::native("listing the devices"))?;
    devices.sort_by(|a, b| a.name().cmp(b.name()));
    Ok(devices)
}

/// Returns the selected devices: the one that is named, by the caller or by
/// `RINGVERBS_DEVICE`, or all, or the embedded one if there is none.
pub fn chosen(name: Option<&str>) -> Result<Vec<Device>, Error> {
    if let Some(name) = name {
        return match Device::named(name) {
            Err(ringverbs::Error::NoDevice { .. }) => Err(Error::NoSuchDevice {
                name: name.to_owned(),
                there: all()?.iter().map(|it| it.name().to_owned()).collect(),
            }),
            found => Ok(vec![found.map_err(choosing(name))?]),
        };
    }
    if let Some(device) = from_environment()? {
        return Ok(vec![device]);
    }
    let devices = all()?;
    if devices.is_empty() {
        return Ok(vec![embedded()?]);
    }
    Ok(devices)
}

/// Returns the embedded device.
pub fn embedded() -> Result<Device, Error> {
    Device::embedded().map_err(choosing("embedded"))
}

/// Opens a device for queries, whatever its driver.
pub fn inspect(device: &Device) -> Result<Inspector, Error> {
    let doing = Error::native(format!("opening {}", device.name()));
    device.inspect().map_err(doing)
}

/// Returns the device that `RINGVERBS_DEVICE` names, if it is set.
fn from_environment() -> Result<Option<Device>, Error> {
    Device::from_environment().map_err(Error::native("choosing RINGVERBS_DEVICE"))
}

fn choosing(name: &str) -> impl FnOnce(ringverbs::Error) -> Error {
    Error::native(format!("choosing {}", name.escape_debug()))
}

/// An open device.
pub struct OpenDevice {
    pub context: Context,
    /// The device's name.
    pub name: String,
    /// Why the embedded device was chosen by default.
    pub instead: Option<String>,
}

impl fmt::Display for OpenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.context.device().is_some_and(Device::is_embedded) {
            f.write_str(", a ConnectX in this process")?;
        }
        match &self.instead {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

impl OpenDevice {
    fn open(device: &Device) -> Result<Self, Error> {
        let doing = Error::native(format!("opening {}", device.name()));
        Ok(Self {
            context: device.open().map_err(doing)?,
            name: device.name().to_owned(),
            instead: None,
        })
    }

    /// Opens the device if the port is active.
    fn usable(device: &Device, port: u8) -> Result<Self, Error> {
        let chosen = Self::open(device)?;
        let doing = Error::native(format!("asking {} for port {port}", chosen.name));
        let asked = chosen.context.query_port(port);
        match asked.map_err(doing)?.legacy.state {
            PORT_ACTIVE => Ok(chosen),
            _ => Err(Error::PortDown {
                device: chosen.name,
                port,
            }),
        }
    }
}

/// Opens the device that is named, by the caller or by `RINGVERBS_DEVICE`; without a
/// name, the first whose port is active. If there is none and the command needs no
/// other process (`alone`), opens the embedded device.
pub fn context(name: Option<&str>, port: u8, alone: bool) -> Result<OpenDevice, Error> {
    if let Some(name) = name {
        return OpenDevice::open(&Device::named(name).map_err(choosing(name))?);
    }
    if let Some(device) = from_environment()? {
        return OpenDevice::open(&device);
    }
    let devices = ringverbs::devices().map_err(Error::native("listing the devices"));
    let mut reasons = Vec::new();
    match devices {
        Ok(devices) if devices.is_empty() => reasons.push(Error::NoDevice),
        Ok(devices) => {
            for device in devices {
                match OpenDevice::usable(&device, port) {
                    Ok(chosen) => return Ok(chosen),
                    Err(error) => reasons.push(error),
                }
            }
        }
        Err(error) => reasons.push(error),
    }
    if !alone {
        return Err(reasons.into_iter().next().unwrap_or(Error::NoDevice));
    }
    let reasons: Vec<String> = reasons.iter().map(Error::to_string).collect();
    Ok(OpenDevice {
        instead: Some(reasons.join("; ")),
        ..OpenDevice::open(&embedded()?)?
    })
}

/// Returns the kernel module of a driver, or its number.
pub fn driver_name(driver: DriverId) -> String {
    match driver {
        DriverId::UNKNOWN => "unknown".into(),
        DriverId::MLX5 => "mlx5_ib".into(),
        DriverId::MLX4 => "mlx4_ib".into(),
        DriverId::RXE => "rdma_rxe".into(),
        DriverId::EFA => "efa".into(),
        DriverId::SIW => "siw".into(),
        DriverId(number) => format!("driver {number}"),
    }
}
