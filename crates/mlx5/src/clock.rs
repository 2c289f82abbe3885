//! The device's time, and how it goes together with the wall clock.

use std::cell::Cell;
use std::mem::offset_of;

use ring::{Mapping, ReadOnlyMapping};
use uverbs::Context;

use crate::abi::{AllocUcontextResp, CLOCK_INFO_V1, ClockInfo, HAS_CORE_CLOCK};
use crate::context::watch_command;

/// `MLX5_IB_MMAP_CORE_CLOCK`.
pub(crate) const MMAP_CORE_CLOCK: u8 = 5;
/// `MLX5_IB_MMAP_CLOCK_INFO`; its index is the version's number, which is 0.
pub(crate) const MMAP_CLOCK_INFO: u8 = 7;

/// Words of [`ClockInfo`] behind its sign.
const WORDS: usize = size_of::<ClockInfo>() / 8 - 1;

/// What of the device's clock the driver lets the process see. Any thread.
#[derive(Debug)]
pub struct Clock {
    /// The device's counter, and where in the page it is.
    counter: Option<(ReadOnlyMapping, usize)>,
    /// mlx5_core's record of both clocks.
    info: Option<ReadOnlyMapping>,
}

impl Clock {
    /// What the driver has announced; what cannot be mapped is not there, as
    /// with the stock provider.
    pub(crate) fn of(context: &Context, answer: &AllocUcontextResp) -> Self {
        let watch = |announced: bool, command| {
            if announced {
                watch_command(context, command, 0).ok()
            } else {
                None
            }
        };
        let counter = watch(answer.comp_mask & HAS_CORE_CLOCK != 0, MMAP_CORE_CLOCK);
        let at = answer.hca_core_clock_offset % Mapping::page_size() as u64;
        Self {
            counter: counter.map(|page| (page, at as usize)),
            info: watch(
                answer.clock_info_versions & CLOCK_INFO_V1 != 0,
                MMAP_CLOCK_INFO,
            ),
        }
    }

    /// Ticks of the device's clock, now, by reading its register: some hundred
    /// nanoseconds. None if the driver does not let it be seen.
    pub fn ticks(&self) -> Option<u64> {
        let (page, at) = self.counter.as_ref()?;
        page.counter(*at)
    }

    /// The wall clock as the driver last knew it. None without its record, or
    /// while it keeps changing it.
    fn info(&self) -> Option<ClockInfo> {
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

    /// A clock to turn times of completions into the wall's; none without the
    /// driver's record.
    pub fn wall(&self) -> Option<WallClock> {
        self.info().map(|last| WallClock {
            last: Cell::new(last),
        })
    }
}

/// Turns the device's time into the wall clock's. One caller at a time.
#[derive(Debug)]
pub struct WallClock {
    /// The record that was read last, for as long as the driver is changing it.
    last: Cell<ClockInfo>,
}

impl WallClock {
    /// Nanoseconds of the wall clock (since 1970) at `ticks` of the device's
    /// clock, which must be not longer ago, or ahead, than half of its range.
    ///
    /// No system call, no lock. If the driver is at its record all the while,
    /// by what it had there before.
    pub fn nanoseconds(&self, clock: &Clock, ticks: u64) -> u64 {
        if let Some(info) = clock.info() {
            self.last.set(info);
        }
        nanoseconds(&self.last.get(), ticks)
    }
}

/// By a record, whatever is in it: nothing overflows.
fn nanoseconds(info: &ClockInfo, ticks: u64) -> u64 {
    let scaled = |delta: u64, part: u64| {
        let product = delta.wrapping_mul(info.mult.into()).wrapping_add(part);
        product.checked_shr(info.shift).unwrap_or(0)
    };
    let since = ticks.wrapping_sub(info.cycles) & info.mask;
    // In the upper half of the range it is of before the record was made.
    if since <= info.mask / 2 {
        info.nsec.wrapping_add(scaled(since, info.frac))
    } else {
        let before = info.cycles.wrapping_sub(ticks) & info.mask;
        info.nsec
            .wrapping_sub(scaled(before, info.frac.wrapping_neg()))
    }
}

const _: () = {
    // Whole words of 64 bits follow the sign, in the order of `Clock::info`.
    assert!(offset_of!(ClockInfo, nsec) == 8);
    assert!(offset_of!(ClockInfo, cycles) == 16);
    assert!(offset_of!(ClockInfo, frac) == 24);
    assert!(offset_of!(ClockInfo, mult) == 32);
    assert!(offset_of!(ClockInfo, shift) == 36);
    assert!(offset_of!(ClockInfo, mask) == 40);
    assert!(offset_of!(ClockInfo, overflow_period) == 48);
};
