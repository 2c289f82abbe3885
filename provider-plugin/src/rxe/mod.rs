//! The plugin's traits for rdma_rxe.
//!
//! The generic modules implement verbs on the C structures; here are the queues of
//! `ringverbs_rxe`, their locks, and polling.

mod ah;
pub mod cq;
mod device;
mod pd;
mod qp;
mod srq;
mod wr_ex;
mod writers;

/// Devices of the kernel's rdma_rxe.
pub enum Rxe {}
