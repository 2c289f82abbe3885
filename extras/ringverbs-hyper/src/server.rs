//! The server.

use std::error::Error;
use std::future::Future;
use std::io;
use std::pin::pin;

use hyper::body::Body;
use hyper::service::Service;
use hyper::{Request, Response, body};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use ringverbs::stream::ConnectInfo;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::Incoming;
use crate::incoming::PAUSE;

/// Number of consecutive failed accepts after which a server stops.
const MAX_FAILURES: u32 = 10;

/// A service whose requests carry the [`ConnectInfo`].
struct ConnectInfoService<S> {
    service: S,
    info: ConnectInfo,
}

impl<S: Service<Request<body::Incoming>>> Service<Request<body::Incoming>>
    for ConnectInfoService<S>
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn call(&self, mut request: Request<body::Incoming>) -> S::Future {
        request.extensions_mut().insert(self.info.clone());
        self.service.call(request)
    }
}

/// Serves connections forever, each in a task of the current runtime.
///
/// # Errors
/// The listener's error, after ten consecutive failed accepts.
pub async fn serve<T, S, B>(incoming: Incoming<T>, service: S) -> io::Result<()>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Service<Request<body::Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    serve_until(incoming, service, std::future::pending()).await
}

/// As [`serve`], until `stop` is ready; then accepts no more connections, and completes the
/// requests in progress.
///
/// # Errors
/// As [`serve`].
pub async fn serve_until<T, S, B>(
    mut incoming: Incoming<T>,
    service: S,
    stop: impl Future<Output = ()>,
) -> io::Result<()>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Service<Request<body::Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let mut http = auto::Builder::new(TokioExecutor::new());
    // With timers, a client that never completes its headers is disconnected.
    http.http1().timer(TokioTimer::new());
    http.http2().timer(TokioTimer::new());
    let connections = GracefulShutdown::new();
    let mut stop = pin!(stop);
    let mut failures = 0;
    loop {
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = incoming.accept() => accepted,
        };
        let connection = match accepted {
            Ok(connection) => connection,
            Err(error) => {
                failures += 1;
                if failures == MAX_FAILURES {
                    return Err(error);
                }
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        failures = 0;
        let info = connection.connect_info().clone();
        let peer = info.peer_addr;
        let service = ConnectInfoService {
            service: service.clone(),
            info,
        };
        let connection = http
            .serve_connection_with_upgrades(TokioIo::new(connection), service)
            .into_owned();
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, ?peer, "connection failed");
            }
        });
    }
    drop(incoming);
    connections.shutdown().await;
    Ok(())
}
