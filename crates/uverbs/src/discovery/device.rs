//! Devices, as either way of discovery reports them.

use std::ffi::CString;

use crate::kernel::Kernel;
use crate::open_enum;

/// Maximum length of a device name; the kernel's maximum is 63.
const MAX_NAME: usize = 255;

open_enum! {
    /// Kernel driver of a device (`enum rdma_driver_id`).
    DriverId(u32) {
        /// Not reported.
        UNKNOWN = 0,
        /// `mlx5_ib`.
        MLX5 = 1,
        /// `mlx4_ib`.
        MLX4 = 2,
        /// `rdma_rxe`.
        RXE = 14,
        /// `efa`.
        EFA = 17,
        /// `siw`.
        SIW = 18,
    }
}

open_enum! {
    /// Node type of a device (`enum rdma_node_type`).
    NodeType(u8) {
        /// Not reported.
        UNKNOWN = 0,
        /// InfiniBand or RoCE adapter.
        CA = 1,
        /// Switch.
        SWITCH = 2,
        /// Router.
        ROUTER = 3,
        /// iWARP adapter.
        RNIC = 4,
        /// usNIC.
        USNIC = 5,
        /// usNIC over UDP.
        USNIC_UDP = 6,
        /// None of the above.
        UNSPECIFIED = 7,
    }
}

/// An RDMA device that a process can open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name, such as `rxe0`.
    pub name: String,
    /// Index; known from netlink only.
    pub index: Option<u32>,
    /// Kernel driver; known from netlink only.
    pub driver_id: DriverId,
    /// Node type.
    pub node_type: NodeType,
    /// Node GUID, host byte order.
    pub node_guid: Option<u64>,
    /// Number of ports.
    pub num_ports: Option<u32>,
    /// Name of the character device, such as `uverbs0`.
    pub uverbs_name: String,
    /// Device number of the character device.
    pub dev_t: libc::dev_t,
    /// ABI version of the driver data.
    pub abi_version: u32,
    /// Sysfs directory, such as `/sys/class/infiniband/rxe0`.
    pub ibdev_path: String,
}

impl Device {
    /// Returns the path of its character device.
    pub fn device_path(&self) -> String {
        format!("/dev/infiniband/{}", self.uverbs_name)
    }

    /// Returns whether its character device node exists.
    pub(crate) fn is_accessible(&self, kernel: &dyn Kernel) -> bool {
        CString::new(self.device_path()).is_ok_and(|path| kernel.device_number(&path).is_ok())
    }
}

/// A device's character device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CharDevice {
    /// Name of the node in `/dev/infiniband`: one component of a path.
    pub name: String,
    /// Device number of the node.
    pub dev_t: libc::dev_t,
    /// ABI version of the driver data.
    pub abi_version: u32,
    /// Kernel driver.
    pub driver_id: DriverId,
}

/// Returns whether a name can be joined to a path without leaving the
/// directory.
pub(crate) fn is_component(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= MAX_NAME && !name.contains(['/', '\0'])
}
