//! Client of the kernel's connection manager (rdma_ucm): connections by IP
//! address, as with librdmacm, but without that library.
//!
//! ```text
//! EventChannel ── create_id ──► Id ── bind, listen ─────────────► CONNECT_REQUEST ──► Id
//!      │                         └─── resolve_address, resolve_route, connect
//!      └── wait, try_event ──► Event ── Message
//! ```
//!
//! An [`EventChannel`] is an open rdma_cm device. An [`Id`] on it resembles a
//! socket: each operation started on it completes with an [`Event`] that
//! carries the id's [`Key`]. This crate creates no queue pairs: [`Id::qp_attr`]
//! returns the attributes to modify the user's queue pair with, and
//! [`ConnParam::qp_num`] is its number.
//!
//! | side | order |
//! |---|---|
//! | active | `resolve_address`, ADDR_RESOLVED, `resolve_route`, ROUTE_RESOLVED, queue pair to INIT, receives, `connect`, CONNECT_RESPONSE, queue pair to RTR and RTS, `establish` |
//! | passive | `bind`, `listen`, CONNECT_REQUEST, queue pair to INIT, receives, to RTR and RTS, `accept`, ESTABLISHED |
//! | datagram | the same with UD queue pairs that are at RTS from the start, and without `establish`: ESTABLISHED names queue pair, key and path of the service |
//!
//! All system calls go through [`uverbs::kernel::Kernel`]. Input from the
//! kernel and from peers is checked: malformed answers are typed errors, and
//! numbers without a name here are preserved.
//!
//! All types are `Send` and `Sync`.

pub mod abi;
pub mod address;
mod channel;
pub mod command;
pub mod device;
mod entity;
mod error;
pub mod event;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod id;
mod multicast;
pub mod param;
mod port_space;
mod state;

#[cfg(test)]
mod tests;

pub use address::{Address, IbAddress};
pub use channel::{Event, EventChannel};
pub use entity::{Key, ReportedEvents};
pub use error::{Command, Error};
pub use event::{EventKind, Message, Reason, RejectReason, SidrStatus};
pub use id::{Addresses, BoundDevice, Id, Route};
pub use multicast::{JoinFlags, Multicast};
pub use param::{ConnParam, PeerConnection, UdParam};
pub use port_space::PortSpace;
pub use state::State;
