//! Support for tests of the embedded device: a correct driver based on `crates/mlx5`,
//! commands built attribute by attribute, and random sequences of commands.

pub mod driver;
pub mod random;
pub mod raw;
