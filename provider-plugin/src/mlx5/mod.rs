//! The plugin's traits for ConnectX.
//!
//! The generic modules implement verbs on the C structures; here are the queues of
//! `ringverbs_mlx5`, their locks, and polling.
//!
//! Locks: the lock of a completion queue guards its reader and its QP table; the two locks of
//! a queue pair guard its send and its receive queue. Two completion queues are locked one
//! after the other, never nested.

mod ah;
pub mod clock;
pub mod counters;
pub mod cq;
mod device;
pub mod dm;
pub mod entries;
pub mod flow_action;
pub mod key_config;
pub mod memory;
mod pd;
pub mod qp;
pub mod srq;
pub mod wq;
mod writers;

/// ConnectX devices.
pub enum Mlx5 {}
