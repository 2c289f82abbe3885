//! The guest runner and the tests that need a kernel with RDMA.
