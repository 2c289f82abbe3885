//! Devices in tests: the embedded one, and a fake rdma_rxe.
#![allow(missing_docs, reason = "for tests; the names are sufficient")]
#![allow(
    clippy::len_without_is_empty,
    clippy::missing_safety_doc,
    clippy::new_without_default,
    clippy::should_implement_trait,
    reason = "for tests"
)]

#[cfg(feature = "embedded")]
pub mod embedded;
#[cfg(feature = "rxe")]
pub mod rxe;
