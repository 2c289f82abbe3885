//! The service of the examples and tests, written as tonic's generator would write
//! it, so that building takes no protobuf compiler:
//!
//! ```proto
//! service Echo {
//!     rpc Unary(Message) returns (Message);
//!     rpc Repeat(Message) returns (stream Message);
//!     rpc Who(Message) returns (Message);
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

/// Serves every client that comes, for ever.
///
/// # Errors
/// tonic's.
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

/// The method that says who asks.
struct Who;

impl UnaryService<Message> for Who {
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
                WHO => grpc.unary(Who, request).await,
                REPEAT => grpc.server_streaming(Echo, request).await,
                _ => Status::unimplemented("the service has no such method").into_http(),
            })
        })
    }
}

const UNARY: &str = "/ringverbs.Echo/Unary";
const WHO: &str = "/ringverbs.Echo/Who";
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
        Self::connect_by(RdmaConnector::new(), to).await
    }

    /// Connects by a connector.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_by<C>(
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

    /// Asks the server whom it talks to.
    ///
    /// # Errors
    /// The service's, or the transport's.
    pub async fn who(&mut self) -> Result<String, Status> {
        self.ready().await?;
        let codec = ProstCodec::<Message, Message>::default();
        let path = http::uri::PathAndQuery::from_static(WHO);
        let request = Request::new(Message::default());
        let answer = self.grpc.unary(request, path, codec).await?;
        Ok(String::from_utf8_lossy(&answer.into_inner().payload).into_owned())
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
