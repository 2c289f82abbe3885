//! The atomics that the rest of the crate uses: std's, or loom's when the
//! crate is built for model checking, so that the checked code is the shipped
//! code.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
