//! The client and the server over a device. `RXE_ADDR` is the address of its network
//! interface: in a guest, `grpc --ignored --test-threads=1`. The tests that are not
//! ignored run on the embedded device.
#![allow(missing_docs, reason = "a test")]

#[path = "../examples/echo/mod.rs"]
mod echo;

use std::io;
use std::net::SocketAddr;

use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use ringverbs_tonic::{Incoming, RdmaConnector};
use testing::{bytes, program};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt;

async fn listener() -> (RdmaListener, SocketAddr) {
    let listener = RdmaListener::bind(program::address()).await.expect("bind");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn tonic_serves() {
    let (listener, to) = listener().await;
    let server = tokio::spawn(echo::serve(Incoming::new(listener)));
    let mut clients = Vec::new();
    for seed in 0..3 {
        clients.push(tokio::spawn(async move {
            let mut client = echo::Client::connect(to).await.expect("connect");
            for len in [0, 1, 100_000, 3_000_000] {
                let message = echo::Message {
                    payload: bytes(seed, len).into(),
                    times: 7,
                };
                let answer = client.unary(message.clone()).await.expect("an answer");
                assert!(answer == message, "{len} bytes");
            }
            let message = echo::Message {
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
    // The service has the client's addresses.
    let mut client = echo::Client::connect(to).await.expect("connect");
    let peer_info = client.peer_info().await.expect("an answer");
    let address = to.ip().to_string();
    assert!(peer_info.contains(&address), "{peer_info}");
    server.abort();
}

/// A protocol between the stream and HTTP/2, as TLS is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn a_handshake_comes_first() {
    let (listener, to) = listener().await;
    let incoming = Incoming::new(listener).over(|mut stream: RdmaStream| async move {
        let mut byte = [0];
        stream.read_exact(&mut byte).await?;
        (byte == *b"R")
            .then_some(stream)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    });
    let server = tokio::spawn(echo::serve(incoming));
    let connector = RdmaConnector::new().over(|mut stream: RdmaStream, _| async {
        stream.write_all(b"R").await?;
        Ok(stream)
    });
    let mut client = echo::Client::connect_with(connector, to)
        .await
        .expect("connect");
    let message = echo::Message {
        payload: bytes(1, 10).into(),
        times: 1,
    };
    assert_eq!(
        client.unary(message.clone()).await.expect("an answer"),
        message
    );
    let silent = echo::Client::connect(to).await;
    if let Ok(mut client) = silent {
        client
            .unary(message)
            .await
            .expect_err("there was no handshake");
    }
    server.abort();
}

/// The rest of this program.
#[test]
fn on_the_embedded_device() {
    program::run_ignored_tests(2, &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes() {
    if program::ran_in_child("two_processes") {
        return;
    }
    let server = program::Server::start("grpc_server");
    let mut client = echo::Client::connect(server.address).await.unwrap();
    let message = echo::Message {
        payload: vec![9; 100_000].into(),
        times: 3,
    };
    assert!(client.unary(message.clone()).await.unwrap() == message);
}
