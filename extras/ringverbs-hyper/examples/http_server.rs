//! A hyper server over RDMA, HTTP/1 and HTTP/2: `http_server ADDRESS:PORT`.

mod service;

use hyper::service::service_fn;
use ringverbs::stream::tokio::RdmaListener;
use ringverbs_hyper::{Incoming, serve};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or("0.0.0.0:7480".to_owned());
    let incoming = Incoming::new(RdmaListener::bind(&address).await?);
    println!("listening on {}", incoming.local_addr()?);
    serve(incoming, service_fn(service::answer)).await
}
