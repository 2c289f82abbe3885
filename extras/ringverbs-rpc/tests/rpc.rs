//! Clients and servers over a device. `RXE_ADDR` is the address of its network
//! interface: in a guest, `rpc --ignored --test-threads=1`. The tests that are not
//! ignored run on the embedded device.
#![allow(missing_docs, reason = "a test")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ringverbs::cm::{self, AsyncConnection, AsyncConnector, AsyncListener};
use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair};
use ringverbs::{Buffer, ProtectionDomain, Transport};
use ringverbs_rpc::{CallOptions, Client, Error, Options, Request, Response, Server};
use ringverbs_testkit::Fabric;
use testing::bytes;
use testing::program::{self, address};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(60);

/// Handles a request by its first byte.
async fn handle(request: Request) -> Response {
    match request.first() {
        Some(b'r') => Response::refused(77),
        Some(b'p') => std::panic::resume_unwind(Box::new("as asked")),
        Some(b'l') => vec![3; 1 << 20].into(),
        Some(b'h') => vec![3; (1 << 20) + 1].into(),
        Some(b's') => {
            tokio::time::sleep(Duration::from_millis(200)).await;
            request.into()
        }
        Some(b'v') => request.to_vec().into(),
        _ => request.into(),
    }
}

type Serving = JoinHandle<Result<(), Error>>;

async fn server(options: &Options) -> (Serving, SocketAddr) {
    let server = Server::bind_with(address(), options).await.expect("bind");
    let to = server.local_addr().expect("an address");
    (tokio::spawn(server.serve(handle)), to)
}

/// Waits for a future; panics with the caller's location if it takes too long.
#[track_caller]
fn in_time<T>(future: impl Future<Output = T>) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    async move {
        tokio::time::timeout(PATIENCE, future)
            .await
            .unwrap_or_else(|_| panic!("not in time: {caller}"))
    }
}

/// Calls over devices that are named, on a network that loses packets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_survive_lost_packets() {
    let fabric = Fabric::builder().background().build(2).unwrap();
    let fault = fabric.frames().chance(0.05).lose();
    let options = |node: usize| Options::new().device(&fabric.node(node).device());
    let here = "127.0.0.1:0".parse().unwrap();
    let server = Server::bind_with(here, &options(1)).await.unwrap();
    let to = server.local_addr().unwrap();
    let server = tokio::spawn(server.serve(handle));
    let client = in_time(Client::connect_with(to, &options(0)))
        .await
        .unwrap();
    let calls = [10, 3000, 300_000].into_iter().cycle().take(60);
    for (number, size) in calls.enumerate() {
        let mut request = bytes(number as u32, size);
        request[0] = b'e';
        let reply = in_time(client.call(&request)).await.unwrap();
        assert_eq!(&reply[..], &request[..]);
    }
    assert!(fault.hits() > 0);
    // A device of another network does not reach the server.
    let other = Fabric::builder().background().build(1).unwrap();
    let stranger = Options::new().device(&other.node(0).device());
    let refused = in_time(Client::connect_with(to, &stranger)).await;
    assert!(matches!(refused, Err(Error::Connect(_))), "{refused:?}");
    drop(client);
    server.abort();
}

/// Ends the task of a request that is never answered.
async fn unanswered(request: Request, ended: Arc<Notify>) -> Response {
    struct Ended(Arc<Notify>);
    impl Drop for Ended {
        fn drop(&mut self) {
            self.0.notify_one();
        }
    }
    let _ended = Ended(ended);
    std::future::pending::<()>().await;
    request.into()
}

