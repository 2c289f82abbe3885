//! The guest runner, and the tests that need a kernel with RDMA.
//!
//! [`guest`] makes and boots a machine with a real rdma_rxe. The program
//! `rxe-driver` of this package runs in it and reports what passed.

pub mod compare;
pub mod driver;
pub mod guest;
pub mod record;
