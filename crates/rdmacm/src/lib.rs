//! What the kernel's connection manager (rdma_ucm) is asked: connections by IP
//! address, as librdmacm makes them, without it.
//!
//! ```text
//! EventChannel ── create_id ──► Id ── bind, listen ─────────────► CONNECT_REQUEST ──► Id
//!      │                         └─── resolve_address, resolve_route, connect
//!      └── wait, try_event ──► Event ── Message
//! ```
//!
//! An [`EventChannel`] is an open rdma_cm device. An [`Id`] on it is like a
//! socket: what is begun with it ends with an [`Event`] that names it by its
//! [`Key`]. Queue pairs are not this crate's: [`Id::qp_attr`] says to which
//! attributes the user's queue pair is modified, and [`ConnParam::qp_num`] is
//! its number.
//!
//! | side | order |
//! |---|---|
//! | active | `resolve_address`, ADDR_RESOLVED, `resolve_route`, ROUTE_RESOLVED, queue pair to INIT, receives, `connect`, CONNECT_RESPONSE, queue pair to RTR and RTS, `establish` |
//! | passive | `bind`, `listen`, CONNECT_REQUEST, queue pair to INIT, receives, to RTR and RTS, `accept`, ESTABLISHED |
//! | datagram | the same with UD queue pairs that are at RTS from the start, and without `establish`: ESTABLISHED names queue pair, key and path of the service |
//!
//! Every system call is behind [`uverbs::kernel::Kernel`]. What the kernel and
//! peers say is checked: wrong answers are typed errors, and a number without
//! a name here is kept.
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
mod state;

#[cfg(test)]
mod tests;

pub use address::{Address, IbAddress};
pub use channel::{Event, EventChannel};
pub use entity::{Key, Reported};
pub use error::{Command, Error};
pub use event::{EventKind, Message, Reason, RejectReason, SidrStatus};
pub use id::{Addresses, BoundDevice, Id, PortSpace, Route};
pub use multicast::{JoinFlags, Multicast};
pub use param::{ConnParam, PeerConnection, UdParam};
pub use state::State;
