//! Streams over a device. `RXE_ADDR` is the address of its network interface: in
//! a guest, `streams --ignored --test-threads=1 --nocapture`. Without one,
//! `on_the_embedded_device` runs all of it but the bandwidth.
#![allow(missing_docs, reason = "a test")]

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::Shutdown;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::cm::{Connector, Listener, Options};
use ringverbs::stream::{RdmaListener, RdmaStream, StreamOptions};
use ringverbs::{Completion, CompletionQueue, QueuePair, Transport, WorkRequest};
use testing::program::{self, address};

fn pair_with(options: StreamOptions) -> (RdmaStream, RdmaStream) {
    let listener = RdmaListener::bind_with(address(), &options).expect("bind");
    let to = listener.local_addr().expect("an address");
    let client = thread::spawn(move || RdmaStream::connect_with(to, &options).expect("connect"));
    let (server, _) = listener.accept().expect("accept");
    (client.join().expect("a client"), server)
}

fn pair() -> (RdmaStream, RdmaStream) {
    pair_with(StreamOptions::new())
}

/// A random number generator with a seed (splitmix64).
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// Writes it in pieces of random sizes, some of several slices.
fn write_pieces(mut stream: &RdmaStream, data: &[u8], numbers: &mut Rng) -> io::Result<()> {
    let mut at = 0;
    while at < data.len() {
        let most = if numbers.below(4) == 0 { 300_000 } else { 900 };
        let len = (1 + numbers.below(most)).min(data.len() - at);
        let piece = &data[at..at + len];
        at += if numbers.below(2) == 0 {
            let (a, b) = piece.split_at(len / 3);
            stream.write_vectored(&[IoSlice::new(a), IoSlice::new(&[]), IoSlice::new(b)])?
        } else {
            stream.write(piece)?
        };
    }
    Ok(())
}

/// Reads in pieces of random sizes, until the end.
fn read_pieces(mut stream: &RdmaStream, numbers: &mut Rng) -> io::Result<Vec<u8>> {
    let mut data = Vec::new();
    let mut buffer = vec![0; 200_000];
    loop {
        let most = if numbers.below(2) == 0 { 200_000 } else { 700 };
        let len = 1 + numbers.below(most);
        match stream.read(&mut buffer[..len])? {
            0 => return Ok(data),
            count => data.extend_from_slice(&buffer[..count]),
        }
    }
}

#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn both_directions_at_once() {
    const BYTES: usize = 12 << 20;
    for (receives, size, bytes) in [(16, 65536, BYTES), (8, 256, 200_000)] {
        let options = StreamOptions::new().receives(receives).message_size(size);
        let (client, server) = pair_with(options);
        assert_eq!(client.peer_addr().unwrap(), server.local_addr().unwrap());
        let data = [1, 2].map(|seed| Rng(seed).bytes(bytes));
        thread::scope(|scope| {
            for (side, stream) in [&client, &server].into_iter().enumerate() {
                let (mine, theirs) = (&data[side], &data[1 - side]);
                scope.spawn(move || {
                    write_pieces(stream, mine, &mut Rng(3)).expect("write");
                    stream.shutdown(Shutdown::Write).expect("shutdown");
                });
                scope.spawn(move || {
                    let read = read_pieces(stream, &mut Rng(4)).expect("read");
                    assert!(read == *theirs, "the bytes are not those that were written");
                });
            }
        });
    }
}

#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn half_closed() {
    let (mut client, mut server) = pair();
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(
        client.write(b"more").unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );
    let mut text = String::new();
    server.read_to_string(&mut text).unwrap();
    assert_eq!(text, "question");
    // The end stays the end, and the other direction is open.
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);
    let answer = Rng(5).bytes(5_000_000);
    thread::scope(|scope| {
        scope.spawn(|| {
            server.write_all(&answer).unwrap();
            server.close(Duration::from_secs(10)).unwrap();
        });
        let mut read = Vec::new();
        client.read_to_end(&mut read).unwrap();
        assert!(read == answer);
    });
    // Now the peer is gone as well.
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn a_drop_loses_nothing() {
    let (mut client, mut server) = pair();
    let data = Rng(6).bytes(700_000);
    client.write_all(&data).unwrap();
    drop(client);
    // The peer is long gone, its bytes are here.
    thread::sleep(Duration::from_millis(300));
    let mut read = Vec::new();
    server.read_to_end(&mut read).unwrap();
    assert!(read == data);
    let failed = (0..200).find_map(|_| {
        thread::sleep(Duration::from_millis(10));
        server.write(b"is anybody there").err()
    });
    let kind = failed.expect("a write to nobody").kind();
    assert_eq!(kind, ErrorKind::BrokenPipe);
}

