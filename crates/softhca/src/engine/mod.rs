//! The engine: the device's objects and their access to guest memory.

pub(crate) mod buffer;
pub(crate) mod capabilities;
pub(crate) mod compression;
pub(crate) mod copy;
pub mod core;
pub mod counters;
pub mod cq;
pub mod device_memory;
pub mod eq;
pub mod ethernet;
pub mod faults;
pub(crate) mod header_change;
pub(crate) mod host;
pub(crate) mod loopback;
pub(crate) mod mkey;
pub mod paging;
pub(crate) mod qp;
pub(crate) mod registers;
pub(crate) mod scheduling;
pub(crate) mod srq;
pub(crate) mod steering;
pub(crate) mod tag_matching;
pub(crate) mod umem;
pub(crate) mod umr;
pub mod wqe;
