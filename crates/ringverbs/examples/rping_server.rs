//! The server of rdma-core's `rping`: it reads each ping from the client's memory
//! and writes it back.
//!
//! `cargo run --example rping_server [PORT]`, then `rping -c -v -a ADDRESS -C 10`

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use ringverbs::cm::{Connection, Listener, Options};
use ringverbs::{Buffer, CompletionQueue, Inline, QueuePair, RemoteAddr, Transport, WorkRequest};

/// The client's description of its memory: address, key, length, big-endian.
const INFO: usize = 16;
/// The maximum length of a ping.
const PING: usize = 64 * 1024;
/// The time between a failure and the disconnect that explains it.
const PATIENCE: Duration = Duration::from_secs(2);
// Tokens of the operations.
const RECEIVED: u64 = 1;
const MOVED: u64 = 2;
const GO_AHEAD: u64 = 3;

/// Returns the buffer of the next operation with `token`; `None` if the client has
/// disconnected.
fn next(cq: &mut CompletionQueue, connection: &Connection, token: u64) -> Result<Option<Buffer>> {
    loop {
        for _ in 0..1000 {
            if let Some(mut completion) = cq.poll_one()? {
                if let Err(failure) = completion.result {
                    // If a client is killed, operations in flight may fail before
                    // the disconnect arrives.
                    let over = connection.wait_disconnected(Some(PATIENCE));
                    return over.map(|()| None).map_err(|_| failure.into());
                }
                if completion.token == token {
                    return Ok(completion.take_buffer());
                }
            }
        }
        if connection.is_over()? {
            return Ok(None);
        }
    }
}

/// Serves one client until it disconnects. Returns the number of its pings.
fn serve(
    qp: &mut QueuePair,
    cq: &mut CompletionQueue,
    connection: &Connection,
    mut ping: Buffer,
) -> Result<u32> {
    for pings in 0.. {
        // The client sends the location of its ping, then the one of its echo.
        for back in [false, true] {
            let Some(info) = next(cq, connection, RECEIVED)? else {
                return Ok(pings);
            };
            let bytes: [u8; INFO] = info[..].try_into()?;
            qp.receive(info, RECEIVED)?;
            let there = RemoteAddr {
                addr: u64::from_be_bytes(bytes[..8].try_into()?),
                rkey: u32::from_be_bytes(bytes[8..12].try_into()?),
            };
            let len = u32::from_be_bytes(bytes[12..].try_into()?);
            ping.set_len((len as usize).min(PING))?;
            if back {
                qp.write(ping, there, MOVED)?;
            } else {
                qp.read(ping, there, MOVED)?;
            }
            let Some(moved) = next(cq, connection, MOVED)? else {
                return Ok(pings);
            };
            ping = moved;
            if !back {
                let text = ping.split(|byte| *byte == 0).next().unwrap_or_default();
                println!("server ping data: {}", String::from_utf8_lossy(text));
            }
            qp.post(WorkRequest::send(Inline(&[0; INFO])).token(GO_AHEAD))?;
        }
    }
    Ok(u32::MAX)
}

fn main() -> Result<()> {
    let port = std::env::args()
        .nth(1)
        .map_or(Ok(7174), |port| port.parse())?;
    let listener = Listener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    println!("listening on {:?}", listener.local_addr()?);
    let request = listener.next_request(None)?.context("no request")?;
    println!("request from {:?}", request.peer_addr()?);

    // The queue pair must be on the device that received the request.
    let context = request.device()?.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(16).build()?;
    let mut qp = domain
        .queue_pair(Transport::Reliable, &cq)
        .inline(INFO as u32)
        .build()?;

    // A receive must be posted before the client may send.
    request.prepare(&mut qp)?;
    for info in domain.alloc(2 * INFO)?.into_buffers(INFO).take(2) {
        qp.receive(info, RECEIVED)?;
    }
    let connection = request.accept(&mut qp, &Options::default())?;
    connection.wait_established(Some(Duration::from_secs(10)))?;

    let ping = domain.alloc(PING)?.into_buffer();
    let pings = serve(&mut qp, &mut cq, &connection, ping)?;
    println!("{pings} pings, then the client has disconnected");
    Ok(connection.disconnect(&mut qp)?)
}
