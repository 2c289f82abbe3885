//! A tonic gRPC server over RDMA: `grpc_server ADDRESS:PORT`.
#![allow(dead_code, reason = "the client's part of the service")]

mod echo;

use ringverbs::stream::tokio::RdmaListener;
use ringverbs_tonic::Incoming;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or("0.0.0.0:7481".to_owned());
    let incoming = Incoming::new(RdmaListener::bind(&address).await?);
    println!("listening on {}", incoming.local_addr()?);
    Ok(echo::serve(incoming).await?)
}
