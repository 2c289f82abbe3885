//! One thread that waits for completions and a socket together, by epoll: each
//! line from the socket is sent as an RDMA message, and each received message is
//! printed.
//!
//! `cargo run --example epoll [DEVICE]`

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use ringverbs::completion::{ContextFormat, WaitObject};
use ringverbs::{Device, Transport, WorkRequest};

const LINES: usize = 10;
const SIZE: usize = 64;
/// The epoll data of the two descriptors.
const QUEUE: u64 = 1;
const SOCKET: u64 = 2;

fn main() -> anyhow::Result<()> {
    let device = match std::env::args().nth(1) {
        Some(name) => Device::named(&name)?,
        None => Device::first_or_embedded()?,
    };
    eprintln!("device {}", device.name());
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let queue = context.completion_queue().entries(64);
    let reader = queue.reader::<ContextFormat>().wait_object(WaitObject::Fd);
    let mut reader = reader.build()?;
    let local = context.local_address(1)?;
    let make = || {
        domain
            .queue_pair(Transport::Reliable, reader.queue())
            .build()
    };
    let (mut sender, mut receiver) = (make()?, make()?);
    let (a, b) = (sender.endpoint(&local), receiver.endpoint(&local));
    sender.connect(&local, &b)?;
    receiver.connect(&local, &a)?;
    let mut buffers = domain.alloc(2 * LINES * SIZE)?.into_buffers(SIZE);
    for token in 0..LINES as u64 {
        let buffer = buffers.next().context("there is a buffer for each")?;
        receiver.receive(buffer, token)?;
    }

    // A thread that writes a line from time to time.
    let (mut far, near) = UnixStream::pair()?;
    let writer = std::thread::spawn(move || {
        for number in 0..LINES {
            std::thread::sleep(Duration::from_millis(20));
            writeln!(far, "line {number}")?;
        }
        Ok::<_, std::io::Error>(())
    });
    near.set_nonblocking(true)?;
    let mut lines = BufReader::new(near);
    let mut line = String::new();

    let epoll = Epoll::new(EpollCreateFlags::empty())?;
    epoll.add(reader.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, QUEUE))?;
    epoll.add(
        lines.get_ref().as_fd(),
        EpollEvent::new(EpollFlags::EPOLLIN, SOCKET),
    )?;
    let (mut received, mut socket_is_ready) = (0, false);
    while received < LINES {
        if std::mem::take(&mut socket_is_ready) {
            // Reads all available bytes; a line may arrive in pieces.
            while lines.read_line(&mut line).is_ok_and(|count| count > 0) {
                let mut buffer = buffers.next().context("there is a buffer for each")?;
                buffer.copy_from(line.trim_end().as_bytes())?;
                sender.post(WorkRequest::send(buffer).unsignaled())?;
                line.clear();
            }
        }
        while let Some(mut entry) = reader.read_one()? {
            // Sends are not signalled, so this is a receive.
            if let Some(buffer) = std::mem::take(&mut entry.payload).into_buffer() {
                println!("{}: {}", entry.token, String::from_utf8_lossy(&buffer));
                received += 1;
            }
        }
        // The loop may sleep only after the queue was armed and checked again.
        // Otherwise completions are read first, and the socket is only polled.
        let sleep = received < LINES && reader.try_wait()?;
        let timeout = if sleep {
            EpollTimeout::NONE
        } else {
            EpollTimeout::ZERO
        };
        let mut events = [EpollEvent::empty(); 4];
        let count = epoll.wait(&mut events, timeout)?;
        for event in &events[..count] {
            match event.data() {
                QUEUE => reader.consume_events()?,
                _ => socket_is_ready = true,
            }
        }
    }
    writer
        .join()
        .map_err(|_| anyhow::anyhow!("the writer has panicked"))??;
    println!("{received} lines came by RDMA");
    Ok(())
}
