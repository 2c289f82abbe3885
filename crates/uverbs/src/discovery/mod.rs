//! Which devices there are.
//!
//! As libibverbs does it: RDMA netlink names the devices of this network
//! namespace and their character devices; where that fails, sysfs does. A
//! device whose character device node cannot be seen is left out.

pub mod netlink;
pub mod sysfs;

use std::ffi::CString;

use crate::Error;
use crate::kernel::Kernel;
use crate::open_enum;

open_enum! {
    /// Which kernel driver a device has (`enum rdma_driver_id`).
    DriverId(u32) {
        /// Not said.
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
    /// What kind of node a device is (`enum rdma_node_type`).
    NodeType(u8) {
        /// Not said.
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
        /// None of these.
        UNSPECIFIED = 7,
    }
}

/// An RDMA device that a process can open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name, such as `rxe0`.
    pub name: String,
    /// Its number; only netlink says.
    pub index: Option<u32>,
    /// Its kernel driver; only netlink says.
    pub driver_id: DriverId,
    /// What kind of node it is.
    pub node_type: NodeType,
    /// Its node GUID, host byte order.
    pub node_guid: Option<u64>,
    /// How many ports it has.
    pub num_ports: Option<u32>,
    /// Name of its character device, such as `uverbs0`.
    pub uverbs_name: String,
    /// Number of its character device.
    pub dev_t: libc::dev_t,
    /// ABI version of its driver data.
    pub abi_version: u32,
    /// Its sysfs directory, such as `/sys/class/infiniband/rxe0`.
    pub ibdev_path: String,
}

impl Device {
    /// The path of its character device.
    pub fn device_path(&self) -> String {
        format!("/dev/infiniband/{}", self.uverbs_name)
    }

    /// Whether its character device node is there.
    pub(crate) fn is_accessible(&self, kernel: &dyn Kernel) -> bool {
        CString::new(self.device_path()).is_ok_and(|path| kernel.device_number(&path).is_ok())
    }
}

/// All devices that this process can see.
///
/// # Errors
/// If neither netlink nor sysfs could be asked: sysfs's reason. No device, or
/// no RDMA at all in the kernel, is an empty list.
pub fn devices(kernel: &dyn Kernel) -> Result<Vec<Device>, Error> {
    match netlink::devices(kernel) {
        Ok(devices) => Ok(devices),
        Err(error) => {
            tracing::debug!(%error, "RDMA netlink did not answer; asking sysfs");
            sysfs::devices(kernel)
        }
    }
}
