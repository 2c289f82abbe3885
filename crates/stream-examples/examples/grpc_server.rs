//! A tonic gRPC server over RDMA: `grpc_server ADDRESS:PORT`.

use ringverbs::stream::tokio::RdmaListener;
use ringverbs_stream_examples::grpc;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or("0.0.0.0:7481".to_owned());
    let listener = RdmaListener::bind(&address)?;
    println!("listening on {}", listener.local_addr()?);
    Ok(grpc::serve(listener).await?)
}
