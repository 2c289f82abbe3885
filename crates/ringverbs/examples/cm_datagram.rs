//! Datagrams to a service that is found by IP address: the connection manager
//! returns its queue pair number and queue key.
//!
//! `cargo run --example cm_datagram` runs the service, or with an ADDRESS the
//! client. Either side may be rdma-core's `udaddy`, or `udaddy -s ADDRESS`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use ringverbs::cm::{Connector, Listener, Options};
use ringverbs::{
    AddressHandle, Completion, CompletionQueue, Gid, Inline, Operation, ProtectionDomain,
    QueuePair, Transport, WorkRequest,
};

/// udaddy's.
const PORT: u16 = 7174;
const MESSAGES: usize = 10;
const SIZE: usize = 100;
/// Bytes of the route header in front of the data of a received datagram.
const HEADER: usize = 40;
const TIMEOUT: Duration = Duration::from_secs(10);

/// A queue pair and its completions.
fn make(domain: &ProtectionDomain) -> Result<(QueuePair, CompletionQueue)> {
    let cq = domain.context().completion_queue().entries(64).build()?;
    let builder = domain.queue_pair(Transport::Datagram, &cq);
    Ok((builder.inline(SIZE as u32).build()?, cq))
}

fn post_receives(domain: &ProtectionDomain, qp: &mut QueuePair) -> Result<()> {
    let room = HEADER + SIZE;
    for buffer in domain.alloc(MESSAGES * room)?.into_buffers(room) {
        qp.receive(buffer, 0)?;
    }
    Ok(())
}

/// Sends all datagrams, each with our queue pair number for the reply.
fn send(qp: &mut QueuePair, path: &AddressHandle, number: u32, key: u32) -> Result<()> {
    let ours = qp.qp_num();
    for _ in 0..MESSAGES {
        let request = WorkRequest::send(Inline(&[b'x'; SIZE])).immediate(ours);
        qp.post(request.to(path, number, key))
            .map_err(ringverbs::Error::from)?;
    }
    Ok(())
}

/// Waits until all sends or receives have completed, and returns the last one. Fails
/// if a datagram was lost.
fn all(cq: &mut CompletionQueue, operation: Operation) -> Result<Completion> {
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < TIMEOUT {
        let Some(completion) = cq.poll_one()? else {
            continue;
        };
        let bytes = completion.result?.byte_len as usize;
        if completion.operation != operation {
            continue;
        }
        if operation == Operation::Receive && bytes != HEADER + SIZE {
            bail!("{bytes} bytes with the header");
        }
        count += 1;
        if count == MESSAGES {
            return Ok(completion);
        }
    }
    bail!("{count} of {MESSAGES} datagrams")
}

fn client(address: IpAddr) -> Result<()> {
    let connector = Connector::resolve_datagram(SocketAddr::from((address, PORT)), TIMEOUT)?;
    let domain = connector.device()?.open()?.alloc_pd()?;
    let (mut qp, mut cq) = make(&domain)?;
    connector.prepare(&mut qp)?;
    post_receives(&domain, &mut qp)?;
    let found = connector.connect(&mut qp, &Options::default(), Some(TIMEOUT))?;
    let service = found.service().context("no service")?;
    println!("the service is queue pair {}", service.qp_num);
    let path = domain.address_handle(&service.path)?;
    send(&mut qp, &path, service.qp_num, service.qkey)?;
    all(&mut cq, Operation::Receive)?;
    println!("{MESSAGES} datagrams there and back");
    Ok(())
}

fn service() -> Result<()> {
    let listener = Listener::bind_datagram(SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT)))?;
    let request = listener.next_request(None)?.context("no request")?;
    let domain = request.device()?.open()?.alloc_pd()?;
    let (mut qp, mut cq) = make(&domain)?;
    request.prepare(&mut qp)?;
    post_receives(&domain, &mut qp)?;
    let _accepted = request.accept(&mut qp, &Options::default())?;
    // The client's address is in its datagrams.
    let last = all(&mut cq, Operation::Receive)?;
    let number = last.result?.immediate().context("no number")?;
    let local = domain.context().local_address(1)?;
    let path = last.reply_address(&local).context("no address")?;
    let (lid, gid) = (path.dlid, Gid(path.grh.dgid));
    println!("from {gid}, LID {lid}, queue pair {number}");
    let key = qp.query()?.qkey;
    let path = domain.address_handle(&path)?;
    send(&mut qp, &path, number, key)?;
    all(&mut cq, Operation::Send)?;
    println!("{MESSAGES} datagrams there and back");
    Ok(())
}

fn main() -> Result<()> {
    match std::env::args().nth(1) {
        Some(address) => client(address.parse()?),
        None => service(),
    }
}
