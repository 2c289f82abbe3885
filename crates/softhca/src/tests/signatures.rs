//! Signatures and encryption of the data behind memory keys, over messages of several
//! packets.

use super::causes::observe;
use crate::cause::{AccessRule, Cause};
use crate::command::opcode as op;
use crate::command::protection::ENCRYPTION_KEY;
use crate::testing::driver::{Cq, Driver, Input, Qp, SIGNALED, remote, segment, status, word};

const BLOCK: usize = 4096;
const SET_PSV: u8 = 0x20;
const SIGNATURE_ERROR: u8 = 12;

/// One side of a key: a selector of block and checksum, or an integrity field.
#[derive(Clone, Copy)]
enum Side {
    None,
    Crc32,
    /// With this first reference tag, which grows.
    Dif(u32),
}

/// A key with protection, its PSVs, and its memory.
pub(super) struct Key {
    pub(super) key: u32,
    psvs: [u32; 2],
    memory: u64,
    length: u32,
    errors: u32,
}

impl Key {
    fn new(driver: &mut Driver, length: u32) -> Key {
        let pd = driver.pd;
        let psv = |driver: &mut Driver| {
            let create = Input::new(op::CREATE_PSV, 16).or(8, 28, 1).or(8, 0, pd);
            word(&driver.execute(&create, 32), 16)
        };
        let psvs = [psv(driver), psv(driver)];
        let create = Input::new(op::CREATE_MKEY, 0x110)
            .or(0x10, 30, 1)
            .or(0x10, 15, 1)
            .or(0x10, 10, 1)
            .or(0x10, 8, 2)
            .or(0x14, 8, 0xff_ffff)
            .or(0x1c, 30, 1)
            .or(0x1c, 0, pd)
            .or(0x30, 0, 8)
            .or(0x44, 0, 4);
        Key {
            key: driver.create(create) << 8,
            psvs,
            memory: driver.pages(u64::from(length).div_ceil(4096)),
            length,
            errors: 0,
        }
    }

    /// The change of the key, up to its formats.
    fn change(&self, driver: &Driver, formats: usize) -> Vec<u8> {
        let mut bytes = vec![0; 48 + 64];
        let mask: u64 = 1 << 29 | 1 << 13 | 1 | 0x1f << 17 | 1 << 12 | 1 << 9;
        bytes[0] = 1 << 7;
        bytes[5] = 4;
        bytes[7] = (formats / 16) as u8;
        bytes[8..16].copy_from_slice(&mask.to_be_bytes());
        // Reads and writes, of both sides.
        bytes[50] = 0b11_1100;
        bytes[52..56].copy_from_slice(&0xffff_ff00_u32.to_be_bytes());
        let flags = u32::from(formats != 0) << 30 | ((self.errors + 1) & 1) << 26;
        bytes[60..64].copy_from_slice(&flags.to_be_bytes());
        bytes[72..80].copy_from_slice(&u64::from(self.length).to_be_bytes());
        bytes.extend(segment(self.length, driver.key, self.memory));
        bytes.extend([0; 48]);
        bytes
    }

    /// Configures signatures, all of which are checked. Returns the completion's status.
    fn configure_signatures(
        &self,
        driver: &mut Driver,
        cq: &mut Cq,
        qp: &mut Qp,
        [memory, wire]: [Side; 2],
    ) -> (u8, u8) {
        let mut format = [0; 64];
        format[0] = 2 << 6;
        format[1] = 0xff;
        for (n, side) in [memory, wire].into_iter().enumerate() {
            let mut selector = 0;
            match side {
                Side::None => continue,
                Side::Crc32 => selector = 0x22 << 24,
                Side::Dif(tag) => {
                    let inline = &mut format[0x30 - n * 16..][..16];
                    inline[..4].copy_from_slice(&0xc000_1234_u32.to_be_bytes());
                    inline[4..8].copy_from_slice(&tag.to_be_bytes());
                    inline[8..].copy_from_slice(&[1, 0x88, 0, 0, 0, 0x40, 0xff, 0xff]);
                }
            }
            // Blocks of 4096 bytes.
            format[3 - n] = 3;
            let psv = selector | self.psvs[n];
            format[12 - 4 * n..][..4].copy_from_slice(&psv.to_be_bytes());
        }
        let mut change = self.change(driver, 64);
        change.extend(format);
        driver.post_umr(qp, self.key, &change);
        let umr_status = status(&driver.poll(cq).unwrap());
        if umr_status != (0, 0) {
            return umr_status;
        }
        for psv in self.psvs {
            let mut segment = vec![0; 16];
            segment[..4].copy_from_slice(&psv.to_be_bytes());
            driver.post(qp, SET_PSV, SIGNALED, &segment);
            assert_eq!(status(&driver.poll(cq).unwrap()), (0, 0));
        }
        umr_status
    }
}

