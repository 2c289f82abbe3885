//! Completion timestamps of the device's clock.

use std::num::NonZeroU64;
use std::time::Duration;

use crate::{Context, Error, Result};

/// The time at which a device wrote a completion, in ticks of its clock, which starts at an
/// arbitrary value and wraps at [`DeviceClock::mask`]. Only timestamps of the same device can
/// be compared ([`DeviceClock::between`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Timestamp(pub(crate) u64);

impl Timestamp {
    /// Returns the ticks as the device wrote them.
    #[inline]
    pub fn ticks(self) -> u64 {
        self.0
    }
}

/// The parameters of a device's clock. From [`Context::clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceClock {
    kilohertz: NonZeroU64,
    mask: u64,
}

impl DeviceClock {
    fn new(kilohertz: u64, mask: u64) -> Option<Self> {
        let kilohertz = NonZeroU64::new(kilohertz)?;
        (mask != 0).then_some(Self { kilohertz, mask })
    }

    /// Returns the frequency in kHz, which is ticks per millisecond
    /// (`hca_core_clock`).
    pub fn kilohertz(&self) -> u64 {
        self.kilohertz.get()
    }

    /// Returns the valid bits of a timestamp (`completion_timestamp_mask`).
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// Returns the time from `earlier` to `later`, rounded down to nanoseconds.
    /// If `later` is in fact earlier, the result is close to the clock's period: ticks do not
    /// determine the order.
    pub fn between(&self, earlier: Timestamp, later: Timestamp) -> Duration {
        let ticks = later.0.wrapping_sub(earlier.0) & self.mask;
        let per_second = u128::from(self.kilohertz.get()) * 1000;
        let seconds = u128::from(ticks) / per_second;
        let rest = u128::from(ticks) % per_second;
        // The seconds fit, because there are at least 1000 ticks per second; the
        // remainder is less than a second.
        Duration::new(seconds as u64, (rest * 1_000_000_000 / per_second) as u32)
    }
}

impl Context {
    /// Queries the clock of completion timestamps
    /// ([`CompletionQueueBuilder::timestamps`](crate::CompletionQueueBuilder::timestamps)).
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no clock, such as rdma_rxe; EIO if the device
    /// was removed.
    pub fn clock(&self) -> Result<DeviceClock> {
        let attr = self.query_device_ex()?;
        DeviceClock::new(attr.hca_core_clock, attr.timestamp_mask).ok_or(Error::Unsupported {
            what: "a clock for completion timestamps",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_convert_to_nanoseconds_across_the_wrap() {
        let clock = DeviceClock::new(78_125, (1 << 48) - 1).unwrap();
        let between = |earlier, later| clock.between(Timestamp(earlier), Timestamp(later));
        assert_eq!(between(5, 5), Duration::ZERO);
        // 12.8 ns each.
        assert_eq!(between(0, 10), Duration::from_nanos(128));
        assert_eq!(between(0, 1), Duration::from_nanos(12));
        assert_eq!(between((1 << 48) - 4, 6), Duration::from_nanos(128));
        // Bits outside of the mask.
        assert_eq!(between(1 << 60, 10), Duration::from_nanos(128));
        let slow = DeviceClock::new(1, u64::MAX).unwrap();
        let all = slow.between(Timestamp(0), Timestamp(u64::MAX));
        assert_eq!(all.as_secs(), u64::MAX / 1000);
        assert_eq!(all.subsec_millis(), (u64::MAX % 1000) as u32);
        assert_eq!(DeviceClock::new(0, 1), None);
        assert_eq!(DeviceClock::new(1, 0), None);
    }
}
