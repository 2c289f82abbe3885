//! RDMA devices in sysfs.

use std::ffi::CString;

use super::device::{CharDevice, Device, DriverId, NodeType, is_component};
use crate::kernel::{Descriptor, Kernel};
use crate::{Command, Errno, Error};

/// Buffer size for an attribute: the longest is a GID, 40 bytes.
const ATTRIBUTE: usize = 128;

/// Text of an attribute.
struct Text {
    bytes: [u8; ATTRIBUTE],
    len: usize,
}

impl Text {
    /// Returns the text without the newline; empty if it is not UTF-8.
    fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..self.len).unwrap_or_default();
        core::str::from_utf8(bytes)
            .unwrap_or_default()
            .trim_end_matches('\n')
    }
}

/// Reads one attribute.
fn read(kernel: &dyn Kernel, path: String) -> Result<Text, Error> {
    let command = Command::ReadSysfs;
    let refused = |errno: Errno| Error::refused(command, None, errno);
    let path = CString::new(path).map_err(|_| Error::Invalid {
        command,
        what: "the path contains a NUL",
    })?;
    let file = Descriptor::open(kernel, &path, libc::O_RDONLY).map_err(refused)?;
    let mut text = Text {
        bytes: [0; ATTRIBUTE],
        len: 0,
    };
    match file.read(&mut text.bytes).map_err(refused)? {
        len if len < ATTRIBUTE => {
            text.len = len;
            Ok(text)
        }
        _ => Err(Error::BadAnswer {
            command,
            what: "a sysfs attribute is too long",
        }),
    }
}

/// Returns the sysfs directory of a device.
pub(crate) fn ibdev_path(kernel: &dyn Kernel, name: &str) -> String {
    format!("{}/class/infiniband/{name}", kernel.sysfs_path())
}