/// Writes from the first key to the second. `length` is as local work requests count it.
fn write(driver: &mut Driver, qp: &mut Qp, from: &Key, to: &Key, length: u32) {
    let mut segments = remote(0, to.key);
    segments.extend(segment(length, from.key, 0));
    driver.post(qp, 0x08, SIGNALED, &segments);
}

fn fill_memory(driver: &Driver, key: &Key) -> Vec<u8> {
    let data: Vec<u8> = (0..key.length).map(|n| ((n * 7) >> 3) as u8).collect();
    driver.write(key.memory, &data);
    data
}

/// The range that is named is that on the wire, which signatures make longer.
#[test]
fn an_access_beyond_the_signatures_names_the_range_on_the_wire() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let key = Key::new(&mut driver, BLOCK as u32);
    let sides = [Side::None, Side::Dif(1)];
    let configured = key.configure_signatures(&mut driver, &mut cq, &mut b, sides);
    assert_eq!(configured, (0, 0));
    let on_wire = BLOCK as u32 + 8;
    for (length, expected) in [(on_wire, (0, 0)), (on_wire + 1, (13, 0x13))] {
        let (whole, memory) = (driver.key, driver.pages(2));
        let mut told = observe(&mut driver);
        let mut segments = remote(0, key.key);
        segments.extend(segment(length, whole, memory));
        driver.post(&mut a, 0x08, SIGNALED, &segments);
        let found = std::iter::from_fn(|| driver.poll(&mut cq)).map(|entry| status(&entry));
        assert!(found.collect::<Vec<_>>().contains(&expected), "{length}");
        let rule = told().into_iter().find_map(|cause| match cause {
            Cause::Access(error) => Some(error.rule),
            _ => None,
        });
        let range = AccessRule::Range {
            start: 0,
            length: on_wire.into(),
        };
        assert_eq!(rule, (length > on_wire).then_some(range));
    }
}

/// The reported part, whether it is memory's, and the block.
fn signature_error(entry: &[u8], size: u64) -> (u32, bool, u64) {
    assert_eq!(status(entry), (SIGNATURE_ERROR, 0));
    let offset = u64::from(word(entry, 40)) << 32 | u64::from(word(entry, 44));
    let fields = word(entry, 32);
    assert_eq!(offset % size, 0);
    (fields >> 16, fields & 0xff == 1, offset / size)
}

#[test]
fn signatures_are_added_and_removed_on_each_side() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (plain, signed) = (3 * BLOCK as u32, 3 * (BLOCK as u32 + 4));
    let from = Key::new(&mut driver, plain);
    let to = Key::new(&mut driver, signed);
    let sides = [Side::None, Side::Dif(70)];
    from.configure_signatures(&mut driver, &mut cq, &mut a, sides);
    to.configure_signatures(&mut driver, &mut cq, &mut b, [Side::Crc32, Side::Dif(70)]);
    let data = fill_memory(&driver, &from);
    write(&mut driver, &mut a, &from, &to, plain);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert!(driver.poll(&mut cq).is_none());
    let stored = driver.read(to.memory, signed as usize);
    for (n, block) in stored.chunks(BLOCK + 4).enumerate() {
        let data = &data[n * BLOCK..][..BLOCK];
        assert_eq!(&block[..BLOCK], data);
        assert_eq!(block[BLOCK..], crc32fast::hash(data).to_be_bytes());
    }
    // Back by a read: with the local length of what is in memory.
    driver.write(from.memory, &vec![0; plain as usize]);
    let mut segments = remote(0, to.key);
    segments.extend(segment(plain, from.key, 0));
    driver.post(&mut a, 0x10, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(driver.read(from.memory, plain as usize), data);
    // A read beyond the last block fails.
    let mut segments = remote(8, to.key);
    segments.extend(segment(plain, from.key, 0));
    driver.post(&mut a, 0x10, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x13));
}

