//! Device discovery.
//!
//! As in libibverbs: RDMA netlink lists the devices of this network namespace
//! and their character devices; if that fails, sysfs does. A device without an
//! accessible character device node is left out.

pub mod netlink;
pub mod sysfs;

use std::ffi::CString;

use crate::Error;
use crate::kernel::Kernel;
use crate::open_enum;

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

/// Lists the devices that this process can see.
///
/// # Errors
/// The error of sysfs, if netlink and sysfs both failed. If there is no device,
/// or no RDMA support in the kernel, the list is empty.
pub fn devices(kernel: &dyn Kernel) -> Result<Vec<Device>, Error> {
    match netlink::devices(kernel) {
        Ok(devices) => Ok(devices),
        Err(error) => {
            tracing::debug!(%error, "RDMA netlink failed; querying sysfs");
            sysfs::devices(kernel)
        }
    }
}
