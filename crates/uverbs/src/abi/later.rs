//! Numbers of the ioctl interface added after Linux 6.1, the version of
//! [`ids`]: as in `ib_user_ioctl_cmds.h` of rdma-core 65. A kernel without a
//! method returns EPROTONOSUPPORT.
//!
//! [`ids`]: super::ids
#![allow(
    missing_docs,
    reason = "the names are the kernel header's; each group says what it numbers"
)]

// Methods of the device object.
pub const METHOD_QUERY_PORT_SPEED: u16 = 7;

// Attributes of `METHOD_QUERY_PORT_SPEED`.
pub const ATTR_QUERY_PORT_SPEED_PORT_NUM: u16 = 0;
pub const ATTR_QUERY_PORT_SPEED_RESP: u16 = 1;

// Objects.
pub const OBJECT_DMABUF: u16 = 18;

// Methods of a DMA buffer.
pub const METHOD_DMABUF_ALLOC: u16 = 0;

// Attributes of `METHOD_DMABUF_ALLOC`.
pub const ATTR_ALLOC_DMABUF_HANDLE: u16 = 0;
pub const ATTR_ALLOC_DMABUF_PGOFF: u16 = 1;
