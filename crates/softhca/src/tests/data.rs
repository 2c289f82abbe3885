//! Work requests and their completions.

use roce::rule::{Rule, Violation};

use crate::cause::Misuse;
use crate::command::opcode as op;
use crate::fault::Action;
use crate::testing::driver::{
    Cq, Driver, Input, SIGNALED, SOLICITED, remote, segment, status, word,
};

#[test]
fn a_send_completes_on_both_sides() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (from, to) = (driver.pages(1), driver.pages(1));
    driver.write(from, b"what is sent");
    let key = driver.key;
    driver.post_recv(&mut b, &segment(100, key, to));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(12, key, from));
    assert_eq!(driver.read(to, 12), b"what is sent");
    let mut entries = [driver.poll(&mut cq).unwrap(), driver.poll(&mut cq).unwrap()];
    entries.sort_by_key(|entry| entry[63] >> 4);
    let [send, receive] = entries;
    assert_eq!(status(&send), (0, 0));
    assert_eq!(word(&send, 56), 0x0a << 24 | a.number);
    assert_eq!(word(&send, 32), 7, "the user index");
    assert_eq!(word(&send, 60) >> 16, 0, "the entry's index");
    assert_eq!(status(&receive), (2, 0));
    assert_eq!(word(&receive, 44), 12, "bytes");
    assert!(driver.poll(&mut cq).is_none());
}

/// Only datagrams tell whether they have a GRH.
#[test]
fn a_message_over_a_connection_reports_no_grh() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let memory = driver.pages(1);
    let key = driver.key;
    driver.post_recv(&mut b, &segment(100, key, memory));
    // The primary path: a GRH, and this port.
    driver.modify(0x505, a.number, |input| {
        input.or(0x10, 7, 1).or(0x34, 23, 1).or(0x34, 0, 1)
    });
    driver.post(&mut a, 0x0a, 0, &segment(12, key, memory));
    let received = driver.poll(&mut cq).unwrap();
    assert_eq!((status(&received), word(&received, 44)), ((2, 0), 12));
    assert_eq!(word(&received, 24) >> 28, 0);
}

#[test]
fn inline_sends_are_counted() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (from, to) = (driver.pages(1), driver.pages(1));
    let key = driver.key;
    driver.post_recv(&mut b, &segment(100, key, to));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(12, key, from));
    assert_eq!(driver.hca.stats().sends_inline, 0);
    driver.post_recv(&mut b, &segment(100, key, to));
    let mut data = (1_u32 << 31 | 12).to_be_bytes().to_vec();
    data.extend(b"what is sent");
    driver.post(&mut a, 0x0a, SIGNALED, &data);
    assert_eq!(driver.read(to, 12), b"what is sent");
    assert!((0..4).all(|_| driver.poll(&mut cq).is_some()));
    // A UMR is not counted as inline either, although its WQE is kept.
    driver.post(&mut a, 0x25, SIGNALED, &[]);
    let stats = driver.hca.stats();
    assert_eq!((stats.send_requests, stats.sends_inline), (3, 1));
}

/// As UCX does: a header from the WQE, then the program's data.
#[test]
fn inline_data_precedes_the_scatter_list() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (from, to) = (driver.pages(3), driver.pages(3));
    let key = driver.key;
    let data: Vec<u8> = (0..9000_u32).map(|n| (n / 7) as u8).collect();
    driver.write(from, &data);
    driver.post_recv(&mut b, &segment(12288, key, to));
    let mut segments = (1_u32 << 31 | 6).to_be_bytes().to_vec();
    segments.extend(b"header");
    segments.resize(16, 0);
    segments.extend(segment(9000, key, from));
    driver.post(&mut a, 0x0a, SIGNALED, &segments);
    let ends = [(); 2].map(|()| driver.poll(&mut cq).unwrap());
    assert_eq!(ends.map(|end| status(&end).1), [0, 0]);
    assert_eq!(driver.read(to, 6), b"header");
    assert_eq!(driver.read(to + 6, 9000), data);
}

