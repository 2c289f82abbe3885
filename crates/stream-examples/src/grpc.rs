//! gRPC by tonic.
//!
//! The service is written as tonic's generator would write it, so that building
//! takes no protobuf compiler:
//!
//! ```proto
//! service Echo {
//!     rpc Unary(Message) returns (Message);
//!     rpc Repeat(Message) returns (stream Message);
//! }
//! message Message { bytes payload = 1; uint32 times = 2; }
//! ```

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_stream::Stream;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

/// What is sent and comes back.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Message {
    /// Any bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub payload: bytes::Bytes,
    /// How often it is to come back, of `Repeat`.
    #[prost(uint32, tag = "2")]
    pub times: u32,
}

/// A stream that tells tonic who the peer is.
struct Peer(RdmaStream);

impl Connected for Peer {
    type ConnectInfo = Option<SocketAddr>;
    fn connect_info(&self) -> Option<SocketAddr> {
        self.0.peer_addr().ok()
    }
}

impl AsyncRead for Peer {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Peer {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// The streams that come, as tonic wants them.
struct Incoming(RdmaListener);

impl Stream for Incoming {
    type Item = io::Result<Peer>;
    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0
            .poll_accept(cx)
            .map(|accepted| Some(accepted.map(|(stream, _)| Peer(stream))))
    }
}

/// Serves every client that comes, for ever.
///
/// # Errors
/// tonic's.
pub async fn serve(listener: RdmaListener) -> Result<(), tonic::transport::Error> {
    Server::builder()
        .serve_with_incoming(Echo, Incoming(listener))
        .await
}

/// The service.
#[derive(Clone)]
struct Echo;

impl UnaryService<Message> for Echo {
    type Response = Message;
    type Future = BoxFuture<Response<Message>, Status>;
    fn call(&mut self, request: Request<Message>) -> Self::Future {
        Box::pin(async move { Ok(Response::new(request.into_inner())) })
    }
}

impl ServerStreamingService<Message> for Echo {
    type Response = Message;
    type ResponseStream = Pin<Box<dyn Stream<Item = Result<Message, Status>> + Send>>;
    type Future = BoxFuture<Response<Self::ResponseStream>, Status>;
    fn call(&mut self, request: Request<Message>) -> Self::Future {
        let message = request.into_inner();
        let answers = (0..message.times).map(move |times| {
            Ok(Message {
                times,
                ..message.clone()
            })
        });
        let stream: Self::ResponseStream = Box::pin(tokio_stream::iter(answers));
        Box::pin(async move { Ok(Response::new(stream)) })
    }
}

impl Service<http::Request<tonic::body::Body>> for Echo {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = Grpc::new(ProstCodec::<Message, Message>::default());
            Ok(match request.uri().path() {
                UNARY => grpc.unary(Echo, request).await,
                REPEAT => grpc.server_streaming(Echo, request).await,
                _ => Status::unimplemented("the service has no such method").into_http(),
            })
        })
    }
}

const UNARY: &str = "/ringverbs.Echo/Unary";
const REPEAT: &str = "/ringverbs.Echo/Repeat";

/// The service's client.
pub struct Client {
    grpc: tonic::client::Grpc<Channel>,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// tonic's, with that of the stream behind it.
    pub async fn connect(to: SocketAddr) -> Result<Self, tonic::transport::Error> {
        // The name is for HTTP; the connector knows where to go.
        let channel = Endpoint::from_static("http://rdma")
            .connect_with_connector(tower::service_fn(move |_| async move {
                RdmaStream::connect(to).await.map(TokioIo::new)
            }))
            .await?;
        Ok(Self {
            grpc: tonic::client::Grpc::new(channel),
        })
    }

    async fn ready(&mut self) -> Result<(), Status> {
        let ready = self.grpc.ready().await;
        ready.map_err(|error| Status::unavailable(error.to_string()))
    }

    /// Sends a message and waits for it to come back.
    ///
    /// # Errors
    /// The service's, or the transport's.
    pub async fn unary(&mut self, message: Message) -> Result<Message, Status> {
        self.ready().await?;
        let codec = ProstCodec::<Message, Message>::default();
        let path = http::uri::PathAndQuery::from_static(UNARY);
        let answer = self.grpc.unary(Request::new(message), path, codec).await?;
        Ok(answer.into_inner())
    }

    /// Sends a message that comes back as often as it says.
    ///
    /// # Errors
    /// The service's, or the transport's.
    pub async fn repeat(&mut self, message: Message) -> Result<tonic::Streaming<Message>, Status> {
        self.ready().await?;
        let codec = ProstCodec::<Message, Message>::default();
        let path = http::uri::PathAndQuery::from_static(REPEAT);
        let answer = self
            .grpc
            .server_streaming(Request::new(message), path, codec)
            .await?;
        Ok(answer.into_inner())
    }
}
