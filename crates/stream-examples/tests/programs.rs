//! tokio, hyper and tonic over a device. `RXE_ADDR` is the address of its network
//! interface: in a guest, `programs --ignored --test-threads=1`. Without one,
//! `on_the_embedded_device` runs all of it.
#![allow(missing_docs, reason = "a test")]

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use hyper::{Method, StatusCode};
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use ringverbs_stream_examples::{grpc, http};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt;

fn listener() -> (RdmaListener, SocketAddr) {
    let ip = std::env::var("RXE_ADDR").expect("RXE_ADDR: the address of an RDMA device");
    let address = SocketAddr::from((ip.parse::<IpAddr>().expect("an address"), 0));
    let listener = RdmaListener::bind(address).expect("bind");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

async fn pair() -> (RdmaStream, RdmaStream) {
    let (listener, to) = listener();
    let (client, server) = tokio::join!(RdmaStream::connect(to), listener.accept());
    (client.expect("connect"), server.expect("accept").0)
}

fn bytes(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    };
    (0..len).map(step).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an RDMA device"]
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
#[ignore = "needs an RDMA device"]
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
#[ignore = "needs an RDMA device"]
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
#[ignore = "needs an RDMA device"]
async fn connection_refused() {
    let (listener, to) = listener();
    drop(listener);
    let error = RdmaStream::connect(to).await.expect_err("nobody listens");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an RDMA device"]
async fn hyper_serves() {
    let (listener, to) = listener();
    let server = tokio::spawn(http::serve(listener));
    let mut clients = Vec::new();
    for seed in 0..4 {
        clients.push(tokio::spawn(async move {
            let stream = RdmaStream::connect(to).await.expect("connect");
            let mut client = http::Client::new(stream).await.expect("handshake");
            // Several on one connection.
            let get = client.request(Method::GET, "/", Bytes::new()).await;
            assert_eq!(get.unwrap(), (StatusCode::OK, "hello over RDMA\n".into()));
            for len in [0, 1, 65_536, 2_500_001] {
                let body = Bytes::from(bytes(seed, len));
                let answer = client.request(Method::POST, "/echo", body.clone()).await;
                assert!(answer.unwrap() == (StatusCode::OK, body), "{len} bytes");
            }
            let zeros = client
                .request(Method::GET, "/zeros/5000000", Bytes::new())
                .await;
            let (_, zeros) = zeros.unwrap();
            assert!(zeros.len() == 5_000_000 && zeros.iter().all(|byte| *byte == 0));
            let nothing = client.request(Method::GET, "/nothing", Bytes::new()).await;
            assert_eq!(nothing.unwrap().0, StatusCode::NOT_FOUND);
        }));
    }
    for client in clients {
        client.await.expect("a client");
    }
    server.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an RDMA device"]
async fn tonic_serves() {
    let (listener, to) = listener();
    let server = tokio::spawn(grpc::serve(listener));
    let mut clients = Vec::new();
    for seed in 0..3 {
        clients.push(tokio::spawn(async move {
            let mut client = grpc::Client::connect(to).await.expect("connect");
            for len in [0, 1, 100_000, 3_000_000] {
                let message = grpc::Message {
                    payload: bytes(seed, len).into(),
                    times: 7,
                };
                let answer = client.unary(message.clone()).await.expect("an answer");
                assert!(answer == message, "{len} bytes");
            }
            let message = grpc::Message {
                payload: bytes(seed, 50_000).into(),
                times: 60,
            };
            let mut answers = client.repeat(message.clone()).await.expect("answers");
            let mut count = 0;
            while let Some(answer) = answers.next().await {
                let answer = answer.expect("an answer");
                assert!(answer.times == count && answer.payload == message.payload);
                count += 1;
            }
            assert_eq!(count, 60);
        }));
    }
    for client in clients {
        client.await.expect("a client");
    }
    server.abort();
}

/// The rest of this program, on the ConnectX in the process, which needs nothing
/// of the machine. This program again: it is named by the environment.
#[test]
fn on_the_embedded_device() {
    let name = format!("ringverbs-programs-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored"])
        .env(
            "RINGVERBS_DEVICE",
            format!("embedded:{}", directory.display()),
        )
        .env("RXE_ADDR", "127.0.0.1")
        .output()
        .unwrap();
    let _ = std::fs::remove_dir_all(&directory);
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.contains("6 passed; 0 failed"), "{out}");
    println!("{out}");
}
