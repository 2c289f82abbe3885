//! A peer for perftest's `ib_send_bw`, `ib_write_bw` and `ib_read_bw` with the
//! options `-x GID -n COUNT -s SIZE`:
//!
//! - `perftest_peer DEVICE send|write|read COUNT SIZE` is the server of
//!   `ib_send_bw -x GID -n COUNT -s SIZE HOST`, and so on;
//! - with HOST as last argument it is the client.
//!
//! `ringverbs perf` has its own protocol, and more operations.

mod protocol;

use std::time::{Duration, Instant};

use protocol::{CYCLE_SIZE, Destination, Peer, Report};
use ringverbs::qp::{ReadyToReceive, ReadyToSend};
use ringverbs::{
    AccessFlags, Buffer, CompletionQueue, Device, ProtectionDomain, QueuePair, RemoteAddr,
    Transport,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Maximum number of outstanding operations: the number of receives that perftest posts. A
/// sender without a receive retries, but on a slow machine its retries may be exceeded.
const DEPTH: u64 = 512;
/// Maximum number of outstanding reads.
const MAX_READS: u8 = 16;
/// Time without a completion after which the measurement fails.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, PartialEq)]
enum Operation {
    Send,
    Write,
    Read,
}

/// Checks received data. perftest fills its memory with random bytes, so only about one
/// byte in 256 may be zero.
fn check(bytes: &[u8]) -> Result<()> {
    let zeros = bytes.iter().filter(|byte| **byte == 0).count();
    if zeros * 10 > bytes.len() + 10 {
        return Err(format!("{zeros} of {} bytes are zero", bytes.len()).into());
    }
    Ok(())
}

/// Waits for the next completion, which must be a success, and returns its buffer.
fn next_buffer(cq: &mut CompletionQueue) -> Result<Buffer> {
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        for _ in 0..1000 {
            if let Some(mut completion) = cq.poll_one()? {
                if let Err(failure) = completion.result {
                    return Err(failure.into());
                }
                return Ok(completion
                    .take_buffer()
                    .ok_or("a completion without a buffer")?);
            }
        }
    }
    Err("no completion for 20 s".into())
}

/// Runs the client's part: `count` operations, pipelined. Returns the time taken.
fn measure(
    operation: Operation,
    count: u64,
    buffers: Vec<Buffer>,
    remote: RemoteAddr,
    (qp, cq): (&mut QueuePair, &mut CompletionQueue),
) -> Result<Duration> {
    let post = |qp: &mut QueuePair, buffer: Buffer| match operation {
        Operation::Send => qp.send(buffer, 0),
        Operation::Write => qp.write(buffer, remote, 0),
        Operation::Read => qp.read(buffer, remote, 0),
    };
    let (start, mut posted, mut done) = (Instant::now(), 0, 0);
    for buffer in buffers.into_iter().take(count.try_into()?) {
        post(qp, buffer)?;
        posted += 1;
    }
    while done < count {
        let buffer = next_buffer(cq)?;
        if operation == Operation::Read {
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

/// Allocates buffers with data that, like perftest's, has few zeros.
fn buffers(domain: &ProtectionDomain, count: usize, size: usize) -> Result<Vec<Buffer>> {
    let all = domain.alloc(size * count)?.into_buffers(size);
    // A region consists of whole pages, so it may have more buffers than requested.
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
    let (device, operation, count, size, host) = match &arguments[..] {
        [device, operation, count, size] => (device, operation, count, size, None),
        [device, operation, count, size, host] => (device, operation, count, size, Some(host)),
        _ => return Err("perftest_peer DEVICE send|write|read COUNT SIZE [HOST]".into()),
    };
    let operation = match operation.as_str() {
        "send" => Operation::Send,
        "write" => Operation::Write,
        "read" => Operation::Read,
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
    // perftest cycles small messages through a page.
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let memory = domain.alloc_remote(size.max(CYCLE_SIZE as usize), access)?;
    let mut buffers = buffers(&domain, depth as usize, size)?;
    let endpoint = qp.endpoint(&local);
    let ours = Destination {
        lid: local.lid,
        out_reads: MAX_READS.into(),
        qp_num: endpoint.qp_num,
        psn: endpoint.psn,
        rkey: memory.key().rkey,
        addr: memory.key().addr,
        gid: local.gid,
    };

    let mut peer = Peer::connect(host.map(String::as_str))?;
    let mtu = peer.exchange_parameters(local.mtu)?;
    let theirs = peer.exchange_keys(ours)?;
    qp.initialize(&local)?;
    let path = local.path_to(theirs.gid, theirs.lid);
    let receive = ReadyToReceive::reliable(path, theirs.qp_num, theirs.psn, mtu);
    qp.transition(receive.max_dest_rd_atomic(MAX_READS))?;
    let reads = theirs.out_reads.min(MAX_READS.into()) as u8;
    qp.transition(ReadyToSend::reliable(ours.psn).max_rd_atomic(reads))?;
    let server = host.is_none();
    if server && operation == Operation::Send {
        for buffer in buffers.drain(..) {
            qp.receive(buffer, 0)?;
        }
    }
    // Both sides are ready to receive; before sends there is a further exchange.
    peer.exchange_keys(ours)?;
    peer.exchange_keys(ours)?;
    if operation == Operation::Send {
        peer.exchange_keys(ours)?;
    }

    let mut report = Report::default();
    if !server {
        let remote = RemoteAddr::new(theirs.addr, theirs.rkey);
        let elapsed = measure(operation, count, buffers, remote, (&mut qp, &mut cq))?.as_secs_f64();
        report.size = size as u64;
        report.iterations = count;
        report.average = count as f64 * size as f64 / elapsed / f64::from(1 << 20);
        report.peak = report.average;
        report.rate = count as f64 / elapsed / 1e6;
    } else if operation == Operation::Send {
        for _ in 0..count {
            let buffer = next_buffer(&mut cq)?;
            check(&buffer)?;
            if buffer.len() != size {
                return Err(format!("{} bytes instead of {size}", buffer.len()).into());
            }
            qp.receive(buffer, 0)?;
        }
    }
    // Only the client knows when its writes and reads are complete.
    if operation != Operation::Send {
        peer.exchange_keys(ours)?;
        let theirs = peer.exchange_reports(report)?;
        if server {
            report = theirs;
        }
    }
    peer.close(ours)?;
    if server && operation == Operation::Write {
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
