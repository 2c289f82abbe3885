//! Streams of tokio over a device. `RXE_ADDR` is the address of its network
//! interface: in a guest, `tokio_streams --ignored --test-threads=1`. Without one,
//! `on_the_embedded_device` runs all of it.
#![allow(missing_docs, reason = "a test")]

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use ringverbs::stream::RdmaListener as StdListener;
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use testing::{bytes, program};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn listener() -> (RdmaListener, SocketAddr) {
    let listener = RdmaListener::bind(program::address()).await.expect("bind");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

async fn pair() -> (RdmaStream, RdmaStream) {
    let (listener, to) = listener().await;
    let (client, server) = tokio::join!(RdmaStream::connect(to), listener.accept());
    (client.expect("connect"), server.expect("accept").0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn both_directions_at_once() {
    let (client, server) = pair().await;
    let mut tasks = Vec::new();
    for (seed, stream) in [(1, client), (2, server)] {
        let (mut read, mut write) = tokio::io::split(stream);
        tasks.push(tokio::spawn(async move {
            let data = bytes(seed, 8 << 20);
            for piece in data.chunks(123_457) {
                write.write_all(piece).await.expect("write");
            }
            write.shutdown().await.expect("shutdown");
        }));
        tasks.push(tokio::spawn(async move {
            let mut data = Vec::new();
            read.read_to_end(&mut data).await.expect("read");
            assert!(data == bytes(3 - seed, 8 << 20));
        }));
    }
    for task in tasks {
        task.await.expect("a task");
    }
}

/// Credits that go out behind the end of what is written have to arrive as well
/// before all has.
#[tokio::test]
#[ignore = "run by another test, or on an RDMA device"]
async fn the_end_arrives_while_the_peer_is_still_read() {
    let (mut client, mut server) = pair().await;
    // More than the client has receives for.
    let data = bytes(7, 4 << 20);
    let sent = data.clone();
    let server = tokio::spawn(async move {
        server.write_all(&sent).await.expect("write");
        server
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let _ = tokio::time::timeout(Duration::ZERO, client.shutdown()).await;
    let mut read = vec![0; data.len()];
    client.read_exact(&mut read).await.expect("read");
    assert!(read == data);
    // The server's stream is open until then.
    let ended = tokio::time::timeout(Duration::from_secs(20), client.shutdown()).await;
    ended.expect("all has arrived").expect("shutdown");
    drop(server.await.expect("a task"));
}

/// Reads and writes that are dropped before they are done.
#[tokio::test]
#[ignore = "run by another test, or on an RDMA device"]
async fn cancelled() {
    let (mut client, mut server) = pair().await;
    let short = Duration::from_millis(1);
    let data = bytes(5, 3 << 20);
    let writer = tokio::spawn(async move {
        let mut at = 0;
        while at < data.len() {
            let end = (at + 100_000).min(data.len());
            // What was taken is said by a write that is done; others took none.
            if let Ok(written) = tokio::time::timeout(short, client.write(&data[at..end])).await {
                at += written.expect("write");
            }
        }
        client.shutdown().await.expect("shutdown");
    });
    let mut read = Vec::new();
    let mut buffer = vec![0; 70_000];
    loop {
        match tokio::time::timeout(short, server.read(&mut buffer)).await {
            Err(_) => tokio::time::sleep(short).await,
            Ok(Ok(0)) => break,
            Ok(count) => read.extend_from_slice(&buffer[..count.expect("read")]),
        }
    }
    writer.await.expect("the writer");
    assert!(read == bytes(5, 3 << 20));
}

#[tokio::test]
#[ignore = "run by another test, or on an RDMA device"]
async fn connection_refused() {
    let (listener, to) = listener().await;
    drop(listener);
    let error = RdmaStream::connect(to).await.expect_err("nobody listens");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

#[tokio::test]
#[ignore = "run by another test, or on an RDMA device"]
async fn connect_info_names_both_ends() {
    let (client, server) = pair().await;
    let (a, b) = (
        client.connect_info().unwrap(),
        server.connect_info().unwrap(),
    );
    assert_eq!((a.qp_num, a.peer_qp_num), (b.peer_qp_num, b.qp_num));
    assert_ne!(a.qp_num, b.qp_num);
    assert_eq!((a.local_addr, a.peer_addr), (b.peer_addr, b.local_addr));
    assert!(a.peer_addr.is_some() && a.peer_gid.is_some());
    assert_eq!(a.device, b.device);
    assert!(!a.device.is_empty());
}

/// Streams that were accepted at the same time share their channels, also those that threads
/// and those that tasks of two runtimes wait for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn accepted_at_the_same_time() {
    const STREAMS: u8 = 9;
    const ROUNDS: u8 = 200;
    let other_runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let listener = StdListener::bind(program::address()).expect("bind");
    let to = listener.local_addr().expect("an address");
    let clients: Vec<_> = (0..STREAMS)
        .map(|number| {
            tokio::spawn(async move {
                let mut client = RdmaStream::connect(to).await.expect("connect");
                let mut data = Vec::new();
                for round in 0..ROUNDS {
                    client.write_all(&[number, round]).await.expect("write");
                    let mut answer = [0; 2];
                    client.read_exact(&mut answer).await.expect("read");
                    assert_eq!(answer, [number, round]);
                    if number % 2 == 0 {
                        tokio::time::sleep(Duration::from_micros(100)).await;
                    }
                }
                client.shutdown().await.expect("shutdown");
                client.read_to_end(&mut data).await.expect("read");
                assert!(data == [7; 3 << 20]);
            })
        })
        .collect();
    // Until all requests have arrived.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (mut threads, mut tasks) = (Vec::new(), Vec::new());
    for number in 0..STREAMS {
        let (mut stream, _) = listener.accept().expect("accept");
        if number % 3 == 0 {
            threads.push(std::thread::spawn(move || {
                let mut data = [0; 100];
                loop {
                    match stream.read(&mut data).expect("read") {
                        0 => break,
                        count => stream.write_all(&data[..count]).expect("write"),
                    }
                }
                stream.write_all(&[7; 3 << 20]).expect("write");
            }));
            continue;
        }
        let serve = async move {
            let mut stream = RdmaStream::from_std(stream).expect("a stream");
            let mut data = [0; 100];
            loop {
                match stream.read(&mut data).await.expect("read") {
                    0 => break,
                    count => stream.write_all(&data[..count]).await.expect("write"),
                }
            }
            stream.write_all(&[7; 3 << 20]).await.expect("write");
        };
        tasks.push(if number % 3 == 1 {
            tokio::spawn(serve)
        } else {
            other_runtime.spawn(serve)
        });
    }
    for task in clients.into_iter().chain(tasks) {
        task.await.expect("a task");
    }
    for thread in threads {
        thread.join().expect("a thread");
    }
    other_runtime.shutdown_background();
}

/// The rest of this program.
#[test]
fn on_the_embedded_device() {
    program::run_ignored_tests(6, &[]);
}
