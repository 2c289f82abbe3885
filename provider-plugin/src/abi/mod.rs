//! The structures of libibverbs's C ABI that a provider reads and writes.
//!
//! Names are the C names, so that a reader finds them in `verbs.h` (public),
//! `driver.h` (shared between libibverbs and its providers) and the man pages.
//! Only what is the same in every supported release is declared here as a
//! structure; what moves from release to release is in [`crate::layout`].
//!
//! C enumerations are plain integers: a value comes from an application or a
//! device and may be any bit pattern.
#![allow(non_camel_case_types)]
#![allow(dead_code)] // the ABI is declared whole, used in part

mod attrs;
mod consts;
mod driver;
mod objects;
mod work;

pub use attrs::*;
pub use consts::*;
pub use driver::*;
pub use objects::*;
pub use work::*;

#[cfg(test)]
mod tests;
