//! A ConnectX in software: what a driver of the real device sees (engine,
//! front ends), and what lies behind it (transport, fabric).

pub mod fabric;
pub mod packet;
pub mod pcap;
pub mod transport;