#[test]
fn one_signature_error_is_reported_until_the_key_is_rearmed() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let plain = 3 * BLOCK as u32;
    let from = Key::new(&mut driver, plain);
    let mut to = Key::new(&mut driver, plain);
    from.configure_signatures(&mut driver, &mut cq, &mut a, [Side::None, Side::Dif(1)]);
    for round in 0..3 {
        // The responder expects other tags.
        to.configure_signatures(&mut driver, &mut cq, &mut b, [Side::None, Side::Dif(2)]);
        for is_repetition in [false, true] {
            write(&mut driver, &mut a, &from, &to, plain);
            if !is_repetition {
                let entry = driver.poll(&mut cq).unwrap();
                assert_eq!(
                    signature_error(&entry, BLOCK as u64 + 8),
                    (1 << 11, false, 0)
                );
                assert_eq!(word(&entry, 36), to.key);
                assert_eq!((word(&entry, 0x18), word(&entry, 0x1c)), (2, 1));
            }
            assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0), "{round}");
            assert!(driver.poll(&mut cq).is_none());
        }
        to.errors += 1;
    }
    // With the number of an error that was seen before, the key stays silent.
    to.errors += 1;
    to.configure_signatures(&mut driver, &mut cq, &mut b, [Side::None, Side::Dif(2)]);
    write(&mut driver, &mut a, &from, &to, plain);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert!(driver.poll(&mut cq).is_none());
}

#[test]
pub(super) fn a_queue_pair_drains_after_a_signature_error() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let signed = 3 * (BLOCK as u32 + 4);
    let from = Key::new(&mut driver, signed);
    let to = Key::new(&mut driver, signed);
    let key = driver.key;
    from.configure_signatures(&mut driver, &mut cq, &mut a, [Side::Crc32, Side::None]);
    to.configure_signatures(&mut driver, &mut cq, &mut b, [Side::None, Side::None]);
    let (mut a, b) = (
        driver.create_qp(0, &cq, None),
        driver.create_qp(0, &cq, None),
    );
    let number = a.number;
    driver.connect(b.number, number, 1);
    driver.modify(0x502, number, |input| input.or(0xa8, 13, 7));
    driver.modify(0x50e, number, |input| input.or(0x10, 11, 1).or(0x1c, 26, 1));
    driver.modify(0x503, number, |input| {
        (input.or(0x20, 29, 3).or(0x2c, 0, b.number).or(0x34, 0, 1)).or(0xac, 0, 100)
    });
    driver.modify(0x504, number, |input| {
        (input.or(0x38, 27, 14).or(0x88, 21, 4)).or(0x90, 0, 100)
    });
    let posted = |driver: &mut Driver| {
        let output = driver.execute(&Input::new(op::QUERY_QP, 16).or(8, 0, number), 0x110);
        (word(&output, 0x18) >> 28, word(&output, 0x18 + 0xb4) >> 16)
    };
    assert_eq!(posted(&mut driver), (3, 0));
    let mut segments = remote(0, to.key);
    segments.extend(segment(3 * BLOCK as u32, from.key, 0));
    let first = driver.write_wqe(&mut a, 0x08, SIGNALED, &segments);
    // A fenced write follows.
    let mut segments = remote(to.memory, key);
    segments.extend(segment(8, key, from.memory));
    driver.write_wqe(&mut a, 0x08, SIGNALED | 4 << 5, &segments);
    driver.ring(&first);
    let entry = driver.poll(&mut cq).unwrap();
    assert_eq!(
        signature_error(&entry, BLOCK as u64 + 4),
        (1 << 13, true, 0)
    );
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(driver.poll(&mut cq), None);
    assert_eq!(posted(&mut driver), (5, 1));
    // It goes on when it is told to.
    driver.modify(0x50c, number, |input| input);
    driver.run();
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(posted(&mut driver), (3, 2));
}

#[test]
fn psvs_of_other_domains_are_rejected() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    let pd = driver.create(Input::new(op::ALLOC_PD, 16));
    let create = Input::new(op::CREATE_PSV, 16).or(8, 28, 1).or(8, 0, pd);
    let other_psv = word(&driver.execute(&create, 32), 16);
    let mut key = Key::new(&mut driver, BLOCK as u32);
    key.psvs[1] = other_psv;
    let sides = [Side::None, Side::Crc32];
    let failed = key.configure_signatures(&mut driver, &mut cq, &mut a, sides);
    assert_eq!(failed, (13, 6));
    for input in [
        Input::new(op::CREATE_PSV, 16).or(8, 28, 1).or(8, 0, 0xffff),
        Input::new(op::CREATE_PSV, 16).or(8, 28, 5),
        Input::new(op::DESTROY_PSV, 16).or(8, 0, 0xffff),
    ] {
        assert_ne!(driver.command(&input, 32).0, 0);
    }
    driver.execute(&Input::new(op::DESTROY_PSV, 16).or(8, 0, other_psv), 16);
}

