//! The guest runner, and the tests that need a kernel with RDMA.
//!
//! [`guest`] builds and boots a machine with a real rdma_rxe. The program `rxe-driver` of
//! this package runs the cases in it and reports their results.

pub mod compare;
pub mod driver;
pub mod guest;
pub mod record;
