//! A ConnectX in software. `command`, `engine` and `hca` implement the interface to the
//! driver; the crate `roce` has transport, packets and fabric. The front ends are `vfio` here,
//! and the crate `embedded`.

pub mod ancillary;
pub mod card;
pub mod cause;
pub mod chaos;
pub mod command;
#[cfg(feature = "serve")]
pub mod control;
pub mod engine;
pub mod fault;
pub mod hca;
mod health;
mod inject;
mod late;
pub mod layout;
pub mod link_shape;
pub mod observed_frame;
pub mod opcode;
pub mod platform;
pub mod profile;
pub mod profiles;
pub mod queue_depths;
mod rights;
mod settings;
pub mod status;
mod table;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
pub mod units;
#[cfg(feature = "serve")]
pub mod vfio;
pub mod work;

pub use hca::{Connection, Hca, Settings};
pub use roce::rule;

#[cfg(test)]
mod tests;
