//! Tagged messages: the receiver selects messages by tag instead of taking the next
//! one.
//!
//! A worker sends three kinds of messages in any order. The receiver takes them in
//! its own order, and queries the length of the report before it allocates the
//! buffer.
//!
//! `cargo run -p ringverbs-libfabric --example tagged [DEVICE]`

use std::time::{Duration, Instant};

use anyhow::Result;
use ringverbs::completion::TaggedEntry;
use ringverbs::{Device, ProtectionDomain, Transport};
use ringverbs_libfabric::{TagMatch, TaggedEndpoint};

// A tag has 64 bits of any meaning: here a message's kind and number.
const RESULT: u64 = 1 << 32;
const LOG: u64 = 2 << 32;
const REPORT: u64 = 3 << 32;

/// Maximum number of messages in flight, and maximum length of a message.
const DEPTH: u32 = 16;
const LONGEST: usize = 1024;

/// Matches all messages of a kind: the number's bits are ignored.
fn any_of(kind: u64) -> TagMatch {
    TagMatch {
        tag: kind,
        ignore: u64::from(u32::MAX),
    }
}

/// Waits for the next entry: of a receive, with its message.
fn next(end: &mut TaggedEndpoint) -> Result<TaggedEntry> {
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        if let Some(entry) = end.next_entry()? {
            return Ok(entry?);
        }
    }
    anyhow::bail!("nothing has come for 30 seconds")
}

/// Receives one message that `which` accepts, into memory of `len` bytes.
fn receive(
    end: &mut TaggedEndpoint,
    domain: &ProtectionDomain,
    which: TagMatch,
    len: usize,
) -> Result<(u64, Vec<u8>)> {
    end.receive(domain.alloc(len)?.into_buffer(), which, 0);
    let entry = next(end)?;
    let (tag, buffer) = (entry.tag, entry.payload.into_buffer());
    let (Some(tag), Some(buffer)) = (tag, buffer) else {
        anyhow::bail!("a receive without a message");
    };
    Ok((tag, buffer.to_vec()))
}

fn main() -> Result<()> {
    let device = match std::env::args().nth(1) {
        Some(name) => Device::named(&name)?,
        None => Device::first_or_embedded()?,
    };
    eprintln!("device {}", device.name());
    let context = device.open()?;
    let domain = context.alloc_pd()?;

    // Both ends are in one process; each has its own completion queue.
    let local = context.local_address(1)?;
    let queue = || context.completion_queue().entries(64).build();
    let queues = (queue()?, queue()?);
    let mut a = domain.queue_pair(Transport::Reliable, &queues.0).build()?;
    let mut b = domain.queue_pair(Transport::Reliable, &queues.1).build()?;
    let ends = (a.endpoint(&local), b.endpoint(&local));
    a.connect(&local, &ends.1)?;
    b.connect(&local, &ends.0)?;
    let mut worker = TaggedEndpoint::new(a, queues.0, DEPTH, LONGEST)?;
    let mut office = TaggedEndpoint::new(b, queues.1, DEPTH, LONGEST)?;

    // The worker sends its messages. The bytes are copied, so it needs no buffer.
    let report = "all went well. ".repeat(40);
    for number in 0..4 {
        let (log, result) = (format!("step {number}"), (number * number).to_string());
        worker.send(LOG | number, log.as_bytes(), number)?;
        worker.send(RESULT | number, result.as_bytes(), number)?;
    }
    worker.send(REPORT, report.as_bytes(), 0)?;
    for _ in 0..9 {
        next(&mut worker)?;
    }

    // The receiver takes the results first, although other messages came earlier.
    let mut sum = 0;
    for number in 0..4 {
        let (tag, text) = receive(&mut office, &domain, any_of(RESULT), 64)?;
        // Messages of one kind arrive in the order of sending.
        assert_eq!(tag, RESULT | number);
        sum += String::from_utf8(text)?.parse::<u64>()?;
    }
    println!("sum of the results: {sum}");
    // One log message, by its exact tag; the others stay unmatched.
    let (_, text) = receive(&mut office, &domain, TagMatch::exact(LOG | 2), 64)?;
    println!("log, line 2: {}", String::from_utf8(text)?);
    // The length of the report. `peek` takes no message, and processes no new
    // arrivals: `next_entry` does.
    while office.peek(any_of(REPORT)).is_none() {
        office.next_entry()?;
    }
    let (_, len) = office.peek(any_of(REPORT)).unwrap_or_default();
    let (_, text) = receive(&mut office, &domain, any_of(REPORT), len)?;
    println!(
        "report of {len} bytes: {}...",
        &String::from_utf8(text)?[..14]
    );
    assert_eq!((sum, len), (1 + 4 + 9, report.len()));
    Ok(())
}
