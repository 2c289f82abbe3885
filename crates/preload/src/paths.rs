//! Paths of RDMA devices, and their replacements.

use std::cell::Cell;
use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::config;
use crate::internal;
use crate::status;
use crate::tree;

const SYSFS_ROOT: &[u8] = b"/sys/";
/// Prefixes of the paths of RDMA devices. All but the first must end at a component.
const SYSFS: &[u8] = b"/sys/class/infiniband";
const SYSFS_CM: &[u8] = b"/sys/class/misc/rdma_cm";
const SYSFS_DEVICES: &[u8] = b"/sys/devices/ringverbs";
const DEVICES: &[u8] = b"/dev/infiniband";
/// The links to all PCI devices, and the beginning of the names of devices without a node.
const PCI_DEVICES: &[u8] = b"/sys/bus/pci/devices";
const OWN_FUNCTIONS: &[u8] = b"/ffff:00:";
const DRIVER: &[u8] = b"/sys/bus/pci/drivers/mlx5_core";
/// Prefixes of the paths of a node, of which the first need not end at a component.
const PCI_ROOTS: &[u8] = b"/sys/devices/pci";
const NODE: [&[u8]; 3] = [
    b"/sys/bus/pci",
    b"/sys/class/pci_bus",
    b"/sys/devices/system/node",
];

/// Beginning of the paths of control groups, and names of their files that list the NUMA nodes
/// that a process may use: with a node, those of the node.
const CONTROL_GROUPS: &[u8] = b"/sys/fs/cgroup/";
const ALLOWED_NODES: [&[u8]; 3] = [
    b"/cpuset.mems",
    b"/cpuset.mems.effective",
    b"/cpuset.effective_mems",
];
const ONLINE_NODES: &[u8] = b"/sys/devices/system/node/online";

/// A path of RDMA devices.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DevicePath {
    /// A device, by its number.
    Device(usize),
    /// The connection manager.
    Manager,
    /// An attribute that differs between processes: its path below `/sys`.
    Dynamic(String),
    /// The status of a process: its path.
    Status(String),
    /// Any other path, within the tree of files.
    Tree(CString),
}

thread_local! {
    /// This thread classifies a path.
    static IS_CLASSIFYING: Cell<bool> = const { Cell::new(false) };
}

/// Classifies a path; `None` if it does not belong to RDMA devices, or there are no embedded
/// devices.
pub(crate) fn device_path(path: &CStr) -> Option<DevicePath> {
    struct Scope;
    impl Drop for Scope {
        fn drop(&mut self) {
            left_by_jump();
        }
    }
    let is_nested = IS_CLASSIFYING.try_with(|it| it.replace(true)).ok()?;
    // An allocator reads files of the system in its first call, which may be one in here.
    if is_nested && !internal::is_in_handler() {
        return None;
    }
    let _scope = Scope;
    classify(path)
}

/// Called before the program leaves this thread's calls by longjmp(3).
pub(crate) fn left_by_jump() {
    let _ = IS_CLASSIFYING.try_with(|it| it.set(false));
}

fn classify(path: &CStr) -> Option<DevicePath> {
    let bytes = path.to_bytes();
    let within = |name: &[u8]| {
        let rest = bytes.strip_prefix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    };
    let in_sysfs = bytes.starts_with(SYSFS)
        || within(SYSFS_CM)
        || within(SYSFS_DEVICES)
        || within(DRIVER)
        || is_own_function(bytes);
    let is_device = in_sysfs || within(DEVICES);
    let may_be_node = || {
        let within_node = || bytes.starts_with(PCI_ROOTS) || NODE.into_iter().any(within);
        let in_sysfs = bytes.starts_with(SYSFS_ROOT);
        in_sysfs && (within_node() || lists_nodes(bytes)) || status::is_read(bytes)
    };
    if !is_device && !may_be_node() {
        return None;
    }
    let config = config::get()?;
    if !is_device && config.node.is_none() {
        return None;
    }
    if lists_nodes(bytes) {
        // A node without NUMA nodes has no such file.
        let listed = in_tree(ONLINE_NODES).filter(|path| tree_has(path));
        return listed.map(DevicePath::Tree);
    }
    let text = path.to_str().unwrap_or("");
    if status::is_read(bytes) {
        return Some(DevicePath::Status(text.to_owned()));
    }
    if let Some(name) = text.strip_prefix("/dev/infiniband/") {
        if name == "rdma_cm" {
            return Some(DevicePath::Manager);
        }
        let number = name.strip_prefix("uverbs").and_then(|n| n.parse().ok());
        if let Some(number) = number.filter(|number| *number < config.profiles.len()) {
            return Some(DevicePath::Device(number));
        }
    }
    if let Some(name) = text.strip_prefix("/sys/") {
        if tree::is_dynamic(name) {
            return Some(DevicePath::Dynamic(name.to_owned()));
        }
    }
    in_tree(bytes).map(DevicePath::Tree)
}

/// Returns whether a path is that of all PCI devices, or of a device without a node.
fn is_own_function(path: &[u8]) -> bool {
    let rest = path.strip_prefix(PCI_DEVICES);
    rest.is_some_and(|rest| rest.starts_with(OWN_FUNCTIONS) || rest.iter().all(|it| *it == b'/'))
}

/// Returns whether a path is a control group's list of NUMA nodes.
fn lists_nodes(path: &[u8]) -> bool {
    path.starts_with(CONTROL_GROUPS) && ALLOWED_NODES.iter().any(|name| path.ends_with(name))
}

/// Returns the list of the node's NUMA nodes; `None` if it has none.
pub(crate) fn online_nodes() -> Option<String> {
    let path = in_tree(ONLINE_NODES)?;
    fs::read_to_string(OsStr::from_bytes(path.to_bytes())).ok()
}

/// Returns whether the tree has a file.
fn tree_has(path: &CStr) -> bool {
    Path::new(OsStr::from_bytes(path.to_bytes())).exists()
}

/// Returns the path in the tree of files that replaces a path.
pub(crate) fn in_tree(path: &[u8]) -> Option<CString> {
    let mut whole = tree::root_of(path)?.as_os_str().as_bytes().to_vec();
    whole.extend_from_slice(path);
    CString::new(whole).ok()
}
