//! Request and response over RDMA, without HTTP.
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
//! **Small messages** are sends; inline where the device has room, otherwise from a
//! pool of registered buffers. A reply is returned in the buffer that it has arrived
//! in. **Large ones** go through memory that the *client* makes available, a piece
//! for each such call: the server reads the request from there and writes the reply
//! to it, [`CallOptions::reply_up_to`] bytes at most. A server exposes no memory.
//!
//! **Flow control.** Both sides say how many receives they post; the client keeps no
//! more calls in flight than the smaller number. A side posts a receive again before
//! it releases the call's slot, so every message finds a receive, and the
//! connections are made without RNR retries. Further calls wait.
//!
//! **Dropped and timed out calls** return at once. Their slot, and the memory that
//! the server may still write, are free again when the server has answered.
//!
//! **Peers are not trusted.** Whatever they send is checked, and ends the connection
//! if it is malformed ([`Error::Protocol`]). A server has a limit for connections,
//! and each of them one for requests, bytes and memory ([`Options`]). What is
//! registered for a connection: `4 * window * message_size + large_buffers *
//! max_message` bytes, on each side. Nothing is encrypted.

#![forbid(unsafe_code)]

mod body;
mod client;
mod error;
mod options;
mod queues;
mod server;
mod wire;

pub use body::{Reply, Request, Response};
pub use client::Client;
pub use error::Error;
pub use options::{CallOptions, Options};
pub use server::Server;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
