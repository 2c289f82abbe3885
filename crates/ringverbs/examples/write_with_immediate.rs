//! RDMA write with immediate data: bytes appear in the peer's memory without
//! its doing, and a number tells it that they are there.
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

    // The target's memory. A peer writes to it when it likes, so it is no
    // `&[u8]`: it is copied out of. Its key says where it is, and is what the
    // writer has to be told; here by a variable, elsewhere by a message.
    let memory = domain.alloc_remote(4096, AccessFlags::REMOTE_WRITE)?;
    let key = memory.key();
    println!("the target's memory: {key:x?}");

    // A write with immediate data uses up a receive, which needs no memory.
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
                // The number was the writer's to choose: here it is where.
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
