//! What runs beside the kernel with rdma_rxe: sets a device up and puts the
//! programs under test through their cases.

pub mod setup;
