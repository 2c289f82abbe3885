//! The client of rdma-core's `rping`: the server reads each ping from this process's
//! memory, and writes it back.
//!
//! Start `rping -s -v` or the example `rping_server`, then
//! `cargo run --example rping_client ADDRESS [COUNT [PORT]]`

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ringverbs::cm::{Connection, Connector, Options};
use ringverbs::{
    AccessFlags, CompletionQueue, Error, Inline, QueuePair, RemoteAddr, Transport, WorkRequest,
};

/// The description of memory: address, key, length, big-endian.
const INFO: usize = 16;
/// The ping length of an rping server without `-S`.
const PING: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Sends the server the memory to read or write.
fn advertise(qp: &mut QueuePair, memory: RemoteAddr) -> Result<()> {
    let mut info = [0; INFO];
    info[..8].copy_from_slice(&memory.addr.to_be_bytes());
    info[8..12].copy_from_slice(&memory.rkey.to_be_bytes());
    info[12..].copy_from_slice(&(PING as u32).to_be_bytes());
    Ok(qp
        .post(WorkRequest::send(Inline(&info)))
        .map_err(Error::from)?)
}

/// Waits for the server's go-ahead.
fn go_ahead(qp: &mut QueuePair, cq: &mut CompletionQueue, connection: &Connection) -> Result<()> {
    loop {
        for _ in 0..1000 {
            if let Some(mut completion) = cq.poll_one()? {
                if let Err(failure) = completion.result {
                    return Err(failure.into());
                }
                // Sends complete here, too; they have no buffer.
                if let Some(buffer) = completion.take_buffer() {
                    return Ok(qp.receive(buffer, 0)?);
                }
            }
        }
        if connection.is_over()? {
            bail!("the server has disconnected");
        }
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address: IpAddr = arguments
        .next()
        .context("usage: rping_client ADDRESS [COUNT [PORT]]")?
        .parse()?;
    let count: u32 = arguments.next().map_or(Ok(10), |count| count.parse())?;
    let port = arguments.next().map_or(Ok(7174), |port| port.parse())?;

    // The device with the route to the server.
    let connector = Connector::resolve(SocketAddr::from((address, port)), TIMEOUT)?;
    let context = connector.device()?.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(16).build()?;
    let mut qp = domain
        .queue_pair(Transport::Reliable, &cq)
        .inline(INFO as u32)
        .build()?;

    // Memory that the server may read, and memory that it may write.
    let ping = domain.alloc_remote(PING, AccessFlags::REMOTE_READ)?;
    let pong = domain.alloc_remote(PING, AccessFlags::REMOTE_WRITE)?;

    connector.prepare(&mut qp)?;
    for buffer in domain.alloc(2 * INFO)?.into_buffers(INFO).take(2) {
        qp.receive(buffer, 0)?;
    }
    let connection = connector.connect(&mut qp, &Options::default(), Some(TIMEOUT))?;
    println!("connected to {:?}", connection.peer_addr()?);

    let (mut sent, mut back) = ([0u8; PING], [0u8; PING]);
    for number in 0..count {
        // The format of rping: text, letters, and a zero at the end.
        let text = format!("rdma-ping-{number}: ");
        sent[..text.len()].copy_from_slice(text.as_bytes());
        for (index, byte) in (0u32..).zip(&mut sent).skip(text.len()) {
            *byte = b'A' + ((number + index) % 58) as u8;
        }
        sent[PING - 1] = 0;
        ping.write_at(0, &sent)?;
        advertise(&mut qp, ping.key())?;
        go_ahead(&mut qp, &mut cq, &connection)?;
        advertise(&mut qp, pong.key())?;
        go_ahead(&mut qp, &mut cq, &connection)?;
        pong.read_at(0, &mut back)?;
        if sent != back {
            bail!("ping {number} came back changed");
        }
        println!("ping data: {}", String::from_utf8_lossy(&back[..PING - 1]));
    }
    println!("{count} pings came back as they were sent");
    connection.disconnect(&mut qp)?;
    Ok(connection.wait_disconnected(Some(TIMEOUT))?)
}
