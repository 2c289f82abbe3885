//! The embedded device for unmodified programs: a library for `LD_PRELOAD` that presents
//! devices of crates/embedded to the system's libibverbs and librdmacm, for use with any
//! provider.
//!
//! ```text
//! program ── libibverbs ── open, ioctl, mmap, read ... ──► calls ──► C library
//!                                                            │
//!             descriptors, sysfs tree ◄──────────────────────┤
//!                                                            ▼
//!                                           process ──► embedded::Network
//! ```
//!
//! The exported functions (`calls`) interpose those of the C library. They call the C
//! library (`real`) except for paths of RDMA devices (`paths`) and for descriptors that were
//! opened through such paths (`table`). Nothing is set up before the first such path: in a
//! program that does not use RDMA the library costs an atomic load per call. Without
//! `RINGVERBS_EMBEDDED`, and in a program with raised privileges, it does nothing, but record
//! (`record`) and check (`host`) what the program does with devices of the host, if asked to.

mod calls;
mod chaos;
mod check;
mod config;
mod doorbells;
mod dynamic;
mod explain;
mod fault;
mod hooks;
mod host;
mod internal;
mod memory_map;
mod netlink;
mod own;
mod paths;
mod posts;
mod process;
mod promises;
mod real;
mod record;
mod relative;
mod request;
mod resources;
mod standard_error;
mod status;
mod switch;
mod table;
mod tree;
