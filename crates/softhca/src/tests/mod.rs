//! The whole HCA, driven by commands, queues and registers, without a guest.

mod commands;
mod data;
mod driver;
mod hostile;
mod memory;
