//! Peers that neither answer nor refuse: a network that loses all packets, in a namespace of
//! its own. Whoever waits for the peer ends within the time that is documented, and nothing
//! stops a runtime.
#![allow(missing_docs, reason = "a test")]

use std::future::Future;
use std::io::{self, ErrorKind, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::cm::{Connector, manager::PortSpace};
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use ringverbs::stream::{RdmaListener as StdListener, RdmaStream as StdStream, StreamOptions};
use ringverbs::{CompletionQueue, Device, ProtectionDomain, QueuePair, Transport};
use testing::hosts::succeeds;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SERVER: Ipv4Addr = Ipv4Addr::new(127, 57, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 57, 0, 2);

/// Only a heavily loaded machine needs as much time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longer than a drop takes on a machine that is busy otherwise.
const AT_ONCE: Duration = Duration::from_millis(900);

fn device(address: Ipv4Addr) -> Device {
    Device::roce(&address.to_string()).expect("a device")
}

fn options(address: Ipv4Addr) -> StreamOptions {
    StreamOptions::new().device(&device(address))
}

/// Runs a test again in a namespace whose loopback interface is up. Returns whether this is
/// that process.
fn is_in_namespace(test: &str) -> bool {
    const INSIDE: &str = "RINGVERBS_TEST_NAMESPACE";
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if !succeeds("unshare", "--net true") || !succeeds("nft", "--version") {
        testing::skip!("a network namespace needs root, unshare(1) and nft(8)");
        return false;
    }
    let output = Command::new("unshare")
        .args([
            "--net",
            "sh",
            "-c",
            "ip link set lo up && exec \"$@\"",
            "sh",
        ])
        .arg(std::env::current_exe().expect("this program"))
        .args([test, "--exact", "--nocapture"])
        .env(INSIDE, "1")
        .output();
    let end = Instant::now();
    let output = output.expect("unshare");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    print!("{text}");
    assert!(output.status.success(), "{errors}");
    assert!(end.elapsed() < PATIENCE);
    false
}

/// All packets of the devices vanish from here on.
fn lose_everything() {
    for command in [
        "add table inet silence",
        "add chain inet silence in { type filter hook input priority 0 ; }",
        "add rule inet silence in udp dport 4791 counter drop",
    ] {
        assert!(succeeds("nft", command), "nft {command}");
    }
}

/// Returns whether packets have vanished.
fn has_lost_packets() -> bool {
    let mut list = Command::new("nft");
    let list = list.args(["list", "table", "inet", "silence"]);
    let list = list.output().expect("nft").stdout;
    let list = String::from_utf8_lossy(&list);
    list.contains("counter packets") && !list.contains("counter packets 0 ")
}

/// Runs something; returns its result, and how long it took.
fn timed<T>(what: &str, run: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    let result = run();
    let took = begin.elapsed();
    println!("{what}: {took:?}");
    (result, took)
}

/// As [`timed`], beside a task that must go on meanwhile.
async fn timed_beside<T>(what: &str, run: impl Future<Output = T>) -> (T, Duration) {
    let begin = Instant::now();
    let ticks = async {
        let mut longest = Duration::ZERO;
        loop {
            let begin = Instant::now();
            tokio::time::sleep(Duration::from_millis(5)).await;
            longest = longest.max(begin.elapsed());
            if longest > AT_ONCE {
                return longest;
            }
        }
    };
    let result = tokio::select! {
        result = tokio::time::timeout(PATIENCE, run) => result,
        paused = ticks => panic!("{what}: the runtime stood still for {paused:?}"),
    };
    let took = begin.elapsed();
    println!("{what}: {took:?}");
    (result.unwrap_or_else(|_| panic!("{what}: no end")), took)
}

fn is_time_out(result: io::Result<()>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::TimedOut)
}