/// Connections that are accepted at the same time share a completion queue, which has room for
/// the operations of all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn connections_accepted_at_the_same_time() {
    const CLIENTS: u32 = 12;
    // All at once, within the time of a call also in an emulated guest.
    const CALLS: u32 = 60;
    let options = Options::new();
    let server = Server::bind_with(address(), &options).await.expect("bind");
    let to = server.local_addr().expect("an address");
    let connecting: Vec<_> = (0..CLIENTS)
        .map(|_| tokio::spawn(Client::connect(to)))
        .collect();
    // Until all requests have arrived.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let server = tokio::spawn(server.serve(handle));
    let mut calls = Vec::new();
    for (number, client) in connecting.into_iter().enumerate() {
        let client = in_time(client).await.unwrap().expect("connect");
        let client = Arc::new(client);
        for call in 0..CALLS {
            let client = Arc::clone(&client);
            calls.push(tokio::spawn(async move {
                let mut request = bytes(number as u32 * CALLS + call, 900);
                request[0] = b'e';
                let reply = client.call(&request).await.expect("a reply");
                assert!(reply[..] == request[..]);
            }));
        }
    }
    for call in calls {
        in_time(call).await.unwrap();
    }
    server.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn requests_of_all_sizes_are_answered() {
    let (server, to) = server(&Options::new()).await;
    let client = Client::connect(to).await.unwrap();
    assert_eq!(client.max_request(), 1 << 20);
    let sizes = [
        0,
        1,
        95,
        96,
        97,
        111,
        112,
        113,
        4063,
        4064,
        4065,
        4080,
        4081,
        65_536,
        1 << 20,
    ];
    for (seed, len) in sizes.into_iter().enumerate() {
        for first in [b'e', b'v'] {
            let mut request = bytes(seed as u32, len);
            if let Some(byte) = request.first_mut() {
                *byte = first;
            }
            let options = CallOptions::new().reply_up_to(len).timeout(PATIENCE);
            let reply = client.call_with(&request, &options).await.unwrap();
            assert!(reply[..] == request[..], "{len} bytes");
            assert!(reply.into_vec() == request);
        }
    }
    server.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn errors_have_types() {
    let (server, to) = server(&Options::new()).await;
    let client = Client::connect(to).await.unwrap();
    let long = vec![b'e'; (1 << 20) + 1];
    let (len, limit) = (long.len(), 1 << 20);
    assert_eq!(
        client.call(&long).await.unwrap_err(),
        Error::RequestTooLong { len, limit }
    );
    assert_eq!(client.call(b"r").await.unwrap_err(), Error::Refused(77));
    assert_eq!(client.call(b"p").await.unwrap_err(), Error::HandlerPanicked);
    // The call has no room, then as much as is needed, then the server has none.
    let len = 1 << 20;
    assert_eq!(
        client.call(b"l").await.unwrap_err(),
        Error::ReplyTooLong { len }
    );
    let room = CallOptions::new().reply_up_to(len);
    assert_eq!(client.call_with(b"l", &room).await.unwrap().len(), len);
    assert_eq!(
        client.call_with(b"h", &room).await.unwrap_err(),
        Error::ReplyTooLong { len: len + 1 }
    );
    let more = CallOptions::new().reply_up_to(len + 1);
    assert_eq!(
        client.call_with(b"l", &more).await.unwrap_err(),
        Error::ReplyTooLong { len: len + 1 }
    );
    let short = CallOptions::new().timeout(Duration::from_millis(20));
    assert_eq!(
        client.call_with(b"s", &short).await.unwrap_err(),
        Error::Timeout
    );
    // The connection is still usable.
    assert_eq!(&client.call(b"e").await.unwrap()[..], b"e");
    let none = Options::new().window(0);
    assert!(matches!(
        Client::connect_with(to, &none).await,
        Err(Error::Options { .. })
    ));
    server.abort();
}

/// Many more calls than the window, of both sorts, on several connections. Retries
/// for a missing receive are off, so that one would end the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn calls_wait_for_the_window() {
    let small = Options::new()
        .window(4)
        .max_message(20_000)
        .large_buffers(2);
    let (server, to) = server(&small).await;
    let mut tasks = Vec::new();
    // Either side's window is the smaller one.
    for window in [1, 3, 16] {
        let options = Options::new()
            .window(window)
            .max_message(20_000)
            .message_size(1024);
        let client = Client::connect_with(to, &options).await.unwrap();
        for seed in 0..120 {
            let client = client.clone();
            tasks.push(tokio::spawn(async move {
                let len = [0, 10, 500, 2000, 20_000][seed as usize % 5];
                let mut request = bytes(seed, len);
                if let Some(first) = request.first_mut() {
                    *first = b'e';
                }
                let options = CallOptions::new().reply_up_to(len).timeout(PATIENCE);
                let reply = client.call_with(&request, &options).await.unwrap();
                assert!(reply[..] == request[..]);
            }));
        }
    }
    for task in tasks {
        in_time(task).await.unwrap();
    }
    server.abort();
}

/// Dropped and timed out calls keep their slots and memory until the server has replied, and
/// no longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn dropped_calls_release_their_slots() {
    let (server, to) = server(&Options::new()).await;
    let options = Options::new().window(3).large_buffers(2);
    let client = Client::connect_with(to, &options).await.unwrap();
    let room = CallOptions::new().reply_up_to(100_000).timeout(PATIENCE);
    let mut slow = vec![b's'; 100_000];
    for round in 0..3 {
        slow[1] = round;
        for _ in 0..4 {
            let call = client.call_with(&slow, &room);
            let _ = tokio::time::timeout(Duration::from_millis(10), call).await;
        }
        // They occupy both buffers: this one waits for them, and gets its own reply.
        slow[1] = 100 + round;
        let reply = in_time(client.call_with(&slow, &room)).await.unwrap();
        assert!(reply[..] == slow[..]);
    }
    server.abort();
}

