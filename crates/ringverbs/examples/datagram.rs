//! Datagrams: one queue pair communicates with any number of peers. An address
//! vector numbers the peers, and finds the sender of a datagram.
//!
//! `cargo run --example datagram [DEVICE]`

use std::time::Duration;

use anyhow::Context as _;
use ringverbs::completion::{AddressVector, Peer, PeerId, ROUTE_HEADER, RawAddress};
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

    // The addresses of the peers; here all are in one process, at one address.
    let mut peers = AddressVector::new();
    let mut enter = |qp: &QueuePair| -> Result<PeerId, Error> {
        let address = RawAddress {
            gid: local.gid,
            qp_num: qp.qp_num(),
        };
        let path = domain.address_handle_to(&local, &local)?;
        let peer = Peer {
            address,
            path,
            qkey: QKEY,
        };
        Ok(peers.insert(address, peer))
    };
    let from = enter(&sender)?;
    let to = receivers.each_ref().map(&mut enter);

    let mut buffers = domain.alloc(3 * 256)?.into_buffers(256);
    for (token, qp) in (0..).zip(&mut receivers) {
        let Some(buffer) = buffers.next() else { break };
        qp.receive(buffer, token)?;
    }
    for (id, name) in to.into_iter().zip(["first", "second", "third"]) {
        let Some(peer) = peers.get(id?) else { continue };
        let text = format!("hello, {name}");
        let request = WorkRequest::send(Inline(text.as_bytes()));
        let posted = sender.post(request.to(&peer.path, peer.address.qp_num, peer.qkey));
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
                // A known sender can be answered: the address vector has the path.
                let who = match peers.find(&address) {
                    Some(id) if id == from => "the sender",
                    Some(_) => "another peer",
                    None => "a stranger",
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
