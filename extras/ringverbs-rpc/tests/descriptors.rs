//! A server whose process has no descriptors left. The limit holds for the whole process, so
//! this is the only test of its program.
#![allow(missing_docs, reason = "a test")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use ringverbs::cm::{self, Connector, manager::PortSpace};
use ringverbs::{Device, Transport};
use ringverbs_rpc::{Client, Options, Request, Server};

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_outlives_a_lack_of_descriptors() {
    // The connection manager of a test kit waits in simulated time.
    let device = Device::roce("127.62.0.1").unwrap();
    let options = Options::new().device(&device);
    let here = "127.62.0.1:0".parse().unwrap();
    let server = Server::bind_with(here, &options).await.unwrap();
    let to = server.local_addr().unwrap();

    let connector = Connector::resolve_on(&device, PortSpace::TCP, None, to, PATIENCE).unwrap();
    let context = connector.device().unwrap().open().unwrap();
    let cq = context.completion_queue().build().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue_pair = domain.queue_pair(Transport::Reliable, &cq);
    let mut qp = queue_pair.build().unwrap();
    connector.prepare(&mut qp).unwrap();
    let connecting = thread::spawn(move || {
        let connected = connector.connect(&mut qp, &cm::Options::default(), Some(PATIENCE));
        connected.map(drop)
    });
    // The request has arrived by then.
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The lowest free number is assigned, so all below it are in use.
    let last = File::open("/dev/null").unwrap();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, last.as_raw_fd() as u64 + 1, hard).unwrap();
    let server = tokio::spawn(server.serve(|request: Request| async { request }));
    let refused = connecting.join().unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    let refused = refused.unwrap_err();
    assert!(refused.is_rejected(), "{refused}");

    let client = Client::connect_with(to, &options).await.unwrap();
    let reply = client.call(b"again").await.unwrap();
    assert_eq!(&reply[..], b"again");
    server.abort();
}
