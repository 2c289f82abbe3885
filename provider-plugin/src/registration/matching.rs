//! Matching of mlx5 devices: which are served, and which are left to another provider.
//!
//! A device whose PCI id is in the match table is served. A device that only matches by the
//! kernel's driver id is opened once to check its support: it may be older than ConnectX-4,
//! or newer than the match table.

use core::ffi::CStr;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use mlx5::{CreateError, DeviceContext, Devx};
use uverbs::discovery::{Device, DriverId, NodeType};

use super::MLX5_MATCH_TABLE;
use crate::abi::{VERBS_MATCH_PCI, VERBS_MATCH_SENTINEL, verbs_sysfs_dev};
use crate::open::RDMA_DRIVER_MLX5;

/// `verbs_device_ops.match_device` of mlx5: whether a device is served that the match table
/// may have matched. If not, libibverbs asks the next provider.
pub unsafe extern "C" fn match_mlx5(sysfs: *mut verbs_sysfs_dev) -> bool {
    // SAFETY: libibverbs passes a device that it found, and an entry of our table or
    // null.
    let Some(found) = (unsafe { sysfs.as_ref() }) else {
        return false;
    };
    // SAFETY: as above.
    let Some(entry) = (unsafe { found.match_.as_ref() }) else {
        return false;
    };
    let text = |chars: &[core::ffi::c_char]| -> String {
        // SAFETY: the same bytes.
        let bytes = unsafe { &*(core::ptr::from_ref(chars) as *const [u8]) };
        let text = CStr::from_bytes_until_nul(bytes).unwrap_or_default();
        text.to_string_lossy().into_owned()
    };
    let is_served = || {
        let sysfs = text(&found.ibdev_path);
        let modalias = || std::fs::read_to_string(Path::new(&sysfs).join("device/modalias"));
        if entry.kind == VERBS_MATCH_PCI || modalias().is_ok_and(|it| is_in_match_table(&it)) {
            return true;
        }
        let device = Device {
            name: text(&found.ibdev_name),
            index: None,
            driver_id: DriverId(RDMA_DRIVER_MLX5),
            node_type: NodeType::UNSPECIFIED,
            node_guid: None,
            num_ports: None,
            uverbs_name: text(&found.sysfs_name),
            dev_t: found.sysfs_cdev,
            abi_version: 1,
            ibdev_path: sysfs,
        };
        match unsupported_reason(&device) {
            None => true,
            Some(reason) => {
                let line = format!(
                    "ringverbs: {} is left to another provider: {reason}\n",
                    device.name
                );
                let _ = std::io::stderr().write_all(line.as_bytes());
                false
            }
        }
    };
    // AssertUnwindSafe: the device is only read.
    catch_unwind(AssertUnwindSafe(is_served)).unwrap_or(false)
}

/// Returns whether the modalias of a PCI device, such as `pci:v000015B3d00001017sv...`, is
/// in the match table.
fn is_in_match_table(modalias: &str) -> bool {
    let id = |rest: &str| u32::from_str_radix(rest.get(..8)?, 16).ok();
    let ids = modalias.strip_prefix("pci:v").and_then(|rest| {
        let device = rest.get(8..)?.strip_prefix('d')?;
        Some((id(rest)?, id(device)?))
    });
    let Some((vendor, device)) = ids else {
        return false;
    };
    let entries = MLX5_MATCH_TABLE.0.iter();
    entries
        .take_while(|entry| entry.kind != VERBS_MATCH_SENTINEL)
        .filter(|entry| entry.kind == VERBS_MATCH_PCI)
        .any(|entry| (u32::from(entry.vendor), u32::from(entry.device)) == (vendor, device))
}

/// Opens and closes a device. Returns why the device is not supported; other errors are
/// returned when the program opens the device.
fn unsupported_reason(device: &Device) -> Option<CreateError> {
    let kernel = Box::new(uverbs::kernel::RealKernel);
    let context = uverbs::Context::open(kernel, device).ok()?;
    match DeviceContext::open_with(&context, Devx::No) {
        Err(error @ (CreateError::Unsupported { .. } | CreateError::BadAnswer { .. })) => {
            Some(error)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_match_by_modalias() {
        for known in [
            "pci:v000015B3d00001017sv000015B3sd00000020bc02sc00i00\n",
            "pci:v000015B3d0000A2DCsv",
        ] {
            assert!(is_in_match_table(known), "{known}");
        }
        for unknown in [
            // Connect-IB, another vendor, a scalable function.
            "pci:v000015B3d00001011sv000015B3sd00000020bc02sc00i00\n",
            "pci:v00008086d00001017sv",
            "auxiliary:mlx5_core.sf\n",
            "pci:v000015B3d",
            "pci:v000015B3d\u{fe0f}\u{fe0f}\u{fe0f}",
            "pci:v000015B",
            "pci:v00000000d00000000",
            "",
        ] {
            assert!(!is_in_match_table(unknown), "{unknown}");
        }
    }
}
