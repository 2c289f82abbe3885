//! A server whose listener gets connection requests that are never answered, over devices on
//! addresses of the loopback interface.
#![allow(missing_docs, reason = "a test")]

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringverbs::Device;
use ringverbs_rpc::{Client, Options, Request, Server};
use testing::attacker::ForgedRequest;

const HERE: Ipv4Addr = Ipv4Addr::new(127, 60, 0, 1);

fn options(address: Ipv4Addr) -> Options {
    let device = Device::roce(&address.to_string()).expect("a device");
    Options::new().device(&device)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("descriptors")
        .count()
}

#[test]
fn half_open_requests_keep_no_client_out() {
    let builder = &mut tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(1).enable_all().build().unwrap();
    let server = runtime.block_on(Server::bind_with((HERE, 0).into(), &options(HERE)));
    let server = server.unwrap();
    let to = server.local_addr().unwrap();
    runtime.spawn(server.serve(|request: Request| async { request }));

    // What an honest client would send.
    let silent = Ipv4Addr::new(127, 60, 0, 3);
    let client = options(Ipv4Addr::new(127, 60, 0, 2)).connect_timeout(Duration::from_millis(100));
    let mut request = ForgedRequest::capture(silent, move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let _ = runtime.block_on(Client::connect_with((silent, 1).into(), &client));
    })
    .unwrap();

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
    let before = descriptors();
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
    let more = descriptors().saturating_sub(before);
    stop.store(true, Ordering::Relaxed);
    let requests: usize = attacker.join().unwrap();
    println!(
        "{requests} requests: {clients} clients, longest {longest:?}; {more} more descriptors"
    );
    assert!(requests >= 100 && clients >= 20 && longest < Duration::from_secs(3));
    assert!(more < 200, "{more} descriptors");
}
