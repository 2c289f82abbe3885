//! What may get lost: messages of an unreliable connection, and datagrams. Each
//! one that arrives does so once, whole, with the bytes that were sent.

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::{AccessFlags, RemoteRegion, Success, Transport, WorkRequest};

use super::link::{End, RECEIVES, SIZE, ends, found};
use testing::{Rng, is_pattern, pattern, setting};

/// Messages that are sent before a look at what has arrived.
const BATCH: u64 = 8;
/// Places for writes with immediate data, more than are on their way.
const SLOTS: u64 = 32;
/// When nothing more is on its way.
const QUIET: Duration = Duration::from_millis(300);
const QKEY: u32 = 0x1234_5678;
/// What comes before the data in a received datagram: its route header.
const HEADER: usize = 40;

/// What has been sent, by its number, which is its immediate data.
struct Messages {
    lengths: Vec<usize>,
    arrived: HashSet<u64>,
}

impl Messages {
    fn add(&mut self, len: usize) -> u64 {
        self.lengths.push(len);
        self.lengths.len() as u64 - 1
    }

    /// The number of a message that has arrived, and how long it was.
    fn received(&mut self, success: &Success) -> (u64, usize) {
        let number = u64::from(success.immediate().expect("immediate data"));
        let len = self.lengths.get(number as usize);
        let len = *len.unwrap_or_else(|| panic!("{number} was never sent"));
        assert!(self.arrived.insert(number), "{number} arrived twice");
        (number, len)
    }
}

/// Polls until nothing comes for a while; `look` checks each message and gives
/// back its buffer, which is posted again.
fn drain(a: &mut End, b: &mut End, quiet: Duration, mut look: impl FnMut(&Success, &[u8])) {
    let mut moved = Instant::now();
    while moved.elapsed() < quiet || a.qp.in_flight().0 > 0 {
        assert!(moved.elapsed() < Duration::from_secs(30), "nothing moves");
        while let Some(completion) = a.cq.poll_one().unwrap() {
            completion.result.unwrap();
            moved = Instant::now();
        }
        while let Some(mut completion) = b.cq.poll_one().unwrap() {
            let success = completion.result.unwrap();
            let mut buffer = completion.take_buffer().unwrap();
            look(&success, &buffer);
            buffer.fill_up();
            b.qp.receive(buffer, 0).unwrap();
            moved = Instant::now();
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn post_receives(b: &mut End) {
    for buffer in b.buffers(RECEIVES) {
        b.qp.receive(buffer, 0).unwrap();
    }
}

fn report(what: &str, messages: &Messages) {
    let (arrived, sent) = (messages.arrived.len(), messages.lengths.len());
    println!("{what}: {arrived} of {sent} arrived, whole");
    assert!(arrived * 10 > sent, "hardly any arrived");
}

#[test]
#[ignore = "needs two rxe devices"]
fn messages_of_an_unreliable_connection_are_complete() {
    let count = setting("MESSAGES", 200) / 2;
    let mut numbers = Rng(setting("SEED", 1));
    let (mut a, mut b) = ends(Transport::Unreliable);
    let (at_a, at_b) = (a.qp.endpoint(&a.local), b.qp.endpoint(&b.local));
    found(|| a.qp.connect(&a.local, &at_b));
    found(|| b.qp.connect(&b.local, &at_a));
    let packet = at_a.mtu.min(at_b.mtu).bytes() as usize;
    let access = AccessFlags::REMOTE_WRITE;
    let region: RemoteRegion = b
        .domain
        .alloc_remote(SLOTS as usize * SIZE, access)
        .unwrap();
    post_receives(&mut b);
    let mut messages = Messages {
        lengths: Vec::new(),
        arrived: HashSet::new(),
    };
    let place = |number: u64| (number % SLOTS) as usize * SIZE;
    while messages.lengths.len() < count {
        for mut buffer in a.buffers(BATCH as usize) {
            // Writes have one packet: after one whose end was lost rdma_rxe
            // (Linux 6.12) receives no other message on the connection.
            let write = numbers.one_in(2);
            let len = 1 + numbers.below(if write { packet } else { SIZE });
            let number = messages.add(len);
            buffer.set_len(len).unwrap();
            pattern(number, &mut buffer);
            let request = if !write {
                WorkRequest::send(buffer)
            } else {
                WorkRequest::write(buffer, region.key().offset(place(number)))
            };
            a.qp.post(request.immediate(number as u32)).unwrap();
        }
        let quiet = match messages.lengths.len() < count {
            true => Duration::from_millis(5),
            false => QUIET,
        };
        drain(&mut a, &mut b, quiet, |success, buffer| {
            let (number, len) = messages.received(success);
            assert_eq!(success.byte_len as usize, len, "message {number}");
            if success.is_remote_write() {
                let mut there = vec![0; len];
                region.read_at(place(number), &mut there).unwrap();
                assert!(is_pattern(number, &there), "write {number} is wrong");
            } else {
                assert!(is_pattern(number, buffer), "message {number} is wrong");
            }
        });
    }
    report("unreliable connection", &messages);
}

#[test]
#[ignore = "needs two rxe devices"]
fn datagrams_are_complete() {
    let count = setting("MESSAGES", 200);
    let mut numbers = Rng(setting("SEED", 1));
    let (mut a, mut b) = ends(Transport::Datagram);
    a.qp.activate(&a.local, QKEY).unwrap();
    b.qp.activate(&b.local, QKEY).unwrap();
    let path = found(|| a.domain.address_handle_to(&a.local, &b.local));
    let longest = a.local.mtu.bytes() as usize;
    post_receives(&mut b);
    let mut messages = Messages {
        lengths: Vec::new(),
        arrived: HashSet::new(),
    };
    while messages.lengths.len() < count {
        for mut buffer in a.buffers(BATCH as usize) {
            let len = 1 + numbers.below(longest);
            let number = messages.add(len);
            buffer.set_len(len).unwrap();
            pattern(number, &mut buffer);
            let request = WorkRequest::send(buffer).immediate(number as u32);
            a.qp.post(request.to(&path, b.qp.qp_num(), QKEY)).unwrap();
        }
        let quiet = match messages.lengths.len() < count {
            true => Duration::from_millis(5),
            false => QUIET,
        };
        drain(&mut a, &mut b, quiet, |success, buffer| {
            let (number, len) = messages.received(success);
            assert_eq!(success.byte_len as usize, HEADER + len, "{number}");
            assert!(is_pattern(number, &buffer[HEADER..]), "{number} is wrong");
        });
    }
    report("datagrams", &messages);
}
