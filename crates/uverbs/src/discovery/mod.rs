//! Device discovery.
//!
//! As in libibverbs: RDMA netlink lists the devices of this network namespace
//! and their character devices; if that fails, sysfs does. A device without an
//! accessible character device node is left out.

mod device;
pub mod netlink;
pub mod sysfs;

pub use device::{CharDevice, Device, DriverId, NodeType};

use crate::Error;
use crate::kernel::Kernel;

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
