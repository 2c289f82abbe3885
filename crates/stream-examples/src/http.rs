//! HTTP/1 by hyper.

use std::error::Error;
use std::io;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};

/// Serves every client that comes, for ever.
///
/// # Errors
/// The listener's.
pub async fn serve(listener: RdmaListener) -> io::Result<()> {
    loop {
        let (stream, peer) = listener.accept().await?;
        tokio::spawn(async move {
            // As for a `TcpStream`.
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service_fn(answer));
            if let Err(error) = connection.await {
                eprintln!("{peer}: {error}");
            }
        });
    }
}

/// `GET /`: a greeting. `POST /echo`: what was sent. `GET /zeros/N`: N zeros.
async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let path = request.uri().path().to_owned();
    let body = match (request.method(), path.as_str()) {
        (&Method::GET, "/") => Bytes::from_static(b"hello over RDMA\n"),
        (&Method::POST, "/echo") => request.into_body().collect().await?.to_bytes(),
        (&Method::GET, path) => match path.strip_prefix("/zeros/").map(str::parse::<u32>) {
            Some(Ok(count)) if count <= 1 << 28 => vec![0; count as usize].into(),
            _ => return Ok(status(StatusCode::NOT_FOUND)),
        },
        _ => return Ok(status(StatusCode::METHOD_NOT_ALLOWED)),
    };
    Ok(Response::new(body.into()))
}

fn status(status: StatusCode) -> Response<Full<Bytes>> {
    let mut response = Response::default();
    *response.status_mut() = status;
    response
}

/// A connection of a client's.
pub struct Client {
    sender: hyper::client::conn::http1::SendRequest<Full<Bytes>>,
}

impl Client {
    /// Speaks HTTP over a stream.
    ///
    /// # Errors
    /// hyper's.
    pub async fn new(stream: RdmaStream) -> hyper::Result<Self> {
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Self { sender })
    }

    /// Asks, and waits for the whole answer.
    ///
    /// # Errors
    /// hyper's, or a path that is none.
    pub async fn request(
        &mut self,
        method: Method,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Result<(StatusCode, Bytes), Box<dyn Error + Send + Sync>> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "rdma")
            .body(Full::new(body.into()))?;
        self.sender.ready().await?;
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        Ok((status, response.into_body().collect().await?.to_bytes()))
    }
}
