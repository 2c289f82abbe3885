//! ringverbs on ConnectX: what differs from rdma_rxe.
//!
//! Objects of the C interface over `ringverbs_mlx5`, and the operations on
//! them. A context has rxe's operations or these (`ops.rs`), so neither asks
//! which device it has. Of an mlx5 context all queues, queue pairs, address
//! handles and completion queues are of the types here.
//!
//! Locks: a completion queue's guards its reader and the directory of the queue
//! pairs that complete to it; a queue pair's two guard its send and its receive
//! queue. Who needs both of two completion queues takes one after the other,
//! never one in the other.

pub mod ah;
pub mod cq;
pub mod pd;
pub mod post;
mod qp;
pub mod refused;
mod srq;
mod writers;

/// ConnectX devices.
pub enum Mlx5 {}
