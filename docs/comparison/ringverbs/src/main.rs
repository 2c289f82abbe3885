//! 1000 round trips of 64 bytes between two queue pairs of a process.
#![forbid(unsafe_code)]

use std::time::Instant;

use ringverbs::{Buffer, CompletionQueue, Device, QueuePair, Transport};

type Any = Box<dyn std::error::Error>;

fn exchange(
    from: &mut QueuePair,
    to: &mut QueuePair,
    queue: &mut CompletionQueue,
    message: Buffer,
    place: Buffer,
) -> Result<(Buffer, Buffer), Any> {
    to.receive(place, 1)?;
    from.send(message, 0)?;
    let mut buffers = [None, None];
    for _ in 0..2 {
        let mut completion = queue.poll_until_one()?;
        buffers[completion.token as usize] = completion.take_buffer();
    }
    let [message, place] = buffers;
    Ok((
        message.expect("the sent one"),
        place.expect("the received one"),
    ))
}

fn main() -> Result<(), Any> {
    let context = Device::first()?.open()?;
    let domain = context.alloc_pd()?;
    let mut queue = context.completion_queue().entries(16).build()?;
    let local = context.local_address(1)?;
    let mut a = domain.queue_pair(Transport::Reliable, &queue).build()?;
    let mut b = domain.queue_pair(Transport::Reliable, &queue).build()?;
    a.connect(&local, &b.endpoint(&local))?;
    b.connect(&local, &a.endpoint(&local))?;
    let mut message = domain.alloc(64)?.into_buffers(64).next().expect("one");
    let mut place = domain.alloc(64)?.into_buffers(64).next().expect("one");
    message.fill(7);
    let start = Instant::now();
    for _ in 0..1000 {
        (message, place) = exchange(&mut a, &mut b, &mut queue, message, place)?;
        (place, message) = exchange(&mut b, &mut a, &mut queue, place, message)?;
    }
    assert!(message.iter().all(|byte| *byte == 7));
    println!("{:?} a round trip", start.elapsed() / 1000);
    Ok(())
}
