//! An echo server whose clients share one receive queue: its memory depends on the
//! number of messages in flight, not on the number of clients.
//!
//! Server and clients are threads of one process, which exchange endpoints over
//! channels; separate programs would use TCP.
//!
//! `cargo run --example srq_echo [DEVICE [CLIENTS]]`

use std::{collections::HashMap, sync::mpsc, thread};

use anyhow::Result;
use ringverbs::{Device, Endpoint, Operation, Transport};

const MESSAGES: usize = 10;
const SIZE: usize = 256;

/// A client: sends messages and checks the echoes.
fn client(
    number: usize,
    device: &Device,
    tell: mpsc::Sender<(Endpoint, mpsc::Sender<Endpoint>)>,
) -> Result<()> {
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(8).build()?;
    let mut qp = domain.queue_pair(Transport::Reliable, &cq).build()?;
    let local = context.local_address(1)?;
    let (answer, peer) = mpsc::channel();
    let _ = tell.send((qp.endpoint(&local), answer));
    let Ok(peer) = peer.recv() else { return Ok(()) };
    qp.connect(&local, &peer)?;

    let mut out = domain.alloc(SIZE)?.into_buffer();
    let mut back = domain.alloc(SIZE)?.into_buffer();
    for message in 0..MESSAGES {
        let text = format!("message {message} of client {number}");
        out.copy_from(text.as_bytes())?;
        qp.receive(back, 0)?;
        qp.send(out, 0)?;
        let mut buffers = [None, None];
        for _ in 0..2 {
            let mut done = cq.poll_until_one()?;
            assert!(done.result.is_ok(), "{done:?}");
            let received = done.operation == Operation::Receive;
            buffers[usize::from(received)] = done.take_buffer();
        }
        let [Some(sent), Some(echo)] = buffers else {
            unreachable!()
        };
        assert_eq!(&echo[..], text.as_bytes());
        (out, back) = (sent, echo);
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let device = match args.next() {
        Some(name) => Device::named(&name)?,
        None => Device::first_or_embedded()?,
    };
    eprintln!("device {}", device.name());
    let clients = args.next().and_then(|n| n.parse().ok()).unwrap_or(8);
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(256).build()?;

    // Receives for any client.
    let mut srq = domain.shared_receive_queue().depth(64).build()?;
    for buffer in domain.alloc(64 * SIZE)?.into_buffers(SIZE).take(64) {
        srq.receive(buffer, 0)?;
    }

    let (tell, calls) = mpsc::channel();
    let threads: Vec<_> = (0..clients)
        .map(|number| {
            let (device, tell) = (device.clone(), tell.clone());
            thread::spawn(move || client(number, &device, tell))
        })
        .collect();
    drop(tell);

    // One queue pair for each client, all on the shared queue.
    let local = context.local_address(1)?;
    let mut pairs = HashMap::new();
    for (peer, answer) in calls.iter().take(clients) {
        let builder = domain.queue_pair(Transport::Reliable, &cq).srq(&srq);
        let mut qp = builder.build()?;
        qp.connect(&local, &peer)?;
        let _ = answer.send(qp.endpoint(&local));
        pairs.insert(qp.qp_num(), qp);
    }

    // Each message is sent back to its client; after the send, its buffer is posted
    // as a receive again.
    let mut echoed = 0;
    while echoed < clients * MESSAGES {
        let mut done = cq.poll_until_one()?;
        let (number, operation) = (done.qp_num, done.operation);
        let Some(mut buffer) = done.take_buffer() else {
            continue;
        };
        if operation == Operation::Receive && done.result.is_ok() {
            if let Some(qp) = pairs.get_mut(&number) {
                qp.send(buffer, 0)?;
            }
        } else {
            echoed += 1;
            buffer.fill_up();
            srq.receive(buffer, 0)?;
        }
    }
    for thread in threads {
        thread.join().unwrap_or(Ok(()))?;
    }
    println!("{clients} clients, {echoed} messages echoed, 64 buffers");
    Ok(())
}
