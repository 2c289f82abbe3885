//! A gRPC service on one host and its clients on another, over devices that speak RoCE v2
//! over UDP: loopback addresses, and, as root and with ip(8), network namespaces. Each
//! client has its own connection and checks the responses. `CLIENTS` is the number of
//! clients of the second test.
#![allow(missing_docs, reason = "a test")]

#[path = "../examples/echo/mod.rs"]
#[allow(dead_code, reason = "the server's part of the service")]
mod echo;

use std::env;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use testing::hosts::Namespaces;
use testing::program::{self, DEVICE, Server};
use testing::{bytes, setting};
use tokio_stream::StreamExt;

/// Time limit, with a margin for a loaded machine.
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// The server's address, in the process of the clients.
const SERVER: &str = "RINGVERBS_TEST_SERVER";
const COUNT: &str = "RINGVERBS_TEST_CLIENTS";
/// The clients' address, in their process.
const FROM: &str = "RINGVERBS_TEST_FROM";

/// A program on a host: on the device with its address, in a network namespace.
fn command(namespace: Option<&str>, address: &str, program: &str) -> Command {
    let mut command = match namespace {
        Some(name) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", name, program]);
            command
        }
        None => Command::new(program),
    };
    command
        .env(DEVICE, format!("roce:{address}"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command
}

/// Runs a server on the first host, and `test` of this program with clients on the second.
fn serve(test: &str, hosts: [(Option<&str>, &str); 2], clients: usize) {
    let [(place, address), (other, from)] = hosts;
    let example = program::example_path("grpc_server");
    let mut server = command(place, address, example.to_str().unwrap());
    let server = Server::spawn(server.arg(format!("{address}:0")));

    let this = env::current_exe().unwrap();
    let began = Instant::now();
    let client_process = command(other, from, this.to_str().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(SERVER, server.address.to_string())
        .env(FROM, from)
        .env(COUNT, clients.to_string())
        .spawn()
        .unwrap();
    let output = program::wait_with_timeout(client_process, TIME_LIMIT);
    let said = String::from_utf8_lossy(&output.stdout);
    let right = output.status.success() && said.contains(&format!("{clients} clients"));
    assert!(right, "{output:?}");
    println!("{clients} clients: {:?}", began.elapsed());
}

/// In the clients' process, runs the clients and returns true.
fn run_as_clients() -> bool {
    let Ok(server) = env::var(SERVER) else {
        return false;
    };
    let to: SocketAddr = server.parse().unwrap();
    let count: u32 = setting(COUNT, 1);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let clients: Vec<_> = (0..count)
            .map(|it| tokio::spawn(run_client(to, it)))
            .collect();
        for client in clients {
            client.await.unwrap();
        }
    });
    println!("{count} clients");
    true
}

async fn run_client(to: SocketAddr, number: u32) {
    let mut client = echo::Client::connect(to).await.expect("connect");
    for (round, length) in [0, 1, 5_000, 100_000].into_iter().enumerate() {
        let message = echo::Message {
            payload: bytes(number * 8 + round as u32, length).into(),
            times: number,
        };
        let answer = client.unary(message.clone()).await.expect("an answer");
        assert!(answer == message, "client {number}, {length} bytes");
    }
    let message = echo::Message {
        payload: bytes(number * 8 + 7, 3_000).into(),
        times: 20,
    };
    let mut answers = client.repeat(message.clone()).await.expect("answers");
    for times in 0..message.times {
        let answer = answers.next().await.expect("one more").expect("an answer");
        assert!(answer.times == times && answer.payload == message.payload);
    }
    assert!(answers.next().await.is_none());
    let peer_info = client.peer_info().await.expect("an answer");
    assert!(peer_info.contains(&env::var(FROM).unwrap()), "{peer_info}");
}

#[test]
fn clients_on_another_address() {
    if run_as_clients() {
        return;
    }
    // Addresses that no other run of this test uses.
    let [.., high, low] = std::process::id().to_be_bytes();
    let [to, from] = [53, 54].map(|number| format!("127.{number}.{high}.{low}"));
    let hosts = [(None, &to[..]), (None, &from[..])];
    serve("clients_on_another_address", hosts, 10);
}

#[test]
fn a_hundred_clients_on_another_host() {
    if run_as_clients() {
        return;
    }
    let Some(namespaces) = Namespaces::new("grpc", 1500) else {
        return;
    };
    let host = |at: usize, address| (Some(&namespaces.0[at][..]), address);
    let hosts = [host(0, "192.0.2.1"), host(1, "192.0.2.2")];
    let clients = setting("CLIENTS", 100);
    serve("a_hundred_clients_on_another_host", hosts, clients);
}