/// A pair of streams that have exchanged something.
async fn pair(listener: &RdmaListener) -> (RdmaStream, RdmaStream) {
    let to = listener.local_addr().expect("an address");
    let options = options(CLIENT);
    let connected = RdmaStream::connect_with(to, &options);
    let (client, server) = tokio::join!(connected, listener.accept());
    let (mut client, (mut server, _)) = (client.expect("connect"), server.expect("accept"));
    client.write_all(b"ping").await.expect("write");
    server.read_exact(&mut [0; 4]).await.expect("read");
    (client, server)
}

#[test]
fn streams_of_a_runtime_end() {
    if !is_in_namespace("streams_of_a_runtime_end") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let listener = RdmaListener::bind_with((SERVER, 0), &options(SERVER)).await;
        let listener = listener.expect("bind");
        let (mut writer, mut reader) = pair(&listener).await;
        let (mut shut, _shut_peer) = pair(&listener).await;
        let mut dropped = Vec::new();
        for _ in 0..8 {
            let (client, server) = pair(&listener).await;
            dropped.extend([client, server]);
        }
        lose_everything();

        let to = listener.local_addr().expect("an address");
        let limit = Duration::from_secs(1);
        let patient = options(CLIENT).connect_timeout(limit);
        let (result, took) = timed_beside("connect", RdmaStream::connect_with(to, &patient)).await;
        assert!(is_time_out(result.map(drop)));
        assert!(
            took >= limit && took < limit + Duration::from_secs(5),
            "{took:?}"
        );

        // A future that is dropped while it waits.
        let unlimited = options(CLIENT);
        let connect = RdmaStream::connect_with(to, &unlimited);
        let connect = tokio::time::timeout(Duration::from_millis(300), connect);
        let (result, _) = timed_beside("dropped connect", connect).await;
        assert!(result.is_err());

        for stream in &mut dropped {
            stream.write_all(b"vanishes").await.expect("write");
        }
        let (_, took) = timed("16 drops", || drop(dropped));
        assert!(took < AT_ONCE, "16 drops took {took:?}");

        shut.write_all(b"vanishes").await.expect("write");
        let write = async {
            loop {
                writer.write_all(&[0; 4096]).await?;
            }
        };
        let ends = async { tokio::join!(shut.shutdown(), write) };
        let ((shut_down, written), _) = timed_beside("shutdown and write", ends).await;
        assert!(is_time_out(shut_down) && is_time_out(written));
        let mut rest = [0];
        let read = tokio::time::timeout(limit, reader.read(&mut rest));
        let (result, _) = timed_beside("read", read).await;
        assert!(result.is_err(), "{result:?}");
        let (_, took) = timed("drop of listener and streams", || {
            drop((listener, writer, reader, shut));
        });
        assert!(took < AT_ONCE, "{took:?}");
    });
    assert!(has_lost_packets());
    // Delivering the data of dropped streams is given up after 5 s.
    let (_, took) = timed("end of the runtime", || drop(runtime));
    assert!(took < PATIENCE / 2, "{took:?}");
}

