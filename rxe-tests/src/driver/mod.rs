//! What runs beside the kernel with rdma_rxe: sets a device up and puts the
//! programs under test through their cases.

pub mod case;
pub mod embedded;
mod link;
pub mod lists;
pub mod process;
pub mod programs;
pub mod pyverbs;
pub mod rates;
pub mod run;
pub mod selection;
pub mod setup;
pub mod stock;
pub mod suite;
