//! What tests, fuzzing and measurements drive a whole HCA with, in one process.

pub mod driver;
pub mod hostile;
