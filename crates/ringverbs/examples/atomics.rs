//! Atomics on a peer's memory: a shared counter, and a lock.
//!
//! `cargo run --example atomics [DEVICE]`

use ringverbs::{AccessFlags, Buffer, CompletionQueue, Device, QueuePair, Transport, WorkRequest};

/// Posts an atomic that stores the old value in `old`, waits, and returns the value.
fn run(
    qp: &mut QueuePair,
    cq: &mut CompletionQueue,
    request: WorkRequest<Buffer>,
) -> anyhow::Result<(u64, Buffer)> {
    qp.post(request)?;
    let mut completion = cq.poll_until_one()?;
    if let Err(failure) = completion.result {
        println!("{:?} failed: {failure}", completion.operation);
        std::process::exit(1);
    }
    let old = completion.take_buffer().unwrap_or_else(|| unreachable!());
    let mut value = [0; 8];
    value.copy_from_slice(&old[..8]);
    Ok((u64::from_ne_bytes(value), old))
}

fn main() -> anyhow::Result<()> {
    let device = match std::env::args().nth(1) {
        Some(name) => Device::named(&name)?,
        None => Device::first_or_embedded()?,
    };
    eprintln!("device {}", device.name());
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(16).build()?;
    let mut client = domain.queue_pair(Transport::Reliable, &cq).build()?;
    let mut server = domain.queue_pair(Transport::Reliable, &cq).build()?;
    let local = context.local_address(1)?;
    let (a, b) = (client.endpoint(&local), server.endpoint(&local));
    client.connect(&local, &b)?;
    server.connect(&local, &a)?;

    // The server's memory: a counter, followed by a lock. The server's device
    // executes the atomics; the server itself does nothing.
    let memory = domain.alloc_remote(4096, AccessFlags::REMOTE_ATOMIC)?;
    let (counter, lock) = (memory.key(), memory.key().offset(8));
    memory.store_u64(0, 40)?;

    // An atomic stores the old value in a buffer of 8 bytes.
    let mut old = domain.alloc(8)?.into_buffer();
    old.set_len(8)?;

    let add = WorkRequest::fetch_add(old, counter, 2);
    let (before, old) = run(&mut client, &mut cq, add)?;
    println!("counter: {before} + 2 = {}", memory.load_u64(0)?);

    // A free lock is 0; the holder has swapped in its number.
    let mut old = old;
    for owner in [7, 8] {
        let take = WorkRequest::compare_swap(old, lock, 0, owner);
        let (holder, back) = run(&mut client, &mut cq, take)?;
        match holder {
            0 => println!("{owner} has taken the lock"),
            holder => println!("{owner} finds that {holder} holds it"),
        }
        old = back;
    }
    println!("the lock's word: {}", memory.load_u64(8)?);
    Ok(())
}
