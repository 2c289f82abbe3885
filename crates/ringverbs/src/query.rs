//! Queries of devices, ports and GID tables.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use uverbs::{ContextInfo, Udata};

use crate::{Context, Error, Result};

/// A global identifier: the address of a port, in network byte order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns whether it is an IPv4-mapped address.
    pub fn is_ipv4(&self) -> bool {
        Ipv6Addr::from(self.0).to_ipv4_mapped().is_some()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

impl FromStr for Gid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let address: Ipv6Addr = text.parse().map_err(|_| Error::Parse {
            expected: "a GID, in the notation of an IPv6 address",
        })?;
        Ok(Self(address.octets()))
    }
}

impl From<Ipv6Addr> for Gid {
    fn from(address: Ipv6Addr) -> Self {
        Self(address.octets())
    }
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The GID.
    pub gid: Gid,
    /// The port, from 1.
    pub port: u8,
    /// Index in the port's GID table.
    pub index: u8,
    /// Type: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2.
    pub gid_type: u32,
    /// Index of the network interface; 0 if there is none.
    pub ifindex: u32,
}

impl GidEntry {
    /// Returns whether RoCE v2 packets can be sent from it.
    pub fn is_roce_v2(&self) -> bool {
        self.gid_type == 2
    }
}

/// Capabilities and limits of a device. `fw_ver` and GUIDs are in network byte
/// order.
pub use uverbs::DeviceAttr;
/// [`DeviceAttr`] with extensions, which are zero if the kernel does not report them.
pub use uverbs::DeviceAttrEx;
/// State and limits of a port.
pub use uverbs::PortAttr;

/// The state of a port that carries traffic (`IBV_PORT_ACTIVE`), in
/// [`PortAttr::legacy`].
pub const PORT_ACTIVE: u8 = 4;
/// The result of device discovery ([`Device::found`](crate::Device::found)).
pub use uverbs::discovery::{Device as FoundDevice, DriverId, NodeType};

/// The default partition, with full membership (IBA 10.9.1.2).
#[cfg(feature = "embedded")]
const DEFAULT_PKEY: u16 = 0xffff;

/// Number of GIDs in one request; no device has more.
const MAX_GIDS: usize = 1024;

impl Context {
    /// Queries the capabilities and limits of the device. A system call.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn query_device(&self) -> Result<DeviceAttr> {
        Ok(self.uverbs().query_device()?)
    }

    /// Queries the capabilities and limits of the device, with extensions
    /// (`ibv_query_device_ex`). A system call.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn query_device_ex(&self) -> Result<DeviceAttrEx> {
        Ok(self.uverbs().query_device_ex(Udata::none())?)
    }

    /// Queries state and limits of a port, counted from 1. A system call.
    ///
    /// # Errors
    /// EINVAL if there is no such port.
    pub fn query_port(&self, port: u8) -> Result<PortAttr> {
        Ok(self.uverbs().query_port(port)?)
    }

    /// Queries the effective speed of a port, counted from 1, in units of 100
    /// Mbit/s. Unlike the width and speed of [`Self::query_port`] it covers rates
    /// that have no encoding, such as those of bonded ports.
    ///
    /// # Errors
    /// EINVAL if there is no such port; EOPNOTSUPP or EPROTONOSUPPORT if the driver or the
    /// kernel does not support the query (kernels before Linux 7 do not).
    pub fn query_port_speed(&self, port: u8) -> Result<u64> {
        Ok(self.uverbs().query_port_speed(port.into())?)
    }

    /// Queries the GID at an index of a port's table.
    ///
    /// # Errors
    /// ENODATA for an empty entry, EINVAL for an index outside of the table.
    pub fn gid(&self, port: u8, index: u8) -> Result<Gid> {
        let entry = self.uverbs().query_gid_entry(port.into(), index.into())?;
        Ok(Gid(entry.gid))
    }

    /// Returns the partition key at an index of a port's table, in host byte order.
    ///
    /// # Errors
    /// ENOENT for an index outside of the table; [`Error::Unsupported`] for a
    /// context that was not opened on a [`Device`](crate::Device).
    pub fn pkey(&self, port: u8, index: u16) -> Result<u16> {
        let device = self.device().ok_or(Error::Unsupported {
            what: "partition keys of a context that was not opened by name",
        })?;
        #[cfg(feature = "embedded")]
        if device.is_embedded() {
            // An embedded device has only the default partition, and no sysfs
            // entry.
            let refused = |raw| {
                uverbs::Error::refused(uverbs::Command::ReadSysfs, None, uverbs::Errno::new(raw))
            };
            return match (port, index) {
                (1, 0) => Ok(DEFAULT_PKEY),
                _ => Err(refused(libc::ENOENT).into()),
            };
        }
        let kernel = self.uverbs().kernel();
        let path = &device.found().ibdev_path;
        Ok(uverbs::discovery::sysfs::read_pkey(
            kernel, path, port, index,
        )?)
    }

    /// Queries the GIDs of all ports.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn gids(&self) -> Result<Vec<GidEntry>> {
        gid_table(self.uverbs())
    }
}

fn gid_table(context: &uverbs::Context) -> Result<Vec<GidEntry>> {
    let mut entries = vec![uverbs::GidEntry::default(); MAX_GIDS];
    let count = context.query_gid_table(&mut entries)?;
    entries.truncate(count);
    let entries = entries.into_iter();
    Ok(entries
        .filter_map(|entry| {
            Some(GidEntry {
                gid: Gid(entry.gid),
                port: entry.port_num.try_into().ok()?,
                index: entry.gid_index.try_into().ok()?,
                gid_type: entry.gid_type,
                ifindex: entry.netdev_ifindex,
            })
        })
        .collect())
}

/// A device opened for queries only, whatever its driver. From
/// [`Device::inspect`](crate::Device::inspect).
#[derive(Debug)]
pub struct Inspector {
    context: uverbs::Context,
    info: ContextInfo,
}

impl Inspector {
    pub(crate) fn new(context: uverbs::Context, info: ContextInfo) -> Self {
        Self { context, info }
    }

    /// Returns the number of completion vectors. See
    /// [`Context::num_comp_vectors`].
    pub fn num_comp_vectors(&self) -> u32 {
        self.info.num_comp_vectors
    }

    /// Queries the capabilities and limits of the device. Fields that the kernel does not
    /// report are zero.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn query_device_ex(&self) -> Result<DeviceAttrEx> {
        match self.context.query_device_ex(Udata::none()) {
            Err(error) if error.errno().raw() == libc::EOPNOTSUPP => Ok(DeviceAttrEx {
                base: self.context.query_device()?,
                ..DeviceAttrEx::default()
            }),
            other => Ok(other?),
        }
    }

    /// Queries a port. See [`Context::query_port`].
    ///
    /// # Errors
    /// As [`Context::query_port`].
    pub fn query_port(&self, port: u8) -> Result<PortAttr> {
        Ok(self.context.query_port(port)?)
    }

    /// Queries the speed of a port. See [`Context::query_port_speed`].
    ///
    /// # Errors
    /// As [`Context::query_port_speed`].
    pub fn query_port_speed(&self, port: u8) -> Result<u64> {
        Ok(self.context.query_port_speed(port.into())?)
    }

    /// Queries the GIDs of all ports. See [`Context::gids`].
    ///
    /// # Errors
    /// As [`Context::gids`].
    pub fn gids(&self) -> Result<Vec<GidEntry>> {
        gid_table(&self.context)
    }
}
