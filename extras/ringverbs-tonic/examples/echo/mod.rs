//! The service of the examples and tests, written as tonic's generator would write
//! it, so that building takes no protobuf compiler:
//!
//! ```proto
//! service Echo {
//!     rpc Unary(Message) returns (Message);
//!     rpc Repeat(Message) returns (stream Message);
//!     rpc PeerInfo(Message) returns (Message);
//! }
//! message Message { bytes payload = 1; uint32 times = 2; }
//! ```

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use ringverbs_tonic::{ConnectInfo, Incoming, RdmaConnector};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_stream::Stream;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

/// The request and response of all methods.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Message {
    /// Any bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub payload: bytes::Bytes,
    /// The number of responses to `Repeat`.
    #[prost(uint32, tag = "2")]
    pub times: u32,
}

/// Serves all clients, forever.
///
/// # Errors
/// tonic's error.
pub async fn serve<T>(incoming: Incoming<T>) -> Result<(), tonic::transport::Error>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    Server::builder().serve_with_incoming(Echo, incoming).await
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

/// The method that returns the client's addresses.
struct PeerInfo;

impl UnaryService<Message> for PeerInfo {
    type Response = Message;
    type Future = BoxFuture<Response<Message>, Status>;
    fn call(&mut self, request: Request<Message>) -> Self::Future {
        let info = request.extensions().get::<ConnectInfo>();
        let payload = format!("{info:?}").into();
        Box::pin(async move { Ok(Response::new(Message { payload, times: 1 })) })
    }
}

impl ServerStreamingService<Message> for Echo {
    type Response = Message;
    type ResponseStream = Pin<Box<dyn Stream<Item = Result<Message, Status>> + Send>>;
    type Future = BoxFuture<Response<Self::ResponseStream>, Status>;
    fn call(&mut self, request: Request<Message>) -> Self::Future {
        let message = request.into_inner();
        let messages = (0..message.times).map(move |times| {
            Ok(Message {
                times,
                ..message.clone()
            })
        });
        let stream: Self::ResponseStream = Box::pin(tokio_stream::iter(messages));
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
                PEER_INFO => grpc.unary(PeerInfo, request).await,
                REPEAT => grpc.server_streaming(Echo, request).await,
                _ => Status::unimplemented("the service has no such method").into_http(),
            })
        })
    }
}

const UNARY: &str = "/ringverbs.Echo/Unary";
const PEER_INFO: &str = "/ringverbs.Echo/PeerInfo";
const REPEAT: &str = "/ringverbs.Echo/Repeat";

/// The service's client.
pub struct Client {
    grpc: tonic::client::Grpc<Channel>,
}

impl Client {
    /// Connects with the default connector.
    ///
    /// # Errors
    /// tonic's error, whose source is the stream's error.
    pub async fn connect(to: SocketAddr) -> Result<Self, tonic::transport::Error> {
        Self::connect_with(RdmaConnector::new(), to).await
    }

    /// Connects with a connector.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_with<C>(
        connector: C,
        to: SocketAddr,
    ) -> Result<Self, tonic::transport::Error>
    where
        C: Service<http::Uri, Error = io::Error> + Send + 'static,
        C::Response: hyper::rt::Read + hyper::rt::Write + Send + Unpin,
        C::Future: Send,
    {
        let endpoint = Endpoint::from_shared(format!("http://{to}"))?;
        let channel = endpoint.connect_with_connector(connector).await?;
        Ok(Self {
            grpc: tonic::client::Grpc::new(channel),
        })
    }

    /// Returns this client's addresses as the server reports them.
    ///
    /// # Errors
    /// The service's, or the transport's.
    pub async fn peer_info(&mut self) -> Result<String, Status> {
        self.ready().await?;
        let codec = ProstCodec::<Message, Message>::default();
        let path = http::uri::PathAndQuery::from_static(PEER_INFO);
        let request = Request::new(Message::default());
        let answer = self.grpc.unary(request, path, codec).await?;
        Ok(String::from_utf8_lossy(&answer.into_inner().payload).into_owned())
    }

    async fn ready(&mut self) -> Result<(), Status> {
        let ready = self.grpc.ready().await;
        ready.map_err(|error| Status::unavailable(error.to_string()))
    }

    /// Sends a message and waits for its echo.
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

    /// Sends a message that the server echoes `times` times.
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
