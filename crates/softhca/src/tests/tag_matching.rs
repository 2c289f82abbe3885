//! Tag matching: list operations, messages with tags, rendezvous.

use proptest::prelude::*;

use crate::testing::driver::{Cq, Driver, Input, Qp, SIGNALED, segment, status, word};

const LOG_TAGS: u32 = 3;
/// User index of the SRQ; that of the queue pairs is 7.
const UIDX: u32 = 9;

/// Kinds of messages.
const NO_TAG: u8 = 0;
const RNDV: u8 = 1;
const FIN: u8 = 2;
const EAGER: u8 = 3;

const FULL_MASK: u64 = u64::MAX;

/// Opcodes of CQEs: a message, and what has no message of its own.
const SEND: u8 = 2;
const NO_PACKET: u8 = 6;

/// Operations in CQEs.
mod app {
    pub const CONSUMED: u8 = 1;
    pub const EXPECTED: u8 = 2;
    pub const UNEXPECTED: u8 = 3;
    pub const NO_TAG: u8 = 4;
    pub const APPEND: u8 = 5;
    pub const REMOVE: u8 = 6;
    pub const NOOP: u8 = 7;
    pub const CONSUMED_SOFTWARE: u8 = 9;
    pub const CONSUMED_MESSAGE: u8 = 10;
    pub const CONSUMED_MESSAGE_SOFTWARE: u8 = 11;
    pub const CANCELED: u8 = 12;
}

/// A sender, and a receiver with an SRQ with tag matching.
struct Fixture {
    driver: Driver,
    /// The completion queue of the SRQ, and that of the sender.
    cq: Cq,
    sender_cq: Cq,
    xrqn: u32,
    entries: u64,
    doorbell: u64,
    posted: u16,
    /// Queue pair of the list operations.
    operations: Qp,
    sender: Qp,
    receiver: Qp,
    /// Index at which the next tag is appended.
    next: u16,
    memory: u64,
}

fn create_xrq(driver: &mut Driver, cq: u32, entries: u64, doorbell: u64) -> Input {
    Input::new(0x717, 0x158)
        .or(0x10, 8, 1)
        .or(0x10, 0, 1)
        .or(0x14, 0, UIDX)
        .or(0x18, 0, cq)
        .or(0x30, 28, LOG_TAGS)
        .or(0x98, 0, driver.pd)
        .put64(0xa0, doorbell)
        .or(0xb0, 16, 5)
        .or(0xb0, 0, 3)
        .put64(0x150, entries)
}

