//! Notifications of changes of the program's mappings, for an interceptor of its calls.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::driver::pinned::{Locked, Loss};
use crate::runtime::embedded::Embedded;

/// Longest time that a change waits for a device. A thread of the device may itself wait for
/// the allocator in whose call the change is made.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Locks the devices; `None` if one stays locked.
fn lock(devices: &[Embedded]) -> Option<Locked<'_>> {
    let until = Instant::now() + MAX_WAIT;
    Locked::new(|index| Some(devices.get(index)?.device.lock_until(until)))
}

/// Called before the program gives up the pages of a range: keeps those that are registered
/// with the devices, for them alone. Returns whether there are such pages.
///
/// # Safety
/// The program must be about to give up all pages of the range, which must be whole pages.
pub unsafe fn keep_registered(devices: &[Embedded], range: Range<usize>, loss: Loss) -> bool {
    // SAFETY: guaranteed by the caller.
    lock(devices).is_some_and(|mut locked| unsafe { locked.keep(&range, loss) })
}

/// Returns whether pages of a range are registered with the devices.
pub fn has_registered(devices: &[Embedded], range: &Range<usize>) -> bool {
    lock(devices).is_some_and(|mut locked| locked.has(range))
}

/// Moves pages by `change`, which returns their new address or `None` if they were not moved;
/// the devices follow them.
pub fn move_registered(
    devices: &[Embedded],
    range: Range<usize>,
    change: impl FnOnce() -> Option<usize>,
) {
    match lock(devices) {
        Some(mut locked) => locked.follow(&range, change),
        None => _ = change(),
    }
}

/// Changes the protection of pages by `change`; the devices keep their access.
pub fn protect_registered<T>(
    devices: &[Embedded],
    range: Range<usize>,
    protection: i32,
    change: impl FnOnce() -> T,
) -> T {
    match lock(devices) {
        Some(mut locked) => locked.protect(&range, protection, change),
        None => change(),
    }
}
