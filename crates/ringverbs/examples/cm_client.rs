//! A client that connects by IP address, and echoes the messages that it receives.
//!
//! Start the example `cm_server` or rdma-core's `ucmatose`, then
//! `cargo run --example cm_client ADDRESS [PORT]`

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ringverbs::cm::{self, Connector, Options};
use ringverbs::{Operation, Transport};

/// Messages in each direction, and the bytes of each: ucmatose's defaults.
const MESSAGES: usize = 10;
const SIZE: usize = 100;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Returns private data without its padding of zeros.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address: IpAddr = arguments
        .next()
        .context("usage: cm_client ADDRESS [PORT]")?
        .parse()?;
    let port: u16 = arguments.next().map_or(Ok(7471), |port| port.parse())?;

    // The queue pair must be on the device with the route to the server.
    let connector = Connector::resolve(SocketAddr::from((address, port)), TIMEOUT)?;
    let context = connector.device()?.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(64).build()?;
    let mut qp = domain.queue_pair(Transport::Reliable, &cq).build()?;

    // Receives must be posted before the server may send.
    connector.prepare(&mut qp)?;
    for buffer in domain
        .alloc(MESSAGES * SIZE)?
        .into_buffers(SIZE)
        .take(MESSAGES)
    {
        qp.receive(buffer, 0)?;
    }
    let connection = match connector.connect(&mut qp, &Options::default(), Some(TIMEOUT)) {
        Ok(connection) => connection,
        // The server's program rejected the request, or there is none.
        Err(error) => {
            if let cm::Error::Failed { private_data, .. } = &error {
                println!("the server says: {:?}", text(private_data));
            }
            return Err(error.into());
        }
    };
    println!(
        "connected to {:?}, which says: {:?}",
        connection.peer_addr()?,
        text(connection.private_data())
    );

    // Each message is sent back from the buffer in which it arrived.
    let mut received = 0;
    while received < MESSAGES {
        let Some(mut completion) = cq.poll_one()? else {
            // Checking the connection is a system call, so it is done only when
            // the completion queue is empty.
            if connection.is_over()? {
                bail!("the server is gone after {received} messages");
            }
            continue;
        };
        let success = completion.result?;
        // Sends complete here, too.
        if completion.operation != Operation::Receive {
            continue;
        }
        if success.byte_len as usize != SIZE {
            bail!("{} bytes instead of {SIZE}", success.byte_len);
        }
        let buffer = completion
            .take_buffer()
            .context("a receive has its buffer")?;
        println!("message {received} begins with {:?}", &buffer[..4]);
        received += 1;
        qp.send(buffer, 0)?;
    }

    // The server disconnects after the last message; answering the disconnect
    // ends its wait.
    connection.wait_disconnected(Some(TIMEOUT))?;
    connection.disconnect(&mut qp)?;
    println!("{received} messages went back; disconnected");
    Ok(())
}