#[test]
fn rdma_and_atomics_reach_memory() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    let (local, remote_va) = (driver.pages(3), driver.pages(3));
    let key = driver.key;
    let data: Vec<u8> = (0..9000_u32).map(|n| n as u8).collect();
    driver.write(local, &data);
    // A write of several packets from two scatter/gather elements.
    let mut segments = remote(remote_va, key);
    segments.extend(segment(5000, key, local));
    segments.extend(segment(4000, key, local + 5000));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(driver.read(remote_va, 9000), data);
    // Read the data back.
    driver.write(local, &[0; 9000]);
    let mut segments = remote(remote_va, key);
    segments.extend(segment(9000, key, local));
    driver.post(&mut a, 0x10, SIGNALED, &segments);
    let entry = driver.poll(&mut cq).unwrap();
    assert_eq!((status(&entry), word(&entry, 44)), ((0, 0), 9000));
    assert_eq!(driver.read(local, 9000), data);
    // Fetch and add; memory is in network byte order by default.
    driver.write(remote_va, &5_u64.to_be_bytes());
    let mut segments = remote(remote_va, key);
    segments.extend(7_u64.to_be_bytes());
    segments.extend([0; 8]);
    segments.extend(segment(8, key, local));
    driver.post(&mut a, 0x12, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(driver.read(remote_va, 8), 12_u64.to_be_bytes());
    assert_eq!(driver.read(local, 8), 5_u64.to_be_bytes());
    // Compare and swap, in the host's byte order.
    let set = Input::new(op::SET_HCA_CAP, 0x110)
        .or(4, 0, 3 << 1)
        .or(0x18, 30, 1);
    driver.execute(&set, 16);
    driver.write(remote_va, &12_u64.to_le_bytes());
    let mut segments = remote(remote_va, key);
    segments.extend(99_u64.to_be_bytes());
    segments.extend(12_u64.to_be_bytes());
    segments.extend(segment(8, key, local));
    driver.post(&mut a, 0x11, SIGNALED, &segments);
    assert_eq!(driver.read(remote_va, 8), 99_u64.to_le_bytes());
    assert_eq!(driver.read(local, 8), 12_u64.to_le_bytes());
}

#[test]
fn remote_access_without_rights_fails() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    let memory = driver.pages(1);
    let key = driver.key;
    let local_only = driver.create_key(memory, 64, 0, 0b11);
    let mut segments = remote(memory, local_only);
    segments.extend(segment(8, key, memory));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    let entry = driver.poll(&mut cq).unwrap();
    assert_eq!(status(&entry), (13, 0x13), "remote access error");
    assert_ne!(entry[54], 0, "the vendor's syndrome");
    // Later work requests are flushed.
    driver.post(&mut a, 0x0a, 0, &segment(8, key, memory));
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x05));
}

#[test]
fn bounds_and_variants_of_a_key_are_checked() {
    let mut driver = Driver::new("ib");
    let memory = driver.pages(1);
    let small = driver.create_key(memory, 64, 0, 0x1f);
    for (key, va, length, allowed) in [
        (small, memory, 64, true),
        (small, memory + 1, 64, false),
        (small, memory - 1, 8, false),
        (small ^ 1, memory, 8, false),
        (small + 0x100, memory, 8, false),
    ] {
        let (mut cq, mut a, mut b) = driver.pair();
        let whole_key = driver.key;
        driver.post_recv(&mut b, &segment(64, whole_key, memory));
        driver.post(&mut a, 0x0a, SIGNALED, &segment(length, key, va));
        let entry = driver.poll(&mut cq).unwrap();
        let failed = status(&entry) == (13, 0x04);
        assert_eq!(!failed, allowed, "{key:#x} {va:#x} {length}");
    }
}

#[test]
fn a_key_translates_to_its_pages() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (x, y, z) = (driver.pages(1), driver.pages(1), driver.pages(1));
    let start = 0x7fff_0000_0123;
    let paged = driver.create_paged_key(start, 3 * 4096 - 0x123, &[z, x, y]);
    let (key, to) = (driver.key, driver.pages(3));
    driver.write(z + 4090, b"at the");
    driver.write(x, b" seam");
    driver.post_recv(&mut b, &segment(64, key, to));
    let va = start - 0x123 + 4090;
    driver.post(&mut a, 0x0a, SIGNALED, &segment(11, paged, va));
    assert_eq!(driver.read(to, 11), b"at the seam");
    while driver.poll(&mut cq).is_some() {}
    // Access up to the end of the key succeeds, beyond it fails.
    let end = start + 3 * 4096 - 0x123;
    driver.post_recv(&mut b, &segment(64, key, to));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(8, paged, end - 8));
    assert_eq!(status(&driver.poll(&mut cq).unwrap()).1, 0);
    while driver.poll(&mut cq).is_some() {}
    driver.post_recv(&mut b, &segment(64, key, to));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(8, paged, end - 7));
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x04));
}

