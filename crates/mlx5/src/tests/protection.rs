//! Signatures and encryption of memory keys: what is written, and reports of wrong
//! signatures. The byte comparison with libmlx5 has the encodings.

use super::*;
use crate::{
    BlockSignature, BlockSize, CrcKind, CryptoEngine, Encryption, KeyChanges, KeyLayout,
    KeyProtection, LayoutChange, ProtectedKeys, Role, Signature, SignatureDomain, SignatureError,
    SignatureField,
};

const RC: Service = Service::ReliableConnection;
const KEY: u32 = 0x0123_4500;
const PSVS: [u32; 2] = [0x11, 0x22];

fn pair(sig_pipelining: bool) -> TestQp {
    let cap = cap(8, 1, 400);
    let send = SendPlan::new(&cap, RC, &LIMITS, KeyChanges::Layouts, 0).unwrap();
    let mut queues = qp_queues_with_plan(70, RC, send, &cap, None);
    Arc::get_mut(&mut queues).unwrap().sig_pipelining = sig_pipelining;
    TestQp::with(queues, false)
}

fn crc(block: BlockSize) -> SignatureDomain {
    SignatureDomain {
        block,
        signature: Signature::Crc {
            kind: CrcKind::Crc32c,
            seed: 0,
        },
    }
}

fn memory_and_wire() -> BlockSignature {
    BlockSignature {
        memory: Some(crc(BlockSize::Bytes512)),
        wire: Some(crc(BlockSize::Bytes4096)),
        check_mask: 0xf0,
        copy_mask: None,
    }
}

const LIST: [Sge; 1] = [Sge {
    addr: 0x1000,
    length: 516,
    lkey: 9,
}];

fn push(pair: &mut TestQp, protection: &mut KeyProtection) -> Result<(), PostError> {
    let change = LayoutChange {
        key: KEY,
        access: None,
        layout: Some(KeyLayout::List(&LIST)),
    };
    pair.send
        .push_protected(7, SendFlags::SIGNALED, &change, protection)
}

/// The mask and the key's flags of the work request at a block.
fn said(pair: &TestQp, block: u32) -> (u64, u32) {
    let bytes = pair.sent(block as usize * 64, 128);
    assert_eq!(bytes[3], 0x25);
    (be64(&bytes, 24), be32(&bytes, 64 + 12))
}

const SIG_ERR: u64 = 1 << 9;
const FORMATS: u64 = 1 << 12;
const UNCHANGED: u64 = 1 << 0 | 1 << 13 | 1 << 29;

#[test]
fn signatures_take_a_work_request_for_each_psv() {
    let keys = Arc::default();
    let mut protection = KeyProtection::new(KEY, Some(PSVS), None, &keys);
    let mut pair = pair(false);
    pair.send.begin();
    protection.open(false);
    protection.set_signatures(memory_and_wire()).unwrap();
    assert!(
        protection.set_signatures(memory_and_wire()).is_err(),
        "twice"
    );
    push(&mut pair, &mut protection).unwrap();
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    // Eight segments, the layout, a format; then two of two segments.
    let bytes = pair.sent(0, 6 * 64);
    assert_eq!(be32(&bytes, 4) & 0x3f, 16);
    assert_eq!((be16(&bytes, 20), be16(&bytes, 22)), (4, 4));
    assert_eq!(
        said(&pair, 0),
        (UNCHANGED | SIG_ERR | FORMATS, 1 << 30 | 1 << 26)
    );
    for (n, psv) in PSVS.into_iter().enumerate() {
        let entry = &bytes[(4 + n) * 64..];
        assert_eq!((entry[3], be32(entry, 4) & 0x3f), (0x20, 2));
        assert_eq!((be32(entry, 16), be64(entry, 24)), (psv, 0));
    }
    // Only the last is signalled, and each behind a key change waits for it.
    let flags = [0, 4, 5].map(|block| bytes[block * 64 + 11]);
    assert_eq!(flags, [0, 0x20, 0x28]);
    // Without new ones the key keeps them; removed, it has no formats.
    for (reset, said_now) in [(false, (UNCHANGED, 0)), (true, (UNCHANGED | FORMATS, 0))] {
        let at = pair.record(1);
        pair.send.begin();
        protection.open(reset);
        push(&mut pair, &mut protection).unwrap();
        // SAFETY: there is no device.
        unsafe { pair.send.publish() };
        assert_eq!(said(&pair, at), said_now);
    }
}

#[test]
fn there_is_room_for_all_work_requests_or_none_is_posted() {
    let keys = Arc::default();
    let mut protection = KeyProtection::new(KEY, Some(PSVS), None, &keys);
    let mut pair = pair(false);
    pair.send.begin();
    let mut pushed = 0;
    let refused = loop {
        protection.open(false);
        protection.set_signatures(memory_and_wire()).unwrap();
        match push(&mut pair, &mut protection) {
            Ok(()) => pushed += 3,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, PostError::Full);
    assert_eq!(pushed, pair.send.capacity() / 3 * 3);
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    assert_eq!(pair.record(1), pushed / 3 * 6);
}

/// A report as the device writes it.
fn report(key: u32, syndrome: u16, domain: u8) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[16..20].copy_from_slice(&0x1122_3344u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&0x5566_7788u32.to_be_bytes());
    bytes[32..34].copy_from_slice(&syndrome.to_be_bytes());
    bytes[35] = domain;
    bytes[36..40].copy_from_slice(&key.to_be_bytes());
    bytes[47] = 9;
    bytes[63] = 12 << 4;
    bytes
}

