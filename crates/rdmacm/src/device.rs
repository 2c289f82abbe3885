//! Discovery of the connection manager's character device.
//!
//! As in librdmacm: RDMA netlink is queried first, which makes the kernel load
//! the module; then sysfs. If both fail, the usual path and this crate's ABI
//! version are assumed.

use std::ffi::CString;

use uverbs::Errno;
use uverbs::abi::netlink::{NLDEV_CMD_GET_CHARDEV, attr};
use uverbs::discovery::netlink::{MessageBuilder, Progress, parse_char_device, read_answer};
use uverbs::discovery::sysfs::parse_device_number;
use uverbs::kernel::{Descriptor, Kernel};

use crate::abi::ABI_VERSION;
use crate::{Command, Error};

/// Name of the device, in the kernel and in `/dev/infiniband`.
const NAME: &str = "rdma_cm";
/// Size of the buffer for a sysfs attribute.
const MAX_ATTRIBUTE: usize = 64;

/// The connection manager's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CmDevice {
    /// Name of the node in `/dev/infiniband`.
    pub name: String,
    /// Device number of the node, if known.
    pub dev_t: Option<libc::dev_t>,
    /// Version of the ABI.
    pub abi_version: u32,
}

/// Builds the request for the device's name, on which the kernel loads its
/// module.
pub fn netlink_request() -> Vec<u8> {
    MessageBuilder::request(NLDEV_CMD_GET_CHARDEV, 0)
        .name(attr::ATTR_CHARDEV_TYPE, NAME)
        .finish()
}

fn by_netlink(kernel: &dyn Kernel) -> Option<CmDevice> {
    let mut found = None;
    let mut is_complete = false;
    let result = kernel.netlink(&netlink_request(), &mut |datagram| {
        let progress = read_answer(datagram, NLDEV_CMD_GET_CHARDEV, false, |payload| {
            found = Some(parse_char_device(payload)?);
            Ok(())
        });
        is_complete = matches!(progress, Ok(Progress::Done));
        !matches!(progress, Ok(Progress::More))
    });
    if let Err(errno) = result {
        tracing::debug!(%errno, "RDMA netlink failed; querying sysfs");
    }
    let device = found.filter(|_| is_complete)?;
    Some(CmDevice {
        name: device.name,
        dev_t: Some(device.dev_t),
        abi_version: device.abi_version,
    })
}

fn read_attribute(kernel: &dyn Kernel, name: &str) -> Option<String> {
    let path = format!("{}/class/misc/{NAME}/{name}", kernel.sysfs_path());
    let file = Descriptor::open(kernel, &CString::new(path).ok()?, libc::O_RDONLY).ok()?;
    let mut text = [0; MAX_ATTRIBUTE];
    let len = file.read(&mut text).ok()?;
    let text = text.get(..len)?;
    Some(core::str::from_utf8(text).ok()?.trim().to_owned())
}

fn by_sysfs(kernel: &dyn Kernel) -> Option<CmDevice> {
    Some(CmDevice {
        name: NAME.to_owned(),
        dev_t: read_attribute(kernel, "dev").and_then(|text| parse_device_number(&text)),
        abi_version: read_attribute(kernel, "abi_version")?.parse().ok()?,
    })
}

/// Finds the device. Whether it exists is only known when it is opened.
pub fn find(kernel: &dyn Kernel) -> CmDevice {
    by_netlink(kernel)
        .or_else(|| by_sysfs(kernel))
        .unwrap_or_else(|| CmDevice {
            name: NAME.to_owned(),
            dev_t: None,
            abi_version: ABI_VERSION,
        })
}

/// Opens the device in non-blocking mode.
pub(crate) fn open(kernel: Box<dyn Kernel>) -> Result<Descriptor<Box<dyn Kernel>>, Error> {
    let device = find(&*kernel);
    if device.abi_version != ABI_VERSION {
        return Err(Error::Abi {
            found: device.abi_version,
        });
    }
    let refused = |errno| Error::Refused {
        command: Command::Open,
        id: None,
        errno,
    };
    let by_name = format!("/dev/infiniband/{}", device.name);
    let by_number = device
        .dev_t
        .map(|dev| format!("/dev/char/{}:{}", libc::major(dev), libc::minor(dev)));
    let mut reason = Errno::new(libc::ENOENT);
    for path in core::iter::once(by_name).chain(by_number) {
        let path = CString::new(path).map_err(|_| refused(Errno::new(libc::EINVAL)))?;
        // A node with this name but another device number is not opened.
        let number = kernel.device_number(&path);
        if device
            .dev_t
            .is_some_and(|dev| number.is_ok_and(|number| number != dev))
        {
            tracing::debug!(?path, "the node belongs to another device");
            continue;
        }
        match kernel.open(&path, libc::O_RDWR) {
            Ok(fd) => {
                // SAFETY: the kernel has just returned the descriptor; this is
                // its only owner.
                let file = unsafe { Descriptor::new(kernel, fd) };
                file.set_nonblocking(true).map_err(refused)?;
                return Ok(file);
            }
            Err(errno) if errno.raw() == libc::ENOENT => {}
            Err(errno) => reason = errno,
        }
    }
    Err(refused(reason))
}