#[test]
fn a_ksm_key_begins_at_its_start_address() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (x, y) = (driver.pages(1), driver.pages(1));
    let (key, pd, to) = (driver.key, driver.pd, driver.pages(1));
    let start = 0x7fff_0000_0330;
    let part = |va: u64| (u64::from(key), va);
    let mut create = Input::new(op::CREATE_MKEY, 0x130)
        .or(0x10, 8, 3)
        .or(0x10, 10, 0x1f)
        .or(0x14, 8, 0xff_ffff)
        .or(0x1c, 0, pd)
        .put64(0x20, start)
        .put64(0x28, 8192)
        .or(0x44, 0, 2)
        .or(0x48, 0, 12)
        .or(0x60, 0, 2);
    for (n, (key, va)) in [part(x), part(y)].into_iter().enumerate() {
        create = create.put64(0x110 + 16 * n, key).put64(0x118 + 16 * n, va);
    }
    let parts = driver.create(create) << 8;
    driver.write(x + 4090, b"at the");
    driver.write(y, b" seam");
    driver.post_recv(&mut b, &segment(64, key, to));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(11, parts, start + 4090));
    assert_eq!(status(&driver.poll(&mut cq).unwrap()).1, 0);
    assert_eq!(driver.read(to, 11), b"at the seam");
}

#[test]
pub(super) fn an_armed_cq_raises_one_event() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (key, memory) = (driver.key, driver.pages(1));
    let uar = u64::from(driver.uar) * 4096;
    driver
        .hca
        .write(uar + 0x40, &(driver.eqn << 24).to_be_bytes());
    arm_cq(&mut driver, &cq, false);
    driver.post_recv(&mut b, &segment(64, key, memory));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(8, key, memory));
    let event = driver.read(driver.eq, 64);
    assert_eq!((event[1], word(&event, 56)), (0, cq.number));
    assert_eq!(*driver.hca.platform().interrupts.borrow(), [1]);
    assert_eq!(driver.hca.stats().eqes, 1, "not rearmed");
    while driver.poll(&mut cq).is_some() {}
    arm_cq(&mut driver, &cq, false);
    assert_eq!(driver.hca.stats().eqes, 1);
}

/// Arms with the driver's consumer index. Returns the number of events posted so far.
fn arm_cq(driver: &mut Driver, cq: &Cq, solicited_only: bool) -> u64 {
    let word = cq.index & 0xff_ffff | u32::from(solicited_only) << 24;
    let mut bytes = word.to_be_bytes().to_vec();
    bytes.extend(cq.number.to_be_bytes());
    let uar = u64::from(driver.uar) * 4096;
    driver.hca.write(uar + 0x20, &bytes);
    driver.hca.stats().eqes
}

/// A completion that is polled only after the queue is armed again causes a single
/// event. perftest's event latency test relies on it: it has one request outstanding
/// and takes each event for the next completion.
#[test]
fn a_reported_completion_raises_no_second_event() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    arm_cq(&mut driver, &cq, false);
    for events in 1..=40 {
        driver.post(&mut a, 0x00, SIGNALED, &[]);
        assert_eq!(driver.hca.stats().eqes, events);
        assert_eq!(arm_cq(&mut driver, &cq, false), events);
        assert!(driver.poll(&mut cq).is_some());
    }
}

#[test]
fn arming_reports_an_unreported_completion_immediately() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    arm_cq(&mut driver, &cq, false);
    for _ in 0..2 {
        driver.post(&mut a, 0x00, SIGNALED, &[]);
    }
    assert_eq!(driver.hca.stats().eqes, 1);
    assert!(driver.poll(&mut cq).is_some());
    assert_eq!(
        arm_cq(&mut driver, &cq, false),
        2,
        "the second is unreported"
    );
    assert!(driver.poll(&mut cq).is_some());
    assert_eq!(arm_cq(&mut driver, &cq, false), 2);
    driver.post(&mut a, 0x00, SIGNALED, &[]);
    assert_eq!(driver.hca.stats().eqes, 3, "the third is reported");
    // The fourth is polled before the queue is armed again.
    driver.post(&mut a, 0x00, SIGNALED, &[]);
    while driver.poll(&mut cq).is_some() {}
    assert_eq!(arm_cq(&mut driver, &cq, false), 3);
}

