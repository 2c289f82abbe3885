//! Selecting and opening devices.

use std::fmt;

use ringverbs::query::{DriverId, Inspector, PORT_ACTIVE};
use ringverbs::{Context, Device};

use crate::error::Error;

/// Returns all devices, sorted by name.
pub fn all() -> Result<Vec<Device>, Error> {
    let mut devices = ringverbs::devices().map_err(Error::verb("listing the devices"))?;
    devices.sort_by(|a, b| a.name().cmp(b.name()));
    Ok(devices)
}

/// Returns the device that the caller or `RINGVERBS_DEVICE` names; without a name all
/// devices, or the embedded one if there is none.
pub fn selected(name: Option<&str>) -> Result<Vec<Device>, Error> {
    if let Some(name) = name {
        return match Device::named(name) {
            Err(ringverbs::Error::NoDevice { .. }) => Err(Error::NoSuchDevice {
                name: name.to_owned(),
                available: all()?.iter().map(|it| it.name().to_owned()).collect(),
            }),
            found => Ok(vec![found.map_err(selecting(name))?]),
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
    Device::embedded().map_err(selecting("embedded"))
}

/// Opens a device for queries, whatever its driver.
pub fn inspect(device: &Device) -> Result<Inspector, Error> {
    let error = Error::verb(format!("opening {}", device.name()));
    device.inspect().map_err(error)
}

/// Returns the device that `RINGVERBS_DEVICE` names, if it is set.
fn from_environment() -> Result<Option<Device>, Error> {
    Device::from_environment().map_err(Error::verb("selecting the device of RINGVERBS_DEVICE"))
}

fn selecting(name: &str) -> impl FnOnce(ringverbs::Error) -> Error {
    Error::verb(format!("selecting device {}", name.escape_debug()))
}

/// An open device.
pub struct OpenDevice {
    pub context: Context,
    /// The device's name.
    pub name: String,
    /// Why the embedded device was opened by default.
    pub fallback_reason: Option<String>,
}

impl fmt::Display for OpenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.context.device().is_some_and(Device::is_embedded) {
            f.write_str(", a ConnectX in this process")?;
        }
        match &self.fallback_reason {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

impl OpenDevice {
    fn open(device: &Device) -> Result<Self, Error> {
        let error = Error::verb(format!("opening {}", device.name()));
        Ok(Self {
            context: device.open().map_err(error)?,
            name: device.name().to_owned(),
            fallback_reason: None,
        })
    }

    /// Opens the device if the port is active.
    fn open_active(device: &Device, port: u8) -> Result<Self, Error> {
        let opened = Self::open(device)?;
        let error = Error::verb(format!("querying port {port} of {}", opened.name));
        let queried = opened.context.query_port(port);
        match queried.map_err(error)?.legacy.state {
            PORT_ACTIVE => Ok(opened),
            _ => Err(Error::PortDown {
                device: opened.name,
                port,
            }),
        }
    }
}

/// Opens the device that the caller or `RINGVERBS_DEVICE` names; without a name, the
/// first one whose port is active. If there is none and both sides are in this process
/// (`both_sides`), opens the embedded device.
pub fn open(name: Option<&str>, port: u8, both_sides: bool) -> Result<OpenDevice, Error> {
    if let Some(name) = name {
        return OpenDevice::open(&Device::named(name).map_err(selecting(name))?);
    }
    if let Some(device) = from_environment()? {
        return OpenDevice::open(&device);
    }
    let devices = ringverbs::devices().map_err(Error::verb("listing the devices"));
    let mut reasons = Vec::new();
    match devices {
        Ok(devices) if devices.is_empty() => reasons.push(Error::NoDevice),
        Ok(devices) => {
            for device in devices {
                match OpenDevice::open_active(&device, port) {
                    Ok(opened) => return Ok(opened),
                    Err(error) => reasons.push(error),
                }
            }
        }
        Err(error) => reasons.push(error),
    }
    if !both_sides {
        return Err(reasons.into_iter().next().unwrap_or(Error::NoDevice));
    }
    let reasons: Vec<String> = reasons.iter().map(Error::to_string).collect();
    Ok(OpenDevice {
        fallback_reason: Some(reasons.join("; ")),
        ..OpenDevice::open(&embedded()?)?
    })
}

/// Returns the name of a driver's kernel module, or the driver's number.
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
