//! The embedded device for unmodified programs: a library for `LD_PRELOAD` that
//! gives libibverbs and librdmacm of the system a device of crates/embedded, which
//! any provider can drive.
//!
//! ```text
//! program ── libibverbs ── open, ioctl, mmap, read ... ──► calls ──► C library
//!                                                            │
//!             descriptors, sysfs tree ◄──────────────────────┤
//!                                                            ▼
//!                                             world ──► embedded::Network
//! ```
//!
//! The exported functions (`calls`) have the names of the C library's. They pass
//! everything on to it (`real`) but the paths of RDMA devices (`paths`) and the
//! descriptors that were opened through those (`table`). Nothing is set up before
//! the first such path: in a program that does not use RDMA the library costs an
//! atomic load a call. Without `RINGVERBS_EMBEDDED`, and in a program with raised
//! rights, it does nothing.

mod calls;
mod config;
mod dynamic;
mod fault;
mod own;
mod paths;
mod real;
mod table;
mod tree;
mod verbs;
mod world;
