//! Support for tests of the embedded device: a correct driver based on `crates/mlx5`,
//! commands built attribute by attribute, and random sequences of commands.
#![allow(missing_docs, reason = "for tests; the names are sufficient")]
#![allow(
    clippy::len_without_is_empty,
    clippy::missing_safety_doc,
    clippy::new_without_default,
    clippy::should_implement_trait,
    reason = "for tests"
)]

pub mod driver;
pub mod random;
pub mod raw;