/// Data of a message: a header with this tag, and more.
fn message(kind: u8, tag: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend(0xc0ffee_u32.to_be_bytes());
    bytes.extend(tag.to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Time of a CQE.
fn time(entry: &[u8]) -> u64 {
    u64::from(word(entry, 48)) << 32 | u64::from(word(entry, 52))
}

/// Operation of a CQE of tag matching, and the index of its tag.
fn tag_operation(entry: &[u8]) -> (u8, u16) {
    assert_eq!(entry[40], 1, "an application");
    (entry[41], u16::from_be_bytes([entry[42], entry[43]]))
}

impl Fixture {
    fn new() -> Fixture {
        Fixture::with(true, false)
    }

    fn with(offload: bool, wide: bool) -> Fixture {
        let mut driver = Driver::new("ib");
        let cq = driver.create_cq_with(5, wide, |input| input);
        let sender_cq = driver.create_cq(5);
        let (entries, doorbell) = (driver.pages(1), driver.pages(1));
        let create = create_xrq(&mut driver, cq.number, entries, doorbell);
        let xrqn = driver.create(create);
        let operations = driver.create_qp(0, &cq, Some(xrqn));
        driver.connect(operations.number, operations.number, 1);
        let sender = driver.create_qp(0, &sender_cq, None);
        // Without a send queue of its own, as the kernel makes it for rendezvous.
        let receiver = driver.create_qp_with(0, &cq, Some(xrqn), |input| {
            match offload {
                true => input.or(0x20, 15, 1).or(0x18, 4, 1),
                false => input,
            }
            // Data in CQEs: up to 64 bytes in one of 128, or up to 32.
            .or(0xdc, 0, if wide { 2 } else { 1 })
        });
        driver.connect(sender.number, receiver.number, 1);
        driver.connect(receiver.number, sender.number, 1);
        let memory = driver.pages(8);
        Fixture {
            driver,
            cq,
            sender_cq,
            xrqn,
            entries,
            doorbell,
            posted: 0,
            operations,
            sender,
            receiver,
            next: 0,
            memory,
        }
    }

    /// Posts a receive WQE for messages that match no tag.
    fn post_recv(&mut self, length: u32, va: u64) {
        let slot = u64::from(self.posted & 7);
        let mut entry = vec![0; 16];
        entry[2..4].copy_from_slice(&(self.posted.wrapping_add(1) & 7).to_be_bytes());
        entry.extend(segment(length, self.driver.key, va));
        self.driver.write(self.entries + slot * 32, &entry);
        self.posted = self.posted.wrapping_add(1);
        let record = u32::from(self.posted).to_be_bytes();
        self.driver.write(self.doorbell, &record);
    }

    fn post_tag_operation(&mut self, kind: u8, seen: Option<u16>, index: u16, rest: &[u8]) {
        let mut segments = vec![kind << 4, 0x80, 0, 0, 0, 0, 0, 0];
        segments[2..4].copy_from_slice(&index.to_be_bytes());
        if let Some(seen) = seen {
            segments[1] |= 0x40;
            segments[6..8].copy_from_slice(&seen.to_be_bytes());
        }
        segments.resize(16, 0);
        segments.extend(rest);
        segments.resize(segments.len().max(32), 0);
        self.driver.post(&mut self.operations, 0x28, 0, &segments);
    }

    /// Appends a tag with this buffer. Returns its index.
    fn append(&mut self, tag: u64, mask: u64, length: u32, va: u64) -> u16 {
        let index = self.next;
        self.next = (index + 1) & ((1 << LOG_TAGS) - 1);
        let mut rest = tag.to_be_bytes().to_vec();
        rest.extend(mask.to_be_bytes());
        rest.extend(segment(length, self.driver.key, va));
        self.post_tag_operation(1, None, self.next, &rest);
        index
    }

    /// Sends a message.
    fn send(&mut self, data: &[u8]) {
        let from = self.memory + 7 * 4096;
        self.driver.write(from, data);
        let segment = segment(data.len() as u32, self.driver.key, from);
        self.driver.post(&mut self.sender, 0x0a, SIGNALED, &segment);
    }

    /// The next completion of the SRQ.
    fn poll(&mut self) -> Option<Vec<u8>> {
        self.driver.poll(&mut self.cq)
    }

    /// The next completion, which has this opcode and operation. Returns it with the
    /// index of its tag.
    fn expect(&mut self, opcode: u8, operation: u8) -> (Vec<u8>, u16) {
        let entry = self.poll().expect("a completion");
        assert_eq!(status(&entry), (opcode, 0));
        let (app, index) = tag_operation(&entry);
        assert_eq!(app, operation);
        assert_eq!(word(&entry, 32), UIDX);
        (entry, index)
    }

    /// The next completion, which is of a list operation. Returns whether it succeeded,
    /// and the number of unexpected messages.
    fn expect_list_operation(&mut self, operation: u8) -> (bool, u16) {
        let (entry, _) = self.expect(NO_PACKET, operation);
        (word(&entry, 0) == 1 << 31, (word(&entry, 4) >> 16) as u16)
    }

    /// The rendezvous that the device transfers now.
    fn transfers_mut(&mut self) -> &mut u32 {
        let receiver = self.driver.hca.core.qp_mut(self.receiver.number);
        &mut receiver.unwrap().transfers
    }

    fn send_status(&mut self) -> (u8, u8) {
        status(&self.driver.poll(&mut self.sender_cq).expect("a completion"))
    }
}

#[test]
fn a_message_is_received_into_the_buffer_of_its_tag() {
    let mut fixture = Fixture::new();
    let buffer = fixture.memory;
    fixture.append(5, FULL_MASK, 64, buffer + 64);
    let index = fixture.append(0x10, 0xff, 64, buffer);
    assert_eq!(fixture.expect_list_operation(app::APPEND), (true, 0));
    assert_eq!(fixture.expect_list_operation(app::APPEND), (true, 0));
    let data = message(EAGER, 0x310, b"what is sent");
    fixture.send(&data);
    let (entry, tag_index) = fixture.expect(SEND, app::CONSUMED_MESSAGE);
    assert_eq!(tag_index, index);
    assert_eq!(entry[..16], data[..16], "the header");
    assert_eq!(word(&entry, 44), 12, "bytes");
    assert_eq!(word(&entry, 56), fixture.receiver.number);
    assert_eq!(fixture.driver.read(buffer, 13), b"what is sent\0");
    assert_eq!(fixture.send_status(), (0, 0));
    assert!(fixture.poll().is_none());
    // Without data, and without a buffer.
    let index = fixture.append(6, FULL_MASK, 0, 0);
    fixture.expect_list_operation(app::APPEND);
    fixture.send(&message(EAGER, 6, b""));
    let (entry, tag_index) = fixture.expect(SEND, app::CONSUMED_MESSAGE);
    assert_eq!((tag_index, word(&entry, 44)), (index, 0));
}

#[test]
fn a_long_message_completes_twice() {
    let mut fixture = Fixture::new();
    let buffer = fixture.memory;
    let index = fixture.append(5, FULL_MASK, 8192, buffer);
    fixture.expect_list_operation(app::APPEND);
    let data: Vec<u8> = (0..4000_u32).map(|n| (n / 3) as u8).collect();
    let sent = message(EAGER, 5, &data);
    fixture.send(&sent);
    let (entry, tag_index) = fixture.expect(NO_PACKET, app::CONSUMED);
    assert_eq!((&entry[..16], tag_index), (&sent[..16], index));
    let (entry, tag_index) = fixture.expect(SEND, app::EXPECTED);
    assert_eq!((&entry[..16], tag_index), (&[0; 16][..], index));
    assert_eq!(word(&entry, 44), 4000);
    assert_eq!(fixture.driver.read(buffer, 4000), data);
}

#[test]
fn an_unexpected_message_is_received_into_a_wqe() {
    let mut fixture = Fixture::new();
    let (buffer, to) = (fixture.memory, fixture.memory + 4096);
    fixture.append(5, FULL_MASK, 64, buffer);
    fixture.expect_list_operation(app::APPEND);
    for (kind, operation) in [
        (EAGER, app::UNEXPECTED),
        (RNDV, app::UNEXPECTED),
        (NO_TAG, app::NO_TAG),
        (FIN, app::NO_TAG),
        (0x7f, app::NO_TAG),
    ] {
        fixture.post_recv(100, to);
        // The tag of the list is for eager messages and rendezvous alone.
        let tag = if operation == app::NO_TAG { 5 } else { 6 };
        let data = message(kind, tag, b"what is sent, too long for a CQE");
        fixture.send(&data);
        let (entry, _) = fixture.expect(SEND, operation);
        assert_eq!(word(&entry, 60) >> 16, u32::from(fixture.posted - 1));
        assert_eq!((word(&entry, 44), &entry[..16]), (48, &[0; 16][..]));
        assert_eq!(fixture.driver.read(to, 48), data);
    }
    // Too short for a header.
    fixture.post_recv(100, to);
    fixture.send(&[EAGER; 15]);
    fixture.expect(SEND, app::NO_TAG);
    // Short enough for the CQE.
    fixture.post_recv(100, to);
    let data = message(EAGER, 6, b"what is sent");
    fixture.send(&data);
    let (entry, _) = fixture.expect(SEND, app::UNEXPECTED);
    assert_eq!((&entry[..28], entry[63] & 0xc), (&data[..], 4));
    // A write with immediate data is no message of this kind.
    fixture.post_recv(100, to);
    let mut segments = crate::testing::driver::remote(to, fixture.driver.key);
    segments.extend(segment(8, fixture.driver.key, to));
    fixture.driver.post(&mut fixture.sender, 0x09, 0, &segments);
    let entry = fixture.poll().unwrap();
    assert_eq!((status(&entry), entry[40]), ((1, 0), 0));
}

#[test]
fn a_late_tag_waits_until_software_has_seen_unexpected_messages() {
    let mut fixture = Fixture::new();
    let (buffer, to) = (fixture.memory, fixture.memory + 4096);
    fixture.append(1, FULL_MASK, 64, buffer);
    fixture.expect_list_operation(app::APPEND);
    fixture.post_recv(100, to);
    fixture.send(&message(EAGER, 2, b""));
    fixture.expect(SEND, app::UNEXPECTED);
    // Appended after the message that it is for.
    let late_tag = fixture.append(2, FULL_MASK, 64, buffer);
    assert_eq!(fixture.expect_list_operation(app::APPEND), (true, 1));
    fixture.post_recv(100, to);
    fixture.send(&message(EAGER, 2, b""));
    fixture.expect(SEND, app::UNEXPECTED);
    // The tag from before matches.
    fixture.send(&message(EAGER, 1, b""));
    assert_eq!(fixture.expect(SEND, app::CONSUMED_MESSAGE).1, 0);
    fixture.post_tag_operation(0, Some(1), 0, &[]);
    assert_eq!(fixture.expect_list_operation(app::NOOP), (true, 2));
    fixture.post_recv(100, to);
    fixture.send(&message(EAGER, 2, b""));
    fixture.expect(SEND, app::UNEXPECTED);
    fixture.post_tag_operation(0, Some(3), 0, &[]);
    assert_eq!(fixture.expect_list_operation(app::NOOP), (true, 3));
    fixture.send(&message(EAGER, 2, b""));
    assert_eq!(fixture.expect(SEND, app::CONSUMED_MESSAGE).1, late_tag);
}

#[test]
fn a_tag_is_removed_once() {
    let mut fixture = Fixture::new();
    let buffer = fixture.memory;
    let indices = [1, 2].map(|tag| fixture.append(tag, FULL_MASK, 64, buffer));
    fixture.send(&message(EAGER, 2, b""));
    fixture.post_tag_operation(2, None, indices[0], &[]);
    fixture.post_tag_operation(2, None, indices[0], &[]);
    fixture.post_tag_operation(2, None, indices[1], &[]);
    fixture.post_tag_operation(2, None, 0xffff, &[]);
    for _ in 0..2 {
        fixture.expect_list_operation(app::APPEND);
    }
    assert_eq!(fixture.expect(SEND, app::CONSUMED_MESSAGE).1, indices[1]);
    let removed = [(); 4].map(|()| fixture.expect_list_operation(app::REMOVE).0);
    assert_eq!(removed, [true, false, false, false]);
}

#[test]
fn unsignaled_tag_operations_do_not_complete() {
    let mut fixture = Fixture::new();
    let mut segments = vec![0x10, 0, 0, 1];
    segments.resize(32, 0);
    segments.extend(segment(0, 0x100, 0));
    fixture
        .driver
        .post(&mut fixture.operations, 0x28, 0, &segments);
    assert!(fixture.poll().is_none());
    fixture.send(&message(EAGER, 9, b""));
    fixture.expect(SEND, app::CONSUMED_MESSAGE);
}

#[test]
fn a_short_rendezvous_is_stored() {
    let mut fixture = Fixture::with(true, true);
    let (buffer, from) = (fixture.memory, fixture.memory + 8192);
    fixture.append(5, FULL_MASK, 64, buffer);
    fixture.expect_list_operation(app::APPEND);
    fixture.driver.write(from, b"what is sent");
    fixture.send(&rendezvous(&fixture, from, 12));
    fixture.expect(NO_PACKET, app::CONSUMED);
    fixture.expect(SEND, app::EXPECTED);
    assert_eq!(fixture.driver.read(buffer, 12), b"what is sent");
}

#[test]
fn rendezvous_beyond_the_transfer_limit_wait() {
    let mut fixture = Fixture::new();
    let buffer = fixture.memory;
    fixture.append(5, FULL_MASK, 64, buffer);
    fixture.expect_list_operation(app::APPEND);
    *fixture.transfers_mut() = 64;
    let sent = rendezvous(&fixture, buffer, 12);
    fixture.send(&sent);
    assert!(fixture.poll().is_none());
    *fixture.transfers_mut() = 63;
    let now = &fixture.driver.hca.platform().now;
    now.set(now.get() + 100_000_000);
    fixture.driver.run();
    fixture.expect(NO_PACKET, app::CONSUMED);
    fixture.expect(SEND, app::EXPECTED);
    assert_eq!(*fixture.transfers_mut(), 63);
    let receiver = fixture.receiver.number;
    fixture.driver.modify(0x50a, receiver, |input| input);
    assert_eq!(*fixture.transfers_mut(), 0);
}

#[test]
fn the_device_transfers_a_rendezvous() {
    let mut fixture = Fixture::new();
    let (buffer, from) = (fixture.memory, fixture.memory + 8192);
    let index = fixture.append(5, FULL_MASK, 5000, buffer);
    fixture.expect_list_operation(app::APPEND);
    let data: Vec<u8> = (0..5000_u32).map(|n| (n / 5) as u8).collect();
    fixture.driver.write(from, &data);
    let ended = fixture.memory + 6 * 4096;
    let key = fixture.driver.key;
    fixture
        .driver
        .post_recv(&mut fixture.sender, &segment(64, key, ended));
    let mut rendezvous_header = from.to_be_bytes().to_vec();
    rendezvous_header.extend(key.to_be_bytes());
    rendezvous_header.extend(5000_u32.to_be_bytes());
    rendezvous_header.extend(b"for the program");
    let sent = message(RNDV, 5, &rendezvous_header);
    fixture.send(&sent);
    let (entry, tag_index) = fixture.expect(NO_PACKET, app::CONSUMED);
    assert_eq!((&entry[..16], tag_index), (&sent[..16], index));
    let (entry, tag_index) = fixture.expect(SEND, app::EXPECTED);
    assert_eq!((tag_index, word(&entry, 44)), (index, 5000));
    assert!(fixture.poll().is_none());
    assert_eq!(fixture.driver.read(buffer, 5000), data);
    // The sender gets its header back.
    assert_eq!(fixture.send_status(), (0, 0));
    let received = fixture.driver.poll(&mut fixture.sender_cq).unwrap();
    assert_eq!((status(&received), word(&received, 44)), ((2, 0), 16));
    assert!(time(&received) > time(&entry), "before the data was read");
    let mut header = sent[..16].to_vec();
    header[0] = FIN;
    assert_eq!(fixture.driver.read(ended, 16), header);
}

/// Message of a rendezvous with tag 5 for this memory.
fn rendezvous(fixture: &Fixture, va: u64, length: u32) -> Vec<u8> {
    let mut rendezvous_header = va.to_be_bytes().to_vec();
    rendezvous_header.extend(fixture.driver.key.to_be_bytes());
    rendezvous_header.extend(length.to_be_bytes());
    message(RNDV, 5, &rendezvous_header)
}

#[test]
fn software_transfers_what_the_device_cannot() {
    // A queue pair with a send queue; memory longer than the buffer.
    for (offload, length) in [(false, 32), (true, 65)] {
        let mut fixture = Fixture::with(offload, false);
        let buffer = fixture.memory;
        let index = fixture.append(5, FULL_MASK, 64, buffer);
        fixture.expect_list_operation(app::APPEND);
        let sent = rendezvous(&fixture, buffer, length);
        fixture.send(&sent);
        let (entry, tag_index) = fixture.expect(SEND, app::CONSUMED_MESSAGE_SOFTWARE);
        assert_eq!((&entry[..16], tag_index), (&sent[..16], index));
        assert_eq!(word(&entry, 44), 16);
        assert_eq!(fixture.driver.read(buffer, 16), sent[16..]);
        assert!(fixture.poll().is_none());
    }
    // With more than a packet.
    let mut fixture = Fixture::with(false, false);
    let index = fixture.append(5, FULL_MASK, 8192, fixture.memory);
    fixture.expect_list_operation(app::APPEND);
    let mut sent = rendezvous(&fixture, 0, 1);
    sent.resize(2000, 7);
    fixture.send(&sent);
    assert_eq!(fixture.expect(NO_PACKET, app::CONSUMED_SOFTWARE).1, index);
    let (entry, tag_index) = fixture.expect(SEND, app::EXPECTED);
    assert_eq!((tag_index, word(&entry, 44)), (index, 1984));
}

#[test]
fn a_rendezvous_that_fails_is_canceled() {
    let mut fixture = Fixture::new();
    let buffer = fixture.memory;
    let index = fixture.append(5, FULL_MASK, 64, buffer);
    let other = fixture.append(5, FULL_MASK, 64, buffer);
    for _ in 0..2 {
        fixture.expect_list_operation(app::APPEND);
    }
    // A rendezvous from memory without access rights, and a second one behind it.
    let mut sent = rendezvous(&fixture, buffer, 32);
    sent[24..28].copy_from_slice(&0x1234_u32.to_be_bytes());
    let from = fixture.memory + 4096;
    fixture.driver.write(from, &sent);
    let segment = segment(sent.len() as u32, fixture.driver.key, from);
    let first = fixture
        .driver
        .write_wqe(&mut fixture.sender, 0x0a, 0, &segment);
    fixture
        .driver
        .write_wqe(&mut fixture.sender, 0x0a, 0, &segment);
    fixture.driver.ring(&first);
    for tag_index in [index, other] {
        assert_eq!(fixture.expect(NO_PACKET, app::CONSUMED).1, tag_index);
    }
    for tag_index in [index, other] {
        assert_eq!(fixture.expect(NO_PACKET, app::CANCELED).1, tag_index);
    }
    assert!(fixture.poll().is_none());
}

#[test]
fn a_message_longer_than_its_buffer_is_canceled() {
    for (length, matched) in [(65, false), (2000, true)] {
        let mut fixture = Fixture::new();
        let index = fixture.append(5, FULL_MASK, 64, fixture.memory);
        fixture.expect_list_operation(app::APPEND);
        fixture.send(&message(EAGER, 5, &vec![1; length]));
        if matched {
            assert_eq!(fixture.expect(NO_PACKET, app::CONSUMED).1, index);
        }
        assert_eq!(fixture.expect(NO_PACKET, app::CANCELED).1, index);
        assert_eq!(fixture.send_status(), (13, 0x12), "an invalid request");
        assert!(fixture.poll().is_none());
    }
}

#[test]
fn short_messages_are_scattered_into_wide_cqes() {
    let mut fixture = Fixture::with(false, true);
    let buffer = fixture.memory;
    let index = fixture.append(5, FULL_MASK, 64, buffer);
    fixture.expect_list_operation(app::APPEND);
    let sent = message(EAGER, 5, b"what is sent");
    fixture.send(&sent);
    let at = fixture.cq.entry(fixture.cq.index) - 64;
    let (entry, tag_index) = fixture.expect(SEND, app::CONSUMED_MESSAGE);
    assert_eq!(
        (tag_index, word(&entry, 44), entry[63] & 0xc),
        (index, 12, 8)
    );
    assert_eq!(entry[..16], sent[..16]);
    assert_eq!(fixture.driver.read(at, 12), b"what is sent");
    assert_eq!(fixture.driver.read(buffer, 12), [0; 12]);
}

#[test]
fn the_sender_waits_for_a_receive() {
    let mut fixture = Fixture::new();
    let buffer = fixture.memory;
    fixture.send(&message(EAGER, 5, b"what is sent"));
    assert!(fixture.driver.poll(&mut fixture.sender_cq).is_none());
    // It is not unexpected yet, so the tag is for it.
    let index = fixture.append(5, FULL_MASK, 64, buffer);
    assert_eq!(fixture.expect_list_operation(app::APPEND), (true, 0));
    let now = &fixture.driver.hca.platform().now;
    now.set(now.get() + 100_000_000);
    fixture.driver.run();
    assert_eq!(fixture.expect(SEND, app::CONSUMED_MESSAGE).1, index);
    assert_eq!(fixture.send_status(), (0, 0));
}

#[test]
fn malformed_tag_operations_fail_the_queue_pair() {
    for (case, kind, index, first) in [
        ("a tag beyond the list", 1, 1 << LOG_TAGS, None),
        ("a place that is taken", 1, 1, Some(0)),
        ("an unknown operation", 7, 0, None),
    ] {
        let mut fixture = Fixture::new();
        if let Some(next) = first {
            // The next one has its place.
            fixture.post_tag_operation(1, None, next, &[]);
            fixture.expect_list_operation(app::APPEND);
        }
        fixture.post_tag_operation(kind, None, index, &[]);
        let entry = fixture.poll().unwrap();
        assert_eq!(status(&entry), (13, 2), "{case}");
        assert_eq!(word(&entry, 56) & 0xff_ffff, fixture.operations.number);
    }
    // A queue pair without tags.
    let mut fixture = Fixture::new();
    fixture.driver.post(&mut fixture.sender, 0x28, 0, &[0; 32]);
    assert_eq!(fixture.send_status(), (13, 2));
}

#[test]
fn xrq_commands() {
    let mut fixture = Fixture::new();
    fixture.append(5, FULL_MASK, 64, fixture.memory);
    fixture.post_recv(100, fixture.memory);
    fixture.send(&message(EAGER, 6, b""));
    fixture.post_tag_operation(0, Some(7), 0, &[]);
    let query = Input::new(0x719, 16).or(8, 0, fixture.xrqn);
    let output = fixture.driver.execute(&query, 0x158);
    assert_eq!(word(&output, 0x10), 1 << 8 | 1);
    assert_eq!(
        (word(&output, 0x14), word(&output, 0x18)),
        (UIDX, fixture.cq.number)
    );
    assert_eq!(word(&output, 0x30), LOG_TAGS << 28 | 1);
    assert_eq!(word(&output, 0x34), 7 << 16 | 1);
    assert_eq!(word(&output, 0xb0) & 0xf_001f, 5 << 16 | 3);
    // A limit.
    for arm in [Input::new(0x71a, 16), Input::new(0x703, 16).or(4, 0, 2)] {
        fixture
            .driver
            .execute(&arm.or(8, 0, fixture.xrqn).or(12, 0, 3), 16);
        let output = fixture.driver.execute(&query, 0x158);
        assert_eq!(word(&output, 0x94), 3);
    }
    let destroy = Input::new(0x718, 16).or(8, 0, fixture.xrqn);
    let of_cq = Input::new(0x401, 16).or(8, 0, fixture.cq.number);
    assert_eq!(fixture.driver.command(&destroy, 16).0, 6, "in use");
    for qp in [fixture.operations.number, fixture.receiver.number] {
        fixture
            .driver
            .execute(&Input::new(0x501, 16).or(8, 0, qp), 16);
    }
    assert_eq!(fixture.driver.command(&of_cq, 16).0, 6, "in use");
    fixture.driver.execute(&destroy, 16);
    fixture.driver.execute(&of_cq, 16);
    assert_eq!(fixture.driver.command(&query, 0x158).0, 5);
    // Creation: no completion queue, no tag matching, a list that is too long.
    let cq = fixture.sender_cq.number;
    let create = create_xrq(&mut fixture.driver, 0, fixture.entries, fixture.doorbell);
    assert_eq!(fixture.driver.command(&create, 16).0, 5);
    let create = create.or(0x18, 0, cq);
    assert_eq!(
        fixture
            .driver
            .command(&create.clone().or(0x30, 28, 8), 16)
            .0,
        8
    );
    assert_eq!(
        fixture.driver.command(&create.clone().or(0x10, 8, 2), 16).0,
        3
    );
    let xrqn = fixture.driver.create(create);
    // Other services than RC.
    for service in [1, 2] {
        let pd = fixture.driver.pd;
        let create = Input::new(0x500, 0x118)
            .or(0x18, 16, service)
            .or(0x1c, 0, pd)
            .or(0x20, 15, 1)
            .or(0xb4, 0, cq)
            .or(0xc4, 24, 1)
            .or(0xc4, 0, xrqn);
        assert_eq!(fixture.driver.command(&create, 16).0, 3);
    }
    // An SRQ without tags is no XRQ.
    let srq = fixture.driver.create_srq(fixture.entries, fixture.doorbell);
    let query = Input::new(0x719, 16).or(8, 0, srq);
    assert_eq!(fixture.driver.command(&query, 0x158).0, 5);
}

/// A step of a random sequence.
#[derive(Debug, Clone)]
enum Step {
    Append {
        tag: u64,
        mask: u64,
    },
    Remove {
        index: u16,
    },
    /// Reports unexpected messages: all, or fewer.
    Synchronize {
        behind: bool,
    },
    Send {
        tag: u64,
        long: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let mask = prop_oneof![Just(0b11_u64), Just(0b01), Just(0b10), Just(0)];
    prop_oneof![
        3 => (0..4_u64, mask).prop_map(|(tag, mask)| Step::Append { tag, mask }),
        1 => (0..1_u16 << LOG_TAGS).prop_map(|index| Step::Remove { index }),
        1 => any::<bool>().prop_map(|behind| Step::Synchronize { behind }),
        4 => (0..4_u64, any::<bool>()).prop_map(|(tag, long)| Step::Send { tag, long }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The device does what the man page says, in any order of operations.
    #[test]
    fn matching_equals_a_model(steps in prop::collection::vec(step(), 1..60)) {
        let mut fixture = Fixture::new();
        let (buffer, to) = (fixture.memory, fixture.memory + 4096);
        // Index, tag, mask, and whether it may match.
        let mut list: Vec<(u16, u64, u64, bool)> = Vec::new();
        let (mut received, mut seen) = (0_u16, 0_u16);
        for step in steps {
            match step {
                Step::Append { tag, mask } => {
                    // As software: no place is named twice.
                    if list.iter().any(|tag_entry| tag_entry.0 == fixture.next) {
                        continue;
                    }
                    let index = fixture.append(tag, mask, 4096, buffer);
                    prop_assert_eq!(fixture.expect_list_operation(app::APPEND), (true, received));
                    list.push((index, tag, mask, received == seen));
                }
                Step::Remove { index } => {
                    fixture.post_tag_operation(2, None, index, &[]);
                    let is_listed = list.iter().any(|tag_entry| tag_entry.0 == index);
                    prop_assert_eq!(fixture.expect_list_operation(app::REMOVE), (is_listed, received));
                    list.retain(|tag_entry| tag_entry.0 != index);
                }
                Step::Synchronize { behind } => {
                    seen = received.wrapping_sub(behind.into());
                    fixture.post_tag_operation(0, Some(seen), 0, &[]);
                    prop_assert_eq!(fixture.expect_list_operation(app::NOOP), (true, received));
                    if !behind {
                        list.iter_mut().for_each(|tag_entry| tag_entry.3 = true);
                    }
                }
                Step::Send { tag, long } => {
                    fixture.post_recv(4096, to);
                    let length = if long { 1500 } else { 100 };
                    fixture.send(&message(EAGER, tag, &vec![tag as u8 + 1; length]));
                    prop_assert_eq!(fixture.send_status(), (0, 0));
                    let position = list.iter().position(|tag_entry| tag_entry.3 && tag & tag_entry.2 == tag_entry.1);
                    match position.map(|position| list.remove(position)) {
                        Some((index, ..)) => {
                            // The WQE is for the next message.
                            fixture.posted -= 1;
                            if long {
                                prop_assert_eq!(fixture.expect(NO_PACKET, app::CONSUMED).1, index);
                                prop_assert_eq!(fixture.expect(SEND, app::EXPECTED).1, index);
                            } else {
                                let ends = fixture.expect(SEND, app::CONSUMED_MESSAGE);
                                prop_assert_eq!(ends.1, index);
                            }
                            let stored = fixture.driver.read(buffer, length);
                            prop_assert_eq!(stored, vec![tag as u8 + 1; length]);
                        }
                        None => {
                            fixture.expect(SEND, app::UNEXPECTED);
                            received += 1;
                        }
                    }
                }
            }
            prop_assert!(fixture.poll().is_none());
        }
    }

    /// Any operations and messages are handled, and queues and memory stay bounded.
    #[test]
    fn any_operation_and_message_is_handled(
        requests in prop::collection::vec(
            (any::<bool>(), prop::collection::vec(any::<u8>(), 0..120), any::<[u8; 4]>()),
            1..40,
        ),
        offload in any::<bool>(),
    ) {
        let mut fixture = Fixture::with(offload, false);
        let buffer = fixture.memory;
        for (is_operation, mut bytes, parameters) in requests {
            fixture.post_recv(256, buffer);
            if is_operation {
                // Mostly well-formed.
                bytes.resize(48, 0);
                bytes[0] = parameters[0] & 0x30 | u8::from(parameters[0] & 0xc0 == 0xc0);
                bytes[2] = 0;
                bytes[3] = parameters[1] & 0xf;
                bytes[16..24].copy_from_slice(&u64::from(parameters[2] & 3).to_be_bytes());
                bytes[24..32].copy_from_slice(&u64::from(parameters[3] & 3).to_be_bytes());
                bytes[32..].copy_from_slice(&segment(64, fixture.driver.key, buffer));
                fixture.driver.post(&mut fixture.operations, 0x28, parameters[0] & 8, &bytes);
            } else {
                if let Some(kind) = bytes.first_mut() {
                    *kind &= 3;
                }
                if let Some(tag) = bytes.get_mut(8..16) {
                    tag.copy_from_slice(&u64::from(parameters[2] & 3).to_be_bytes());
                }
                fixture.send(&bytes);
            }
            while fixture.poll().is_some() {}
            while fixture.driver.poll(&mut fixture.sender_cq).is_some() {}
        }
    }
}
