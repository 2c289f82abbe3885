//! Datagrams: one queue pair talks to any number of peers, whose addresses it
//! keeps in an address vector of its own.
//!
//! `cargo run --example datagram [DEVICE]`

use ringverbs::{AddressHandle, Device, Error, Inline, Operation, Transport, WorkRequest};

/// Datagrams carry a queue key, and are dropped where it is another.
const QKEY: u32 = 0x1234_5678;
/// What comes before the data in a received datagram: its route header.
const HEADER: usize = 40;

/// Where a peer is.
struct Peer {
    name: &'static str,
    path: AddressHandle,
    qp_num: u32,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = match std::env::args().nth(1) {
        Some(name) => Device::named(&name)?,
        None => Device::first()?,
    };
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(64).build()?;
    let local = context.local_address(1)?;
    let make = || -> Result<_, Box<dyn std::error::Error>> {
        let builder = domain.queue_pair(Transport::Datagram, &cq).inline(64);
        let mut qp = builder.build()?;
        qp.activate(&local, QKEY)?;
        Ok(qp)
    };
    let mut sender = make()?;
    let mut receivers = [make()?, make()?, make()?];

    // The address vector. (All in one process here, so all at one address.)
    let names = ["first", "second", "third"];
    let mut vector = Vec::new();
    for (name, qp) in names.into_iter().zip(&receivers) {
        vector.push(Peer {
            name,
            path: domain.address_handle_to(&local, local.gid)?,
            qp_num: qp.qp_num(),
        });
    }

    let mut buffers = domain.alloc(3 * 256)?.into_buffers(256);
    for (token, qp) in (0..).zip(&mut receivers) {
        let Some(buffer) = buffers.next() else { break };
        qp.receive(buffer, token)?;
    }
    for peer in &vector {
        let text = format!("hello, {}", peer.name);
        let request = WorkRequest::send(Inline(text.as_bytes()));
        let posted = sender.post(request.to(&peer.path, peer.qp_num, QKEY));
        posted.map_err(Error::from)?;
    }

    for _ in 0..6 {
        let mut completion = cq.poll_until_one()?;
        let sender = completion.sender();
        match completion.result {
            Ok(success) if completion.operation == Operation::Receive => {
                // Where it came from, for an answer.
                let from = sender.map(|gid| gid.to_string()).unwrap_or_default();
                let Some(buffer) = completion.take_buffer() else {
                    continue;
                };
                let text = String::from_utf8_lossy(&buffer[HEADER..]).into_owned();
                println!("{from} queue pair {}: {text}", success.src_qp);
            }
            Ok(_) => {}
            Err(failure) => println!("{:?} failed: {failure}", completion.operation),
        }
    }
    Ok(())
}
