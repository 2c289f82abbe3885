//! A server of connections by IP address: it serves a number of clients, one
//! after another, and rejects the next one with a reason.
//!
//! `cargo run --example cm_server [CLIENTS [PORT]]`, then in another terminal
//! the example `cm_client ADDRESS`, or rdma-core's `ucmatose -s ADDRESS`: both
//! receive messages and send as many back.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ringverbs::cm::{Connection, Listener, Options, Request};
use ringverbs::{CompletionQueue, Operation, Transport};

/// Messages in each direction, and the bytes of each: ucmatose's defaults.
const MESSAGES: usize = 10;
const SIZE: usize = 100;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for completions until `count` messages have been received; returns their
/// bytes.
fn receive(
    cq: &mut CompletionQueue,
    connection: &Connection,
    count: usize,
) -> Result<Vec<Vec<u8>>> {
    let mut messages = Vec::new();
    while messages.len() < count {
        let mut found = false;
        while let Some(mut completion) = cq.poll_one()? {
            found = true;
            if let Err(failure) = completion.result {
                return Err(failure.into());
            }
            // Sends complete here, too.
            if completion.operation == Operation::Receive {
                let buffer = completion
                    .take_buffer()
                    .context("a receive has its buffer")?;
                messages.push(buffer.to_vec());
            }
        }
        // Checking the connection is a system call, so it is done only when the
        // completion queue is empty.
        if !found && connection.is_over()? {
            bail!("the client is gone");
        }
    }
    Ok(messages)
}

fn serve(request: Request) -> Result<()> {
    // The queue pair must be on the device that received the request.
    let context = request.device()?.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(64).build()?;
    let mut qp = domain.queue_pair(Transport::Reliable, &cq).build()?;

    // Receives must be posted before the client may send: before `accept`.
    request.prepare(&mut qp)?;
    let mut buffers = domain.alloc(2 * MESSAGES * SIZE)?.into_buffers(SIZE);
    for buffer in buffers.by_ref().take(MESSAGES) {
        qp.receive(buffer, 0)?;
    }
    let options = Options {
        private_data: b"welcome",
        ..Options::default()
    };
    let connection = request.accept(&mut qp, &options)?;
    connection.wait_established(Some(TIMEOUT))?;

    for (number, mut buffer) in (0u8..).zip(buffers.take(MESSAGES)) {
        buffer.fill(b'a' + number);
        qp.send(buffer, 0)?;
    }
    let messages = receive(&mut cq, &connection, MESSAGES)?;
    for message in &messages {
        if message.len() != SIZE {
            bail!("{} bytes instead of {SIZE}", message.len());
        }
    }
    println!("{} messages of {SIZE} bytes came back", messages.len());

    // The server disconnects; the client answers.
    connection.disconnect(&mut qp)?;
    connection.wait_disconnected(Some(TIMEOUT))?;
    println!("disconnected");
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let clients: u32 = arguments.next().map_or(Ok(1), |count| count.parse())?;
    let port: u16 = arguments.next().map_or(Ok(7471), |port| port.parse())?;
    let listener = Listener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    println!("listening on {:?}", listener.local_addr()?);
    for _ in 0..clients {
        let request = listener.next_request(None)?.context("no request")?;
        println!("request from {:?}", request.peer_addr()?);
        // A client's error does not end the server.
        if let Err(error) = serve(request) {
            println!("this client: {error}");
        }
    }
    if let Some(request) = listener.next_request(Some(TIMEOUT))? {
        request.reject(b"enough for today")?;
        println!("one more was rejected");
    }
    Ok(())
}
