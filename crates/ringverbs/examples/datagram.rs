//! Datagrams: one queue pair communicates with any number of peers, and a datagram's headers
//! name its sender.
//!
//! `cargo run --example datagram [DEVICE]`

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Context as _;
use ringverbs::completion::{ROUTE_HEADER, RawAddress};
use ringverbs::{Device, Error, Inline, Operation, QueuePair, Transport, WorkRequest};

/// The queue key of the datagrams; a receiver with another key drops them.
const QKEY: u32 = 0x1234_5678;

const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> anyhow::Result<()> {
    let device = match std::env::args().nth(1) {
        Some(name) => Device::named(&name)?,
        None => Device::first_or_embedded()?,
    };
    eprintln!("device {}", device.name());
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(64).build()?;
    let local = context.local_address(1)?;
    let make = || -> anyhow::Result<_> {
        let builder = domain.queue_pair(Transport::Datagram, &cq).inline(64);
        let mut qp = builder.build()?;
        qp.activate(&local, QKEY)?;
        Ok(qp)
    };
    let mut sender = make()?;
    let mut receivers = [make()?, make()?, make()?];

    // The paths to the peers, by address; here all are in one process.
    let address = |qp: &QueuePair| RawAddress {
        gid: local.gid,
        qp_num: qp.qp_num(),
    };
    let mut peers = HashMap::new();
    for qp in receivers.iter().chain([&sender]) {
        peers.insert(address(qp), domain.address_handle_to(&local, &local)?);
    }
    let from = address(&sender);
    let to = receivers.each_ref().map(address);

    let mut buffers = domain.alloc(3 * 256)?.into_buffers(256);
    for (token, qp) in (0..).zip(&mut receivers) {
        let Some(buffer) = buffers.next() else { break };
        qp.receive(buffer, token)?;
    }
    for (to, name) in to.iter().zip(["first", "second", "third"]) {
        let Some(path) = peers.get(to) else { continue };
        let text = format!("hello, {name}");
        let request = WorkRequest::send(Inline(text.as_bytes()));
        let posted = sender.post(request.to(path, to.qp_num, QKEY));
        posted.map_err(Error::from)?;
    }

    for _ in 0..6 {
        // The loss of a datagram is not reported.
        let completion = cq.poll_for(TIMEOUT)?;
        let mut completion = completion.context("not all datagrams have come")?;
        let gid = completion.sender();
        match completion.result {
            Ok(success) if completion.operation == Operation::Receive => {
                let (Some(gid), Some(buffer)) = (gid, completion.take_buffer()) else {
                    continue;
                };
                let address = RawAddress {
                    gid,
                    qp_num: success.src_qp,
                };
                // A known sender can be answered by its path.
                let who = match peers.contains_key(&address) {
                    true if address == from => "the sender",
                    true => "another peer",
                    false => "a stranger",
                };
                let text = String::from_utf8_lossy(&buffer[ROUTE_HEADER..]);
                println!("{who}, {address}: {text}");
            }
            Ok(_) => {}
            Err(failure) => println!("{:?} failed: {failure}", completion.operation),
        }
    }
    Ok(())
}
