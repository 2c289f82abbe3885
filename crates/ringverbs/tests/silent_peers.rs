//! Servers whose listeners get connection requests that are never answered, over devices on
//! addresses of the loopback interface.
#![allow(missing_docs, reason = "a test")]

use std::net::{Ipv4Addr, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::Device;
use ringverbs::cm::{Listener, manager::PortSpace};
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use ringverbs::stream::{RdmaListener as StdListener, RdmaStream as StdStream, StreamOptions};
use testing::attacker::ForgedRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The tests measure resources of the process, so they run one after the other.
fn serial() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn options(address: Ipv4Addr) -> StreamOptions {
    let device = Device::roce(&address.to_string()).expect("a device");
    StreamOptions::new().device(&device)
}

/// Returns the n-th address of a test.
fn address(test: u8, n: u16) -> Ipv4Addr {
    let [high, low] = n.to_be_bytes();
    Ipv4Addr::new(127, test, high, low)
}

/// Resources of this process: descriptors, and resident memory in KiB.
fn resources() -> (usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let words = line.and_then(|line| line.split_whitespace().nth(1));
    let memory = words.and_then(|it| it.parse().ok()).expect("a size");
    (testing::open_files(), memory)
}

/// A request that an honest client would send.
fn captured(test: u8) -> ForgedRequest {
    let options = options(address(test, 2)).connect_timeout(Duration::from_millis(100));
    let to = address(test, 3);
    let connect = move || drop(StdStream::connect_with((to, 1), &options));
    ForgedRequest::capture(to, connect).expect("a request")
}

/// Sends `count` requests at a rate, from as many sources as `sources`.
fn attack(
    mut request: ForgedRequest,
    (test, sources): (u8, u16),
    to: (Ipv4Addr, u16),
    (count, pause): (usize, Duration),
    stop: &AtomicBool,
) -> usize {
    for n in 0..count {
        if stop.load(Ordering::Relaxed) {
            return n;
        }
        let from = address(test, 256 + n as u16 % sources);
        request.send(from, to).expect("send");
        thread::sleep(pause);
    }
    count
}

/// A server on a runtime with one thread, which writes to each stream, and drops it.
struct Server {
    port: u16,
    /// The longest time in ms that its thread did not run.
    longest_pause: Arc<AtomicU64>,
    runtime: tokio::runtime::Runtime,
}

impl Server {
    fn start(at: Ipv4Addr) -> Self {
        let builder = &mut tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().unwrap();
        let longest_pause = Arc::new(AtomicU64::new(0));
        let options = options(at);
        let listener = runtime.block_on(RdmaListener::bind_with((at, 0), &options));
        let listener = listener.expect("bind");
        let port = listener.local_addr().unwrap().port();
        runtime.spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.expect("accept");
                tokio::spawn(async move {
                    let answer = tokio::time::timeout(Duration::from_secs(1), async {
                        let mut question = [0; 4];
                        stream.read_exact(&mut question).await?;
                        stream.write_all(&question).await
                    });
                    drop(answer.await);
                });
            }
        });
        let longest = Arc::clone(&longest_pause);
        runtime.spawn(async move {
            loop {
                let begin = Instant::now();
                tokio::time::sleep(Duration::from_millis(5)).await;
                longest.fetch_max(begin.elapsed().as_millis() as u64, Ordering::Relaxed);
            }
        });
        Self {
            port,
            longest_pause,
            runtime,
        }
    }
}

/// Connects one client after the other for some time; returns their number, and the longest
/// time that one took.
async fn clients(
    options: &StreamOptions,
    to: (Ipv4Addr, u16),
    time: Duration,
) -> (usize, Duration) {
    let end = Instant::now() + time;
    let (mut count, mut longest) = (0, Duration::ZERO);
    while Instant::now() < end {
        let begin = Instant::now();
        let mut stream = RdmaStream::connect_with(to, options)
            .await
            .expect("an honest client connects");
        stream.write_all(b"ping").await.expect("write");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        assert_eq!(answer, "ping");
        longest = longest.max(begin.elapsed());
        count += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (count, longest)
}

fn honest_clients_are_served(test: u8, sources: u16, rate: u32) {
    let _serial = serial();
    let here = address(test, 1);
    let server = Server::start(here);
    let to = (here, server.port);
    let request = captured(test);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let pause = Duration::from_secs(1) / rate;
    let attacker =
        thread::spawn(move || attack(request, (test, sources), to, (usize::MAX, pause), &stopped));
    let options = options(address(test, 4));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let before = resources();
    let (count, longest) = runtime.block_on(clients(&options, to, Duration::from_secs(6)));
    let after = resources();
    stop.store(true, Ordering::Relaxed);
    let requests = attacker.join().unwrap();
    let paused = server.longest_pause.load(Ordering::Relaxed);
    let descriptors = after.0.saturating_sub(before.0);
    let memory = after.1.saturating_sub(before.1);
    println!(
        "{requests} requests: {count} clients, longest {longest:?}; paused {paused} ms; \
         {descriptors} more descriptors, {memory} more KiB"
    );
    drop(server.runtime);
    assert!(count >= 20 && longest < Duration::from_secs(3));
    assert!(
        paused < 1000,
        "the server's thread stood still for {paused} ms"
    );
    assert!(descriptors < 100, "{descriptors} descriptors");
    assert!(memory < 64 << 10, "{memory} KiB");
}

#[test]
fn unanswered_requests_do_not_stop_a_server() {
    honest_clients_are_served(50, 1, 12);
}

#[test]
fn half_open_requests_keep_no_client_out() {
    honest_clients_are_served(51, 1, 50);
}

#[test]
fn half_open_requests_of_many_sources_keep_no_client_out() {
    honest_clients_are_served(52, 251, 50);
}

/// Streams whose peers have stopped are dropped in a runtime with one thread.
#[test]
fn dropped_streams_neither_block_nor_start_a_thread_each() {
    const STREAMS: usize = 20;
    const PORT: &str = "PORT_OF_SILENT_PEERS";
    let here = address(54, 1);
    if let Ok(port) = std::env::var(PORT) {
        let (to, options) = ((here, port.parse().unwrap()), options(address(54, 2)));
        let connect = |_| StdStream::connect_with(to, &options).expect("connect");
        let _streams: Vec<_> = (0..STREAMS).map(connect).collect();
        // Until it is killed.
        thread::sleep(Duration::from_secs(60));
        return;
    }
    let _serial = serial();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut peer = runtime.block_on(async {
        let listener = RdmaListener::bind_with((here, 0), &options(here)).await;
        let listener = listener.expect("bind");
        let port = listener.local_addr().unwrap().port();
        let name = "dropped_streams_neither_block_nor_start_a_thread_each";
        let peer = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact"])
            .env(PORT, port.to_string())
            .stdout(Stdio::null())
            .spawn()
            .expect("a peer");
        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            streams.push(listener.accept().await.expect("accept").0);
        }
        let stop = Command::new("kill")
            .args(["-STOP", &peer.id().to_string()])
            .status();
        assert!(stop.unwrap().success());
        for stream in &mut streams {
            stream.write_all(b"not read").await.expect("write");
        }
        let begin = Instant::now();
        drop(streams);
        let took = begin.elapsed();
        // A thread has its name once it runs.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let threads = threads_of_lingering_streams();
        println!("{STREAMS} drops took {took:?}, {threads} threads");
        assert!(took < Duration::from_millis(500) && threads == 1);
        peer
    });
    peer.kill().expect("kill");
    peer.wait().expect("wait");
    // The thread ends with the last stream.
    let begin = Instant::now();
    while threads_of_lingering_streams() != 0 {
        assert!(begin.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(10));
    }
}