#[test]
fn a_solicited_completion_raises_one_event() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (key, memory) = (driver.key, driver.pages(1));
    let data = segment(8, key, memory);
    let mut send = |driver: &mut Driver, flags| {
        driver.post_recv(&mut b, &segment(64, key, memory));
        driver.post(&mut a, 0x0a, flags, &data);
    };
    // An unsolicited and a solicited completion before the queue is armed.
    send(&mut driver, SIGNALED);
    assert_eq!(arm_cq(&mut driver, &cq, true), 0);
    send(&mut driver, SIGNALED | SOLICITED);
    assert_eq!(driver.hca.stats().eqes, 1);
    assert_eq!(arm_cq(&mut driver, &cq, true), 1, "none is polled");
    send(&mut driver, SIGNALED);
    assert_eq!(arm_cq(&mut driver, &cq, true), 1);
    assert_eq!(arm_cq(&mut driver, &cq, false), 2, "the third send's");
    send(&mut driver, SIGNALED | SOLICITED);
    assert_eq!(driver.hca.stats().eqes, 2, "reported, and not armed");
    send(&mut driver, SIGNALED);
    assert_eq!(
        arm_cq(&mut driver, &cq, true),
        3,
        "a solicited completion is unreported"
    );
    while driver.poll(&mut cq).is_some() {}
    assert_eq!(arm_cq(&mut driver, &cq, true), 3);
}

/// A thread that waits for any completion is woken although another one then asks for
/// solicited ones.
#[test]
fn a_request_for_any_completion_is_not_weakened() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    for (events, kinds) in [(1, &[false, true][..]), (2, &[true, false]), (2, &[true])] {
        for solicited_only in kinds {
            arm_cq(&mut driver, &cq, *solicited_only);
        }
        driver.post(&mut a, 0x00, SIGNALED, &[]);
        assert_eq!(driver.hca.stats().eqes, events, "{kinds:?}");
        while driver.poll(&mut cq).is_some() {}
    }
}

/// The last 16 bytes of error CQEs as ConnectX cards were seen to write them, without number,
/// counter and owner bit: hardware syndrome and type, vendor syndrome, syndrome, operation.
#[test]
fn syndromes_are_those_of_cards() {
    const BAD_KEY: u32 = 0x7fff_ff00;
    let check = |operation: u8, local: bool, receives: bool, expected: &[[u8; 5]]| {
        let mut driver = Driver::new("ib");
        let (mut cq, mut a, mut b) = driver.pair();
        let (key, memory) = (driver.key, driver.pages(1));
        if receives {
            driver.post_recv(&mut b, &segment(4, key, memory));
        }
        let mut segments = match operation {
            0x0a => Vec::new(),
            _ => remote(memory, if local { key } else { BAD_KEY }),
        };
        segments.extend(segment(8, if local { BAD_KEY } else { key }, memory));
        driver.post(&mut a, operation, SIGNALED, &segments);
        let mut seen = Vec::new();
        while let Some(entry) = driver.poll(&mut cq) {
            assert_eq!(entry[48..52], [0; 4]);
            seen.push([entry[52], entry[53], entry[54], entry[55], entry[56]]);
        }
        seen.sort_unstable();
        assert_eq!(seen, expected, "{operation:#x} {local}");
    };
    check(0x10, false, false, &[[0, 0, 0x88, 0x13, 0x10]]);
    check(0x08, false, false, &[[0, 0, 0x88, 0x13, 0x08]]);
    check(0x0a, true, false, &[[0x93, 0, 0x52, 0x04, 0x0a]]);
    check(0x08, true, false, &[[0x9d, 0, 0x53, 0x04, 0x08]]);
    let both = [[0, 0, 0x88, 0x13, 0x09], [0x92, 0, 0xc2, 0x11, 0x00]];
    check(0x09, false, true, &both);
    let both = [[0, 0, 0x8a, 0x12, 0x0a], [0, 0, 0xd7, 0x01, 0x00]];
    check(0x0a, false, true, &both);
}

/// Drivers drain a receive queue so: an error, a receive, and its completion as flushed.
#[test]
fn receives_posted_in_the_error_state_are_flushed() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (key, memory) = (driver.key, driver.pages(1));
    driver.post_recv(&mut a, &segment(64, key, memory));
    assert!(!driver.hca.flush_posted_receives(), "no queue is in error");
    assert!(driver.hca.fail_queue_pair(a.number));
    driver.run();
    let mut flushed = |driver: &Driver| driver.poll(&mut cq).map(|entry| status(&entry));
    assert_eq!(flushed(&driver), Some((14, 5)));
    driver.post_recv(&mut a, &segment(64, key, memory));
    driver.post_recv(&mut b, &segment(64, key, memory));
    assert!(driver.hca.flush_posted_receives());
    driver.run();
    assert_eq!(flushed(&driver), Some((14, 5)));
    assert!(driver.hca.flush_posted_receives(), "still in error");
    driver.run();
    assert_eq!(
        flushed(&driver),
        None,
        "neither again, nor of a queue without an error"
    );
}

