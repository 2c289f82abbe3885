//! RDMA write with immediate data: the device writes to the peer's memory, and a
//! number notifies the peer.
//!
//! `cargo run --example write_with_immediate [DEVICE]`

use ringverbs::{AccessFlags, Device, Operation, Transport, WorkRequest};

fn main() -> anyhow::Result<()> {
    let device = match std::env::args().nth(1) {
        Some(name) => Device::named(&name)?,
        None => Device::first_or_embedded()?,
    };
    eprintln!("device {}", device.name());
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(16).build()?;
    let mut writer = domain.queue_pair(Transport::Reliable, &cq).build()?;
    let mut target = domain.queue_pair(Transport::Reliable, &cq).build()?;
    let local = context.local_address(1)?;
    let (a, b) = (writer.endpoint(&local), target.endpoint(&local));
    writer.connect(&local, &b)?;
    target.connect(&local, &a)?;

    // The target's memory. A peer may write at any time, so it is not a `&[u8]`:
    // data is copied out. The writer needs its key (address and rkey), here from a
    // variable, otherwise from a message.
    let memory = domain.alloc_remote(4096, AccessFlags::REMOTE_WRITE)?;
    let key = memory.key();
    println!("the target's memory: {key:x?}");

    // A write with immediate data consumes a receive, which needs no memory.
    target.receive((), 1)?;

    // The writer's side: a buffer, written 100 bytes into the target's memory.
    let mut buffer = domain.alloc(4096)?.into_buffer();
    buffer.copy_from(b"written from afar")?;
    let request = WorkRequest::write(buffer, key.offset(100));
    writer.post(request.immediate(100).token(2))?;

    for _ in 0..2 {
        let completion = cq.poll_until_one()?;
        match (completion.operation, completion.result) {
            (Operation::Receive, Ok(success)) => {
                // The writer chooses the number: here the offset of the data.
                let at = success.immediate().unwrap_or_default() as usize;
                let mut bytes = vec![0; success.byte_len as usize];
                memory.read_at(at, &mut bytes)?;
                println!("at {at}: {}", String::from_utf8_lossy(&bytes));
            }
            (operation, Ok(_)) => println!("{operation:?} done"),
            (operation, Err(failure)) => println!("{operation:?} failed: {failure}"),
        }
    }
    Ok(())
}
