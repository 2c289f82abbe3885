//! Tag matching: list operations, messages with tags, rendezvous.

use proptest::prelude::*;

use crate::testing::driver::{Cq, Driver, Input, Qp, SIGNALED, segment, status, word};

const LOG_TAGS: u32 = 3;
/// User index of the SRQ; that of the queue pairs is 7.
const UIDX: u32 = 9;

/// Kinds of messages.
const NO_TAG: u8 = 0;
const RENDEZVOUS: u8 = 1;
const FINISHED: u8 = 2;
const EAGER: u8 = 3;

const EVERYTHING: u64 = u64::MAX;

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
struct Bench {
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
        .long(0xa0, doorbell)
        .or(0xb0, 16, 5)
        .or(0xb0, 0, 3)
        .long(0x150, entries)
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
fn app_of(entry: &[u8]) -> (u8, u16) {
    assert_eq!(entry[40], 1, "an application");
    (entry[41], u16::from_be_bytes([entry[42], entry[43]]))
}

impl Bench {
    fn new() -> Bench {
        Bench::with(true, false)
    }

    fn with(offload: bool, wide: bool) -> Bench {
        let mut driver = Driver::new("ib");
        let cq = driver.create_cq_with(5, wide, |input| input);
        let sender_cq = driver.create_cq(5);
        let (entries, doorbell) = (driver.pages(1), driver.pages(1));
        let create = create_xrq(&mut driver, cq.number, entries, doorbell);
        let xrqn = driver.number(create);
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
        Bench {
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

    fn operate(&mut self, kind: u8, seen: Option<u16>, index: u16, rest: &[u8]) {
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
        self.operate(1, None, self.next, &rest);
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
        let (app, index) = app_of(&entry);
        assert_eq!(app, operation);
        assert_eq!(word(&entry, 32), UIDX);
        (entry, index)
    }

    /// The next completion, which is of a list operation. Returns whether it succeeded,
    /// and the number of unexpected messages.
    fn listed(&mut self, operation: u8) -> (bool, u16) {
        let (entry, _) = self.expect(NO_PACKET, operation);
        (word(&entry, 0) == 1 << 31, (word(&entry, 4) >> 16) as u16)
    }

    /// The rendezvous that the device transfers now.
    fn transfers(&mut self) -> &mut u32 {
        let receiver = self.driver.hca.core.qp_mut(self.receiver.number);
        &mut receiver.unwrap().transfers
    }

    fn sent(&mut self) -> (u8, u8) {
        status(&self.driver.poll(&mut self.sender_cq).expect("a completion"))
    }
}

#[test]
fn a_message_is_received_into_the_buffer_of_its_tag() {
    let mut bench = Bench::new();
    let buffer = bench.memory;
    bench.append(5, EVERYTHING, 64, buffer + 64);
    let index = bench.append(0x10, 0xff, 64, buffer);
    assert_eq!(bench.listed(app::APPEND), (true, 0));
    assert_eq!(bench.listed(app::APPEND), (true, 0));
    let data = message(EAGER, 0x310, b"what is sent");
    bench.send(&data);
    let (entry, of) = bench.expect(SEND, app::CONSUMED_MESSAGE);
    assert_eq!(of, index);
    assert_eq!(entry[..16], data[..16], "the header");
    assert_eq!(word(&entry, 44), 12, "bytes");
    assert_eq!(word(&entry, 56), bench.receiver.number);
    assert_eq!(bench.driver.read(buffer, 13), b"what is sent\0");
    assert_eq!(bench.sent(), (0, 0));
    assert!(bench.poll().is_none());
    // Without data, and without a buffer.
    let index = bench.append(6, EVERYTHING, 0, 0);
    bench.listed(app::APPEND);
    bench.send(&message(EAGER, 6, b""));
    let (entry, of) = bench.expect(SEND, app::CONSUMED_MESSAGE);
    assert_eq!((of, word(&entry, 44)), (index, 0));
}

#[test]
fn a_long_message_completes_twice() {
    let mut bench = Bench::new();
    let buffer = bench.memory;
    let index = bench.append(5, EVERYTHING, 8192, buffer);
    bench.listed(app::APPEND);
    let data: Vec<u8> = (0..4000_u32).map(|n| (n / 3) as u8).collect();
    let sent = message(EAGER, 5, &data);
    bench.send(&sent);
    let (entry, of) = bench.expect(NO_PACKET, app::CONSUMED);
    assert_eq!((&entry[..16], of), (&sent[..16], index));
    let (entry, of) = bench.expect(SEND, app::EXPECTED);
    assert_eq!((&entry[..16], of), (&[0; 16][..], index));
    assert_eq!(word(&entry, 44), 4000);
    assert_eq!(bench.driver.read(buffer, 4000), data);
}

#[test]
fn an_unexpected_message_is_received_into_a_wqe() {
    let mut bench = Bench::new();
    let (buffer, to) = (bench.memory, bench.memory + 4096);
    bench.append(5, EVERYTHING, 64, buffer);
    bench.listed(app::APPEND);
    for (kind, operation) in [
        (EAGER, app::UNEXPECTED),
        (RENDEZVOUS, app::UNEXPECTED),
        (NO_TAG, app::NO_TAG),
        (FINISHED, app::NO_TAG),
        (0x7f, app::NO_TAG),
    ] {
        bench.post_recv(100, to);
        // The tag of the list is for eager messages and rendezvous alone.
        let tag = if operation == app::NO_TAG { 5 } else { 6 };
        let data = message(kind, tag, b"what is sent, too long for a CQE");
        bench.send(&data);
        let (entry, _) = bench.expect(SEND, operation);
        assert_eq!(word(&entry, 60) >> 16, u32::from(bench.posted - 1));
        assert_eq!((word(&entry, 44), &entry[..16]), (48, &[0; 16][..]));
        assert_eq!(bench.driver.read(to, 48), data);
    }
    // Too short for a header.
    bench.post_recv(100, to);
    bench.send(&[EAGER; 15]);
    bench.expect(SEND, app::NO_TAG);
    // Short enough for the CQE.
    bench.post_recv(100, to);
    let data = message(EAGER, 6, b"what is sent");
    bench.send(&data);
    let (entry, _) = bench.expect(SEND, app::UNEXPECTED);
    assert_eq!((&entry[..28], entry[63] & 0xc), (&data[..], 4));
    // A write with immediate data is no message of this kind.
    bench.post_recv(100, to);
    let mut segments = crate::testing::driver::remote(to, bench.driver.key);
    segments.extend(segment(8, bench.driver.key, to));
    bench.driver.post(&mut bench.sender, 0x09, 0, &segments);
    let entry = bench.poll().unwrap();
    assert_eq!((status(&entry), entry[40]), ((1, 0), 0));
}

#[test]
fn tags_that_may_be_late_wait_for_software() {
    let mut bench = Bench::new();
    let (buffer, to) = (bench.memory, bench.memory + 4096);
    bench.append(1, EVERYTHING, 64, buffer);
    bench.listed(app::APPEND);
    bench.post_recv(100, to);
    bench.send(&message(EAGER, 2, b""));
    bench.expect(SEND, app::UNEXPECTED);
    // Appended after the message that it is for.
    let late = bench.append(2, EVERYTHING, 64, buffer);
    assert_eq!(bench.listed(app::APPEND), (true, 1));
    bench.post_recv(100, to);
    bench.send(&message(EAGER, 2, b""));
    bench.expect(SEND, app::UNEXPECTED);
    // The tag from before matches.
    bench.send(&message(EAGER, 1, b""));
    assert_eq!(bench.expect(SEND, app::CONSUMED_MESSAGE).1, 0);
    bench.operate(0, Some(1), 0, &[]);
    assert_eq!(bench.listed(app::NOOP), (true, 2));
    bench.post_recv(100, to);
    bench.send(&message(EAGER, 2, b""));
    bench.expect(SEND, app::UNEXPECTED);
    bench.operate(0, Some(3), 0, &[]);
    assert_eq!(bench.listed(app::NOOP), (true, 3));
    bench.send(&message(EAGER, 2, b""));
    assert_eq!(bench.expect(SEND, app::CONSUMED_MESSAGE).1, late);
}

#[test]
fn a_tag_is_removed_once() {
    let mut bench = Bench::new();
    let buffer = bench.memory;
    let indices = [1, 2].map(|tag| bench.append(tag, EVERYTHING, 64, buffer));
    bench.send(&message(EAGER, 2, b""));
    bench.operate(2, None, indices[0], &[]);
    bench.operate(2, None, indices[0], &[]);
    bench.operate(2, None, indices[1], &[]);
    bench.operate(2, None, 0xffff, &[]);
    for _ in 0..2 {
        bench.listed(app::APPEND);
    }
    assert_eq!(bench.expect(SEND, app::CONSUMED_MESSAGE).1, indices[1]);
    let removed = [(); 4].map(|()| bench.listed(app::REMOVE).0);
    assert_eq!(removed, [true, false, false, false]);
}

#[test]
fn operations_complete_only_if_they_ask_for_it() {
    let mut bench = Bench::new();
    let mut segments = vec![0x10, 0, 0, 1];
    segments.resize(32, 0);
    segments.extend(segment(0, 0x100, 0));
    bench.driver.post(&mut bench.operations, 0x28, 0, &segments);
    assert!(bench.poll().is_none());
    bench.send(&message(EAGER, 9, b""));
    bench.expect(SEND, app::CONSUMED_MESSAGE);
}

#[test]
fn a_short_rendezvous_is_stored() {
    let mut bench = Bench::with(true, true);
    let (buffer, from) = (bench.memory, bench.memory + 8192);
    bench.append(5, EVERYTHING, 64, buffer);
    bench.listed(app::APPEND);
    bench.driver.write(from, b"what is sent");
    bench.send(&rendezvous(&bench, from, 12));
    bench.expect(NO_PACKET, app::CONSUMED);
    bench.expect(SEND, app::EXPECTED);
    assert_eq!(bench.driver.read(buffer, 12), b"what is sent");
}

#[test]
fn rendezvous_beyond_the_limit_wait() {
    let mut bench = Bench::new();
    let buffer = bench.memory;
    bench.append(5, EVERYTHING, 64, buffer);
    bench.listed(app::APPEND);
    *bench.transfers() = 64;
    let sent = rendezvous(&bench, buffer, 12);
    bench.send(&sent);
    assert!(bench.poll().is_none());
    *bench.transfers() = 63;
    let now = &bench.driver.hca.platform().now;
    now.set(now.get() + 100_000_000);
    bench.driver.run();
    bench.expect(NO_PACKET, app::CONSUMED);
    bench.expect(SEND, app::EXPECTED);
    assert_eq!(*bench.transfers(), 63);
    let receiver = bench.receiver.number;
    bench.driver.modify(0x50a, receiver, |input| input);
    assert_eq!(*bench.transfers(), 0);
}

#[test]
fn the_device_transfers_a_rendezvous() {
    let mut bench = Bench::new();
    let (buffer, from) = (bench.memory, bench.memory + 8192);
    let index = bench.append(5, EVERYTHING, 5000, buffer);
    bench.listed(app::APPEND);
    let data: Vec<u8> = (0..5000_u32).map(|n| (n / 5) as u8).collect();
    bench.driver.write(from, &data);
    let ended = bench.memory + 6 * 4096;
    let key = bench.driver.key;
    bench
        .driver
        .post_recv(&mut bench.sender, &segment(64, key, ended));
    let mut names = from.to_be_bytes().to_vec();
    names.extend(key.to_be_bytes());
    names.extend(5000_u32.to_be_bytes());
    names.extend(b"for the program");
    let sent = message(RENDEZVOUS, 5, &names);
    bench.send(&sent);
    let (entry, of) = bench.expect(NO_PACKET, app::CONSUMED);
    assert_eq!((&entry[..16], of), (&sent[..16], index));
    let (entry, of) = bench.expect(SEND, app::EXPECTED);
    assert_eq!((of, word(&entry, 44)), (index, 5000));
    assert!(bench.poll().is_none());
    assert_eq!(bench.driver.read(buffer, 5000), data);
    // The sender gets its header back.
    assert_eq!(bench.sent(), (0, 0));
    let received = bench.driver.poll(&mut bench.sender_cq).unwrap();
    assert_eq!((status(&received), word(&received, 44)), ((2, 0), 16));
    assert!(time(&received) > time(&entry), "before the data was read");
    let mut header = sent[..16].to_vec();
    header[0] = FINISHED;
    assert_eq!(bench.driver.read(ended, 16), header);
}

/// Message of a rendezvous with tag 5 for this memory.
fn rendezvous(bench: &Bench, va: u64, length: u32) -> Vec<u8> {
    let mut names = va.to_be_bytes().to_vec();
    names.extend(bench.driver.key.to_be_bytes());
    names.extend(length.to_be_bytes());
    message(RENDEZVOUS, 5, &names)
}

#[test]
fn software_transfers_rendezvous_the_device_may_not() {
    // A queue pair with a send queue; memory longer than the buffer.
    for (offload, length) in [(false, 32), (true, 65)] {
        let mut bench = Bench::with(offload, false);
        let buffer = bench.memory;
        let index = bench.append(5, EVERYTHING, 64, buffer);
        bench.listed(app::APPEND);
        let sent = rendezvous(&bench, buffer, length);
        bench.send(&sent);
        let (entry, of) = bench.expect(SEND, app::CONSUMED_MESSAGE_SOFTWARE);
        assert_eq!((&entry[..16], of), (&sent[..16], index));
        assert_eq!(word(&entry, 44), 16);
        assert_eq!(bench.driver.read(buffer, 16), sent[16..]);
        assert!(bench.poll().is_none());
    }
    // With more than a packet.
    let mut bench = Bench::with(false, false);
    let index = bench.append(5, EVERYTHING, 8192, bench.memory);
    bench.listed(app::APPEND);
    let mut sent = rendezvous(&bench, 0, 1);
    sent.resize(2000, 7);
    bench.send(&sent);
    assert_eq!(bench.expect(NO_PACKET, app::CONSUMED_SOFTWARE).1, index);
    let (entry, of) = bench.expect(SEND, app::EXPECTED);
    assert_eq!((of, word(&entry, 44)), (index, 1984));
}

#[test]
fn a_rendezvous_that_fails_is_canceled() {
    let mut bench = Bench::new();
    let buffer = bench.memory;
    let index = bench.append(5, EVERYTHING, 64, buffer);
    let other = bench.append(5, EVERYTHING, 64, buffer);
    for _ in 0..2 {
        bench.listed(app::APPEND);
    }
    // Memory that nobody may read; and a second one behind it.
    let mut sent = rendezvous(&bench, buffer, 32);
    sent[24..28].copy_from_slice(&0x1234_u32.to_be_bytes());
    let from = bench.memory + 4096;
    bench.driver.write(from, &sent);
    let segment = segment(sent.len() as u32, bench.driver.key, from);
    let first = bench.driver.place(&mut bench.sender, 0x0a, 0, &segment);
    bench.driver.place(&mut bench.sender, 0x0a, 0, &segment);
    bench.driver.ring(&first);
    for of in [index, other] {
        assert_eq!(bench.expect(NO_PACKET, app::CONSUMED).1, of);
    }
    for of in [index, other] {
        assert_eq!(bench.expect(NO_PACKET, app::CANCELED).1, of);
    }
    assert!(bench.poll().is_none());
}

#[test]
fn a_message_longer_than_its_buffer_is_canceled() {
    for (length, matched) in [(65, false), (2000, true)] {
        let mut bench = Bench::new();
        let index = bench.append(5, EVERYTHING, 64, bench.memory);
        bench.listed(app::APPEND);
        bench.send(&message(EAGER, 5, &vec![1; length]));
        if matched {
            assert_eq!(bench.expect(NO_PACKET, app::CONSUMED).1, index);
        }
        assert_eq!(bench.expect(NO_PACKET, app::CANCELED).1, index);
        assert_eq!(bench.sent(), (13, 0x12), "an invalid request");
        assert!(bench.poll().is_none());
    }
}

#[test]
fn short_messages_are_scattered_into_wide_cqes() {
    let mut bench = Bench::with(false, true);
    let buffer = bench.memory;
    let index = bench.append(5, EVERYTHING, 64, buffer);
    bench.listed(app::APPEND);
    let sent = message(EAGER, 5, b"what is sent");
    bench.send(&sent);
    let at = bench.cq.entry(bench.cq.index) - 64;
    let (entry, of) = bench.expect(SEND, app::CONSUMED_MESSAGE);
    assert_eq!((of, word(&entry, 44), entry[63] & 0xc), (index, 12, 8));
    assert_eq!(entry[..16], sent[..16]);
    assert_eq!(bench.driver.read(at, 12), b"what is sent");
    assert_eq!(bench.driver.read(buffer, 12), [0; 12]);
}

#[test]
fn without_a_receive_the_sender_waits() {
    let mut bench = Bench::new();
    let buffer = bench.memory;
    bench.send(&message(EAGER, 5, b"what is sent"));
    assert!(bench.driver.poll(&mut bench.sender_cq).is_none());
    // It is not unexpected yet, so the tag is for it.
    let index = bench.append(5, EVERYTHING, 64, buffer);
    assert_eq!(bench.listed(app::APPEND), (true, 0));
    let now = &bench.driver.hca.platform().now;
    now.set(now.get() + 100_000_000);
    bench.driver.run();
    assert_eq!(bench.expect(SEND, app::CONSUMED_MESSAGE).1, index);
    assert_eq!(bench.sent(), (0, 0));
}

#[test]
fn malformed_operations_end_the_queue_pair() {
    for (what, kind, index, first) in [
        ("a tag beyond the list", 1, 1 << LOG_TAGS, None),
        ("a place that is taken", 1, 1, Some(0)),
        ("an unknown operation", 7, 0, None),
    ] {
        let mut bench = Bench::new();
        if let Some(next) = first {
            // The next one has its place.
            bench.operate(1, None, next, &[]);
            bench.listed(app::APPEND);
        }
        bench.operate(kind, None, index, &[]);
        let entry = bench.poll().unwrap();
        assert_eq!(status(&entry), (13, 2), "{what}");
        assert_eq!(word(&entry, 56) & 0xff_ffff, bench.operations.number);
    }
    // A queue pair without tags.
    let mut bench = Bench::new();
    bench.driver.post(&mut bench.sender, 0x28, 0, &[0; 32]);
    assert_eq!(bench.sent(), (13, 2));
}

#[test]
fn commands_of_an_xrq() {
    let mut bench = Bench::new();
    bench.append(5, EVERYTHING, 64, bench.memory);
    bench.post_recv(100, bench.memory);
    bench.send(&message(EAGER, 6, b""));
    bench.operate(0, Some(7), 0, &[]);
    let query = Input::new(0x719, 16).or(8, 0, bench.xrqn);
    let output = bench.driver.ok(&query, 0x158);
    assert_eq!(word(&output, 0x10), 1 << 8 | 1);
    assert_eq!(
        (word(&output, 0x14), word(&output, 0x18)),
        (UIDX, bench.cq.number)
    );
    assert_eq!(word(&output, 0x30), LOG_TAGS << 28 | 1);
    assert_eq!(word(&output, 0x34), 7 << 16 | 1);
    assert_eq!(word(&output, 0xb0) & 0xf_001f, 5 << 16 | 3);
    // A limit.
    for arm in [Input::new(0x71a, 16), Input::new(0x703, 16).or(4, 0, 2)] {
        bench.driver.ok(&arm.or(8, 0, bench.xrqn).or(12, 0, 3), 16);
        let output = bench.driver.ok(&query, 0x158);
        assert_eq!(word(&output, 0x94), 3);
    }
    let destroy = Input::new(0x718, 16).or(8, 0, bench.xrqn);
    let of_cq = Input::new(0x401, 16).or(8, 0, bench.cq.number);
    assert_eq!(bench.driver.command(&destroy, 16).0, 6, "in use");
    for qp in [bench.operations.number, bench.receiver.number] {
        bench.driver.ok(&Input::new(0x501, 16).or(8, 0, qp), 16);
    }
    assert_eq!(bench.driver.command(&of_cq, 16).0, 6, "in use");
    bench.driver.ok(&destroy, 16);
    bench.driver.ok(&of_cq, 16);
    assert_eq!(bench.driver.command(&query, 0x158).0, 5);
    // Creation: no completion queue, no tag matching, a list that is too long.
    let cq = bench.sender_cq.number;
    let create = create_xrq(&mut bench.driver, 0, bench.entries, bench.doorbell);
    assert_eq!(bench.driver.command(&create, 16).0, 5);
    let create = create.or(0x18, 0, cq);
    assert_eq!(
        bench.driver.command(&create.clone().or(0x30, 28, 8), 16).0,
        8
    );
    assert_eq!(
        bench.driver.command(&create.clone().or(0x10, 8, 2), 16).0,
        3
    );
    let xrqn = bench.driver.number(create);
    // Other services than RC.
    for service in [1, 2] {
        let pd = bench.driver.pd;
        let create = Input::new(0x500, 0x118)
            .or(0x18, 16, service)
            .or(0x1c, 0, pd)
            .or(0x20, 15, 1)
            .or(0xb4, 0, cq)
            .or(0xc4, 24, 1)
            .or(0xc4, 0, xrqn);
        assert_eq!(bench.driver.command(&create, 16).0, 3);
    }
    // An SRQ without tags is no XRQ.
    let srq = bench.driver.create_srq(bench.entries, bench.doorbell);
    let query = Input::new(0x719, 16).or(8, 0, srq);
    assert_eq!(bench.driver.command(&query, 0x158).0, 5);
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
    fn matching_is_that_of_a_model(steps in prop::collection::vec(step(), 1..60)) {
        let mut bench = Bench::new();
        let (buffer, to) = (bench.memory, bench.memory + 4096);
        // Index, tag, mask, and whether it may match.
        let mut list: Vec<(u16, u64, u64, bool)> = Vec::new();
        let (mut received, mut seen) = (0_u16, 0_u16);
        for step in steps {
            match step {
                Step::Append { tag, mask } => {
                    // As software: no place is named twice.
                    if list.iter().any(|it| it.0 == bench.next) {
                        continue;
                    }
                    let index = bench.append(tag, mask, 4096, buffer);
                    prop_assert_eq!(bench.listed(app::APPEND), (true, received));
                    list.push((index, tag, mask, received == seen));
                }
                Step::Remove { index } => {
                    bench.operate(2, None, index, &[]);
                    let there = list.iter().any(|it| it.0 == index);
                    prop_assert_eq!(bench.listed(app::REMOVE), (there, received));
                    list.retain(|it| it.0 != index);
                }
                Step::Synchronize { behind } => {
                    seen = received.wrapping_sub(behind.into());
                    bench.operate(0, Some(seen), 0, &[]);
                    prop_assert_eq!(bench.listed(app::NOOP), (true, received));
                    if !behind {
                        list.iter_mut().for_each(|it| it.3 = true);
                    }
                }
                Step::Send { tag, long } => {
                    bench.post_recv(4096, to);
                    let length = if long { 1500 } else { 100 };
                    bench.send(&message(EAGER, tag, &vec![tag as u8 + 1; length]));
                    prop_assert_eq!(bench.sent(), (0, 0));
                    let place = list.iter().position(|it| it.3 && tag & it.2 == it.1);
                    match place.map(|place| list.remove(place)) {
                        Some((index, ..)) => {
                            // The WQE is for the next message.
                            bench.posted -= 1;
                            if long {
                                prop_assert_eq!(bench.expect(NO_PACKET, app::CONSUMED).1, index);
                                prop_assert_eq!(bench.expect(SEND, app::EXPECTED).1, index);
                            } else {
                                let ends = bench.expect(SEND, app::CONSUMED_MESSAGE);
                                prop_assert_eq!(ends.1, index);
                            }
                            let stored = bench.driver.read(buffer, length);
                            prop_assert_eq!(stored, vec![tag as u8 + 1; length]);
                        }
                        None => {
                            bench.expect(SEND, app::UNEXPECTED);
                            received += 1;
                        }
                    }
                }
            }
            prop_assert!(bench.poll().is_none());
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
        let mut bench = Bench::with(offload, false);
        let buffer = bench.memory;
        for (operates, mut bytes, small) in requests {
            bench.post_recv(256, buffer);
            if operates {
                // Mostly well-formed.
                bytes.resize(48, 0);
                bytes[0] = small[0] & 0x30 | u8::from(small[0] & 0xc0 == 0xc0);
                bytes[2] = 0;
                bytes[3] = small[1] & 0xf;
                bytes[16..24].copy_from_slice(&u64::from(small[2] & 3).to_be_bytes());
                bytes[24..32].copy_from_slice(&u64::from(small[3] & 3).to_be_bytes());
                bytes[32..].copy_from_slice(&segment(64, bench.driver.key, buffer));
                bench.driver.post(&mut bench.operations, 0x28, small[0] & 8, &bytes);
            } else {
                if let Some(kind) = bytes.first_mut() {
                    *kind &= 3;
                }
                if let Some(tag) = bytes.get_mut(8..16) {
                    tag.copy_from_slice(&u64::from(small[2] & 3).to_be_bytes());
                }
                bench.send(&bytes);
            }
            while bench.poll().is_some() {}
            while bench.driver.poll(&mut bench.sender_cq).is_some() {}
        }
    }
}
