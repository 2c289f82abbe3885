//! Support for tests, fuzzing and benchmarks that drive a whole HCA in one process.

pub mod driver;
pub mod hostile;