#[test]
fn streams_of_threads_end() {
    if !is_in_namespace("streams_of_threads_end") {
        return;
    }
    let listener = StdListener::bind_with((SERVER, 0), &options(SERVER)).expect("bind");
    let to = listener.local_addr().expect("an address");
    let pair = || {
        let client = thread::spawn(move || StdStream::connect_with(to, &options(CLIENT)));
        let (server, _) = listener.accept().expect("accept");
        (client.join().unwrap().expect("connect"), server)
    };
    let (_writer, reader) = pair();
    let (mut closed, _closed_peer) = pair();
    let (mut limited, _limited_peer) = pair();
    let (mut dropped, dropped_peer) = pair();
    lose_everything();

    let limit = Duration::from_secs(1);
    let patient = options(CLIENT).connect_timeout(limit);
    let (result, took) = timed("connect", || StdStream::connect_with(to, &patient));
    assert!(is_time_out(result.map(drop)));
    assert!(
        took >= limit && took < limit + Duration::from_secs(5),
        "{took:?}"
    );

    let (result, took) = timed("read with a time-out", || {
        reader.set_read_timeout(Some(limit)).expect("a time-out");
        io::Read::read(&mut &reader, &mut [0])
    });
    let error = result.expect_err("nothing arrives");
    assert!(matches!(
        error.kind(),
        ErrorKind::TimedOut | ErrorKind::WouldBlock
    ));
    assert!(took < limit + Duration::from_secs(5), "{took:?}");

    limited.set_write_timeout(Some(limit)).expect("a time-out");
    let (result, took) = timed("write with a time-out", || {
        loop {
            if let Err(error) = limited.write_all(&[0; 4096]) {
                return error;
            }
        }
    });
    assert!(matches!(
        result.kind(),
        ErrorKind::TimedOut | ErrorKind::WouldBlock
    ));
    assert!(took < limit + Duration::from_secs(5), "{took:?}");

    closed.write_all(b"vanishes").expect("write");
    let (result, took) = timed("close", || closed.close(limit));
    assert!(is_time_out(result));
    assert!(took < limit + Duration::from_secs(5), "{took:?}");

    // 100 ms, and the thread of all streams goes on with the rest.
    dropped.write_all(b"vanishes").expect("write");
    let (_, took) = timed("drops", || drop((dropped, dropped_peer)));
    assert!(took < AT_ONCE, "{took:?}");
    let (_, took) = timed("drop of the listener", || drop(listener));
    assert!(took < AT_ONCE, "{took:?}");
    assert!(has_lost_packets());
}

/// An end of a connection without the connection manager.
struct End {
    domain: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    local: ringverbs::LocalAddress,
}

impl End {
    fn new(address: Ipv4Addr) -> Self {
        let context = device(address).open().expect("open");
        let domain = context.alloc_pd().expect("a domain");
        let cq = context
            .completion_queue()
            .entries(16)
            .build()
            .expect("a queue");
        let qp = domain.queue_pair(Transport::Reliable, &cq).build();
        let local = context.local_address(1).expect("an address");
        Self {
            qp: qp.expect("a queue pair"),
            domain,
            cq,
            local,
        }
    }
}

#[test]
fn work_requests_and_ids_end() {
    if !is_in_namespace("work_requests_and_ids_end") {
        return;
    }
    let (mut a, mut b) = (End::new(CLIENT), End::new(SERVER));
    let (to_b, to_a) = (b.qp.endpoint(&b.local), a.qp.endpoint(&a.local));
    a.qp.connect(&a.local, &to_b).expect("connect");
    b.qp.connect(&b.local, &to_a).expect("connect");
    let buffer = b.domain.alloc(64).expect("memory").into_buffer();
    b.qp.receive(buffer, 1).expect("receive");
    lose_everything();

    let buffer = a.domain.alloc(64).expect("memory").into_buffer();
    a.qp.send(buffer, 2).expect("send");
    let (completion, took) = timed("send", || a.cq.poll_until_one());
    let completion = completion.expect("a completion");
    let failure = completion.result.expect_err("nobody answers");
    assert!(failure.to_string().contains("retries"), "{failure}");
    assert!(took < PATIENCE / 2, "{took:?}");

    // An id that waits for the answer to its request is destroyed.
    let to = SocketAddr::from((SERVER, 9));
    let client = device(CLIENT);
    let (result, took) = timed("connect of an id", || {
        let connector = Connector::resolve_on(&client, PortSpace::TCP, None, to, PATIENCE);
        let connector = connector.expect("a route");
        let context = connector.device().expect("a device").open().expect("open");
        let domain = context.alloc_pd().expect("a domain");
        let cq = context
            .completion_queue()
            .entries(16)
            .build()
            .expect("a queue");
        let mut qp = domain
            .queue_pair(Transport::Reliable, &cq)
            .build()
            .expect("a queue pair");
        let limit = Duration::from_secs(1);
        connector
            .connect(&mut qp, &Default::default(), Some(limit))
            .map(drop)
    });
    println!("{result:?}");
    assert!(result.is_err() && took < PATIENCE / 2, "{took:?}");
    let (_, took) = timed("drop of queue pairs", || drop((a, b)));
    assert!(took < AT_ONCE, "{took:?}");
    assert!(has_lost_packets());
}
