//! Finding and opening devices.

use ringverbs::Device;
use ringverbs::kernel::discovery::DriverId;
use ringverbs::kernel::{Context, ContextInfo};

use crate::error::Error;

/// All devices there are, by name.
pub fn all() -> Result<Vec<Device>, Error> {
    let mut devices = ringverbs::devices().map_err(Error::native("listing the devices"))?;
    devices.sort_by(|a, b| a.name().cmp(b.name()));
    Ok(devices)
}

/// The devices a command is about: the one named, or all; at least one.
pub fn chosen(name: Option<&str>) -> Result<Vec<Device>, Error> {
    let mut devices = all()?;
    if let Some(name) = name {
        let there: Vec<String> = devices
            .iter()
            .map(|device| device.name().to_owned())
            .collect();
        devices.retain(|device| device.name() == name);
        if devices.is_empty() {
            return Err(Error::NoSuchDevice {
                name: name.to_owned(),
                there,
            });
        }
    }
    if devices.is_empty() {
        return Err(Error::NoDevice);
    }
    Ok(devices)
}

/// Opens a device, whatever its driver, to be asked.
pub fn open(device: &Device) -> Result<(Context, ContextInfo), Error> {
    let doing = Error::native(format!("opening {}", device.name()));
    device.open_kernel().map_err(doing)
}

/// Opens the device of that name, or the first, for operations on it.
pub fn context(name: Option<&str>) -> Result<ringverbs::Context, Error> {
    let device = match name {
        Some(name) => Device::named(name),
        None => Device::first(),
    };
    let device = device.map_err(Error::native("choosing a device"))?;
    device
        .open()
        .map_err(Error::native(format!("opening {}", device.name())))
}

/// The kernel module of a driver, or its number.
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
