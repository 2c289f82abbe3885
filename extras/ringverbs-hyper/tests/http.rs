//! The client and the server over a device. `RXE_ADDR` is the address of its network
//! interface: in a guest, `http --ignored --test-threads=1`. The tests that are not
//! ignored run on the embedded device.
#![allow(missing_docs, reason = "a test")]

#[path = "../examples/service/mod.rs"]
mod service;

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use ringverbs::stream::StreamOptions;
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use ringverbs_hyper::{ConnectInfo, Incoming, RdmaConnector, serve, serve_until};
use testing::{bytes, program};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type HttpClient = Client<RdmaConnector, Full<Bytes>>;

fn client(http2: bool) -> HttpClient {
    Client::builder(TokioExecutor::new())
        .http2_only(http2)
        .build(RdmaConnector::new())
}

async fn ask(
    client: &HttpClient,
    to: SocketAddr,
    (method, path, body): (Method, &str, Bytes),
) -> (StatusCode, Bytes, ConnectInfo) {
    let request = Request::builder()
        .method(method)
        .uri(format!("http://{to}{path}"))
        .body(Full::new(body));
    let answer = client.request(request.unwrap()).await.expect("an answer");
    let (status, info) = (answer.status(), answer.extensions().get().cloned());
    let body = answer.into_body().collect().await.expect("a body");
    (status, body.to_bytes(), info.expect("who has answered"))
}

