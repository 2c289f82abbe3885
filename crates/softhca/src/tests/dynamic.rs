//! Dynamic connections through commands and work requests.

use crate::command::opcode as op;
use crate::testing::driver::{Cq, Driver, Input, Qp, SIGNALED, remote, segment, status, word};

const KEY: u64 = 0x0bad_c0de;

/// Creates an SRQ with two receives of 64 bytes at `memory`.
fn srq(driver: &mut Driver, memory: u64) -> u32 {
    let (buffer, doorbell) = (driver.pages(1), driver.pages(1));
    let srqn = driver.create_srq(buffer, doorbell);
    let key = driver.key;
    for index in 0..2_u8 {
        let mut entry = vec![0, 0, 0, index + 1];
        entry.resize(16, 0);
        entry.extend(segment(64, key, memory + 64 * u64::from(index)));
        driver.write(buffer + u64::from(index) * 32, &entry);
    }
    driver.write(doorbell, &2_u32.to_be_bytes());
    srqn
}

/// Returns the command that creates a target that permits remote writes only.
fn create_dct(driver: &Driver, cq: &Cq, srqn: u32) -> Input {
    Input::new(op::CREATE_DCT, 0x80)
        .or(0x14, 0, 9)
        .or(0x18, 0, cq.number)
        .or(0x1c, 18, 1)
        .or(0x20, 8, 12)
        .or(0x24, 0, srqn)
        .or(0x28, 0, driver.pd)
        .put64(0x30, KEY)
        .or(0x38, 24, 3)
}

/// Creates an initiator that is ready to send.
fn create_dci(driver: &mut Driver, cq: &Cq, log_errored: u32) -> Qp {
    // The SRQ number is ignored for initiators.
    let dci = driver.create_qp_with(5, cq, Some(0xff_ffff), |input| {
        input.or(0x98, 24, log_errored)
    });
    driver.connect(dci.number, 0, 0);
    dci
}

/// Returns the address vector for the HCA's own target.
fn address(dctn: u32, key: u64) -> Vec<u8> {
    let mut av = key.to_be_bytes().to_vec();
    av.extend((1 << 31 | dctn).to_be_bytes());
    av.extend(1_u32.to_be_bytes());
    av.resize(48, 0);
    av
}

#[test]
fn a_target_receives_requests_with_its_number_and_key() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut send_cq) = (driver.create_cq(4), driver.create_cq(4));
    let memory = driver.pages(1);
    let srqn = srq(&mut driver, memory);
    let dctn = driver.create(create_dct(&driver, &cq, srqn));
    let mut dci = create_dci(&mut driver, &send_cq, 0);
    let (from, key) = (driver.pages(1), driver.key);
    driver.write(from, &[5; 64]);
    let mut segments = address(dctn, KEY);
    segments.extend(segment(40, key, from));
    driver.post(&mut dci, 0x0a, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut send_cq).unwrap()), (0, 0));
    let entry = driver.poll(&mut cq).unwrap();
    assert_eq!(status(&entry), (2, 0));
    assert_eq!(word(&entry, 44), 40);
    // User index, source queue pair, and target.
    assert_eq!(word(&entry, 32) & 0xff_ffff, 9);
    assert_eq!(word(&entry, 24) & 0xff_ffff, dci.number);
    assert_eq!(word(&entry, 56) & 0xff_ffff, dctn);
    assert_eq!(driver.read(memory, 41), [&[5; 40][..], &[0]].concat());
    // A write succeeds; a read is not permitted.
    for (opcode, expected) in [(0x08, (0, 0)), (0x10, (13, 0x12))] {
        let mut segments = address(dctn, KEY);
        segments.extend(remote(memory + 512, key));
        segments.extend(segment(64, key, from));
        driver.post(&mut dci, opcode, SIGNALED, &segments);
        let entry = driver.poll(&mut send_cq).unwrap();
        assert_eq!(status(&entry), expected, "{opcode:#x}");
    }
    assert_eq!(driver.read(memory + 512, 64), [5; 64]);
    // The target serves another initiator as well.
    let mut dci = create_dci(&mut driver, &send_cq, 0);
    let mut segments = address(dctn, KEY);
    segments.extend(segment(8, key, from));
    driver.post(&mut dci, 0x0a, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut send_cq).unwrap()), (0, 0));
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (2, 0));
}

