//! The process around the devices: networks and their threads, waiting and turns, descriptors
//! of events, and the public face [`Embedded`](embedded::Embedded).

pub(crate) mod capture_control;
pub(crate) mod check;
pub(crate) mod connections;
pub(crate) mod control;
pub(crate) mod device;
pub(crate) mod embedded;
pub(crate) mod exit_flush;
pub(crate) mod fault_record;
pub(crate) mod faults;
pub(crate) mod kernel;
pub(crate) mod network;
pub(crate) mod nodes;
pub(crate) mod pinning;
pub(crate) mod programs;
pub(crate) mod reasons;
pub(crate) mod resources;
pub(crate) mod runner;
pub(crate) mod shared_words;
pub(crate) mod status;
pub(crate) mod time;
pub mod usage;
pub(crate) mod wait;
