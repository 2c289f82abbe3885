//! A message in each direction between two machines, which exchange their endpoints
//! over TCP and the messages over RDMA.
//!
//! `hello_tcp listen 0.0.0.0:7000` on one, `hello_tcp connect ADDRESS:7000` on
//! the other, or both on the same.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use ringverbs::{Device, Operation, Transport, tcp};

const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, address, device @ ..] = &arguments[..] else {
        anyhow::bail!("usage: hello_tcp listen|connect ADDRESS:PORT [DEVICE]");
    };

    let device = match device {
        [name, ..] => Device::named(name)?,
        [] => Device::first_or("embedded:")?,
    };
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(16).build()?;
    let mut qp = domain.queue_pair(Transport::Reliable, &cq).build()?;
    let local = context.local_address(1)?;

    // The peer may send as soon as it is connected, so the receive is posted
    // earlier, in state INIT, where no message can arrive.
    let mut outgoing = domain.alloc(8192)?.into_buffer();
    let incoming = outgoing.split_off(4096);
    qp.initialize(&local)?;
    qp.receive(incoming, 1)?;

    // Each side sends the endpoint of its queue pair to the other.
    let stream = if role == "listen" {
        TcpListener::bind(address)?.accept()?.0
    } else {
        TcpStream::connect(address)?
    };
    let peer = tcp::connect(&mut qp, &local, &stream, PATIENCE)?;
    println!("connected to {peer}");

    outgoing.copy_from(format!("hello from the side that said {role}").as_bytes())?;
    qp.send(outgoing, 2)?;
    for _ in 0..2 {
        let mut done = cq.poll_until_one()?;
        let result = done.result;
        result?;
        if let (Operation::Receive, Some(buffer)) = (done.operation, done.take_buffer()) {
            println!("received: {}", String::from_utf8_lossy(&buffer));
        }
    }
    // Exiting destroys the queue pair, so both sides must be done.
    Ok(tcp::barrier(&stream, PATIENCE)?)
}