#[test]
fn a_wrong_signature_is_reported_to_its_key() {
    let keys: Arc<ProtectedKeys> = Arc::default();
    let mut protection = KeyProtection::new(KEY, Some(PSVS), None, &keys);
    let mut pair = pair(false);
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    ring.set_protected_keys(&keys);
    protection.open(false);
    protection.set_signatures(memory_and_wire()).unwrap();
    push(&mut pair, &mut protection).unwrap();
    assert_eq!(protection.take_error(), Ok(None));
    device.write(report(KEY | 0x33, 1 << 13, 1));
    // SAFETY: there is no memory to write to.
    assert!(unsafe { read(&mut ring) }.is_none(), "it is no completion");
    assert_eq!(device.consumed(), 1);
    let error = SignatureError {
        field: SignatureField::Guard,
        expected: 0x1122_3344,
        actual: 0x5566_7788,
        offset: 9,
    };
    assert_eq!(protection.take_error(), Ok(Some(error)));
    assert_eq!(protection.take_error(), Ok(None));
    // The next configuration tells the device, and sets the PSVs again.
    let at = 6;
    protection.open(false);
    push(&mut pair, &mut protection).unwrap();
    assert_eq!(said(&pair, at), (UNCHANGED | SIG_ERR, 0));
    assert_eq!(pair.sent((at as usize + 3) * 64, 64)[3], 0x20);
    // Of nothing that can be wrong.
    device.write(report(KEY, 1 << 3, 0));
    // SAFETY: as above.
    assert!(unsafe { read(&mut ring) }.is_none());
    assert!(protection.take_error().is_err());
    // Of a key that there is not: malformed, as before.
    drop(protection);
    device.write(report(KEY, 1 << 13, 1));
    // SAFETY: as above.
    assert!(unsafe { read(&mut ring) }.unwrap().is_err());
}

#[test]
fn detaching_keeps_signature_errors() {
    let keys: Arc<ProtectedKeys> = Arc::default();
    let mut protection = KeyProtection::new(KEY, Some(PSVS), None, &keys);
    protection.set_signatures(memory_and_wire()).unwrap();
    let pair = pair(false);
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    ring.set_protected_keys(&keys);
    // Where others have the user index.
    let mut bytes = report(KEY, 1 << 13, 70);
    bytes[35] = 70;
    device.write(bytes);
    ring.detach(&pair.queues);
    // SAFETY: there is no memory to write to.
    assert!(unsafe { read(&mut ring) }.is_none());
    assert!(protection.take_error().is_err(), "it was read");
}

#[test]
fn a_single_unit_engine_refuses_more_units() {
    let keys = Arc::default();
    let attributes = Encryption {
        encrypts_sent: true,
        signature_first: true,
        unit: BlockSize::Bytes512,
        tweak: [1; 16],
        key: 3,
        key_tag: [0; 8],
    };
    for (engine, fits) in [
        (CryptoEngine::SingleBlock, false),
        (CryptoEngine::MultiBlock, true),
    ] {
        let mut protection = KeyProtection::new(KEY, None, Some(engine), &keys);
        let mut pair = pair(false);
        protection.open(false);
        protection.set_encryption(attributes).unwrap();
        assert!(protection.set_signatures(memory_and_wire()).is_err());
        assert_eq!(push(&mut pair, &mut protection).is_ok(), fits);
    }
}

#[test]
fn cancelled_requests_complete_with_their_opcodes() {
    let mut pair = pair(true);
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    pair.send.begin();
    for wr_id in [5, 6, 5] {
        push_send(&mut pair.send, wr_id).unwrap();
    }
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    // The first has been begun.
    assert_eq!(pair.send.cancel(1, 5), Ok(1));
    let opcodes = [0, 1, 2].map(|n| pair.sent(n * 64, 64)[3]);
    assert_eq!(opcodes, [0x0a, 0x0a, 0]);
    assert_eq!(pair.send.cancel(1, 7), Ok(0));
    assert_eq!(pair.send.cancel(4, 5), Err(PostError::BadOperation));
    for (slot, request, wr_id) in [(0, 0x0a, 5), (1, 0x0a, 6), (2, 0, 5)] {
        device.write_cqe(&TestCqe {
            user_index: 70,
            slot,
            request,
            ..TestCqe::default()
        });
        // SAFETY: there is no memory to write to.
        let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
        assert_eq!((wc.status, wc.opcode, wc.wr_id), (0, 0, wr_id));
    }
    // Of another queue pair the device says nothing like that.
    let mut other = self::pair(false);
    push_send(&mut other.send, 1).unwrap();
    assert!(other.send.cancel(0, 1).is_err());
}