#[test]
fn a_cq_that_is_not_polled_overruns() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    for _ in 0..17 {
        driver.post(&mut a, 0x00, SIGNALED, &[]);
    }
    let query = Input::new(op::QUERY_CQ, 16).or(8, 0, cq.number);
    let output = driver.execute(&query, 0x110);
    assert_eq!(word(&output, 0x10) >> 28, 0xa, "in error");
    let event = driver.read(driver.eq, 64);
    assert_eq!((event[1], word(&event, 32), event[43]), (4, cq.number, 1));
    for _ in 0..16 {
        assert!(driver.poll(&mut cq).is_some());
    }
}

#[test]
fn a_consumer_index_may_have_16_bits() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    for n in 0..0x1_0020_u32 {
        driver.post(&mut a, 0x00, SIGNALED, &[]);
        assert!(driver.poll(&mut cq).is_some(), "{n}");
        driver.write(cq.doorbell, &(cq.index & 0xffff).to_be_bytes());
    }
    for _ in 0..17 {
        driver.post(&mut a, 0x00, SIGNALED, &[]);
    }
    let query = Input::new(op::QUERY_CQ, 16).or(8, 0, cq.number);
    assert_eq!(
        word(&driver.execute(&query, 0x110), 0x10) >> 28,
        0xa,
        "overrun"
    );
}

#[test]
fn the_owner_bit_alternates_with_every_pass() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    for n in 0..100_u32 {
        driver.post(&mut a, 0x00, SIGNALED, &[]);
        let entry = driver.poll(&mut cq).unwrap();
        assert_eq!(word(&entry, 60) >> 16, n & 0xffff);
        assert!(driver.poll(&mut cq).is_none());
    }
}

#[test]
fn a_resized_cq_continues_in_its_new_buffer() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    driver.post(&mut a, 0x00, SIGNALED, &[]);
    let new = driver.pages(1);
    for n in 0..64 {
        driver.write(new + n * 64 + 63, &[0xf1]);
    }
    let resize = Input::new(op::MODIFY_CQ, 0x118)
        .or(4, 0, 1)
        .or(8, 0, cq.number)
        .or(0x1c, 24, 5)
        .put64(0x110, new);
    driver.execute(&resize, 16);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()).0, 0);
    assert_eq!(
        status(&driver.poll(&mut cq).unwrap()).0,
        5,
        "the old buffer's end"
    );
    driver.post(&mut a, 0x00, SIGNALED, &[]);
    cq.buffer = new;
    cq.log_size = 5;
    assert_eq!(status(&driver.poll(&mut cq).unwrap()).0, 0);
    // Two CQEs that are not polled do not fit into one entry.
    driver.post(&mut a, 0x00, SIGNALED, &[]);
    driver.post(&mut a, 0x00, SIGNALED, &[]);
    let resize = Input::new(op::MODIFY_CQ, 0x118)
        .or(4, 0, 1)
        .or(8, 0, cq.number)
        .or(0x1c, 24, 0)
        .put64(0x110, new);
    assert_eq!(driver.command(&resize, 16).0, 0x40);
}

#[test]
fn a_blue_flame_copy_takes_precedence_over_the_ring() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    // The WQE is signalled in its BlueFlame copy only.
    let mut entry = driver.write_wqe(&mut a, 0x00, 0, &[]);
    entry.resize(64, 0);
    entry[11] = SIGNALED;
    let at = u64::from(driver.uar) * 4096 + 0x900;
    for (n, part) in entry.chunks(8).enumerate() {
        driver.hca.write(at + n as u64 * 8, part);
    }
    driver.run();
    assert!(driver.poll(&mut cq).is_some());
    assert_eq!(driver.hca.stats().blue_flames, 1);
    // A doorbell followed by a BlueFlame copy in the same buffer counts as both.
    let first = driver.write_wqe(&mut a, 0x00, SIGNALED, &[]);
    assert!(!driver.hca.has_partial_blue_flame());
    driver.hca.write(at, &first[..8]);
    assert!(driver.hca.has_partial_blue_flame());
    let mut second = driver.write_wqe(&mut a, 0x00, SIGNALED, &[]);
    second.resize(64, 0);
    for (n, part) in second.chunks(8).enumerate() {
        driver.hca.write(at + n as u64 * 8, part);
    }
    driver.run();
    assert!(driver.poll(&mut cq).is_some() && driver.poll(&mut cq).is_some());
    assert_eq!(driver.hca.stats().doorbells, 1);
}