/// Replies and requests that the program keeps do not block the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn kept_replies_are_copied_when_buffers_run_out() {
    let (server, to) = server(&Options::new()).await;
    let client = Client::connect_with(to, &Options::new().window(2))
        .await
        .unwrap();
    let mut kept = Vec::new();
    for number in 0..20_u8 {
        kept.push(in_time(client.call(&[b'e', number])).await.unwrap());
    }
    for (number, reply) in kept.iter().enumerate() {
        assert_eq!(reply[..], [b'e', number as u8]);
    }
    server.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn end_of_a_side_fails_the_calls_of_the_other() {
    let running = Arc::new(AtomicUsize::new(0));
    let begun = Arc::new(Notify::new());
    let server = Server::bind_with(address(), &Options::new().max_connections(1))
        .await
        .unwrap();
    let to = server.local_addr().unwrap();
    struct Running(Arc<AtomicUsize>);
    impl Drop for Running {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let (count, notify) = (Arc::clone(&running), Arc::clone(&begun));
    let server = tokio::spawn(server.serve(move |request: Request| {
        count.fetch_add(1, Ordering::SeqCst);
        let running = Running(Arc::clone(&count));
        notify.notify_one();
        async move {
            let _running = running;
            if request.is_empty() {
                std::future::pending::<()>().await;
            }
            request
        }
    }));
    let client = Client::connect(to).await.unwrap();
    // The limit of connections.
    Client::connect(to).await.unwrap_err();
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.call(b"").await.map(drop) }
    });
    in_time(begun.notified()).await;
    // Without its client the handler ends.
    call.abort();
    let _ = call.await;
    drop(client);
    while running.load(Ordering::SeqCst) > 0 {
        in_time(tokio::time::sleep(Duration::from_millis(5))).await;
    }
    let client = loop {
        match Client::connect(to).await {
            Ok(client) => break client,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    assert_eq!(&client.call(b"x").await.unwrap()[..], b"x");
    // One at a time: a second notification is not counted.
    in_time(begun.notified()).await;
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.call(b"").await.map(drop) }
    });
    in_time(begun.notified()).await;
    server.abort();
    assert_eq!(in_time(call).await.unwrap(), Err(Error::Disconnected));
    assert_eq!(
        in_time(client.call(b"x")).await.map(drop),
        Err(Error::Disconnected)
    );
    Client::connect(to).await.unwrap_err();
}

/// A hostile peer, which uses the verbs directly.
struct Hostile {
    qp: AsyncQueuePair,
    domain: ProtectionDomain,
    _connection: AsyncConnection,
}

fn hostile_queue_pair(device: &ringverbs::Device) -> (AsyncQueuePair, ProtectionDomain) {
    let domain = device.open().unwrap().alloc_pd().unwrap();
    let queue = domain.context().completion_queue().entries(512);
    let cq = AsyncCompletionQueue::spawn(queue).unwrap();
    let qp = domain.queue_pair(Transport::Reliable, &cq);
    let qp = qp.send_depth(128).recv_depth(128).build().unwrap();
    let qp = AsyncQueuePair::new(qp, &cq)
        .map_err(|(_, error)| error)
        .unwrap();
    (qp, domain)
}

impl Hostile {
    async fn connect(to: SocketAddr, hello: &[u8]) -> Result<Self, cm::Error> {
        let connector = AsyncConnector::resolve(to).await?;
        let (qp, domain) = hostile_queue_pair(&connector.device()?);
        connector.prepare(&qp)?;
        let options = cm::Options {
            private_data: hello,
            rnr_retry_count: 0,
            ..cm::Options::default()
        };
        let connection = connector.connect(&qp, &options).await?;
        Ok(Self {
            qp,
            domain,
            _connection: connection,
        })
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self
            .domain
            .alloc(bytes.len().max(4096))
            .unwrap()
            .into_buffer();
        buffer.copy_from(bytes).unwrap();
        buffer
    }

    fn receive(&self, count: usize) {
        for _ in 0..count {
            self.qp.post_receive(self.buffer(&[0; 4096])).unwrap();
        }
    }

    /// Sends, and waits until the other side has ended the connection.
    async fn send_and_be_disconnected(self, messages: &[Vec<u8>]) {
        self.receive(64);
        for message in messages {
            if self.qp.send(self.buffer(message)).await.is_err() {
                return;
            }
        }
        in_time(self._connection.disconnected()).await.unwrap();
    }
}