/// Parses `major:minor`.
pub fn parse_device_number(text: &str) -> Option<libc::dev_t> {
    let (major, minor) = text.split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Parses groups of four hexadecimal digits, separated by colons: the format of
/// GUIDs and GIDs.
pub fn parse_groups<const GROUPS: usize>(text: &str) -> Option<[u16; GROUPS]> {
    let mut groups = [0; GROUPS];
    let mut parts = text.split(':');
    for group in &mut groups {
        let part = parts.next()?;
        if part.len() != 4 || !part.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        *group = u16::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(groups)
}

/// Parses a GID, network byte order.
pub fn parse_gid(text: &str) -> Option<[u8; 16]> {
    let mut gid = [0; 16];
    for (bytes, group) in gid.chunks_exact_mut(2).zip(parse_groups::<8>(text)?) {
        bytes.copy_from_slice(&group.to_be_bytes());
    }
    Some(gid)
}

/// Parses a GUID, host byte order.
pub fn parse_guid(text: &str) -> Option<u64> {
    let groups = parse_groups::<4>(text)?;
    Some(
        groups
            .into_iter()
            .fold(0, |guid, group| guid << 16 | u64::from(group)),
    )
}

/// Parses a partition key, such as `0xffff`.
pub fn parse_pkey(text: &str) -> Option<u16> {
    u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// Parses a node type, such as `1: CA`.
pub fn parse_node_type(text: &str) -> NodeType {
    let digits = text
        .split(|c: char| !c.is_ascii_digit())
        .next()
        .unwrap_or_default();
    digits.parse().map_or(NodeType::UNKNOWN, NodeType)
}

/// Reads the character device of the uverbs class directory `class_dir/name`.
fn char_device_at(kernel: &dyn Kernel, class_dir: &str, name: &str) -> Option<CharDevice> {
    let dev = read(kernel, format!("{class_dir}/{name}/dev")).ok()?;
    let abi = read(kernel, format!("{class_dir}/{name}/abi_version")).ok();
    Some(CharDevice {
        name: name.to_owned(),
        dev_t: parse_device_number(dev.as_str())?,
        abi_version: abi.and_then(|text| text.as_str().parse().ok()).unwrap_or(0),
        driver_id: DriverId::UNKNOWN,
    })
}

/// Lists the names in a directory that are safe as a path component, sorted.
fn list(kernel: &dyn Kernel, path: &str) -> Result<Vec<String>, Errno> {
    let path = CString::new(path).map_err(|_| Errno::new(libc::EINVAL))?;
    let mut names = kernel.list_directory(&path)?;
    names.retain(|name| is_component(name) && !name.starts_with('.'));
    names.sort_unstable();
    Ok(names)
}

/// Returns the uverbs character device of the device with the sysfs directory
/// `ibdev_path`.
pub(crate) fn char_device(kernel: &dyn Kernel, ibdev_path: &str) -> Option<CharDevice> {
    let class_dir = format!("{ibdev_path}/device/infiniband_verbs");
    let names = list(kernel, &class_dir).ok()?;
    char_device_at(kernel, &class_dir, names.first()?)
}

/// Lists all devices by sysfs.
///
/// # Errors
/// The class directory exists but cannot be read. If it does not exist there
/// are no devices.
pub fn devices(kernel: &dyn Kernel) -> Result<Vec<Device>, Error> {
    let class_dir = format!("{}/class/infiniband_verbs", kernel.sysfs_path());
    let names = match list(kernel, &class_dir) {
        Ok(names) => names,
        Err(errno) if errno.raw() == libc::ENOENT => return Ok(Vec::new()),
        Err(errno) => {
            return Err(Error::refused(Command::ReadSysfs, None, errno));
        }
    };
    Ok(names
        .iter()
        .filter_map(|uverbs| device_at(kernel, &class_dir, uverbs))
        .collect())
}

fn device_at(kernel: &dyn Kernel, class_dir: &str, uverbs: &str) -> Option<Device> {
    // Files beside the devices, such as the class's own abi_version, have no
    // ibdev and end here.
    let name = read(kernel, format!("{class_dir}/{uverbs}/ibdev")).ok()?;
    let name = name.as_str();
    if !is_component(name) {
        return None;
    }
    let char_device = char_device_at(kernel, class_dir, uverbs)?;
    let path = ibdev_path(kernel, name);
    let attribute = |file: &str| read(kernel, format!("{path}/{file}")).ok();
    let device = Device {
        name: name.to_owned(),
        index: None,
        driver_id: DriverId::UNKNOWN,
        node_type: attribute("node_type")
            .map_or(NodeType::UNKNOWN, |text| parse_node_type(text.as_str())),
        node_guid: attribute("node_guid").and_then(|text| parse_guid(text.as_str())),
        num_ports: list(kernel, &format!("{path}/ports"))
            .ok()
            .and_then(|ports| ports.len().try_into().ok()),
        uverbs_name: char_device.name,
        dev_t: char_device.dev_t,
        abi_version: char_device.abi_version,
        ibdev_path: path,
    };
    device.is_accessible(kernel).then_some(device)
}

/// Reads a partition key of a port, host byte order. `ibdev_path` is
/// [`Device::ibdev_path`]; ports count from 1.
///
/// # Errors
/// ENOENT past the end of the table.
pub fn read_pkey(
    kernel: &dyn Kernel,
    ibdev_path: &str,
    port: u8,
    index: u16,
) -> Result<u16, Error> {
    let text = read(kernel, format!("{ibdev_path}/ports/{port}/pkeys/{index}"))?;
    parse_pkey(text.as_str()).ok_or(Error::BadAnswer {
        command: Command::ReadSysfs,
        what: "not a partition key",
    })
}

/// Reads a GID of a port, network byte order, for kernels without
/// [`Context::query_gid_entry`](crate::Context::query_gid_entry). An empty
/// entry is all zero.
///
/// # Errors
/// ENOENT past the end of the table.
pub fn read_gid(
    kernel: &dyn Kernel,
    ibdev_path: &str,
    port: u8,
    index: u16,
) -> Result<[u8; 16], Error> {
    let text = read(kernel, format!("{ibdev_path}/ports/{port}/gids/{index}"))?;
    parse_gid(text.as_str()).ok_or(Error::BadAnswer {
        command: Command::ReadSysfs,
        what: "not a GID",
    })
}
