//! A server whose listener gets connection requests that are never answered, over devices on
//! addresses of the loopback interface.
#![allow(missing_docs, reason = "a test")]

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ringverbs::Device;
use ringverbs_rpc::{Client, Options, Request, Server};
use testing::attacker::ForgedRequest;

const HERE: Ipv4Addr = Ipv4Addr::new(127, 60, 0, 1);

fn options(address: Ipv4Addr) -> Options {
    let device = Device::roce(&address.to_string()).expect("a device");
    Options::new().device(&device)
}

/// A request that an honest client would send.
fn captured(from: Ipv4Addr, to: Ipv4Addr) -> ForgedRequest {
    let options = options(from).connect_timeout(Duration::from_millis(100));
    let connect = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let _ = runtime.block_on(Client::connect_with((to, 1).into(), &options));
    };
    ForgedRequest::capture(to, connect).unwrap()
}

/// The tests count the descriptors of the process, so they run one after the other.
fn serial() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As many as a server accepts at once, of different sources, which get its answers.
#[test]
fn half_open_requests_cost_no_descriptor() {
    let _serial = serial();
    let here = Ipv4Addr::new(127, 61, 0, 1);
    let builder = &mut tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(1).enable_all().build().unwrap();
    let server = runtime.block_on(Server::bind_with((here, 0).into(), &options(here)));
    let server = server.unwrap();
    let to = (here, server.local_addr().unwrap().port());
    runtime.spawn(server.serve(|request: Request| async { request }));
    let mut request = captured(Ipv4Addr::new(127, 61, 0, 2), Ipv4Addr::new(127, 61, 0, 3));

    let source = |n| {
        let from = Ipv4Addr::new(127, 61, 1, n);
        let socket = UdpSocket::bind((from, 4791)).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        (from, socket)
    };
    let sources: Vec<_> = (0..32).map(source).collect();
    let mut handshake = |(from, socket): &(Ipv4Addr, UdpSocket)| {
        request.send_on(socket, *from, to).unwrap();
        socket.recv(&mut [0; 1024]).expect("an answer");
    };
    let (first, others) = sources.split_first().unwrap();
    // The server opens its device for it.
    handshake(first);
    let before = testing::open_files();
    others.iter().for_each(handshake);
    let more = testing::open_files() as isize - before as isize;
    println!("{} requests: {more} more descriptors", others.len());
    assert!(more <= 0, "{more} descriptors");
}

#[test]
fn half_open_requests_keep_no_client_out() {
    let _serial = serial();
    let builder = &mut tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(1).enable_all().build().unwrap();
    let server = runtime.block_on(Server::bind_with((HERE, 0).into(), &options(HERE)));
    let server = server.unwrap();
    let to = server.local_addr().unwrap();
    runtime.spawn(server.serve(|request: Request| async { request }));

    let silent = Ipv4Addr::new(127, 60, 0, 3);
    let mut request = captured(Ipv4Addr::new(127, 60, 0, 2), silent);

    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let attacker = std::thread::spawn(move || {
        let mut count = 0;
        while !stopped.load(Ordering::Relaxed) {
            request.send(silent, (HERE, to.port())).unwrap();
            count += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
        count
    });
    let client = options(Ipv4Addr::new(127, 60, 0, 4));
    let here = tokio::runtime::Runtime::new().unwrap();
    let before = testing::open_files();
    let (clients, longest) = here.block_on(async {
        let end = Instant::now() + Duration::from_secs(6);
        let (mut count, mut longest) = (0, Duration::ZERO);
        while Instant::now() < end {
            let begin = Instant::now();
            let connected = Client::connect_with(to, &client).await;
            let connected = connected.expect("an honest client connects");
            let reply = connected.call(b"ping").await.expect("a reply");
            assert_eq!(&reply[..], b"ping");
            longest = longest.max(begin.elapsed());
            count += 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        (count, longest)
    });
    let more = testing::open_files().saturating_sub(before);
    stop.store(true, Ordering::Relaxed);
    let requests: usize = attacker.join().unwrap();
    println!(
        "{requests} requests: {clients} clients, longest {longest:?}; {more} more descriptors"
    );
    assert!(requests >= 100 && clients >= 20 && longest < Duration::from_secs(3));
    assert!(more < 100, "{more} descriptors");
}
