//! RDMA netlink: message types and attribute numbers, from `rdma_netlink.h`.

use super::kernel_structs;

/// Protocol number of RDMA netlink sockets.
pub const NETLINK_RDMA: libc::c_int = 20;
/// Netlink client for queries of devices.
pub const RDMA_NL_NLDEV: u16 = 5;

/// Get one device, or dump all.
pub const NLDEV_CMD_GET: u16 = 1;
/// Get the settings of the RDMA subsystem.
pub const NLDEV_CMD_SYS_GET: u16 = 6;
/// Get a device's character device.
pub const NLDEV_CMD_GET_CHARDEV: u16 = 15;

/// Returns the message type of a command of the device client.
pub const fn nldev_type(command: u16) -> u16 {
    (RDMA_NL_NLDEV << 10) + command
}

kernel_structs! {
    /// `struct nlmsghdr`.
    NlMsgHdr, 16 { len: u32, msg_type: u16, flags: u16, seq: u32, pid: u32 }

    /// `struct nlattr`; `len` counts this header and the payload, not the padding.
    NlAttr, 4 { len: u16, attr_type: u16 }
}

/// Attribute numbers, without the `RDMA_NLDEV_` prefix.
#[allow(missing_docs, reason = "the names are the kernel header's")]
pub mod attr {
    pub const ATTR_DEV_INDEX: u16 = 1;
    pub const ATTR_DEV_NAME: u16 = 2;
    pub const ATTR_PORT_INDEX: u16 = 3;
    pub const ATTR_NODE_GUID: u16 = 6;
    pub const ATTR_DEV_NODE_TYPE: u16 = 14;
    pub const ATTR_CHARDEV_TYPE: u16 = 69;
    pub const ATTR_CHARDEV_NAME: u16 = 70;
    pub const ATTR_CHARDEV_ABI: u16 = 71;
    pub const ATTR_CHARDEV: u16 = 72;
    pub const ATTR_UVERBS_DRIVER_ID: u16 = 73;
    pub const SYS_ATTR_COPY_ON_FORK: u16 = 93;
}
