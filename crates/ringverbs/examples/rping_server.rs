//! The server of rdma-core's `rping`: it reads each ping out of the client's
//! memory and writes it back.
//!
//! `cargo run --example rping_server [PORT]`, then `rping -c -v -a ADDRESS -C 10`

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use ringverbs::cm::{self, Connection, Listener, Options};
use ringverbs::{Buffer, Completion, CompletionQueue, Inline, QueuePair, RemoteAddr, Transport};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What the client says of its memory: address, key, length, big endian.
const INFO: usize = 16;
/// The longest ping that rping makes.
const PING: usize = 64 * 1024;

/// The next completion, or none when the client is gone.
fn next(cq: &mut CompletionQueue, connection: &Connection) -> Result<Option<Completion>> {
    loop {
        for _ in 0..1000 {
            if let Some(completion) = cq.poll_one()? {
                if let Err(failure) = completion.result {
                    return Err(failure.into());
                }
                return Ok(Some(completion));
            }
        }
        if connection.is_over()? {
            return Ok(None);
        }
    }
}

/// Serves one client until it is gone. Gives the number of its pings.
fn serve(
    qp: &mut QueuePair,
    cq: &mut CompletionQueue,
    connection: &Connection,
    mut ping: Buffer,
) -> Result<u32> {
    const READ: u64 = 2;
    const WRITE: u64 = 3;
    const GO_AHEAD: u64 = 4;
    let mut pings = 0;
    let mut write_back = false;
    loop {
        // The client advertises the memory with its ping, then that for ours.
        let remote = loop {
            let Some(mut completion) = next(cq, connection)? else {
                return Ok(pings);
            };
            // Our go-aheads complete here, too.
            if let Some(info) = completion.take_buffer() {
                let bytes: [u8; INFO] = info[..].try_into()?;
                qp.receive(info, 1)?;
                let remote = RemoteAddr {
                    addr: u64::from_be_bytes(bytes[..8].try_into()?),
                    rkey: u32::from_be_bytes(bytes[8..12].try_into()?),
                };
                break (remote, u32::from_be_bytes(bytes[12..].try_into()?));
            }
        };
        let (remote, len) = (remote.0, remote.1 as usize);
        ping.set_len(len.min(PING))?;
        if write_back {
            qp.write(ping, remote, WRITE)?;
        } else {
            qp.read(ping, remote, READ)?;
        }
        // The buffer comes back when that is done.
        ping = loop {
            let Some(mut completion) = next(cq, connection)? else {
                return Ok(pings);
            };
            if completion.token == READ || completion.token == WRITE {
                break completion
                    .take_buffer()
                    .ok_or("the operation had a buffer")?;
            }
        };
        if !write_back {
            let text = ping.split(|byte| *byte == 0).next().unwrap_or_default();
            println!("server ping data: {}", String::from_utf8_lossy(text));
            pings += 1;
        }
        write_back = !write_back;
        qp.post(ringverbs::WorkRequest::send(Inline(&[0; INFO])).token(GO_AHEAD))?;
    }
}

fn main() -> Result<()> {
    let port = std::env::args()
        .nth(1)
        .map_or(Ok(7174), |port| port.parse())?;
    let listener = Listener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    println!("listening on {:?}", listener.local_addr()?);
    let request = listener.next_request(None)?.ok_or("no request")?;
    println!("request from {:?}", request.peer_addr()?);

    // The queue pair is made on the device that the request came by.
    let context = request.device()?.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(16).build()?;
    let mut qp = domain
        .queue_pair(Transport::Reliable, &cq)
        .inline(INFO as u32)
        .build()?;

    // A receive must be there before the client may send.
    request.prepare(&mut qp)?;
    for info in domain.alloc(2 * INFO)?.into_buffers(INFO) {
        qp.receive(info, 1)?;
    }
    let connection = request.accept(&mut qp, &Options::default())?;
    connection.wait_established(Some(Duration::from_secs(10)))?;

    let ping = domain.alloc(PING)?.into_buffer();
    let pings = serve(&mut qp, &mut cq, &connection, ping)?;
    match connection.disconnect(&mut qp) {
        Ok(()) => println!("{pings} pings, disconnected"),
        Err(error @ cm::Error::Manager(_)) => println!("{pings} pings, gone: {error}"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
