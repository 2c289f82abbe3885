//! A ConnectX in software. `command`, `engine` and `hca` implement the interface to the
//! driver; `transport` and `fabric` carry the packets. The front ends are `vfio` here, and
//! the crate `embedded`.

pub mod ancillary;
pub mod bits;
pub mod command;
#[cfg(feature = "serve")]
pub mod control;
pub mod engine;
pub mod fabric;
pub mod hca;
mod health;
pub mod packet;
pub mod pcap;
pub mod platform;
pub mod profile;
pub mod profiles;
mod settings;
pub mod status;
mod table;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
pub mod transport;
#[cfg(feature = "serve")]
pub mod vfio;

pub use hca::{Hca, Settings};

#[cfg(test)]
mod tests;
