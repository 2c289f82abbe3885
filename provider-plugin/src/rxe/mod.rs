//! ringverbs on rdma_rxe: what differs from other devices.
//!
//! What a verb does to the C structures is in the modules above, generic over
//! the kind of device; here are the queues of `ringverbs_rxe`, under which
//! lock each is, and the data path.

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
