//! The conditions of a measurement: device, host, options.

use std::fs;
use std::thread;

use ringverbs::{Context, Device};
use serde::Serialize;

use super::protocol::{Goal, Setup};
use super::units;
use crate::device::driver_name;

/// The conditions of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Conditions {
    pub device: String,
    /// The driver; of an embedded device, a description.
    pub driver: String,
    /// The port's MTU in bytes.
    pub mtu: Option<u32>,
    pub processor: String,
    /// Processors that this process may use.
    pub processors: usize,
    pub kernel: String,
    /// The server's host, if the server is not in this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// The version of this program.
    pub version: &'static str,
}

/// Returns the first line of a file, or "unknown".
fn first_line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").trim().to_owned()
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let mut names = fields.filter(|(key, _)| key.trim() == "model name");
    match names.next() {
        Some((_, name)) => name.trim().to_owned(),
        None => std::env::consts::ARCH.to_owned(),
    }
}

impl Conditions {
    pub fn of(context: &Context, port: u8, server: Option<&str>) -> Self {
        let device = context.device();
        let driver = match device {
            Some(device) if device.is_embedded() => "ConnectX in software".to_owned(),
            Some(device) => driver_name(device.found().driver_id),
            None => "unknown".to_owned(),
        };
        Self {
            device: device.map(Device::name).unwrap_or_default().to_owned(),
            driver,
            mtu: context
                .local_address(port)
                .ok()
                .map(|local| local.mtu.bytes()),
            processor: processor(),
            processors: thread::available_parallelism().map_or(1, usize::from),
            kernel: first_line("/proc/sys/kernel/osrelease"),
            server: server.map(str::to_owned),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// Returns device, host and program as the caption of a plot.
    pub fn caption(&self) -> String {
        let mut text = format!("{} ({}", self.device, self.driver);
        if let Some(mtu) = self.mtu {
            text += &format!(", MTU {mtu}");
        }
        text += ")";
        match &self.server {
            Some(server) => text += &format!(", server {server}"),
            None => text += ", both sides in one process",
        }
        let processors = if self.processors == 1 { "CPU" } else { "CPUs" };
        text + &format!(
            " · {}, {} {processors}, Linux {} · ringverbs {}",
            self.processor, self.processors, self.kernel, self.version
        )
    }
}

/// Returns the options as the caption of a plot.
pub fn options(setup: &Setup, goal: Goal) -> String {
    let goal = match goal {
        Goal::Operations(count) => format!("{count} operations"),
        Goal::Milliseconds(time) => units::time(time as f64 * 1e6),
    };
    let pairs = if setup.queue_pairs == 1 { "" } else { "s" };
    format!(
        "{}, {} queue pair{pairs}, {}; bandwidth {}with {} outstanding{}; {goal} per point",
        setup.transport.name(),
        setup.queue_pairs,
        if setup.events { "events" } else { "polled" },
        if setup.bidirectional {
            "of both directions "
        } else {
            ""
        },
        setup.depth,
        if setup.queue_pairs == 1 {
            ""
        } else {
            " on each"
        },
    )
}
