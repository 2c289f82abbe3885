//! RDMA netlink: message types and attribute numbers, from `rdma_netlink.h`.

use super::kernel_structs;

/// Protocol number of RDMA netlink sockets.
pub const NETLINK_RDMA: libc::c_int = 20;
/// Netlink client for queries of devices.
pub const RDMA_NL_NLDEV: u16 = 5;

/// Get one device, or dump all.
pub const NLDEV_CMD_GET: u16 = 1;
/// Add a device to a network interface.
pub const NLDEV_CMD_NEWLINK: u16 = 3;
/// Remove a device that was added.
pub const NLDEV_CMD_DELLINK: u16 = 4;
/// Get one port of a device, or dump all.
pub const NLDEV_CMD_PORT_GET: u16 = 5;
/// Get the settings of the RDMA subsystem.
pub const NLDEV_CMD_SYS_GET: u16 = 6;
/// Get the numbers of objects of a device, or dump all.
pub const NLDEV_CMD_RES_GET: u16 = 9;
/// Get a queue pair, or dump all.
pub const NLDEV_CMD_RES_QP_GET: u16 = 10;
/// Get an id of the connection manager, or dump all.
pub const NLDEV_CMD_RES_CM_ID_GET: u16 = 11;
/// Get a completion queue, or dump all.
pub const NLDEV_CMD_RES_CQ_GET: u16 = 12;
/// Get a memory region, or dump all.
pub const NLDEV_CMD_RES_MR_GET: u16 = 13;
/// Get a protection domain, or dump all.
pub const NLDEV_CMD_RES_PD_GET: u16 = 14;
/// Get a device's character device.
pub const NLDEV_CMD_GET_CHARDEV: u16 = 15;
/// Get the counters of a port, or of objects.
pub const NLDEV_CMD_STAT_GET: u16 = 17;
/// Get a context, or dump all.
pub const NLDEV_CMD_RES_CTX_GET: u16 = 22;
/// Get a shared receive queue, or dump all.
pub const NLDEV_CMD_RES_SRQ_GET: u16 = 23;

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

/// Attribute of the settings of the subsystem, since Linux 6.8: programs without rights may use
/// queue keys with the top bit set.
pub const SYS_ATTR_PRIVILEGED_QKEY_MODE: u16 = 96;
/// The same, since Linux 6.12: there are notifications.
pub const SYS_ATTR_MONITOR_MODE: u16 = 103;

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
    pub const ATTR_RES_SUMMARY: u16 = 15;
    pub const ATTR_RES_SUMMARY_ENTRY: u16 = 16;
    pub const ATTR_RES_SUMMARY_ENTRY_NAME: u16 = 17;
    pub const ATTR_RES_SUMMARY_ENTRY_CURR: u16 = 18;
    pub const ATTR_RES_QP: u16 = 19;
    pub const ATTR_RES_QP_ENTRY: u16 = 20;
    pub const ATTR_RES_LQPN: u16 = 21;
    pub const ATTR_RES_RQPN: u16 = 22;
    pub const ATTR_RES_RQ_PSN: u16 = 23;
    pub const ATTR_RES_SQ_PSN: u16 = 24;
    pub const ATTR_RES_PATH_MIG_STATE: u16 = 25;
    pub const ATTR_RES_TYPE: u16 = 26;
    pub const ATTR_RES_STATE: u16 = 27;
    pub const ATTR_RES_PID: u16 = 28;
    pub const ATTR_RES_KERN_NAME: u16 = 29;
    pub const ATTR_RES_CM_ID: u16 = 30;
    pub const ATTR_RES_CM_ID_ENTRY: u16 = 31;
    pub const ATTR_RES_PS: u16 = 32;
    pub const ATTR_RES_SRC_ADDR: u16 = 33;
    pub const ATTR_RES_DST_ADDR: u16 = 34;
    pub const ATTR_RES_CQ: u16 = 35;
    pub const ATTR_RES_CQ_ENTRY: u16 = 36;
    pub const ATTR_RES_CQE: u16 = 37;
    pub const ATTR_RES_USECNT: u16 = 38;
    pub const ATTR_RES_MR: u16 = 40;
    pub const ATTR_RES_MR_ENTRY: u16 = 41;
    pub const ATTR_RES_RKEY: u16 = 42;
    pub const ATTR_RES_LKEY: u16 = 43;
    pub const ATTR_RES_MRLEN: u16 = 45;
    pub const ATTR_RES_PD: u16 = 46;
    pub const ATTR_RES_PD_ENTRY: u16 = 47;
    pub const ATTR_RES_LOCAL_DMA_LKEY: u16 = 48;
    pub const ATTR_NDEV_INDEX: u16 = 50;
    pub const ATTR_NDEV_NAME: u16 = 51;
    pub const ATTR_RES_PDN: u16 = 60;
    pub const ATTR_RES_CQN: u16 = 61;
    pub const ATTR_RES_MRN: u16 = 62;
    pub const ATTR_RES_CM_IDN: u16 = 63;
    pub const ATTR_RES_CTXN: u16 = 64;
    pub const SYS_ATTR_NETNS_MODE: u16 = 66;
    pub const ATTR_DEV_PROTOCOL: u16 = 67;
    pub const ATTR_CHARDEV_TYPE: u16 = 69;
    pub const ATTR_CHARDEV_NAME: u16 = 70;
    pub const ATTR_CHARDEV_ABI: u16 = 71;
    pub const ATTR_CHARDEV: u16 = 72;
    pub const ATTR_UVERBS_DRIVER_ID: u16 = 73;
    pub const ATTR_STAT_RES: u16 = 75;
    pub const ATTR_STAT_HWCOUNTERS: u16 = 80;
    pub const ATTR_STAT_HWCOUNTER_ENTRY: u16 = 81;
    pub const ATTR_STAT_HWCOUNTER_ENTRY_NAME: u16 = 82;
    pub const ATTR_STAT_HWCOUNTER_ENTRY_VALUE: u16 = 83;
    pub const ATTR_DEV_DIM: u16 = 84;
    pub const ATTR_RES_CTX: u16 = 86;
    pub const ATTR_RES_CTX_ENTRY: u16 = 87;
    pub const ATTR_RES_SRQ: u16 = 88;
    pub const ATTR_RES_SRQ_ENTRY: u16 = 89;
    pub const ATTR_RES_SRQN: u16 = 90;
    pub const ATTR_MIN_RANGE: u16 = 91;
    pub const ATTR_MAX_RANGE: u16 = 92;
    pub const SYS_ATTR_COPY_ON_FORK: u16 = 93;
}