async fn listener() -> (RdmaListener, SocketAddr) {
    let listener = RdmaListener::bind(program::address()).await.expect("bind");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

async fn exercise(http2: bool) {
    let (listener, to) = listener().await;
    let server = tokio::spawn(serve(Incoming::new(listener), service_fn(service::answer)));
    let mut clients = Vec::new();
    for seed in 0..4 {
        clients.push(tokio::spawn(async move {
            let client = client(http2);
            let get = |path| (Method::GET, path, Bytes::new());
            let (status, body, info) = ask(&client, to, get("/")).await;
            assert_eq!((status, body), (StatusCode::OK, "hello over RDMA\n".into()));
            assert_eq!(info.peer_addr, Some(to));
            for len in [0, 1, 65_536, 2_500_001] {
                let sent = Bytes::from(bytes(seed, len));
                let (status, body, _) =
                    ask(&client, to, (Method::POST, "/echo", sent.clone())).await;
                assert!(status == StatusCode::OK && body == sent, "{len} bytes");
            }
            let (_, zeros, _) = ask(&client, to, get("/zeros/5000000")).await;
            assert!(zeros.len() == 5_000_000 && zeros.iter().all(|byte| *byte == 0));
            assert_eq!(
                ask(&client, to, get("/nothing")).await.0,
                StatusCode::NOT_FOUND
            );
            // The server knows who asks.
            let (_, body, info) = ask(&client, to, get("/peer")).await;
            assert_eq!(body, format!("{:?} {}", info.local_addr, info.qp_num));
        }));
    }
    for client in clients {
        client.await.expect("a client");
    }
    server.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn http1() {
    exercise(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn http2() {
    exercise(true).await;
}

/// A stop lets the requests that have begun end, and no more begin.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn a_stopped_server_answers_what_has_begun() {
    let (listener, to) = listener().await;
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let begun = std::sync::Arc::new(std::sync::Mutex::new(Some(begun)));
    let slow = service_fn(move |request| {
        if let Some(begun) = begun.lock().unwrap().take() {
            begun.send(()).unwrap();
        }
        async move {
            tokio::time::sleep(Duration::from_millis(300)).await;
            service::answer(request).await
        }
    });
    let stopped = async { stopped.await.unwrap_or(()) };
    let server = tokio::spawn(serve_until(Incoming::new(listener), slow, stopped));
    let client = client(false);
    let asked = ask(&client, to, (Method::GET, "/", Bytes::new()));
    let ((status, ..), ()) = tokio::join!(asked, async {
        has_begun.await.unwrap();
        stop.send(()).unwrap();
    });
    assert_eq!(status, StatusCode::OK);
    server.await.unwrap().expect("a server that has stopped");
    let refused = RdmaStream::connect(to).await.expect_err("nobody listens");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}

/// Peers that do not finish their handshake, or fail it, delay nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn a_silent_peer_delays_no_other() {
    let (listener, to) = listener().await;
    let greeting = |mut stream: RdmaStream| async move {
        let mut byte = [0];
        stream.read_exact(&mut byte).await?;
        (byte == *b"R")
            .then_some(stream)
            .ok_or_else(|| std::io::ErrorKind::InvalidData.into())
    };
    let incoming = Incoming::new(listener).over(greeting);
    let server = tokio::spawn(serve(incoming, service_fn(service::answer)));
    let small = StreamOptions::new().sends(2).receives(8).message_size(4096);
    let _silent = RdmaStream::connect_with(to, &small).await.unwrap();
    let mut wrong = RdmaStream::connect_with(to, &small).await.unwrap();
    wrong.write_all(b"W").await.unwrap();
    let connector = RdmaConnector::new()
        .options(&small)
        .over(|mut stream: RdmaStream, _| async {
            stream.write_all(b"R").await?;
            Ok(stream)
        });
    let client = Client::builder(TokioExecutor::new()).build::<_, Full<Bytes>>(connector);
    let answer = client.get(format!("http://{to}/").parse().unwrap());
    let answer = tokio::time::timeout(Duration::from_secs(8), answer).await;
    assert_eq!(
        answer.expect("in time").expect("an answer").status(),
        StatusCode::OK
    );
    // The failed one is disconnected.
    let mut rest = Vec::new();
    let _ = wrong.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
    server.abort();
}

/// A URI without a port that can be connected to, and one that nobody serves.
#[tokio::test]
#[ignore = "run by another test, or on an RDMA device"]
async fn errors_of_the_connector_are_the_streams() {
    let (listener, to) = listener().await;
    drop(listener);
    let error = client(false)
        .get(format!("http://{to}/").parse().unwrap())
        .await
        .unwrap_err();
    assert!(error.is_connect());
    let source =
        std::error::Error::source(&error).and_then(|error| error.downcast_ref::<std::io::Error>());
    assert_eq!(
        source.expect("an io::Error").kind(),
        std::io::ErrorKind::ConnectionRefused
    );
}

/// The rest of this program.
#[test]
fn on_the_embedded_device() {
    program::run_ignored_tests(5, &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes() {
    if program::ran_in_child("two_processes") {
        return;
    }
    let server = program::Server::start("http_server");
    let to = server.address;
    for http2 in [false, true] {
        let sent = Bytes::from(vec![7; 300_000]);
        let (status, body, _) =
            ask(&client(http2), to, (Method::POST, "/echo", sent.clone())).await;
        assert!(status == StatusCode::OK && body == sent);
    }
}

/// Connects to a server, which refuses the stream, closes it, or waits for a request.
async fn served(to: SocketAddr) -> Option<RdmaStream> {
    let mut stream = RdmaStream::connect(to).await.ok()?;
    let wait = Duration::from_millis(200);
    let ended = tokio::time::timeout(wait, stream.read(&mut [0])).await;
    ended.is_err().then_some(stream)
}

/// Clients that hold all descriptors of a server do not end it, however long others are
/// rejected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_outlives_a_lack_of_descriptors() {
    if program::ran_in_child("server_outlives_a_lack_of_descriptors") {
        return;
    }
    let example = program::example_path("http_server");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 48; exec \"$0\" 127.0.0.1:0"]);
    let server = program::Server::spawn(command.arg(example));
    let to = server.address;
    let mut streams = Vec::new();
    while let Some(stream) = served(to).await {
        streams.push(stream);
        assert!(streams.len() < 48, "the limit has no effect");
    }
    assert!(!streams.is_empty());
    // Longer than the server waits for other errors to end.
    let end = Instant::now() + Duration::from_secs(4);
    while Instant::now() < end {
        assert!(served(to).await.is_none());
    }
    drop(streams);
    // The server closes its streams in its own time.
    let end = Instant::now() + Duration::from_secs(20);
    let mut stream = loop {
        if let Some(stream) = served(to).await {
            break stream;
        }
        assert!(Instant::now() < end, "no stream is served");
    };
    let request = b"GET / HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// TLS by rustls, in the example, which checks a wrong name, too.
#[test]
fn tls() {
    let output = Command::new(program::example_path("https"))
        .env(program::DEVICE, "embedded")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(text, "hello over RDMA\nanother name is refused\n");
}
