//! The whole HCA, driven by commands, queues and registers, without a guest.

mod commands;
mod compression;
mod copy;
mod data;
mod dynamic;
mod ethernet;
mod health;
mod hostile;
mod memory;
mod scripts;
mod windows;
