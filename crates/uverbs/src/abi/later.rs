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
pub const OBJECT_DMAH: u16 = 17;
pub const OBJECT_DMABUF: u16 = 18;

// Methods of a DMA handle.
pub const METHOD_DMAH_ALLOC: u16 = 0;
pub const METHOD_DMAH_FREE: u16 = 1;

// Attributes of `METHOD_DMAH_ALLOC`.
pub const ATTR_ALLOC_DMAH_HANDLE: u16 = 0;
pub const ATTR_ALLOC_DMAH_CPU_ID: u16 = 1;
pub const ATTR_ALLOC_DMAH_TPH_MEM_TYPE: u16 = 2;
pub const ATTR_ALLOC_DMAH_PH: u16 = 3;

// Attributes of `METHOD_DMAH_FREE`.
pub const ATTR_FREE_DMA_HANDLE: u16 = 0;

// Methods of memory regions.
pub const METHOD_REG_MR: u16 = 5;

// Attributes of `METHOD_REG_MR`.
pub const ATTR_REG_MR_HANDLE: u16 = 0;
pub const ATTR_REG_MR_PD_HANDLE: u16 = 1;
pub const ATTR_REG_MR_DMA_HANDLE: u16 = 2;
pub const ATTR_REG_MR_IOVA: u16 = 3;
pub const ATTR_REG_MR_ADDR: u16 = 4;
pub const ATTR_REG_MR_LENGTH: u16 = 5;
pub const ATTR_REG_MR_ACCESS_FLAGS: u16 = 6;
pub const ATTR_REG_MR_FD: u16 = 7;
pub const ATTR_REG_MR_FD_OFFSET: u16 = 8;
pub const ATTR_REG_MR_RESP_LKEY: u16 = 9;
pub const ATTR_REG_MR_RESP_RKEY: u16 = 10;

// Methods of a DMA buffer.
pub const METHOD_DMABUF_ALLOC: u16 = 0;

// Attributes of `METHOD_DMABUF_ALLOC`.
pub const ATTR_ALLOC_DMABUF_HANDLE: u16 = 0;
pub const ATTR_ALLOC_DMABUF_PGOFF: u16 = 1;
