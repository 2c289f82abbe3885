//! Finding and opening devices.

use uverbs::discovery::{self, Device, DriverId};
use uverbs::kernel::RealKernel;
use uverbs::{Context, ContextInfo, Udata};

use crate::error::Error;

/// All devices there are, by name.
pub fn all() -> Result<Vec<Device>, Error> {
    let mut devices =
        discovery::devices(&RealKernel).map_err(Error::doing("listing the devices"))?;
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(devices)
}

/// The devices a command is about: the one named, or all; at least one.
pub fn chosen(name: Option<&str>) -> Result<Vec<Device>, Error> {
    let mut devices = all()?;
    if let Some(name) = name {
        let there: Vec<String> = devices.iter().map(|device| device.name.clone()).collect();
        devices.retain(|device| device.name == name);
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

/// Opens a device and makes its context.
pub fn open(device: &Device) -> Result<(Context, ContextInfo), Error> {
    let doing = || Error::doing(format!("opening {}", device.name));
    let context = Context::open(Box::new(RealKernel), device).map_err(doing())?;
    let info = context.get_context(Udata::none()).map_err(doing())?;
    Ok((context, info))
}

/// Opens the device of that name, or the first, for operations on it.
pub fn context(name: Option<&str>) -> Result<ringverbs::Context, Error> {
    let device = match name {
        Some(name) => ringverbs::Device::named(name),
        None => ringverbs::Device::first(),
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