/// A hello, and a header: kind, call, length.
fn hello(window: u16, message_size: u32) -> Vec<u8> {
    let mut bytes = b"RVrp".to_vec();
    bytes.extend(1_u16.to_le_bytes());
    bytes.extend(window.to_le_bytes());
    bytes.extend(message_size.to_le_bytes());
    bytes.extend((1_u32 << 20).to_le_bytes());
    bytes
}

fn header(kind: u8, call: u32, len: u32) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend(call.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes.extend([0; 4]);
    bytes
}

/// Requests with bytes that follow; `reply` is the memory for the reply.
fn request(kind: u8, len: u32, reply: (u64, u32, u32), rest: &[u8]) -> Vec<u8> {
    let mut bytes = header(kind, 1, len);
    bytes.extend(reply.0.to_le_bytes());
    bytes.extend(reply.1.to_le_bytes());
    bytes.extend(reply.2.to_le_bytes());
    bytes.extend(rest);
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn a_server_outlives_hostile_clients() {
    let options = Options::new().window(8).max_connections(64);
    let (server, to) = server(&options).await;
    let client = Client::connect_with(to, &options).await.unwrap();
    for refused in [
        &b""[..],
        b"RVrp",
        b"HTTP/1.1 and more",
        &hello(0, 4096),
        &hello(8, 10),
        &[hello(8, 4096)[..4].to_vec(), vec![9; 12]].concat(),
    ] {
        assert!(Hostile::connect(to, refused).await.is_err(), "{refused:?}");
    }
    let none = (0, 0, 0);
    let nowhere = (0x1000, 0xdead, 1 << 20);
    let cases: [Vec<Vec<u8>>; 12] = [
        vec![vec![]],
        vec![vec![1]],
        vec![vec![0; 16]],
        vec![vec![0xff; 4096]],
        vec![header(1, 0, 0)],
        vec![header(3, 0, 0)],
        vec![header(200, 0, 0)],
        vec![request(1, 5, none, b"1234")],
        vec![request(1, u32::MAX, none, b"1234")],
        // Longer than a receive.
        vec![request(1, 6000, none, &[b'e'; 6000])],
        // Memory that is none of the client's: for the reply, for the request.
        vec![request(1, 1, nowhere, b"l")],
        vec![request(
            2,
            100_000,
            none,
            &[0x10, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 0, 0, 0, 0],
        )],
    ];
    for messages in cases {
        let peer = Hostile::connect(to, &hello(8, 4096)).await.unwrap();
        in_time(peer.send_and_be_disconnected(&messages)).await;
    }
    // A request that is too long to be read.
    let peer = Hostile::connect(to, &hello(8, 4096)).await.unwrap();
    let message = request(2, u32::MAX, none, &[0; 16]);
    in_time(peer.send_and_be_disconnected(&[message])).await;
    // More requests than the window, of a client that has no receives.
    let peer = Hostile::connect(to, &hello(8, 4096)).await.unwrap();
    let mut sends = Vec::new();
    for _ in 0..64 {
        sends.push(peer.qp.send(peer.buffer(&request(1, 1, none, b"s"))));
    }
    for send in sends {
        let _ = in_time(send).await;
    }
    // Random bytes, with plausible kinds.
    for seed in 1..20 {
        let peer = Hostile::connect(to, &hello(8, 4096)).await.unwrap();
        let mut message = bytes(seed, seed as usize * 7);
        message[0] %= 9;
        in_time(peer.send_and_be_disconnected(&[message])).await;
    }
    // Other clients are still served.
    assert_eq!(&client.call(b"e").await.unwrap()[..], b"e");
    let client = Client::connect(to).await.unwrap();
    assert_eq!(&client.call(b"e").await.unwrap()[..], b"e");
    server.abort();
}

/// A peer that has lost its queue pair, but has not disconnected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn silent_peer_is_detected() {
    let options = Options::new().keep_alive(Duration::from_millis(50));
    let server = Server::bind_with(address(), &options).await.unwrap();
    let to = server.local_addr().unwrap();
    let (begun, ended) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begin, end) = (Arc::clone(&begun), Arc::clone(&ended));
    let server = tokio::spawn(server.serve(move |request| {
        begin.notify_one();
        unanswered(request, Arc::clone(&end))
    }));
    let peer = Hostile::connect(to, &hello(8, 4096)).await.unwrap();
    let message = request(1, 1, (0, 0, 0), b"s");
    peer.qp.send(peer.buffer(&message)).await.unwrap();
    in_time(begun.notified()).await;
    drop(peer.qp);
    in_time(ended.notified()).await;
    server.abort();
}

