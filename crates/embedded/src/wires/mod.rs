//! Wires to devices of other processes (`segment`) and of other hosts (`udp`). [`wire::Link`] is
//! either, with what wakes the thread that drives it.

pub(crate) mod agent;
pub(crate) mod control_file;
pub(crate) mod frames;
pub(crate) mod link_file;
pub(crate) mod reason_datagram;
pub(crate) mod segment;
pub(crate) mod udp;
pub(crate) mod wire;
