//! RDMA netlink: message types and attribute numbers, from `rdma_netlink.h`.

use super::kernel_structs;

/// Protocol number of RDMA netlink sockets.
pub const NETLINK_RDMA: libc::c_int = 20;
/// Netlink client for queries of devices.
pub const RDMA_NL_NLDEV: u16 = 5;

/// Get one device, or dump all.
pub const NLDEV_CMD_GET: u16 = 1;
/// Get one port of a device, or dump all.
pub const NLDEV_CMD_PORT_GET: u16 = 5;
/// Get the settings of the RDMA subsystem.
pub const NLDEV_CMD_SYS_GET: u16 = 6;
/// Get a device's character device.
pub const NLDEV_CMD_GET_CHARDEV: u16 = 15;

/// Returns the message type of a command of the device client.
pub const fn nldev_type(command: u16) -> u16 {
    (RDMA_NL_NLDEV << 10) + command
}

/// Message type: nothing.
pub const MSG_NOOP: u16 = 1;
/// Message type: an error, or with error 0 an acknowledgement.
pub const MSG_ERROR: u16 = 2;
/// Message type: the end of a dump.
pub const MSG_DONE: u16 = 3;
/// Flag of every request.
pub const FLAG_REQUEST: u16 = 1;
/// Flag of a message that is one of several in an answer.
pub const FLAG_MULTI: u16 = 2;
/// Flag of a request that is to be acknowledged.
pub const FLAG_ACK: u16 = 4;
/// Flags of a request for all objects.
pub const FLAG_DUMP: u16 = 0x300;
/// Flag of an error without the payload of the request.
pub const FLAG_CAPPED: u16 = 0x100;

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
    pub const ATTR_FW_VERSION: u16 = 5;
    pub const ATTR_NODE_GUID: u16 = 6;
    pub const ATTR_SYS_IMAGE_GUID: u16 = 7;
    pub const ATTR_SUBNET_PREFIX: u16 = 8;
    pub const ATTR_LID: u16 = 9;
    pub const ATTR_SM_LID: u16 = 10;
    pub const ATTR_LMC: u16 = 11;
    pub const ATTR_PORT_STATE: u16 = 12;
    pub const ATTR_PORT_PHYS_STATE: u16 = 13;
    pub const ATTR_DEV_NODE_TYPE: u16 = 14;
    pub const ATTR_NDEV_INDEX: u16 = 50;
    pub const ATTR_NDEV_NAME: u16 = 51;
    pub const SYS_ATTR_NETNS_MODE: u16 = 66;
    pub const ATTR_DEV_PROTOCOL: u16 = 67;
    pub const ATTR_CHARDEV_TYPE: u16 = 69;
    pub const ATTR_CHARDEV_NAME: u16 = 70;
    pub const ATTR_CHARDEV_ABI: u16 = 71;
    pub const ATTR_CHARDEV: u16 = 72;
    pub const ATTR_UVERBS_DRIVER_ID: u16 = 73;
    pub const SYS_ATTR_COPY_ON_FORK: u16 = 93;
}
