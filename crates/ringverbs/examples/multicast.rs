//! Multicast: each datagram reaches all members of a group.
//!
//! `cargo run --example multicast DEVICE GROUP COUNT` receives COUNT datagrams, with TEXT after
//! COUNT it sends them. GROUP is an IP address. Peers may be rdma-core's `mckey -m GROUP -b
//! ADDRESS`, or with `-s`.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use ringverbs::completion::ROUTE_HEADER;
use ringverbs::{Device, Error, Gid, Inline, Transport, WorkRequest};

/// The queue key of rdma_cm's groups.
const QKEY: u32 = 0x0123_4567;
/// Stands for all queue pairs of a group.
const MULTICAST_QPN: u32 = 0xff_ffff;
const SIZE: usize = 256;
const TIMEOUT: Duration = Duration::from_secs(30);

/// The group's address in packets of RoCE v2.
fn gid_of(group: IpAddr) -> Gid {
    match group {
        IpAddr::V4(group) => Gid(group.to_ipv6_mapped().octets()),
        IpAddr::V6(group) => Gid(group.octets()),
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, group, count, text @ ..] = &arguments[..] else {
        bail!("usage: multicast DEVICE GROUP COUNT [TEXT]");
    };
    let group = gid_of(group.parse().context("GROUP is no IP address")?);
    let count: u32 = count.parse().context("COUNT is no number")?;
    ensure!((1..=1024).contains(&count), "COUNT is 1 to 1024");
    let context = Device::named(device)?.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(count).build()?;
    let builder = domain.queue_pair(Transport::Datagram, &cq);
    let builder = builder.send_depth(count).recv_depth(count);
    let mut qp = builder.inline(SIZE as u32).build()?;
    let local = context.local_address(1)?;
    qp.activate(&local, QKEY)?;

    let Some(text) = text.first() else {
        let room = ROUTE_HEADER + SIZE;
        let buffers = domain.alloc(count as usize * room)?.into_buffers(room);
        for buffer in buffers.take(count as usize) {
            qp.receive(buffer, 0)?;
        }
        let _member = qp.join(group, 0)?;
        println!("joined {group}");
        for _ in 0..count {
            let completion = cq.poll_for(TIMEOUT)?;
            let mut completion = completion.context("not all datagrams have come")?;
            let length = completion.result?.byte_len as usize;
            let sender = completion.sender().context("no route header")?;
            let buffer = completion.take_buffer().context("no buffer")?;
            let text = String::from_utf8_lossy(&buffer[ROUTE_HEADER..length]);
            println!("{sender}: {text}");
        }
        return Ok(());
    };

    let path = domain.address_handle_to(&local, group)?;
    for token in 0..u64::from(count) {
        let request = WorkRequest::send(Inline(text.as_bytes())).to(&path, MULTICAST_QPN, QKEY);
        qp.post(request.token(token)).map_err(Error::from)?;
    }
    for _ in 0..count {
        let completion = cq.poll_for(TIMEOUT)?;
        completion.context("not all datagrams are sent")?.result?;
    }
    Ok(())
}