/// Has a key of two blocks encrypted on the wire, with tweaks from `tweak` on. Returns the
/// encryption key, the key, and the change that was made to it.
pub(super) fn encrypted_key(
    driver: &mut Driver,
    cq: &mut Cq,
    qp: &mut Qp,
    tweak: u8,
) -> (u32, Key, Vec<u8>) {
    let mut create = Input::new(op::CREATE_GENERAL_OBJECT, 0x110)
        .or(4, 0, ENCRYPTION_KEY)
        .or(0x18, 0, 3)
        .or(0x1c, 0, driver.pd);
    create.0[0x50..0x70].copy_from_slice(&[9; 32]);
    let dek = driver.create(create);
    let key = Key::new(driver, 2 * BLOCK as u32);
    let mut format = [0; 64];
    format[0] = 2 << 6 | 1;
    format[8] = 3;
    format[0x1f] = tweak;
    format[0x20..0x24].copy_from_slice(&dek.to_be_bytes());
    let mut change = key.change(driver, 64);
    change.extend(format);
    driver.post_umr(qp, key.key, &change);
    assert_eq!(status(&driver.poll(cq).unwrap()), (0, 0));
    (dek, key, change)
}

/// Returns the data as it is encrypted with an [`encrypted_key`].
fn encrypted(mut data: Vec<u8>, tweak: u8) -> Vec<u8> {
    let xts = crate::engine::xts::Xts::new(&[9; 32]).unwrap();
    for (tweak, unit) in (u128::from(tweak)..).zip(data.chunks_mut(BLOCK)) {
        xts.apply(tweak.to_le_bytes(), unit, true);
    }
    data
}

#[test]
fn data_is_encrypted_on_the_wire() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    let length = 2 * BLOCK as u32;
    let (dek, from, change) = encrypted_key(&mut driver, &mut cq, &mut a, 5);
    let data = fill_memory(&driver, &from);
    let (stored, whole_key) = (driver.pages(2), driver.key);
    let mut segments = remote(stored, whole_key);
    segments.extend(segment(length, from.key, 0));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    let expected = encrypted(data.clone(), 5);
    assert_eq!(driver.read(stored, length as usize), expected);
    // And decrypted where it arrives, also in parts.
    driver.write(from.memory, &vec![0; length as usize]);
    let mut segments = remote(stored, whole_key);
    segments.extend(segment(length, from.key, 0));
    driver.post(&mut a, 0x10, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(driver.read(from.memory, length as usize), data);
    // A key that is gone cannot be named.
    let destroy = Input::new(op::DESTROY_GENERAL_OBJECT, 16)
        .or(4, 0, ENCRYPTION_KEY)
        .or(8, 0, dek);
    driver.execute(&destroy, 16);
    driver.post_umr(&mut a, from.key, &change);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 6));
}

/// Moves a message from the first key to the second, by a write or by a send. Returns what
/// completes before the receive and the work request.
fn move_message(
    driver: &mut Driver,
    (cq, a, b): (&mut Cq, &mut Qp, &mut Qp),
    is_send: bool,
    [from, to]: [(u32, u64); 2],
    length: u32,
) -> Vec<Vec<u8>> {
    let list = segment(length, from.0, from.1);
    if is_send {
        driver.post_recv(b, &segment(length, to.0, to.1));
        driver.post(a, 0x0a, SIGNALED, &list);
    } else {
        let segments = [remote(to.1, to.0), list].concat();
        driver.post(a, 0x08, SIGNALED, &segments);
    }
    let mut entries: Vec<_> = std::iter::from_fn(|| driver.poll(cq)).collect();
    assert_eq!(entries.pop().map(|entry| status(&entry)), Some((0, 0)));
    let received = is_send.then(|| status(&entries.pop().unwrap()));
    assert!(received.is_none_or(|received| received == (2, 0)));
    entries
}

