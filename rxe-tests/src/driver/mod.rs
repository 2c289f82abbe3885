//! The driver, which runs on a kernel with rdma_rxe: sets up a device and runs the
//! test cases.

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