/// Posts receives to an SRQ: each with its index and that of the next one.
fn post_srq_chain(
    driver: &Driver,
    (buffer, doorbell): (u64, u64),
    memory: u64,
    order: &[(u64, u8)],
) {
    for (index, next) in order {
        let mut entry = vec![0, 0, 0, *next];
        entry.resize(16, 0);
        entry.extend(segment(64, driver.key, memory));
        driver.write(buffer + index * 32, &entry);
    }
    driver.write(doorbell, &(order.len() as u32).to_be_bytes());
}

#[test]
pub(super) fn an_srq_follows_its_next_indices() {
    let mut driver = Driver::new("ib");
    let (buffer, doorbell, memory) = (driver.pages(1), driver.pages(1), driver.pages(1));
    let srqn = driver.create_srq(buffer, doorbell);
    let mut cq = driver.create_cq(4);
    let mut a = driver.create_qp(0, &cq, None);
    let b = driver.create_qp(0, &cq, Some(srqn));
    driver.connect(a.number, b.number, 1);
    driver.connect(b.number, a.number, 1);
    // In the order 0, 2, 1.
    let key = driver.key;
    post_srq_chain(
        &driver,
        (buffer, doorbell),
        memory,
        &[(0, 2), (2, 1), (1, 3)],
    );
    // Request an event when fewer than two are left.
    let arm = Input::new(op::MODIFY_RMP, 0x110)
        .or(8, 28, 1)
        .or(8, 0, srqn)
        .or(0x14, 0, 1)
        .or(0x20, 20, 1)
        .or(0x54, 0, 2);
    driver.execute(&arm, 16);
    let mut indices = Vec::new();
    for events in [0, 1, 1] {
        driver.post(&mut a, 0x0a, 0, &segment(8, key, memory));
        assert_eq!(driver.hca.stats().eqes, events);
        let entry = driver.poll(&mut cq).unwrap();
        indices.push(word(&entry, 60) >> 16);
    }
    assert_eq!(indices, [0, 2, 1]);
    let event = driver.read(driver.eq, 64);
    assert_eq!((event[1], word(&event, 56)), (0x14, srqn));
}

#[test]
fn a_message_is_retransmitted_after_a_returned_receive() {
    let mut driver = Driver::new("ib");
    let (buffer, doorbell, memory) = (driver.pages(1), driver.pages(1), driver.pages(1));
    let srqn = driver.create_srq(buffer, doorbell);
    let mut cq = driver.create_cq(4);
    let mut a = driver.create_qp(0, &cq, None);
    let mut b = driver.create_qp(0, &cq, Some(srqn));
    driver.connect(a.number, b.number, 1);
    driver.connect(b.number, a.number, 1);
    let key = driver.key;
    post_srq_chain(
        &driver,
        (buffer, doorbell),
        memory,
        &[(0, 1), (1, 2), (2, 3)],
    );
    driver.hca.inject_next(Action::ReturnReceive, 2);
    // Receives of a queue pair's own queue are not returned.
    driver.post_recv(&mut a, &segment(64, key, memory));
    driver.post(&mut b, 0x0a, 0, &segment(8, key, memory));
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (2, 0));
    driver.post(&mut a, 0x0a, 8, &segment(8, key, memory));
    // Two receives are returned; the message is sent again each time, and then
    // received.
    for index in 0..4_usize {
        let entry = (0..10_000).find_map(|_| {
            driver.run();
            driver.poll(&mut cq)
        });
        let entry = entry.unwrap();
        // The last one is the completion of the send.
        let (opcode, slot) = [(14, 0), (14, 1), (2, 2), (0, 0)][index];
        assert_eq!((entry[63] >> 4, word(&entry, 60) >> 16), (opcode, slot));
        if opcode == 14 {
            assert_eq!((entry[54], entry[55]), (0x93, 0x22));
        }
    }
    assert_eq!(driver.hca.stats().receives_returned, 2);
}

