//! Request and response (RPC) over RDMA, without HTTP.
//!
//! ```no_run
//! # async fn f() -> Result<(), ringverbs_rpc::Error> {
//! use ringverbs_rpc::{Client, Request, Server};
//!
//! let server = Server::bind("192.0.2.1:7482".parse().unwrap()).await?;
//! tokio::spawn(server.serve(|request: Request| async move {
//!     request.iter().rev().copied().collect::<Vec<u8>>()
//! }));
//!
//! let client = Client::connect("192.0.2.1:7482".parse().unwrap()).await?;
//! let reply = client.call(b"hello").await?;
//! assert_eq!(&reply[..], b"olleh");
//! # Ok(()) }
//! ```
//!
//! **Small messages** are sends: inline up to 128 bytes, otherwise from a pool of registered
//! buffers. A reply is returned in the buffer in which it arrived. **Large messages** use
//! memory that the *client* exposes, a piece for each such call: the server reads the request
//! from it and writes the reply to it, up to [`CallOptions::reply_up_to`] bytes. A server
//! exposes no memory.
//!
//! **Flow control.** Each side announces the number of receives that it posts; the client
//! keeps no more calls in flight than the smaller number, and further calls wait. A side
//! reposts a receive before it releases the call's slot, so every message finds a receive,
//! and connections use no RNR retries.
//!
//! **Dropped and timed out calls** return at once. Their slot, and the memory that the server
//! may still write, are released when the server has replied.
//!
//! **Peers are not trusted.** All input is validated; malformed input ends the connection
//! ([`Error::Protocol`]). A server limits its connections, and the requests, bytes and memory
//! of each ([`Options`]). Each side registers `4 * window * message_size + large_buffers *
//! max_message` bytes for a connection. Nothing is encrypted.

#![forbid(unsafe_code)]

mod body;
mod client;
mod error;
mod message;
mod options;
mod queues;
mod server;

pub use body::{Reply, Request, Response};
pub use client::Client;
pub use error::Error;
pub use options::{CallOptions, Options};
pub use server::Server;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
