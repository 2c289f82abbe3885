//! Calls `rpc_server` with each TEXT, concurrently: `rpc_client ADDRESS:PORT TEXT...`.

use ringverbs_rpc::Client;
use tokio::task::JoinSet;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments
        .next()
        .ok_or("usage: rpc_client ADDRESS:PORT TEXT...")?;
    let client = Client::connect(address.parse()?).await?;
    let mut calls = JoinSet::new();
    for text in arguments {
        let client = client.clone();
        calls.spawn(async move { client.call(text.as_bytes()).await });
    }
    while let Some(reply) = calls.join_next().await {
        println!("{}", String::from_utf8_lossy(&reply??));
    }
    Ok(())
}
