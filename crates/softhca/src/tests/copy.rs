//! Work requests that copy local memory.

use crate::testing::driver::{Cq, Driver, Qp, segment, status};

/// Posts a copy and returns the status of its completion.
fn copy(
    driver: &mut Driver,
    (qp, cq): (&mut Qp, &mut Cq),
    from: (u32, u32, u64),
    to: (u32, u32, u64),
) -> (u8, u8) {
    let mut segments = vec![0; 16];
    segments.extend(segment(from.0, from.1, from.2));
    segments.extend(segment(to.0, to.1, to.2));
    driver.post_with(qp, 0x2f, &segments, |control| control[0] = 1);
    let entry = driver.poll(cq).unwrap();
    // The completion repeats the opcode, next to the queue pair number.
    assert_eq!(entry[56], 0x2f);
    status(&entry)
}

#[test]
fn memory_is_copied_from_key_to_key() {
    let mut driver = Driver::new("roce-umr");
    let (mut cq, mut a, _b) = driver.pair();
    let (from, to) = (driver.pages(3), driver.pages(3));
    let data: Vec<u8> = (0..10_000_u32).map(|n| (n % 251) as u8).collect();
    driver.write(from + 5, &data);
    let key = driver.create_key(from, 3 * 4096, 0, 0x1f);
    let whole_key = driver.key;
    let sides = ((10_000, key, from + 5), (10_000, whole_key, to + 9));
    let actual = copy(&mut driver, (&mut a, &mut cq), sides.0, sides.1);
    assert_eq!(actual, (0, 0));
    assert_eq!(driver.read(to + 9, 10_000), data);
    assert_eq!(driver.read(to, 9), [0; 9]);
    assert_eq!(driver.read(to + 9 + 10_000, 8), [0; 8]);
}

#[test]
fn copies_are_checked_against_their_keys() {
    // Whether the key is that of the source, its rights, the offset of the access, the
    // lengths of both sides, and the expected status.
    let cases = [
        (true, 0x1f, 0, (64, 64), (0, 0)),
        // Local read only; local write only.
        (true, 0x1, 0, (64, 64), (0, 0)),
        (false, 0x1, 0, (64, 64), (13, 0x04)),
        (false, 0x2, 0, (64, 64), (0, 0)),
        (true, 0x2, 0, (64, 64), (13, 0x04)),
        // One byte past the end.
        (true, 0x1f, 4033, (64, 64), (13, 0x04)),
        (false, 0x1f, 4033, (64, 64), (13, 0x04)),
        (true, 0x1f, 0, (64, 63), (13, 0x01)),
        (true, 0x1f, 0, (0, 0), (13, 0x01)),
    ];
    for (n, (source, rights, at, (out, into), expected)) in cases.into_iter().enumerate() {
        let mut driver = Driver::new("roce-umr");
        let (mut cq, mut a, _b) = driver.pair();
        let (from, to) = (driver.pages(2), driver.pages(2));
        let whole_key = driver.key;
        let (mut source_segment, mut destination_segment) =
            ((out, whole_key, from), (into, whole_key, to));
        let (side, start) = match source {
            true => (&mut source_segment, from),
            false => (&mut destination_segment, to),
        };
        side.1 = driver.create_key(start, 4096, 0, rights);
        side.2 += at;
        let actual = copy(
            &mut driver,
            (&mut a, &mut cq),
            source_segment,
            destination_segment,
        );
        assert_eq!(actual, expected, "case {n}");
    }
}

#[test]
fn other_mmo_operations_are_malformed() {
    let mut driver = Driver::new("roce-umr");
    let (mut cq, mut a, _b) = driver.pair();
    let (at, key) = (driver.pages(1), driver.key);
    let mut segments = vec![0; 16];
    segments.extend(segment(8, key, at));
    segments.extend(segment(8, key, at + 64));
    driver.post_with(&mut a, 0x2f, &segments, |control| control[0] = 2);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x02));
}
