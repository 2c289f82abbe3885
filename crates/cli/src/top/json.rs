//! The JSON of `ringverbs top`.

use std::collections::BTreeMap;

use embedded::{DeviceStatus, ProcessStatus, QueuePairStatus};
use serde::Serialize;

use super::View;
use super::host::HostDevice;
use super::rates::{self, Rates};

/// The document of one look.
#[derive(Serialize)]
pub struct Document<'a> {
    processes: Vec<Process<'a>>,
    /// Number of processes that have not answered.
    silent: usize,
    /// Devices of the host.
    devices: &'a [HostDevice],
}

#[derive(Serialize)]
struct Process<'a> {
    process: u32,
    program: &'a str,
    capture: Option<&'a str>,
    devices: Vec<Device<'a>>,
}

#[derive(Serialize)]
struct Device<'a> {
    name: &'a str,
    link: &'static str,
    objects: BTreeMap<&'a str, u64>,
    counters: BTreeMap<&'a str, u64>,
    /// In a second.
    rates: Option<Rates>,
    queue_pairs: Vec<QueuePair<'a>>,
    completion_queues: Vec<CompletionQueue>,
    /// Queue pairs and completion queues that are left out.
    omitted: u64,
    errors: Vec<QueuePairError<'a>>,
    refused_command: Option<&'a str>,
}

#[derive(Serialize)]
struct QueuePair<'a> {
    number: u32,
    #[serde(rename = "type")]
    kind: &'a str,
    state: &'a str,
    peer: Option<u32>,
    peer_address: Option<&'a str>,
    sends: u32,
    max_sends: u32,
    receives: Option<u32>,
    max_receives: Option<u32>,
}

#[derive(Serialize)]
struct CompletionQueue {
    number: u32,
    unread: u32,
    entries: u32,
}

#[derive(Serialize)]
struct QueuePairError<'a> {
    queue_pair: u32,
    reason: &'a str,
}

/// Returns what is seen at a time, with rates since an earlier one.
pub fn document<'a>(before: Option<&View>, now: &'a View) -> Document<'a> {
    let process = |it: &'a ProcessStatus| Process {
        process: it.process,
        program: &it.program,
        capture: it.capture.as_deref(),
        devices: (it.devices.iter())
            .map(|device| of_device(device, rates::of(before, it, device)))
            .collect(),
    };
    Document {
        processes: now.processes.iter().map(process).collect(),
        silent: now.silent,
        devices: &now.devices,
    }
}

fn map(list: &[(String, u64)]) -> BTreeMap<&str, u64> {
    let entries = list.iter().map(|(name, value)| (name.as_str(), *value));
    entries.collect()
}

fn of_device(device: &DeviceStatus, rates: Option<Rates>) -> Device<'_> {
    Device {
        name: &device.name,
        link: if device.is_up { "up" } else { "down" },
        objects: map(&device.objects),
        counters: map(&device.counters),
        rates,
        queue_pairs: device.queue_pairs.iter().map(of_queue_pair).collect(),
        completion_queues: (device.completion_queues.iter())
            .map(|it| CompletionQueue {
                number: it.number,
                unread: it.unread,
                entries: it.entries,
            })
            .collect(),
        omitted: device.omitted,
        errors: (device.errors.iter())
            .map(|(queue_pair, reason)| QueuePairError {
                queue_pair: *queue_pair,
                reason,
            })
            .collect(),
        refused_command: device.refusal.as_deref(),
    }
}

fn of_queue_pair(it: &QueuePairStatus) -> QueuePair<'_> {
    QueuePair {
        number: it.number,
        kind: &it.kind,
        state: &it.state,
        peer: it.peer,
        peer_address: it.address.as_deref(),
        sends: it.sends.0,
        max_sends: it.sends.1,
        receives: it.receives.map(|it| it.0),
        max_receives: it.receives.map(|it| it.1),
    }
}