#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn unread_direction_does_not_block_the_other() {
    let (client, server) = pair();
    let data = Rng(7).bytes(8 << 20);
    client
        .set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let stuck = loop {
        if let Err(error) = (&client).write(&[1; 100_000]) {
            break error;
        }
    };
    assert_eq!(stuck.kind(), ErrorKind::TimedOut);
    thread::scope(|scope| {
        scope.spawn(|| {
            (&server).write_all(&data).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
        });
        let read = read_pieces(&client, &mut Rng(8)).unwrap();
        assert!(read == data);
    });
}

#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn connection_refused() {
    let listener = RdmaListener::bind(address()).unwrap();
    let to = listener.local_addr().unwrap();
    drop(listener);
    let error = RdmaStream::connect(to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
    let taken = RdmaListener::bind(address()).unwrap();
    let error = RdmaListener::bind(taken.local_addr().unwrap()).unwrap_err();
    // As in rdma_cm, the latter of wildcard and loopback addresses.
    let kinds = [ErrorKind::AddrInUse, ErrorKind::AddrNotAvailable];
    assert!(kinds.contains(&error.kind()), "{error}");
    let options = StreamOptions::new().receives(7);
    let error = RdmaListener::bind_with(address(), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn timeouts() {
    let (client, _server) = pair();
    let patience = Duration::from_millis(150);
    client.set_read_timeout(Some(patience)).unwrap();
    let start = Instant::now();
    let error = (&client).read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= patience);
    assert!(client.set_read_timeout(Some(Duration::ZERO)).is_err());
}

/// Another process that writes for ever: this program again.
#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn the_peer_is_killed() {
    if let Ok(to) = std::env::var("STREAM_VICTIM") {
        let mut stream = RdmaStream::connect(to).unwrap();
        loop {
            if let Err(error) = stream.write_all(&[7; 100_000]) {
                panic!("the victim's own: {error}");
            }
        }
    }
    let listener = RdmaListener::bind(address()).unwrap();
    for writes in [false, true] {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["the_peer_is_killed", "--ignored", "--exact"])
            .env("STREAM_VICTIM", listener.local_addr().unwrap().to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = vec![0; 50_000];
        let mut total = 0;
        while total < 3_000_000 {
            let count = stream.read(&mut buffer).unwrap();
            assert!(buffer[..count].iter().all(|byte| *byte == 7));
            total += count;
        }
        victim.kill().unwrap();
        victim.wait().unwrap();
        let start = Instant::now();
        let error = loop {
            let result = if writes {
                stream.write(&buffer)
            } else {
                stream.read(&mut buffer)
            };
            match result {
                Ok(0) => panic!("an end that nobody has sent"),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        println!("killed: {error} after {:?}", start.elapsed());
        assert!(matches!(
            error.kind(),
            ErrorKind::ConnectionReset | ErrorKind::TimedOut
        ));
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn many_connections() {
    const CLIENTS: usize = 60;
    let options = StreamOptions::new().receives(8).sends(4).message_size(4096);
    let listener = RdmaListener::bind_with(address(), &options).unwrap();
    let to = listener.local_addr().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for stream in listener.incoming().take(CLIENTS) {
                let mut stream = stream.unwrap();
                scope.spawn(move || {
                    let mut writer = stream.try_clone().unwrap();
                    io::copy(&mut stream, &mut writer).unwrap();
                });
            }
        });
        // All are open at the same time.
        let mut clients: Vec<_> = (0..CLIENTS)
            .map(|_| RdmaStream::connect_with(to, &options).unwrap())
            .collect();
        for (seed, stream) in clients.iter_mut().enumerate() {
            let data = Rng(seed as u64).bytes(20_000);
            stream.write_all(&data).unwrap();
        }
        for (seed, mut stream) in clients.into_iter().enumerate() {
            stream.shutdown(Shutdown::Write).unwrap();
            let mut read = Vec::new();
            stream.read_to_end(&mut read).unwrap();
            assert!(read == Rng(seed as u64).bytes(20_000));
        }
    });
}

