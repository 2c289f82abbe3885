//! Echoes requests: `rpc_server ADDRESS:PORT`.

use ringverbs_rpc::{Request, Server};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or("0.0.0.0:7482".to_owned());
    let server = Server::bind(address.parse()?).await?;
    println!("listening on {}", server.local_addr()?);
    Ok(server.serve(|request: Request| async { request }).await?)
}
