//! The device's time, and the wall clock's, in pages that are written by hand.

use std::os::unix::fs::FileExt;

use super::objects::{FakeDevice, UcontextAnswer, VALID_ANSWER};

/// Where in the file the pages are: the command in the second byte of their
/// number.
const CLOCK: u64 = (5 << 8) * 4096;
const INFO: u64 = (7 << 8) * 4096;
/// Where in its page the driver says that the counter is.
const AT: u64 = 0xff0;

fn machine() -> FakeDevice {
    let machine = FakeDevice::new();
    machine.pages.set_len(INFO + 4096).unwrap();
    machine
}

fn with_clocks() -> UcontextAnswer {
    UcontextAnswer {
        comp_mask: 1,
        clock_info_versions: 1,
        core_clock: 0x1000 + AT,
        ..VALID_ANSWER
    }
}

/// The driver's record, its fields in their order.
fn record(machine: &FakeDevice, sign: u32, words: [u64; 3], mult: u32, shift: u32, mask: u64) {
    let mut bytes = [sign.to_ne_bytes(), [0; 4]].concat();
    bytes.extend(words.map(u64::to_ne_bytes).concat());
    bytes.extend([mult.to_ne_bytes(), shift.to_ne_bytes()].concat());
    bytes.extend(mask.to_ne_bytes());
    machine.pages.write_all_at(&bytes, INFO).unwrap();
}

#[test]
fn clock_is_read_at_the_announced_offset() {
    let machine = machine();
    let device = machine.open(&with_clocks()).unwrap();
    let now = 0x0123_4567_89ab_cdefu64;
    (machine.pages)
        .write_all_at(&now.to_be_bytes(), CLOCK + AT)
        .unwrap();
    assert_eq!(device.clock().ticks(), Some(now));
    // Half of it beyond the page.
    let beyond = UcontextAnswer {
        core_clock: 0xffc,
        ..with_clocks()
    };
    assert_eq!(machine.open(&beyond).unwrap().clock().ticks(), None);
}

#[test]
fn unannounced_clocks_are_absent() {
    let machine = machine();
    let device = machine.open(&VALID_ANSWER).unwrap();
    assert!(device.clock().ticks().is_none() && device.clock().wall().is_none());
    let other_version = UcontextAnswer {
        clock_info_versions: 2,
        ..with_clocks()
    };
    let device = machine.open(&other_version).unwrap();
    assert!(device.clock().ticks().is_some() && device.clock().wall().is_none());
}

#[test]
fn times_are_converted_to_wall_clock() {
    let machine = machine();
    let device = machine.open(&with_clocks()).unwrap();
    let clock = device.clock();
    // Two and a half nanoseconds to a tick; a half and a quarter left over.
    record(
        &machine,
        2,
        [1_000_000, 0xffff_fff0, 3],
        10,
        2,
        u32::MAX.into(),
    );
    let wall = clock.wall().unwrap();
    assert_eq!(wall.nanoseconds(clock, 0xffff_fff0), 1_000_000);
    assert_eq!(wall.nanoseconds(clock, 0xffff_fff1), 1_000_003);
    // The counter goes over its end.
    assert_eq!(wall.nanoseconds(clock, 0x10), 1_000_000 + 80);
    // Before the record was made.
    assert_eq!(
        wall.nanoseconds(clock, 0xffff_fff0 - 100),
        1_000_000 - (100 * 10 - 3) / 4
    );
    // Renewed.
    record(&machine, 4, [2_000_000, 0x20, 0], 10, 2, u32::MAX.into());
    assert_eq!(wall.nanoseconds(clock, 0x22), 2_000_005);
    // While it is being changed, what was there before counts.
    record(&machine, 5, [9_000_000, 0x20, 0], 10, 2, u32::MAX.into());
    assert_eq!(wall.nanoseconds(clock, 0x22), 2_000_005);
    assert!(clock.wall().is_none());
}

#[test]
fn malformed_clock_record_is_harmless() {
    let machine = machine();
    let device = machine.open(&with_clocks()).unwrap();
    let clock = device.clock();
    for (mult, shift, mask) in [
        (u32::MAX, 64, u64::MAX),
        (u32::MAX, u32::MAX, 0),
        (u32::MAX, 0, u64::MAX),
        (0, 63, 1),
    ] {
        record(&machine, 2, [u64::MAX; 3], mult, shift, mask);
        let wall = clock.wall().unwrap();
        for ticks in [0, 1, u64::MAX / 2, u64::MAX] {
            wall.nanoseconds(clock, ticks);
        }
    }
}
