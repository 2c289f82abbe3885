//! The example servers, each a process, and clients of theirs, on the ConnectX
//! in the process.
#![allow(missing_docs, reason = "a test")]

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use bytes::Bytes;
use hyper::{Method, StatusCode};
use ringverbs::stream::tokio::RdmaStream;
use ringverbs_stream_examples::{grpc, http};

/// Names the device for both sides.
const DEVICE: &str = "RINGVERBS_DEVICE";

/// A process that does not outlive this value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(name: &str) -> (Server, SocketAddr) {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.extend(["examples", name]);
    let child = Command::new(path)
        .arg("127.0.0.1:0")
        .stdout(Stdio::piped())
        .spawn();
    let mut server = Server(child.unwrap());
    let mut line = String::new();
    let mut lines = BufReader::new(server.0.stdout.take().unwrap());
    lines.read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").unwrap();
    (server, address.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_answer() {
    if std::env::var(DEVICE).is_err() {
        // This program again, with the device named.
        let name = format!("ringverbs-servers-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let status = Command::new(std::env::current_exe().unwrap())
            .env(DEVICE, format!("embedded:{}", directory.display()))
            .args(["servers_answer", "--exact", "--nocapture"])
            .status();
        let _ = std::fs::remove_dir_all(&directory);
        assert!(status.unwrap().success());
        return;
    }
    let (_server, to) = serve("http_server");
    let stream = RdmaStream::connect(to).await.unwrap();
    let mut client = http::Client::new(stream).await.unwrap();
    let body = Bytes::from(vec![7; 300_000]);
    let answer = client.request(Method::POST, "/echo", body.clone()).await;
    assert!(answer.unwrap() == (StatusCode::OK, body));

    let (_server, to) = serve("grpc_server");
    let mut client = grpc::Client::connect(to).await.unwrap();
    let message = grpc::Message {
        payload: vec![9; 100_000].into(),
        times: 3,
    };
    assert!(client.unary(message.clone()).await.unwrap() == message);
}
