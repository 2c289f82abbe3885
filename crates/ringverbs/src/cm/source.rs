//! Selection of the connection manager.

use rdmacm::{EventChannel, Id};

use super::{Error, Result};
use crate::{Device, devices};

/// The kernel's connection manager, or that of an embedded device's network.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionManager {
    embedded: Option<Device>,
}

impl ConnectionManager {
    /// Returns the default: the kernel's, unless the environment names an
    /// embedded device.
    pub(super) fn from_environment() -> Result<Self> {
        let device = Device::from_environment()?;
        Ok(device.as_ref().map(Self::of).unwrap_or_default())
    }

    /// Returns the connection manager of a device.
    pub(super) fn of(device: &Device) -> Self {
        #[cfg(feature = "embedded")]
        if device.is_embedded() {
            return Self {
                embedded: Some(device.clone()),
            };
        }
        let _ = device;
        Self::default()
    }

    /// Opens a channel.
    pub(super) fn open(&self) -> Result<EventChannel> {
        #[cfg(feature = "embedded")]
        if let Some(manager) = self.embedded.as_ref().and_then(Device::connection_manager) {
            return Ok(EventChannel::open_on(manager)?);
        }
        Ok(EventChannel::open()?)
    }

    /// Adds the queried device to the error of a request that was sent.
    pub(super) fn explain(&self, error: Error) -> Error {
        match &self.embedded {
            // Listeners on other hosts do not use this device.
            Some(device) if !device.name().starts_with("roce:") => error.with_device(device),
            _ => error,
        }
    }

    /// Returns the device that an id is bound to.
    pub(super) fn device_of(&self, id: &Id) -> Result<Device> {
        let bound = id.addresses()?.device.ok_or(Error::NoDevice)?;
        if let Some(device) = &self.embedded {
            return Ok(device.clone());
        }
        devices()?
            .into_iter()
            .find(|device| match device.found().index {
                Some(index) => index == bound.index,
                None => device.found().node_guid == Some(bound.node_guid),
            })
            .ok_or(Error::NoDevice)
    }
}
