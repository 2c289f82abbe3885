//! Connections by the connection manager, on tokio.

use std::net::SocketAddr;
use std::time::Duration;

use ringverbs::cm::manager::PortSpace;
use ringverbs::cm::{self, AsyncConnector, AsyncListener, Listener, Options};
use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair, Cause};
use ringverbs::{Context, Device, Status, Transport};

use crate::{Bench, LONG, runtime};

const LOCALHOST: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, future).await.unwrap()
}

fn listen(device: &Device) -> (AsyncListener, SocketAddr) {
    let listener = Listener::bind_on(device, PortSpace::TCP, LOCALHOST.into(), 0);
    let listener = AsyncListener::new(listener.unwrap()).unwrap();
    let address = listener.get_ref().local_addr().unwrap().unwrap();
    (listener, address)
}

fn queue_pair(context: &Context) -> (Bench, AsyncQueuePair) {
    let bench = Bench::on(context);
    let queue = context.completion_queue().entries(64);
    let cq = AsyncCompletionQueue::spawn(queue).unwrap();
    let qp = bench.domain.queue_pair(Transport::Reliable, &cq).build();
    let qp = AsyncQueuePair::new(qp.unwrap(), &cq).unwrap();
    (bench, qp)
}

async fn resolve(device: &Device, peer: SocketAddr) -> AsyncConnector {
    let resolve = AsyncConnector::resolve_on(device, PortSpace::TCP, None, peer);
    within(resolve).await.unwrap()
}

#[test]
fn queue_pairs_connect_by_address() {
    runtime().block_on(async {
        let device = Device::embedded().unwrap();
        let (listener, address) = listen(&device);
        let server = async {
            let request = within(listener.next_request()).await.unwrap();
            assert!(request.private_data().starts_with(b"from the client"));
            let context = request.device().unwrap().open().unwrap();
            let (bench, qp) = queue_pair(&context);
            request.prepare_async(&qp).unwrap();
            let receive = qp.receive(bench.buffer(64));
            let left = qp.receive(bench.buffer(64));
            let options = Options {
                private_data: b"from the server",
                ..Options::default()
            };
            let connection = request.accept_async(&qp, &options).unwrap();
            within(connection.established()).await.unwrap();
            let message = within(receive).await.unwrap();
            assert_eq!(&message.data[..], b"hello");
            within(qp.send(message.data)).await.unwrap();
            within(connection.disconnected()).await.unwrap();
            connection.disconnect(&qp).unwrap();
            // The receive in flight is flushed.
            let error = within(left).await.unwrap_err();
            assert!(matches!(error.cause, Cause::Failed(failure)
                if failure.status == Status::WR_FLUSH_ERR));
            assert!(error.data.is_some());
        };
        let client = async {
            let connector = resolve(&device, address).await;
            let context = connector.device().unwrap().open().unwrap();
            let (bench, qp) = queue_pair(&context);
            connector.prepare(&qp).unwrap();
            let receive = qp.receive(bench.buffer(64));
            let options = Options {
                private_data: b"from the client",
                ..Options::default()
            };
            let connection = within(connector.connect(&qp, &options)).await.unwrap();
            let data = connection.get_ref().private_data();
            assert!(data.starts_with(b"from the server"));
            within(qp.send(bench.filled(b"hello"))).await.unwrap();
            assert_eq!(&within(receive).await.unwrap().data[..], b"hello");
            connection.disconnect(&qp).unwrap();
            within(connection.disconnected()).await.unwrap();
        };
        tokio::join!(server, client);
    });
}

/// A request that was given up, one that is rejected, and an address where nobody
/// listens.
#[test]
fn connections_that_are_not_made() {
    runtime().block_on(async {
        let device = Device::embedded().unwrap();
        let (listener, address) = listen(&device);
        let context = device.open().unwrap();
        // The request is not answered, and the future is dropped.
        let (_bench, qp) = queue_pair(&context);
        let connector = resolve(&device, address).await;
        let short = Duration::from_millis(50);
        let options = Options::default();
        let given_up = tokio::time::timeout(short, connector.connect(&qp, &options)).await;
        assert!(given_up.is_err());
        let request = within(listener.next_request()).await.unwrap();
        drop(request);
        // The queue pair is dropped while it connects.
        let (_bench, qp) = queue_pair(&context);
        let connector = resolve(&device, address).await;
        let connect = async move { connector.connect(&qp, &Options::default()).await };
        assert!(tokio::time::timeout(short, connect).await.is_err());
        drop(within(listener.next_request()).await.unwrap());
        // Rejected.
        let (_bench, qp) = queue_pair(&context);
        let connector = resolve(&device, address).await;
        let client = connector.connect(&qp, &options);
        let server = async {
            let request = within(listener.next_request()).await.unwrap();
            request.reject(b"not today").unwrap();
        };
        let (refused, ()) = tokio::join!(within(client), server);
        let Err(cm::Error::Failed { private_data, .. }) = &refused else {
            panic!("{refused:?}");
        };
        assert!(private_data.starts_with(b"not today"));
        assert!(refused.unwrap_err().is_rejected());
        drop(listener);
        let (_bench, qp) = queue_pair(&context);
        let connector = resolve(&device, address).await;
        let refused = within(connector.connect(&qp, &options)).await.unwrap_err();
        assert!(refused.is_rejected(), "{refused}");
    });
}

/// One listener, several tasks that wait, and many clients.
#[test]
fn several_tasks_accept() {
    runtime().block_on(async {
        let device = Device::embedded().unwrap();
        let (listener, address) = listen(&device);
        let listener = std::sync::Arc::new(listener);
        let context = device.open().unwrap();
        let servers: Vec<_> = (0..4)
            .map(|_| {
                let (listener, context) = (listener.clone(), context.clone());
                tokio::spawn(async move {
                    for _ in 0..4 {
                        let request = within(listener.next_request()).await.unwrap();
                        let (bench, qp) = queue_pair(&context);
                        request.prepare_async(&qp).unwrap();
                        let receive = qp.receive(bench.buffer(8));
                        let connection = request.accept_async(&qp, &Options::default());
                        let connection = connection.unwrap();
                        assert_eq!(&within(receive).await.unwrap().data[..], b"x");
                        within(connection.disconnected()).await.unwrap();
                    }
                })
            })
            .collect();
        let clients: Vec<_> = (0..16)
            .map(|_| {
                let (device, context) = (device.clone(), context.clone());
                tokio::spawn(async move {
                    let connector = resolve(&device, address).await;
                    let (bench, qp) = queue_pair(&context);
                    let options = Options::default();
                    let connection = within(connector.connect(&qp, &options)).await;
                    let connection = connection.unwrap();
                    within(qp.send(bench.filled(b"x"))).await.unwrap();
                    connection.disconnect(&qp).unwrap();
                })
            })
            .collect();
        for task in clients.into_iter().chain(servers) {
            task.await.unwrap();
        }
    });
}
