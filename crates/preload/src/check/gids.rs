//! Entries of GID tables that the program has read.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use embedded::sysfs;

use super::Rule;
use crate::config;
use crate::explain::lock;
use crate::host;
use crate::process;

/// By device and index; `None` for all of a device.
static READ: Mutex<BTreeSet<(usize, Option<u32>)>> = Mutex::new(BTreeSet::new());
/// The connection manager chooses indices, and rights.
static MANAGER: AtomicBool = AtomicBool::new(false);

/// Notes that the program has read an entry of a device's table, or all.
pub(crate) fn was_read(device: usize, index: Option<u32>) {
    if process::checks() {
        lock(&READ).insert((device, index));
    }
}

/// Notes that the program uses the connection manager.
pub(crate) fn manager_was_opened() {
    MANAGER.store(true, Ordering::Relaxed);
}

pub(super) fn manager_is_used() -> bool {
    MANAGER.load(Ordering::Relaxed)
}

/// Returns whether a device has an Ethernet port.
pub(super) fn is_ethernet(device: usize) -> bool {
    if host::is_on() {
        return host::is_ethernet(device);
    }
    let profile = config::get().and_then(|it| it.profiles.get(device));
    profile.is_some_and(|profile| sysfs::is_ethernet(profile))
}

/// Returns what is advised of the index of a source GID. On InfiniBand index 0 is that of the
/// port.
pub(super) fn not_read(device: usize, index: u32) -> Option<(Rule, String)> {
    let is_fixed = index != 0 || is_ethernet(device);
    let read = lock(&READ);
    let is_read = [None, Some(index)].map(|it| read.contains(&(device, it)));
    if !is_fixed || is_read.contains(&true) || manager_is_used() {
        return None;
    }
    let message = format!("the source GID has index {index}, which the program has not looked up");
    Some((Rule::FixedGidIndex, message))
}