/// A server that answers each request with these messages.
async fn hostile_server(hello: Vec<u8>, answers: Vec<Vec<u8>>) -> SocketAddr {
    let listener = AsyncListener::bind(address()).await.unwrap();
    let to = listener.get_ref().local_addr().unwrap().unwrap();
    tokio::spawn(async move {
        while let Ok(request) = listener.next_request().await {
            let (qp, domain) = hostile_queue_pair(&request.device().unwrap());
            request.prepare_async(&qp).unwrap();
            let options = cm::Options {
                private_data: &hello,
                ..cm::Options::default()
            };
            for _ in 0..64 {
                qp.post_receive(domain.alloc(8192).unwrap().into_buffer())
                    .unwrap();
            }
            let connection = request.accept_async(&qp, &options).unwrap();
            let peer = Hostile {
                qp,
                domain,
                _connection: connection,
            };
            let answers = answers.clone();
            tokio::spawn(async move {
                while let Ok(message) = peer.qp.message::<Buffer>().await {
                    for answer in &answers {
                        // The call is the client's where that is 0xffffffff.
                        let mut answer = answer.clone();
                        if answer.get(4..8) == Some(&[0xff; 4]) {
                            answer[4..8].copy_from_slice(&message.data[4..8]);
                        }
                        if peer.qp.send(peer.buffer(&answer)).await.is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    to
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test, or on an RDMA device"]
async fn a_client_outlives_hostile_servers() {
    for refused in [&b""[..], b"HTTP/1.1 and more", &hello(0, 4096)] {
        let to = hostile_server(refused.to_vec(), Vec::new()).await;
        let error = Client::connect(to).await.unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    }
    let call = u32::MAX;
    let long = [header(3, call, 5000), vec![1; 5000]].concat();
    let cases: [(Vec<Vec<u8>>, bool); 9] = [
        (vec![vec![]], true),
        (vec![vec![9; 100]], true),
        (vec![header(3, 12345, 0)], true),
        (vec![header(3, call, 4)], true),
        (vec![header(1, call, 0)], true),
        // A reply that was written nowhere, and one beyond its piece.
        (vec![header(4, call, 10)], true),
        (vec![header(4, call, 1 << 30)], true),
        // Longer than a receive.
        (vec![long], false),
        // An empty message.
        (vec![], false),
    ];
    for (answers, is_protocol) in cases {
        let is_silent = answers.is_empty();
        let to = hostile_server(hello(8, 4096), answers.clone()).await;
        let client = Client::connect(to).await.unwrap();
        let patience = if is_silent {
            Duration::from_millis(500)
        } else {
            PATIENCE
        };
        let options = CallOptions::new().timeout(patience);
        let error = client.call_with(b"e", &options).await.unwrap_err();
        let expected = match () {
            () if is_protocol => matches!(error, Error::Protocol { .. }),
            () if is_silent => error == Error::Timeout,
            () => error == Error::Disconnected,
        };
        assert!(expected, "{answers:?}: {error:?}");
        if is_protocol {
            // Later calls fail with the same error.
            let again = client.call(b"e").await.unwrap_err();
            assert!(matches!(again, Error::Protocol { .. }), "{again:?}");
        }
    }
    // A second reply to the same call, whose slot may belong to a newer call.
    let twice = vec![header(3, call, 0), header(3, call, 0)];
    let to = hostile_server(hello(8, 4096), twice).await;
    let client = Client::connect(to).await.unwrap();
    assert_eq!(client.call(b"e").await.unwrap().len(), 0);
    let error = loop {
        if let Err(error) = in_time(client.call(b"e")).await {
            break error;
        }
    };
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
}

/// Runs the ignored tests on the embedded device.
#[test]
fn on_the_embedded_device() {
    program::run_ignored_tests(10, &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes() {
    if program::ran_in_child("two_processes") {
        return;
    }
    let server = program::Server::start("rpc_server");
    let client = Client::connect(server.address).await.unwrap();
    for len in [10, 300_000] {
        let request = bytes(1, len);
        let options = CallOptions::new().reply_up_to(len);
        assert!(client.call_with(&request, &options).await.unwrap()[..] == request[..]);
    }
    // The server is killed while a call is under way, or before the next.
    drop(server);
    let options = CallOptions::new().timeout(PATIENCE);
    let error = client.call_with(b"more", &options).await.unwrap_err();
    assert_eq!(error, Error::Disconnected);
}