#[test]
fn signatures_are_converted_within_a_device() {
    for is_send in [false, true] {
        let mut driver = Driver::new("ib");
        let (mut cq, mut a, mut b) = driver.pair();
        let length = 3 * BLOCK as u32;
        let signed = Key::new(&mut driver, length + 12);
        let sides = [Side::Crc32, Side::None];
        signed.configure_signatures(&mut driver, &mut cq, &mut b, sides);
        let (whole_key, from, to) = (driver.key, driver.pages(3), driver.pages(3));
        let data: Vec<u8> = (0..length).map(|n| ((n * 5) >> 3) as u8).collect();
        driver.write(from, &data);
        let sent = driver.hca.port().counters().sent;
        // Into memory with signatures, which are made there.
        let memories = [(whole_key, from), (signed.key, 0)];
        let queues = (&mut cq, &mut a, &mut b);
        let reports = move_message(&mut driver, queues, is_send, memories, length);
        assert_eq!(reports, Vec::<Vec<u8>>::new());
        let stored = driver.read(signed.memory, length as usize + 12);
        for (block, data) in stored.chunks(BLOCK + 4).zip(data.chunks(BLOCK)) {
            assert_eq!(&block[..BLOCK], data);
            assert_eq!(block[BLOCK..], crc32fast::hash(data).to_be_bytes());
        }
        // Out of it again: a wrong one is noticed.
        driver.write(signed.memory + BLOCK as u64, &[!stored[BLOCK]]);
        let memories = [(signed.key, 0), (whole_key, to)];
        let queues = (&mut cq, &mut a, &mut b);
        let reports = move_message(&mut driver, queues, is_send, memories, length);
        assert_eq!(reports.len(), 1);
        assert_eq!(
            signature_error(&reports[0], BLOCK as u64 + 4),
            (1 << 13, true, 0)
        );
        assert_eq!(driver.read(to, length as usize), data);
        assert_eq!(driver.hca.port().counters().sent > sent, is_send);
    }
}

#[test]
fn signatures_from_plain_memory_are_checked_within_a_device() {
    for is_send in [false, true] {
        let mut driver = Driver::new("ib");
        let (mut cq, mut a, mut b) = driver.pair();
        let length = 2 * BLOCK as u32;
        let on_wire = length + 2 * 4;
        let to = Key::new(&mut driver, length);
        to.configure_signatures(&mut driver, &mut cq, &mut b, [Side::None, Side::Crc32]);
        let (whole_key, from) = (driver.key, driver.pages(3));
        let data: Vec<u8> = (0..length).map(|n| ((n * 3) >> 2) as u8).collect();
        let mut blocks = Vec::new();
        for block in data.chunks(BLOCK) {
            blocks.extend_from_slice(block);
            blocks.extend(crc32fast::hash(block).to_be_bytes());
        }
        let sent = driver.hca.port().counters().sent;
        for is_corrupted in [false, true] {
            blocks[BLOCK + 10] ^= u8::from(is_corrupted);
            driver.write(from, &blocks);
            if is_send {
                // A list that is received into counts what is in memory.
                driver.post_recv(&mut b, &segment(length, to.key, 0));
            }
            let list = segment(on_wire, whole_key, from);
            match is_send {
                true => driver.post(&mut a, 0x0a, SIGNALED, &list),
                false => {
                    let segments = [remote(0, to.key), list].concat();
                    driver.post(&mut a, 0x08, SIGNALED, &segments);
                }
            }
            if is_corrupted {
                let report = driver.poll(&mut cq).unwrap();
                let (which, of_memory, block) = signature_error(&report, BLOCK as u64 + 4);
                assert_eq!((which, of_memory, block), (1 << 13, false, 1));
            }
            if is_send {
                assert_eq!(status(&driver.poll(&mut cq).unwrap()), (2, 0));
            }
            assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
            assert_eq!(driver.poll(&mut cq), None);
            let stored = driver.read(to.memory, length as usize);
            assert_eq!(stored[..BLOCK], data[..BLOCK]);
            assert_eq!(stored == data, !is_corrupted);
        }
        assert_eq!(driver.hca.port().counters().sent > sent, is_send);
    }
}

#[test]
fn data_is_encrypted_within_a_device() {
    for is_send in [false, true] {
        let mut driver = Driver::new("ib");
        let (mut cq, mut a, mut b) = driver.pair();
        let length = 2 * BLOCK as u32;
        let (_, key, _) = encrypted_key(&mut driver, &mut cq, &mut a, 0);
        let data = fill_memory(&driver, &key);
        let (stored, whole_key) = (driver.pages(2), driver.key);
        let sent = driver.hca.port().counters().sent;
        let memories = [(key.key, 0), (whole_key, stored)];
        let queues = (&mut cq, &mut a, &mut b);
        move_message(&mut driver, queues, is_send, memories, length);
        let expected = encrypted(data.clone(), 0);
        assert!(driver.read(stored, length as usize) == expected);
        driver.write(key.memory, &vec![0; length as usize]);
        let memories = [(whole_key, stored), (key.key, 0)];
        let queues = (&mut cq, &mut a, &mut b);
        move_message(&mut driver, queues, is_send, memories, length);
        assert!(driver.read(key.memory, length as usize) == data);
        assert_eq!(driver.hca.port().counters().sent > sent, is_send);
    }
}
