//! Support for tests of the embedded device: a well-behaved driver over
//! `crates/mlx5`, commands attribute by attribute, and random sequences of them.
#![allow(missing_docs, reason = "for tests: the names say it")]
#![allow(
    clippy::len_without_is_empty,
    clippy::missing_safety_doc,
    clippy::new_without_default,
    clippy::should_implement_trait,
    reason = "for tests"
)]

pub mod driver;
pub mod raw;
pub mod world;
