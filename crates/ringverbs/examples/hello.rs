//! A message from one queue pair to another, in one process over loopback.
//!
//! `cargo run --example hello [DEVICE]`

use ringverbs::{Device, Transport};

fn main() -> anyhow::Result<()> {
    // A device, and a protection domain for the objects used together.
    let device = match std::env::args().nth(1) {
        Some(name) => Device::named(&name)?,
        None => Device::first_or_embedded()?,
    };
    let context = device.open()?;
    let domain = context.alloc_pd()?;

    // Two queue pairs whose operations complete in one completion queue.
    let mut cq = context.completion_queue().entries(16).build()?;
    let mut sender = domain.queue_pair(Transport::Reliable, &cq).build()?;
    let mut receiver = domain.queue_pair(Transport::Reliable, &cq).build()?;

    // Each needs the other's endpoint. Two machines would exchange it as text:
    // `endpoint.to_string()`, `text.parse()`.
    let local = context.local_address(1)?;
    let (a, b) = (sender.endpoint(&local), receiver.endpoint(&local));
    println!("{} port {}: {a} to {b}", device.name(), local.port);
    sender.connect(&local, &b)?;
    receiver.connect(&local, &a)?;

    // Registered memory, split into a buffer for each side.
    let mut outgoing = domain.alloc(8192)?.into_buffer();
    let incoming = outgoing.split_off(4096);
    outgoing.copy_from(b"hello over RDMA")?;

    // A posted operation owns its buffer, so the program cannot access it.
    receiver.receive(incoming, 1)?;
    sender.send(outgoing, 2)?;

    // The completion returns the buffer, and the token of the operation.
    for _ in 0..2 {
        let mut completion = cq.poll_until_one()?;
        let result = completion.result;
        let buffer = completion.take_buffer().unwrap_or_else(|| unreachable!());
        match result {
            Ok(_) if completion.token == 1 => {
                println!("received: {}", String::from_utf8_lossy(&buffer));
            }
            Ok(_) => println!("sent {} bytes", buffer.len()),
            Err(failure) => println!("{:?} failed: {failure}", completion.operation),
        }
    }
    Ok(())
}