#[test]
pub(super) fn only_a_drained_target_can_be_destroyed() {
    let mut driver = Driver::new("ib");
    let cq = driver.create_cq(4);
    let memory = driver.pages(1);
    let srqn = srq(&mut driver, memory);
    let create = create_dct(&driver, &cq, srqn);
    // Refused without one of the CQ, the SRQ, the protection domain and the MTU.
    for (offset, bits) in [
        (0x18, 0xff_ffff),
        (0x24, 0xff_ffff),
        (0x28, 0xff_ffff),
        (0x38, 7 << 24),
    ] {
        let invalid = create.clone().or(offset, 0, bits);
        assert_ne!(driver.command(&invalid, 16).0, 0, "{offset:#x}");
    }
    let dctn = driver.create(create.clone());
    let command = |opcode| Input::new(opcode, 0x110).or(8, 0, dctn);
    let output = driver.execute(&command(op::QUERY_DCT), 0x80);
    assert_eq!(output[0x10..0x50], create.0[0x10..0x50]);
    for opcode in [op::DESTROY_QP, op::QUERY_QP, op::TO_ERR_QP, op::DESTROY_DCT] {
        assert_ne!(driver.command(&command(opcode), 0x110).0, 0, "{opcode:#x}");
    }
    let in_use = Input::new(op::DESTROY_CQ, 16).or(8, 0, cq.number);
    assert_ne!(driver.command(&in_use, 16).0, 0, "the target uses it");
    let events = |driver: &Driver| -> Vec<Vec<u8>> {
        let all = (0..64).map(|n| driver.read(driver.eq + n * 64, 64));
        all.filter(|entry| entry[1] == 0x1c).collect()
    };
    assert!(events(&driver).is_empty());
    driver.execute(&command(op::DRAIN_DCT), 16);
    let drained = events(&driver);
    assert_eq!((drained.len(), word(&drained[0], 56)), (1, dctn));
    let output = driver.execute(&command(op::QUERY_DCT), 0x80);
    assert_eq!(word(&output, 0x10) >> 24 & 0xf, 2);
    driver.execute(&command(op::DESTROY_DCT), 16);
    for opcode in [op::DESTROY_DCT, op::DRAIN_DCT, op::QUERY_DCT] {
        assert_ne!(driver.command(&command(opcode), 0x80).0, 0, "{opcode:#x}");
    }
    // A queue pair is not a target.
    let dci = create_dci(&mut driver, &cq, 0);
    for opcode in [op::DESTROY_DCT, op::DRAIN_DCT, op::QUERY_DCT] {
        let input = Input::new(opcode, 0x20).or(8, 0, dci.number);
        assert_ne!(driver.command(&input, 0x80).0, 0, "{opcode:#x}");
    }
}

#[test]
fn errors_of_streams_are_independent_up_to_the_limit() {
    let mut driver = Driver::with("ib", 0, &roce::fabric::Fabric::new(1), true);
    let (cq, mut send_cq) = (driver.create_cq(4), driver.create_cq(4));
    let memory = driver.pages(1);
    let srqn = srq(&mut driver, memory);
    let dctn = driver.create(create_dct(&driver, &cq, srqn));
    let mut dci = create_dci(&mut driver, &send_cq, 2);
    let (from, key) = (driver.pages(1), driver.key);
    let mut write = |driver: &mut Driver, stream: u8, key: u32| {
        let mut segments = address(dctn, KEY);
        segments.extend(remote(memory + 512, driver.key));
        segments.extend(segment(8, key, from));
        driver.post_with(&mut dci, 0x08, &segments, |control| control[10] = stream);
        status(&driver.poll(&mut send_cq).unwrap())
    };
    let restore_stream = |qp: u32, stream: u32| {
        Input::new(op::RTS2RTS_QP, 0x1d0)
            .or(8, 0, 1 << 31 | qp)
            .or(0x10c, 0, 1)
            .or(0x110, 0, stream)
    };
    assert_eq!(write(&mut driver, 1, key), (0, 0));
    assert_eq!(write(&mut driver, 2, key + 1), (13, 0x04));
    assert_eq!(write(&mut driver, 2, key), (13, 0x05), "flushed");
    assert_eq!(write(&mut driver, 1, key), (0, 0));
    // The first queue pair created after the target.
    let qpn = dctn + 1;
    for (stream, in_error) in [(1, false), (2, true), (2, false)] {
        let (command_status, _) = driver.command(&restore_stream(qpn, stream), 16);
        assert_eq!(command_status == 0, in_error, "{stream}");
    }
    assert_eq!(write(&mut driver, 2, key), (0, 0));
    for stream in 3..7 {
        assert_eq!(write(&mut driver, stream, key + 1), (13, 0x04));
    }
    // The whole queue pair is in error now.
    assert_eq!(write(&mut driver, 1, key), (13, 0x05));
}

#[test]
fn a_short_address_vector_is_malformed() {
    let mut driver = Driver::new("ib");
    let mut send_cq = driver.create_cq(4);
    let mut dci = create_dci(&mut driver, &send_cq, 0);
    let (from, key) = (driver.pages(1), driver.key);
    let mut segments = address(0x99, KEY);
    segments[8] = 0;
    segments.extend(segment(8, key, from));
    driver.post(&mut dci, 0x0a, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut send_cq).unwrap()), (13, 0x02));
}