#[test]
fn small_data_is_scattered_into_the_cqe() {
    let mut driver = Driver::new("ib");
    let mut cq = driver.create_cq(4);
    let mut a = driver.create_qp(0, &cq, None);
    let mut b = driver.create_qp_with(0, &cq, None, |input| input.or(0xdc, 0, 1));
    driver.connect(a.number, b.number, 1);
    driver.connect(b.number, a.number, 1);
    let (key, from, to) = (driver.key, driver.pages(1), driver.pages(1));
    driver.write(from, &[0xab; 64]);
    for (length, inline) in [(32_u32, true), (33, false)] {
        driver.post_recv(&mut b, &segment(64, key, to));
        driver.post(&mut a, 0x0a, 0, &segment(length, key, from));
        let entry = driver.poll(&mut cq).unwrap();
        assert_eq!(word(&entry, 44), length);
        assert_eq!(entry[63] & 0xc == 4, inline, "{length}");
        let stored = driver.read(to, length as usize) == vec![0xab; length as usize];
        assert_eq!(stored, !inline);
        if inline {
            assert_eq!(entry[..32], [0xab; 32]);
        }
    }
}

/// Responses of reads are in the CQE, those of atomics in memory.
#[test]
fn responses_of_reads_are_scattered_into_the_cqe() {
    let mut driver = Driver::new("ib");
    let mut cq = driver.create_cq(4);
    let mut a = driver.create_qp_with(0, &cq, None, |input| input.or(0xdc, 8, 1));
    let b = driver.create_qp(0, &cq, None);
    driver.connect(a.number, b.number, 1);
    driver.connect(b.number, a.number, 1);
    let (key, local, remote_va) = (driver.key, driver.pages(1), driver.pages(1));
    driver.write(remote_va, &5_u64.to_be_bytes());
    let fetch_and_add = [remote(remote_va, key), [[0; 8]; 2].concat()].concat();
    let requests = [
        (0x10, remote(remote_va, key), true),
        (0x12, fetch_and_add, false),
    ];
    for (opcode, mut segments, inline) in requests {
        driver.write(local, &[0; 8]);
        segments.extend(segment(8, key, local));
        driver.post(&mut a, opcode, SIGNALED, &segments);
        let entry = driver.poll(&mut cq).unwrap();
        assert_eq!(status(&entry), (0, 0));
        assert_eq!(entry[63] & 0xc == 4, inline, "{opcode:#x}");
        let stored = if inline { 0 } else { 5_u64 };
        assert_eq!(driver.read(local, 8), stored.to_be_bytes());
    }
}

#[test]
pub(super) fn strict_mode_reports_misuse() {
    let fabric = roce::fabric::Fabric::new(1);
    let mut driver = Driver::with("ib", 0, &fabric, true);
    let (mut cq, mut a, _b) = driver.pair();
    // A WQE whose index does not match its position.
    a.posted = 5;
    driver.write(a.doorbell + 4, &1_u32.to_be_bytes());
    let mut entry = driver.write_wqe(&mut a, 0x00, SIGNALED, &[]);
    driver.write(a.send, &entry);
    driver.write(a.doorbell + 4, &1_u32.to_be_bytes());
    entry.truncate(8);
    driver.ring(&entry);
    let entry = driver.poll(&mut cq).unwrap();
    assert_eq!(status(&entry), (13, 0x02));
    assert!(matches!(
        driver.hca.complaints()[0],
        Misuse::WorkRequest { index: 0, violation, .. }
            if violation == Violation::new("index in the work request", 5, Rule::Is(0))
    ));
}

/// Writes a WQE to a BlueFlame buffer, as 8 words.
fn blue_flame(driver: &mut Driver, entry: &[u8]) {
    let at = u64::from(driver.uar) * 4096 + 0x800;
    for (n, part) in entry.chunks(8).enumerate() {
        driver.hca.write(at + n as u64 * 8, part);
    }
    driver.run();
}

