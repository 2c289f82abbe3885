//! The service of the examples and tests.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use ringverbs_hyper::ConnectInfo;

/// `GET /`: a greeting. `POST /echo`: the request's body. `GET /zeros/N`: N zeros.
/// `GET /peer`: the client's address and queue pair number.
pub async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let path = request.uri().path().to_owned();
    let body = match (request.method(), path.as_str()) {
        (&Method::GET, "/") => Bytes::from_static(b"hello over RDMA\n"),
        (&Method::POST, "/echo") => request.into_body().collect().await?.to_bytes(),
        (&Method::GET, "/peer") => match request.extensions().get::<ConnectInfo>() {
            Some(info) => format!("{:?} {}", info.peer_addr, info.peer_qp_num).into(),
            None => return Ok(status(StatusCode::INTERNAL_SERVER_ERROR)),
        },
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
