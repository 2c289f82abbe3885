//! Device failure, and the reset by the driver.

use crate::testing::driver::{Driver, SIGNALED, segment};

const QUEUE_LOW: u64 = 0x14;
const SEVERITY: u64 = 0x238;
const SYNDROME: u64 = 0x23c;
const HEALTH_COUNTER: u64 = 0x1010;

fn read(driver: &mut Driver, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    driver.hca.read(offset, &mut bytes);
    u32::from_be_bytes(bytes)
}

/// Returns the health counter now and 0.2 s later.
fn health_counters(driver: &mut Driver) -> (u32, u32) {
    let before = read(driver, HEALTH_COUNTER);
    let now = &driver.hca.platform().now;
    now.set(now.get() + 200_000_000);
    (before, read(driver, HEALTH_COUNTER))
}

#[test]
fn a_health_syndrome_is_reported_and_operation_continues() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (from, key) = (driver.pages(1), driver.key);
    assert_eq!(health_counters(&mut driver), (0, 2));
    driver.hca.set_health(0x0f, false);
    assert_eq!(read(&mut driver, SYNDROME), 0x0f << 16);
    assert_eq!(read(&mut driver, SEVERITY), 0);
    let (before, after) = health_counters(&mut driver);
    assert_eq!(before, after, "the counter has stopped");
    driver.post_recv(&mut b, &segment(8, key, from));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(8, key, from));
    assert!(driver.poll(&mut cq).is_some());
    driver.hca.set_health(0, false);
    assert_eq!(read(&mut driver, SYNDROME), 0);
    let (before, after) = health_counters(&mut driver);
    assert_eq!(after, before + 2);
}

#[test]
fn a_fatal_error_stops_the_device_until_its_reset() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (from, key) = (driver.pages(1), driver.key);
    driver.post_recv(&mut b, &segment(8, key, from));
    driver.hca.set_health(1, true);
    let doorbells = driver.hca.stats().doorbells;
    driver.post(&mut a, 0x0a, SIGNALED, &segment(8, key, from));
    driver.run();
    assert!(driver.poll(&mut cq).is_none());
    assert_eq!(driver.hca.stats().doorbells, doorbells);
    assert!(driver.hca.deadline().is_none(), "nothing is due");
    let doorbell = 1_u32.to_be_bytes();
    let commands = driver.hca.stats().commands;
    driver.hca.write(0x18, &doorbell);
    assert_eq!(driver.hca.stats().commands, commands);
    assert_eq!(read(&mut driver, SEVERITY), 1 << 31, "a reset is requested");
    assert_eq!(read(&mut driver, 0x1fc), 1 << 30, "a reset is permitted");

    // The driver requests the reset by bits of the command queue address.
    let low = read(&mut driver, QUEUE_LOW);
    assert_eq!(low >> 8 & 7, 0);
    let reset = (low & !0xfff) | 7 << 8;
    driver.hca.write(QUEUE_LOW, &reset.to_be_bytes());
    assert_eq!(read(&mut driver, QUEUE_LOW) >> 8 & 7, 1, "disabled");
    assert_eq!(read(&mut driver, SYNDROME), 0);
    let left: usize = driver.hca.objects().iter().map(|(_, count)| count).sum();
    assert_eq!(left, 0, "objects after the reset");
    // A program that has not noticed the reset still rings its doorbell.
    driver.post(&mut a, 0x0a, SIGNALED, &segment(8, key, from));
    assert_eq!(driver.hca.stats().doorbells, doorbells);
    assert_eq!(driver.hca.complaints(), []);
    let (before, after) = health_counters(&mut driver);
    assert_eq!(after, before + 2);
    // The next command queue address takes the device into use again.
    driver.hca.write(QUEUE_LOW, &0x8000_u32.to_be_bytes());
    assert_eq!(read(&mut driver, QUEUE_LOW) >> 8 & 7, 0);
}