#[test]
pub(super) fn a_difference_of_ring_and_blue_flame_copy_is_reported() {
    let fabric = roce::fabric::Fabric::new(1);
    let mut driver = Driver::with("ib", 0, &fabric, true);
    let (mut cq, mut a, _b) = driver.pair();
    let memory = driver.pages(1);
    let data = segment(8, driver.key, memory);
    // The bytes after the WQE in its block are not compared.
    let mut entry = driver.write_wqe(&mut a, 0x00, SIGNALED, &[]);
    entry.resize(64, 0x77);
    blue_flame(&mut driver, &entry);
    assert!(driver.poll(&mut cq).is_some());
    // Linux's test of write combining.
    let mut entry = driver.write_wqe(&mut a, 0x00, 0, &[]);
    entry.resize(64, 0);
    entry[11] = SIGNALED;
    blue_flame(&mut driver, &entry);
    assert!(driver.poll(&mut cq).is_some());
    assert_eq!(driver.hca.complaints(), []);
    // A different length of the data.
    let mut entry = driver.write_wqe(&mut a, 0x0a, SIGNALED, &data);
    entry.resize(64, 0);
    entry[19] = 4;
    blue_flame(&mut driver, &entry);
    let expected = Misuse::BlueFlame {
        queue: a.number,
        index: 2,
        at: 19,
        ring: 8,
        copy: 4,
    };
    assert_eq!(driver.hca.complaints()[0], expected);
}

#[test]
fn a_late_blue_flame_copy_is_ignored() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    // Its first words arrive, and before the rest another doorbell makes the HCA
    // process the queue.
    let mut entry = driver.write_wqe(&mut a, 0x00, SIGNALED, &[]);
    entry.resize(64, 0);
    let at = u64::from(driver.uar) * 4096 + 0x900;
    for (n, part) in entry.chunks(8).take(2).enumerate() {
        driver.hca.write(at + n as u64 * 8, part);
    }
    driver.ring(&entry);
    assert!(driver.poll(&mut cq).is_some());
    for (n, part) in entry.chunks(8).enumerate().skip(2) {
        driver.hca.write(at + n as u64 * 8, part);
    }
    driver.run();
    assert_eq!(driver.hca.stats().blue_flames, 1);
    // 65536 blocks later the index is the same, but the WQE is another one, which is
    // not signalled.
    for _ in 0..0xffff {
        driver.post(&mut a, 0x00, 0, &[]);
    }
    driver.post(&mut a, 0x00, 0, &[]);
    assert!(driver.poll(&mut cq).is_none());
}

#[test]
fn overlapping_copies_read_before_they_write() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let pages = driver.pages(2);
    let paged = driver.create_paged_key(0, 2 * 4096, &[pages, pages + 4096]);
    let key = driver.key;
    let data: Vec<u8> = (0..1000_u32).map(|n| ((n * 5) >> 2) as u8).collect();
    // The destination is two pages, or the two segments of a receive; source and
    // destination overlap.
    for is_send in [false, true] {
        driver.write(pages + 3500, &data);
        let from = segment(1000, key, pages + 3500);
        if is_send {
            let list = [
                segment(700, key, pages + 3600),
                segment(300, key, pages + 4300),
            ];
            driver.post_recv(&mut b, &list.concat());
            driver.post(&mut a, 0x0a, SIGNALED, &from);
            assert_eq!(status(&driver.poll(&mut cq).unwrap()), (2, 0));
        } else {
            let segments = [remote(3600, paged), from].concat();
            driver.post(&mut a, 0x08, SIGNALED, &segments);
        }
        assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
        assert!(driver.read(pages + 3600, 1000) == data, "{is_send}");
        // A write within the device makes no packet.
        assert_eq!(driver.hca.port().counters().sent > 0, is_send);
    }
}

/// Not all drivers reset it, as UCX does not.
#[test]
fn a_doorbell_record_from_before_a_reset_is_not_read() {
    for in_error in [false, true] {
        let mut driver = Driver::new("ib");
        let (mut cq, mut a, b) = driver.pair();
        let (memory, key) = (driver.pages(1), driver.key);
        let mut segments = remote(memory, key);
        segments.extend(segment(8, key, memory));
        for _ in 0..2 {
            driver.post(&mut a, 0x08, SIGNALED, &segments);
            assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
        }
        driver.modify(op::TO_RST_QP, a.number, |input| input);
        driver.modify(op::TO_RST_QP, b.number, |input| input);
        driver.connect(b.number, a.number, 1);
        driver.connect(a.number, b.number, 1);
        if in_error {
            driver.modify(op::TO_ERR_QP, a.number, |input| input);
        }
        driver.run();
        assert!(driver.poll(&mut cq).is_none());
        a.posted = 0;
        driver.post(&mut a, 0x08, SIGNALED, &segments);
        let expected = if in_error { (13, 5) } else { (0, 0) };
        assert_eq!(status(&driver.poll(&mut cq).unwrap()), expected);
        assert!(driver.poll(&mut cq).is_none());
    }
}
