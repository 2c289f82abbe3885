//! A generator and a receiver of Ethernet frames, by raw packet queues of two contexts.
//! Each frame has a number, and its bytes are checked. Then the same with UDP sockets.
//!
//! `cargo run --release --example packets [DEVICE [BYTES [SECONDS]]]`

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use ringverbs::packet::{Checksums, FlowMatch};
use ringverbs::{Context, Device};

/// A locally administered address, and an EtherType for experiments.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const ETHER_TYPE: [u8; 2] = [0x88, 0xb5];
/// Frames in flight: fewer than the receiver has buffers, so that none is lost.
const WINDOW: u64 = 128;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let device = match arguments.next() {
        Some(name) => Device::named(&name)?,
        None => Device::first_or_embedded()?,
    };
    let bytes: usize = arguments.next().as_deref().unwrap_or("1024").parse()?;
    let seconds: f64 = arguments.next().as_deref().unwrap_or("2").parse()?;
    anyhow::ensure!(bytes >= 22, "a frame has a header and a number");
    println!("device {}, frames of {bytes} bytes", device.name());

    let make = |context: Context| context.alloc_pd()?.packet_queue().frame_size(bytes).build();
    let (mut sender, mut receiver) = (make(device.open()?)?, make(device.open()?)?);
    receiver.add_flow(FlowMatch::Destination(MAC))?;
    measure("raw packets", bytes, seconds, |count| {
        // No buffer is free while all are in flight.
        let frames = (count.sent..count.sent + count.room()).map_while(|number| {
            let mut frame = sender.buffer(bytes)?;
            fill(&mut frame, number);
            Some(frame)
        });
        let mut frames = frames.collect::<Vec<_>>().into_iter();
        let sent = sender.send_all(&mut frames, Checksums::Unchanged);
        count.sent += sent.map_err(|refused| refused.error)? as u64;
        sender.poll(drop)?;
        receiver.poll(|frame| count.check(&frame))?;
        Ok(())
    })?;

    let there = UdpSocket::bind("127.0.0.1:0")?;
    there.set_read_timeout(Some(Duration::from_secs(10)))?;
    let here = UdpSocket::bind("127.0.0.1:0")?;
    here.connect(there.local_addr()?)?;
    let mut frame = vec![0; bytes];
    measure("UDP sockets", bytes, seconds, |count| {
        for _ in 0..count.room().min(16) {
            fill(&mut frame, count.sent);
            count.sent += here.send(&frame).map(|_| 1)?;
        }
        while count.received < count.sent {
            let length = there.recv(&mut frame)?;
            count.check(&frame[..length]);
        }
        Ok(())
    })
}

/// Writes the frame with this number.
fn fill(frame: &mut [u8], number: u64) {
    frame.fill(number as u8);
    frame[..6].copy_from_slice(&MAC);
    frame[12..14].copy_from_slice(&ETHER_TYPE);
    frame[14..22].copy_from_slice(&number.to_be_bytes());
}

/// Counts of sent and received frames; `expected` has room for one frame.
#[derive(Default)]
struct Count {
    sent: u64,
    received: u64,
    expected: Vec<u8>,
}

impl Count {
    fn room(&self) -> u64 {
        WINDOW - (self.sent - self.received)
    }

    fn check(&mut self, frame: &[u8]) {
        fill(&mut self.expected, self.received);
        assert!(frame == self.expected, "frame {} is another", self.received);
        self.received += 1;
    }
}

/// Repeats a step for some seconds; prints the progress, then the rate.
fn measure(
    what: &str,
    bytes: usize,
    seconds: f64,
    mut step: impl FnMut(&mut Count) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut count = Count {
        expected: vec![0; bytes],
        ..Count::default()
    };
    let (began, mut shown) = (Instant::now(), 0.0);
    while began.elapsed().as_secs_f64() < seconds {
        step(&mut count)?;
        let now = began.elapsed().as_secs_f64();
        if now - shown > 0.5 {
            shown = now;
            eprintln!("{what}: {now:.1} s, {} frames", count.received);
        }
    }
    let rate = count.received as f64 / began.elapsed().as_secs_f64();
    let mega = rate * bytes as f64 / 1e6;
    println!("{what}: {rate:.0} packets/s, {mega:.0} MB/s, all as they were sent");
    Ok(())
}
