//! The device's clock, and its conversion to wall clock time.

use std::cell::Cell;
use std::mem::offset_of;
use std::ptr::NonNull;

use mlx5_abi::{AllocUcontextResp, CLOCK_INFO_V1, ClockInfo, context_flag, mmap};
use ring::{Mapping, ReadOnlyMapping};
use uverbs::Context;

use crate::context::watch_command;

/// Words of [`ClockInfo`] after its sequence word.
const WORDS: usize = size_of::<ClockInfo>() / 8 - 1;

/// The pages of the device's clock that the driver announces. Any thread.
#[derive(Debug)]
pub struct Clock {
    /// The device's counter, and its offset in the page.
    counter: Option<(ReadOnlyMapping, usize)>,
    /// mlx5_core's clock record.
    info: Option<ReadOnlyMapping>,
}

impl Clock {
    /// Maps the announced pages. A failure to map counts as absence, as with the
    /// stock provider.
    pub(crate) fn of(context: &Context, answer: &AllocUcontextResp) -> Self {
        let watch = |announced: bool, command| {
            if announced {
                watch_command(context, command, 0).ok()
            } else {
                None
            }
        };
        let has_counter = answer.comp_mask & context_flag::CORE_CLOCK_OFFSET != 0;
        let counter = watch(has_counter, mmap::CORE_CLOCK);
        let at = answer.hca_core_clock_offset % Mapping::page_size() as u64;
        Self {
            counter: counter.map(|page| (page, at as usize)),
            info: watch(
                answer.clock_info_versions & CLOCK_INFO_V1 != 0,
                mmap::CLOCK_INFO,
            ),
        }
    }

    /// Reads the device's clock, in ticks; takes some hundred nanoseconds. `None`
    /// if the driver does not announce it.
    pub fn ticks(&self) -> Option<u64> {
        let (page, at) = self.counter.as_ref()?;
        page.counter(*at)
    }

    /// The address of the device's counter, two words of 32 bits, the high one first.
    /// `None` if the driver does not announce it.
    pub fn counter_address(&self) -> Option<NonNull<u8>> {
        let (page, at) = self.counter.as_ref()?;
        page.address(*at, 8, 4)
    }

    /// The driver's last clock record. `None` without a record, or during an
    /// update.
    pub fn record(&self) -> Option<ClockInfo> {
        let words: [u64; WORDS] = self.info.as_ref()?.record(0)?;
        let [nsec, cycles, frac, mult_shift, mask, overflow_period] = words;
        let halves = mult_shift.to_ne_bytes();
        let half = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| halves[at + i]));
        Some(ClockInfo {
            sign: 0,
            resv: 0,
            nsec,
            cycles,
            frac,
            mult: half(0),
            shift: half(4),
            mask,
            overflow_period,
        })
    }

    /// A converter of completion times to wall clock time; `None` without a clock
    /// record.
    pub fn wall(&self) -> Option<WallClock> {
        self.record().map(|last| WallClock {
            last: Cell::new(last),
        })
    }
}

/// Converts the device's time to wall clock time. One caller at a time.
#[derive(Debug)]
pub struct WallClock {
    /// The last record, for use during an update.
    last: Cell<ClockInfo>,
}

impl WallClock {
    /// Nanoseconds since 1970 at `ticks` of the device's clock, which must be
    /// within half of its range of now.
    ///
    /// No system call, no lock. During an update the previous record is used.
    pub fn nanoseconds(&self, clock: &Clock, ticks: u64) -> u64 {
        if let Some(info) = clock.record() {
            self.last.set(info);
        }
        nanoseconds(&self.last.get(), ticks)
    }
}

/// Converts by a record. Nothing overflows, whatever the record has.
fn nanoseconds(info: &ClockInfo, ticks: u64) -> u64 {
    let scaled = |delta: u64, part: u64| {
        let product = delta.wrapping_mul(info.mult.into()).wrapping_add(part);
        product.checked_shr(info.shift).unwrap_or(0)
    };
    let since = ticks.wrapping_sub(info.cycles) & info.mask;
    // The upper half of the range is before the record.
    if since <= info.mask / 2 {
        info.nsec.wrapping_add(scaled(since, info.frac))
    } else {
        let before = info.cycles.wrapping_sub(ticks) & info.mask;
        info.nsec
            .wrapping_sub(scaled(before, info.frac.wrapping_neg()))
    }
}

const _: () = {
    // Whole words of 64 bits follow the sign, in the order of `Clock::record`.
    assert!(offset_of!(ClockInfo, nsec) == 8);
    assert!(offset_of!(ClockInfo, cycles) == 16);
    assert!(offset_of!(ClockInfo, frac) == 24);
    assert!(offset_of!(ClockInfo, mult) == 32);
    assert!(offset_of!(ClockInfo, shift) == 36);
    assert!(offset_of!(ClockInfo, mask) == 40);
    assert!(offset_of!(ClockInfo, overflow_period) == 48);
};
