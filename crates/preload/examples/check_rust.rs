//! Errors that a safe program of the crate `ringverbs` can have, for tests of `check`:
//! `check_rust ERROR [right]`. With `right` the program does the same as it should be done.

use std::time::Duration;

use ringverbs::{
    AccessFlags, Buffer, CompletionQueue, ConnectOptions, Context, Device, ProtectionDomain,
    QueuePair, Transport,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Number of work requests of an error, of which the device's smallest completion queue has room
/// for one less.
const POSTED: u64 = 5;
const LENGTH: usize = 64;
/// After which time a send is tried again that has found no receive: longer than all pauses.
const RETRY: Duration = Duration::from_millis(491);

/// A device, and what queue pairs need.
struct Objects {
    context: Context,
    domain: ProtectionDomain,
}

impl Objects {
    fn queue(&self, entries: u32) -> Result<CompletionQueue> {
        Ok(self.context.completion_queue().entries(entries).build()?)
    }

    /// Returns a connected pair, each with a completion queue.
    fn pair(&self, queues: [&CompletionQueue; 2]) -> Result<[QueuePair; 2]> {
        let queue_pair = |queue| self.domain.queue_pair(Transport::Reliable, queue).build();
        let (mut a, mut b) = (queue_pair(queues[0])?, queue_pair(queues[1])?);
        let local = self.context.local_address(1)?;
        let (of_a, of_b) = (a.endpoint(&local), b.endpoint(&local));
        let options = ConnectOptions::new().rnr_timer(RETRY);
        a.connect_with(&local, &of_b, &options)?;
        b.connect_with(&local, &of_a, &options)?;
        Ok([a, b])
    }

    fn buffer(&self) -> Result<Buffer> {
        let mut buffer = self.domain.alloc(LENGTH)?.into_buffer();
        buffer.set_len(LENGTH)?;
        Ok(buffer)
    }
}

/// Lets the device see what is posted.
fn pause() {
    std::thread::sleep(Duration::from_millis(30));
}

/// Posts without polling: receives, sends, or the sends of two queue pairs.
fn overfill(objects: &Objects, is_right: bool, kind: &str) -> Result<()> {
    let large = objects.queue(64)?;
    let small = objects.queue(if is_right { 15 } else { 3 })?;
    let [mut a, mut b] = objects.pair(match kind {
        "receives" => [&large, &small],
        _ => [&small, &large],
    })?;
    let [mut second, mut second_peer] = objects.pair([&small, &large])?;
    for token in 0..POSTED {
        b.receive(objects.buffer()?, token)?;
        second_peer.receive(objects.buffer()?, token)?;
    }
    for token in 0..POSTED {
        match kind {
            "sends" => a.send(objects.buffer()?, token)?,
            "2" if token % 2 == 0 => a.send(objects.buffer()?, token)?,
            "2" => second.send(objects.buffer()?, token)?,
            _ => {}
        }
    }
    pause();
    Ok(())
}

/// Posts as many in all, but polls before the next.
fn poll_in_time(objects: &Objects) -> Result<()> {
    let mut small = objects.queue(3)?;
    let [mut a, mut b] = objects.pair([&small, &small])?;
    for token in 0..POSTED {
        b.receive(objects.buffer()?, token)?;
        a.send(objects.buffer()?, token)?;
        for _ in 0..2 {
            small.poll_until_one()?.result?;
        }
    }
    Ok(())
}

/// Two queue pairs write to remote memory; the first one waits for a receive meanwhile.
fn overlap(objects: &Objects, is_right: bool, kind: &str) -> Result<()> {
    let (mut cq, receives) = (objects.queue(16)?, objects.queue(16)?);
    let [mut a, mut b] = objects.pair([&cq, &receives])?;
    let [mut c, _d] = objects.pair([&cq, &receives])?;
    let target = objects
        .domain
        .alloc_remote(4096, AccessFlags::REMOTE_WRITE)?;
    let write = |qp: &mut QueuePair, byte: u8, offset| -> Result<()> {
        let mut buffer = objects.buffer()?;
        buffer.fill(byte);
        Ok(qp.write(buffer, target.key().offset(offset), 1)?)
    };
    a.send(objects.buffer()?, 0)?;
    pause();
    write(&mut a, 1, 0)?;
    pause();
    if is_right {
        b.receive(objects.buffer()?, 0)?;
        cq.poll_until_one()?.result?;
        cq.poll_until_one()?.result?;
    }
    match kind {
        "same-bytes" => write(&mut c, 1, 0)?,
        "beside" => write(&mut c, 2, LENGTH)?,
        "one-queue-pair" => write(&mut a, 2, 32)?,
        _ => write(&mut c, 2, 32)?,
    }
    pause();
    if is_right {
        cq.poll_until_one()?.result?;
        return Ok(());
    }
    b.receive(objects.buffer()?, 0)?;
    for _ in 0..3 {
        cq.poll_until_one()?.result?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (error, is_right) = (&*arguments[0], arguments.len() > 1);
    let context = Device::first()?.open()?;
    let domain = context.alloc_pd()?;
    let objects = Objects { context, domain };
    match (error, error.strip_prefix("small-")) {
        (_, Some(kind)) => overfill(&objects, is_right, kind),
        ("in-time", _) => poll_in_time(&objects),
        ("writes" | "same-bytes" | "beside" | "one-queue-pair", _) => {
            overlap(&objects, is_right, error)
        }
        _ => Err(format!("no error {error}").into()),
    }
}
