//! The latency of calls by ringverbs-rpc and by tonic, on the same device in the same run:
//! `latency [ADDRESS [CALLS]]`. With `RINGVERBS_DEVICE=embedded` no RDMA device is needed.
#![allow(dead_code, reason = "a part of the service that tonic's tests use")]

#[path = "../../ringverbs-tonic/examples/echo/mod.rs"]
mod echo;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ringverbs::stream::tokio::RdmaListener;
use ringverbs_rpc::{CallOptions, Client, Request, Server};
use ringverbs_tonic::Incoming;

/// Number of calls before the measured ones.
const WARM_UP: usize = 20;

fn report(name: &str, len: usize, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_nanos() as f64 / 1000.0;
    println!(
        "{name:>5} {len:>7} {:>9.1} {:>9.1} {:>9.1}",
        at(0),
        at(50),
        at(99)
    );
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let ip: IpAddr = arguments.next().as_deref().unwrap_or("127.0.0.1").parse()?;
    let calls: usize = arguments.next().as_deref().unwrap_or("1000").parse()?;
    let any = SocketAddr::from((ip, 0));

    let server = Server::bind(any).await?;
    let to = server.local_addr()?;
    tokio::spawn(server.serve(|request: Request| async { request }));
    let rpc = Client::connect(to).await?;

    let listener = RdmaListener::bind(any).await?;
    let to = listener.local_addr()?;
    tokio::spawn(echo::serve(Incoming::new(listener)));
    let mut tonic = echo::Client::connect(to).await?;

    println!("µs:     bytes      best    median       99%");
    for len in [32, 1024, 65_536, 1 << 20] {
        let calls = calls.div_ceil(1 + len / 4096) + 10;
        let bytes = vec![7; len];
        let options = CallOptions::new().reply_up_to(len);
        let mut times = Vec::new();
        for round in 0..calls + WARM_UP {
            let begin = Instant::now();
            let reply = rpc.call_with(&bytes, &options).await?;
            assert_eq!(reply.len(), len);
            if round >= WARM_UP {
                times.push(begin.elapsed());
            }
        }
        report("rpc", len, times);
        let mut times = Vec::new();
        for round in 0..calls + WARM_UP {
            let message = echo::Message {
                payload: bytes.clone().into(),
                times: 1,
            };
            let begin = Instant::now();
            let reply = tonic.unary(message).await?;
            assert_eq!(reply.payload.len(), len);
            if round >= WARM_UP {
                times.push(begin.elapsed());
            }
        }
        report("tonic", len, times);
    }
    Ok(())
}