/// Sends in flight of a raw transfer, and receives: so many that the sender
/// rarely finds none, which would cost it a pause.
const DEPTH: u32 = 16;
const RECEIVES: u32 = 128;
const MESSAGE: usize = 64 * 1024;

/// Streams whose handshakes were open at the same time share their channels on the accepting
/// side: an event that one thread reads is another one's.
#[test]
#[ignore = "run by another test, or on an RDMA device"]
fn accepted_at_the_same_time() {
    const STREAMS: usize = 8;
    const ROUNDS: usize = 200;
    let before = testing::open_files();
    let both = pair();
    let of_pair = testing::open_files().saturating_sub(before);
    drop(both);

    let listener = RdmaListener::bind(address()).expect("bind");
    let to = listener.local_addr().expect("an address");
    let before = testing::open_files();
    let connect = || thread::spawn(move || RdmaStream::connect(to).expect("connect"));
    let clients: Vec<_> = (0..STREAMS).map(|_| connect()).collect();
    // Until all requests have arrived.
    thread::sleep(Duration::from_millis(500));
    let servers: Vec<_> = (0..STREAMS)
        .map(|_| listener.accept().expect("accept").0)
        .collect();
    let clients: Vec<_> = clients.into_iter().map(|it| it.join().unwrap()).collect();
    let of_all = testing::open_files().saturating_sub(before);
    println!("descriptors: {of_pair} of a pair, {of_all} of {STREAMS} at once");
    assert!(of_all <= (STREAMS + 2) * of_pair / 2);

    thread::scope(|scope| {
        for mut server in servers {
            scope.spawn(move || {
                let mut data = [0; 100];
                loop {
                    match server.read(&mut data).expect("read") {
                        0 => break,
                        count => server.write_all(&data[..count]).expect("write"),
                    }
                }
                // The drop delivers it, when the peer reads at last.
                server.write_all(&[7; 3 << 20]).expect("write");
            });
        }
        for (number, mut client) in clients.into_iter().enumerate() {
            scope.spawn(move || {
                let mut data = [0; 100];
                for round in 0..ROUNDS {
                    let text = [number as u8, round as u8];
                    client.write_all(&text).expect("write");
                    client.read_exact(&mut data[..2]).expect("read");
                    assert_eq!(data[..2], text);
                    if number % 2 == 0 {
                        thread::sleep(Duration::from_micros(100 * number as u64));
                    }
                }
                client.shutdown(Shutdown::Write).expect("shutdown");
                let mut rest = Vec::new();
                client.read_to_end(&mut rest).expect("read");
                assert!(rest == [7; 3 << 20]);
            });
        }
    });
}

fn raw_side(
    context: &ringverbs::Context,
    buffers: u32,
) -> (QueuePair, CompletionQueue, Vec<ringverbs::Buffer>) {
    let domain = context.alloc_pd().unwrap();
    let channel = context.completion_channel().unwrap();
    let cq = context
        .completion_queue()
        .entries(DEPTH + RECEIVES)
        .channel(&channel)
        .build()
        .unwrap();
    let qp = domain
        .queue_pair(Transport::Reliable, &cq)
        .send_depth(DEPTH)
        .recv_depth(RECEIVES)
        .build()
        .unwrap();
    let region = domain.alloc(buffers as usize * MESSAGE).unwrap();
    (qp, cq, region.into_buffers(MESSAGE).collect())
}

/// Waits as streams do: two threads that spin would take the device's time.
fn next(cq: &mut CompletionQueue) -> Completion {
    loop {
        if let Some(completion) = cq.poll_one().unwrap() {
            return completion;
        }
        let channel = cq.channel().unwrap().clone();
        if !cq.arm(false).unwrap() {
            channel.wait(None).unwrap();
        }
    }
}

