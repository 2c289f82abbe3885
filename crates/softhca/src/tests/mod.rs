//! Tests of the whole HCA without a guest: commands, queues and registers.

pub(crate) mod causes;
mod commands;
mod compression;
mod copy;
mod data;
mod dynamic;
mod ethernet;
pub(crate) mod events;
mod faults;
mod health;
mod hostile;
mod layout;
mod memory;
mod scripts;
mod signatures;
mod tag_matching;
mod windows;
mod work;
