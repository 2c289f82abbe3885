//! A peer for perftest's `ib_send_bw`, `ib_write_bw` and `ib_read_bw` with the
//! options `-x GID -n COUNT -s SIZE`:
//!
//! - `perftest_peer DEVICE send|write|read COUNT SIZE` is the server of
//!   `ib_send_bw -x GID -n COUNT -s SIZE HOST`, and so on;
//! - with HOST as last argument it is the client.
//!
//! `ringverbs perf` measures between two sides of its own, and more operations.

mod wire;

use std::time::{Duration, Instant};

use ringverbs::qp::{ReadyToReceive, ReadyToSend};
use ringverbs::{
    AccessFlags, Buffer, CompletionQueue, Device, ProtectionDomain, QueuePair, RemoteAddr,
    Transport,
};
use wire::{CYCLE, Destination, Peer, Report};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Maximum of outstanding operations: the number of receives that perftest posts.
/// A sender that finds none retries, but on a slow machine the retries may run
/// out.
const DEPTH: u64 = 512;
/// Maximum of outstanding reads.
const READS: u8 = 16;
/// Time without a completion after which the peer is given up.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, PartialEq)]
enum Measured {
    Send,
    Write,
    Read,
}

/// Checks received data. perftest fills its memory with random bytes, of which
/// one in 256 is zero, so there must be few zeros.
fn check(bytes: &[u8]) -> Result<()> {
    let zeros = bytes.iter().filter(|byte| **byte == 0).count();
    if zeros * 10 > bytes.len() + 10 {
        return Err(format!("{zeros} of {} bytes are zero", bytes.len()).into());
    }
    Ok(())
}

/// Returns the buffer of the next operation, which must have succeeded.
fn next(cq: &mut CompletionQueue) -> Result<Buffer> {
    let since = Instant::now();
    while since.elapsed() < PATIENCE {
        for _ in 0..1000 {
            if let Some(mut completion) = cq.poll_one()? {
                if let Err(failure) = completion.result {
                    return Err(failure.into());
                }
                return Ok(completion.take_buffer().ok_or("a completion of nothing")?);
            }
        }
    }
    Err("nothing has completed for 20 s".into())
}

/// Runs the client's part: `count` operations, pipelined. Returns the time taken.
fn measure(
    measured: Measured,
    count: u64,
    buffers: Vec<Buffer>,
    there: RemoteAddr,
    (qp, cq): (&mut QueuePair, &mut CompletionQueue),
) -> Result<Duration> {
    let post = |qp: &mut QueuePair, buffer: Buffer| match measured {
        Measured::Send => qp.send(buffer, 0),
        Measured::Write => qp.write(buffer, there, 0),
        Measured::Read => qp.read(buffer, there, 0),
    };
    let (start, mut posted, mut done) = (Instant::now(), 0, 0);
    for buffer in buffers.into_iter().take(count.try_into()?) {
        post(qp, buffer)?;
        posted += 1;
    }
    while done < count {
        let buffer = next(cq)?;
        if measured == Measured::Read {
            check(&buffer)?;
        }
        done += 1;
        if posted < count {
            post(qp, buffer)?;
            posted += 1;
        }
    }
    Ok(start.elapsed())
}

/// Allocates buffers with content like perftest's: hardly any byte is zero.
fn buffers(domain: &ProtectionDomain, count: usize, size: usize) -> Result<Vec<Buffer>> {
    let all = domain.alloc(size * count)?.into_buffers(size);
    // Regions are whole pages, which may have room for more buffers than
    // requested.
    Ok(all
        .take(count)
        .map(|mut buffer| {
            for (index, byte) in (0u64..).zip(buffer.iter_mut()) {
                *byte = (index % 255 + 1) as u8;
            }
            buffer
        })
        .collect())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (device, measured, count, size, host) = match &arguments[..] {
        [device, measured, count, size] => (device, measured, count, size, None),
        [device, measured, count, size, host] => (device, measured, count, size, Some(host)),
        _ => return Err("perftest_peer DEVICE send|write|read COUNT SIZE [HOST]".into()),
    };
    let measured = match measured.as_str() {
        "send" => Measured::Send,
        "write" => Measured::Write,
        "read" => Measured::Read,
        other => return Err(format!("send, write or read, not {other}").into()),
    };
    let (count, size): (u64, usize) = (count.parse()?, size.parse()?);

    let context = Device::named(device)?.open()?;
    let domain = context.alloc_pd()?;
    let local = context.local_address(1)?;
    let depth = count.clamp(1, DEPTH) as u32;
    let mut cq = context.completion_queue().entries(2 * depth).build()?;
    let mut qp = domain
        .queue_pair(Transport::Reliable, &cq)
        .send_depth(depth)
        .recv_depth(depth)
        .build()?;
    // A peer with small messages cycles through a page.
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let memory = domain.alloc_remote(size.max(CYCLE as usize), access)?;
    let mut buffers = buffers(&domain, depth as usize, size)?;
    let endpoint = qp.endpoint(&local);
    let ours = Destination {
        lid: local.lid,
        out_reads: READS.into(),
        qp_num: endpoint.qp_num,
        psn: endpoint.psn,
        rkey: memory.key().rkey,
        addr: memory.key().addr,
        gid: local.gid,
    };

    let mut peer = Peer::meet(host.map(String::as_str))?;
    let mtu = peer.agree(local.mtu)?;
    let theirs = peer.shake(ours)?;
    qp.initialize(&local)?;
    let path = local.path_to(theirs.gid, theirs.lid);
    let receive = ReadyToReceive::reliable(path, theirs.qp_num, theirs.psn, mtu);
    qp.transition(receive.max_dest_rd_atomic(READS))?;
    let reads = theirs.out_reads.min(READS.into()) as u8;
    qp.transition(ReadyToSend::reliable(ours.psn).max_rd_atomic(reads))?;
    let server = host.is_none();
    if server && measured == Measured::Send {
        for buffer in buffers.drain(..) {
            qp.receive(buffer, 0)?;
        }
    }
    // Both sides can receive, and both know it; senders announce once more that
    // they start.
    peer.shake(ours)?;
    peer.shake(ours)?;
    if measured == Measured::Send {
        peer.shake(ours)?;
    }

    let mut report = Report::default();
    if !server {
        let there = RemoteAddr::new(theirs.addr, theirs.rkey);
        let took = measure(measured, count, buffers, there, (&mut qp, &mut cq))?.as_secs_f64();
        report.size = size as u64;
        report.iterations = count;
        report.average = count as f64 * size as f64 / took / f64::from(1 << 20);
        report.peak = report.average;
        report.rate = count as f64 / took / 1e6;
    } else if measured == Measured::Send {
        for _ in 0..count {
            let buffer = next(&mut cq)?;
            check(&buffer)?;
            if buffer.len() != size {
                return Err(format!("{} bytes instead of {size}", buffer.len()).into());
            }
            qp.receive(buffer, 0)?;
        }
    }
    // Only the client knows when writes to, or reads of, the server's memory are
    // done.
    if measured != Measured::Send {
        peer.shake(ours)?;
        let theirs = peer.report(report)?;
        if server {
            report = theirs;
        }
    }
    peer.part(ours)?;
    if server && measured == Measured::Write {
        let mut bytes = vec![0; size];
        memory.read_at(0, &mut bytes)?;
        check(&bytes)?;
    }
    println!(
        "{} messages of {} bytes, {:.2} MiB/s",
        report.iterations, report.size, report.average
    );
    Ok(())
}