/// Sends of the same size and number in flight, with nothing copied.
fn raw_transfer(bytes: usize) -> Duration {
    let listener = Listener::bind(address()).unwrap();
    let to = listener.local_addr().unwrap().unwrap();
    let messages = bytes / MESSAGE;
    thread::scope(|scope| {
        scope.spawn(|| {
            let request = listener.next_request(None).unwrap().unwrap();
            let context = request.device().unwrap().open().unwrap();
            let (mut qp, mut cq, buffers) = raw_side(&context, RECEIVES);
            request.prepare(&mut qp).unwrap();
            for buffer in buffers {
                qp.receive(buffer, 0).unwrap();
            }
            let connection = request.accept(&mut qp, &Options::default()).unwrap();
            connection.wait_established(None).unwrap();
            for _ in 0..messages {
                let buffer = next(&mut cq).take_buffer().unwrap();
                assert_eq!(buffer.len(), MESSAGE);
                qp.receive(buffer, 0).unwrap();
            }
        });
        let patience = Duration::from_secs(5);
        let connector = Connector::resolve(to, patience).unwrap();
        let context = connector.device().unwrap().open().unwrap();
        let (mut qp, mut cq, mut buffers) = raw_side(&context, DEPTH);
        let connection = connector
            .connect(&mut qp, &Options::default(), Some(patience))
            .unwrap();
        let start = Instant::now();
        let mut done = 0;
        let mut posted = 0;
        while done < messages {
            while posted < messages && !buffers.is_empty() {
                qp.batch(|batch| {
                    for buffer in buffers.drain(..buffers.len().min(4)) {
                        batch.post(WorkRequest::send(buffer)).unwrap();
                        posted += 1;
                    }
                    Ok::<_, ringverbs::Error>(())
                })
                .unwrap();
            }
            let mut completion = next(&mut cq);
            completion.result.unwrap();
            done += 1;
            buffers.extend(completion.take_buffer());
        }
        let elapsed = start.elapsed();
        drop(connection);
        elapsed
    })
}

fn stream_transfer(bytes: usize) -> Duration {
    let (client, server) = pair();
    thread::scope(|scope| {
        scope.spawn(|| {
            let data = vec![9; 1 << 20];
            for _ in 0..bytes / data.len() {
                (&client).write_all(&data).unwrap();
            }
            client.shutdown(Shutdown::Write).unwrap();
        });
        let mut buffer = vec![0; 1 << 20];
        let start = Instant::now();
        let mut total = 0;
        loop {
            match (&server).read(&mut buffer).unwrap() {
                0 => break,
                count => total += count,
            }
        }
        assert_eq!(total, bytes);
        start.elapsed()
    })
}

#[test]
#[ignore = "takes the time of a measurement"]
fn bandwidth() {
    const BYTES: usize = 64 << 20;
    const ROUNDS: u32 = 8;
    // A stream copies, on either side. Where the ConnectX is a program beside an
    // emulated guest, its own copying is not emulated, and is many times as fast.
    let emulated = std::env::var("RXE_DEV").is_ok_and(|name| name.starts_with("mlx5"));
    let least = if emulated { 0.25 } else { 0.8 };
    let rate = |time: Duration| (BYTES as f64 / (1 << 20) as f64) / time.as_secs_f64();
    let mut best = [0.0f64; 2];
    let mut shares = Vec::new();
    let mut share = 0.0;
    for round in 1..=ROUNDS {
        let now = [rate(raw_transfer(BYTES)), rate(stream_transfer(BYTES))];
        best = [best[0].max(now[0]), best[1].max(now[1])];
        shares.push(now[1] / now[0]);
        shares.sort_by(f64::total_cmp);
        // Of the best of each, as a neighbour on the machine only slows one down; or
        // the median of those measured one after the other, as a machine may have been
        // quicker for one of the first only.
        let of_best = best[1] / best[0];
        let median = shares[(shares.len() - 1) / 2];
        share = of_best.max(median);
        let [raw, stream] = now;
        println!(
            "round {round}: raw {raw:.0} MiB/s, stream {stream:.0} MiB/s: \
             {of_best:.2} of the best, median {median:.2}"
        );
        if round >= 3 && share >= least {
            break;
        }
    }
    assert!(share >= least, "the stream is too slow: {share:.2}");
}

/// The rest of this program.
#[test]
fn on_the_embedded_device() {
    program::run_ignored_tests(9, &["--skip", "bandwidth"]);
}
