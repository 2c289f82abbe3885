//! Rates, from two looks at a device.

use embedded::{DeviceStatus, ProcessStatus};
use serde::Serialize;

use super::View;
use super::host::{HostPort, Traffic};

/// Operations and bytes of a device per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Send work requests.
    pub sends: f64,
    /// Receives that were taken.
    pub receives: f64,
    /// Bytes of sent messages, also of reads of peers.
    pub bytes_sent: f64,
    /// Bytes of received messages, also of writes of peers.
    pub bytes_received: f64,
}

/// Returns the rates of a device since an earlier look; `None` if it was not there.
pub fn of(before: Option<&View>, process: &ProcessStatus, device: &DeviceStatus) -> Option<Rates> {
    let mut earlier = before?.processes.iter();
    let earlier = earlier.find(|it| it.process == process.process)?;
    let mut devices = earlier.devices.iter();
    let then = devices.find(|it| it.name == device.name)?;
    let elapsed = process.time.checked_sub(earlier.time)?.as_secs_f64();
    let rate = |name| {
        // They are less if the number is that of a new process.
        let more = device.counter(name).saturating_sub(then.counter(name));
        more as f64 / elapsed
    };
    (elapsed > 0.0).then(|| Rates {
        sends: rate("sends"),
        receives: rate("receives"),
        bytes_sent: rate("bytes_sent"),
        bytes_received: rate("bytes_received"),
    })
}

/// Returns what a port of the host has sent or received per second since an earlier look; `None`
/// if it was not there, or the driver does not count it.
pub fn of_host(before: &View, (device, port): (&str, &HostPort), what: Traffic) -> Option<f64> {
    let then = before.devices.iter().find(|it| it.name == device)?;
    let then = then.ports.iter().find(|it| it.number == port.number)?;
    let elapsed = port.time.checked_sub(then.time)?.as_secs_f64();
    // It is less if the device is a new one.
    let more = port.traffic(what)?.saturating_sub(then.traffic(what)?);
    (elapsed > 0.0).then(|| more as f64 / elapsed)
}
