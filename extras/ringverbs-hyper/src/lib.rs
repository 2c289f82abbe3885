//! HTTP over RDMA with hyper.
//!
//! **Client:** [`RdmaConnector`] is a `tower_service::Service<Uri>`, for hyper-util's `Client`
//! and others.
//!
//! ```no_run
//! # async fn f() -> Result<(), Box<dyn std::error::Error>> {
//! use http_body_util::{BodyExt, Empty};
//! use hyper_util::client::legacy::Client;
//! use hyper_util::rt::TokioExecutor;
//! use ringverbs_hyper::RdmaConnector;
//!
//! let client = Client::builder(TokioExecutor::new())
//!     .build::<_, Empty<bytes::Bytes>>(RdmaConnector::new());
//! let response = client.get("http://192.0.2.1:7480/".parse()?).await?;
//! println!("{:?}", response.into_body().collect().await?.to_bytes());
//! # Ok(()) }
//! ```
//!
//! **Server:** `serve` serves each connection in a task, with HTTP/1 or HTTP/2 as the client
//! chooses. Requests have a [`ConnectInfo`] among their extensions.
//!
//! ```no_run
//! # async fn f() -> Result<(), Box<dyn std::error::Error>> {
//! use std::convert::Infallible;
//!
//! use hyper::{Request, Response, body, service::service_fn};
//! use ringverbs::stream::tokio::RdmaListener;
//! use ringverbs_hyper::{Incoming, serve};
//!
//! let listener = RdmaListener::bind("192.0.2.1:7480").await?;
//! let hello = service_fn(|_: Request<body::Incoming>| async {
//!     Ok::<_, Infallible>(Response::new("hello over RDMA\n".to_owned()))
//! });
//! serve(Incoming::new(listener), hello).await?;
//! # Ok(()) }
//! ```
//!
//! **TLS:** [`Incoming::over`] and [`RdmaConnector::over`] take a handshake, for
//! example tokio-rustls': `examples/https.rs`.
//!
//! Addresses are as in [`ringverbs::stream`]. With `RINGVERBS_DEVICE=embedded` no RDMA device
//! is needed.

#![forbid(unsafe_code)]

#[cfg(feature = "client")]
mod client;
mod incoming;
mod io;
#[cfg(feature = "server")]
mod server;

#[cfg(feature = "client")]
pub use client::{Connecting, HandshakeConnector, RdmaConnector};
pub use incoming::Incoming;
pub use io::RdmaIo;
pub use ringverbs::stream::ConnectInfo;
#[cfg(feature = "server")]
pub use server::{serve, serve_until};