fn threads_of_lingering_streams() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("threads");
    let names = threads.filter_map(|it| std::fs::read_to_string(it.ok()?.path().join("comm")).ok());
    names.filter(|it| it.starts_with("ringverbs-linge")).count()
}

/// Sends 10,000 requests to a listener; returns the descriptors and KiB that they cost.
fn cost_of_many_requests(test: u8, port: u16) -> (usize, usize) {
    let request = captured(test);
    // Until the captured client has given up.
    thread::sleep(Duration::from_millis(500));
    let before = resources();
    let pause = Duration::from_micros(200);
    let to = (address(test, 1), port);
    let stop = AtomicBool::new(false);
    attack(request, (test, 251), to, (10_000, pause), &stop);
    let after = resources();
    (
        after.0.saturating_sub(before.0),
        after.1.saturating_sub(before.1),
    )
}

/// To a listener whose program does not read them.
#[test]
fn ten_thousand_unread_requests_cost_no_descriptor() {
    let _serial = serial();
    let here = address(53, 1);
    let device = Device::roce(&here.to_string()).expect("a device");
    let listener = Listener::bind_on(&device, PortSpace::TCP, (here, 0).into(), 0);
    let listener = listener.expect("bind");
    let port = listener.local_addr().unwrap().unwrap().port();
    let (descriptors, memory) = cost_of_many_requests(53, port);
    println!("{descriptors} more descriptors, {memory} more KiB");
    assert_eq!(descriptors, 0);
    assert!(memory < 10 << 10, "{memory} KiB");
}

/// As many as a listener accepts at once, of different sources, which get its answers.
#[test]
fn half_open_streams_cost_no_descriptor() {
    const REQUESTS: u16 = 31;
    let _serial = serial();
    let here = address(56, 1);
    let listener = StdListener::bind_with((here, 0), &options(here)).expect("bind");
    let to = (here, listener.local_addr().unwrap().port());
    let accepting = thread::spawn(move || listener.accept().map(drop));
    let mut request = captured(56);
    let source = |n| {
        let from = address(56, 256 + n);
        let socket = UdpSocket::bind((from, 4791)).expect("a source");
        let limit = Some(Duration::from_secs(20));
        socket.set_read_timeout(limit).expect("a time-out");
        (from, socket)
    };
    let sources: Vec<_> = (0..=REQUESTS).map(source).collect();
    let mut handshake = |(from, socket): &(Ipv4Addr, UdpSocket)| {
        request.send_on(socket, *from, to).expect("send");
        socket.recv(&mut [0; 1024]).expect("an answer");
    };
    let (first, others) = sources.split_first().expect("sources");
    // The listener opens its device for it.
    handshake(first);
    let before = resources();
    others.iter().for_each(handshake);
    let after = resources();
    let descriptors = after.0 as isize - before.0 as isize;
    let memory = after.1.saturating_sub(before.1);
    println!("{REQUESTS} requests: {descriptors} more descriptors, {memory} more KiB");
    assert!(!accepting.is_finished());
    assert!(descriptors <= 0, "{descriptors} descriptors");
    assert!(memory < 4 << 10, "{memory} KiB");
}

/// To a listener that accepts.
#[test]
fn ten_thousand_requests_cost_little() {
    let _serial = serial();
    let here = address(55, 1);
    let listener = StdListener::bind_with((here, 0), &options(here)).expect("bind");
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        loop {
            drop(listener.accept().expect("accept"));
        }
    });
    let (descriptors, memory) = cost_of_many_requests(55, port);
    println!("{descriptors} more descriptors, {memory} more KiB");
    assert!(memory < 10 << 10, "{memory} KiB");
    assert!(descriptors < 100, "{descriptors} descriptors");
}
