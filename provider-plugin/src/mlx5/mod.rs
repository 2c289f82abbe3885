//! ringverbs on ConnectX: what differs from rdma_rxe.
//!
//! What a verb does to the C structures is in the modules above, generic over
//! the kind of device; here are the queues of `ringverbs_mlx5`, under which
//! lock each is, and the data path.
//!
//! Locks: a completion queue's guards its reader and the directory of the queue
//! pairs that complete to it; a queue pair's two guard its send and its receive
//! queue. Who needs both of two completion queues takes one after the other,
//! never one in the other.

mod ah;
pub mod clock;
pub mod cq;
mod device;
pub mod dm;
pub mod entries;
mod memory;
mod pd;
mod qp;
mod srq;
mod writers;

/// ConnectX devices.
pub enum Mlx5 {}
