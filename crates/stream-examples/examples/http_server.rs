//! A hyper HTTP/1 server over RDMA: `http_server ADDRESS:PORT`.

use ringverbs::stream::tokio::RdmaListener;
use ringverbs_stream_examples::http;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or("0.0.0.0:7480".to_owned());
    let listener = RdmaListener::bind(&address)?;
    println!("listening on {}", listener.local_addr()?);
    http::serve(listener).await
}
