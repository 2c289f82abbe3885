//! Addresses of a device: those of the host, which may change, and its own.

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roce::packet::{Gid, Mac};

use crate::Result;
use crate::directory::Directory;

/// MAC addresses that programs see of a device with addresses of the host, if its interface has
/// none, and of all other hosts. RoCE packets have none.
pub(crate) const DEVICE_MAC: Mac = [0x02, 0x50, 0x53, 0, 0, 1];
pub(crate) const OTHERS_MAC: Mac = [0x02, 0x50, 0x53, 0, 0, 2];

/// The addresses of the host that a port has, as the driver sees them.
pub(crate) trait PortAddresses: Send + Sync {
    /// Returns the addresses.
    fn list(&self) -> &AddressList;

    /// Returns the index of their network interface; 0 if they have none.
    fn interface(&self) -> u32;

    /// Adds a queue pair to a multicast group.
    ///
    /// # Errors
    /// ENOMEM for too many groups; those of the socket calls.
    fn join(&self, group: &Gid) -> Result<()>;

    /// Removes a queue pair from a multicast group.
    fn leave(&self, group: &Gid);

    /// Returns whether the port exchanges raw packets, which takes an Ethernet interface.
    fn has_packets(&self) -> bool;

    /// Exchanges raw packets with the interface, until the result is dropped.
    ///
    /// # Errors
    /// EPERM without the right; those of the socket calls.
    fn open_packets(&self) -> Result<Arc<dyn PacketAccess>>;
}

/// Exchange of raw packets with a network interface, which ends when the value is dropped.
pub(crate) trait PacketAccess: Send + Sync + fmt::Debug {}

/// A GID of a port, with its index.
pub(crate) type IndexedGid = ([u8; 16], u8);

/// GIDs of RoCE v2 of a device that reaches no other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnGids {
    pub(crate) link_local: IndexedGid,
    pub(crate) ipv4: IndexedGid,
}

/// The directory in which processes with the same addresses reserve ports.
#[derive(Clone, Debug)]
pub(crate) struct SharedPorts {
    pub(crate) directory: Arc<Directory>,
    /// The member number of this process.
    pub(crate) member: u8,
    pub(crate) addresses: Arc<AddressList>,
}

/// Maximum number of addresses of a device.
pub(crate) const MAX_ADDRESSES: usize = 16;

/// An address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostAddress {
    pub(crate) ip: IpAddr,
    /// The host had the address at the last check.
    pub(crate) present: bool,
}

/// The addresses of a device, in the order of its GIDs. An address keeps its index, also
/// while the host does not have it.
///
/// Lock order: this lock is taken last.
#[derive(Debug)]
pub(crate) struct AddressList {
    addresses: Mutex<Vec<HostAddress>>,
    /// Number of changes.
    changes: AtomicU32,
}

impl AddressList {
    /// Creates a list of addresses that the host has.
    pub(crate) fn new(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        let present = |ip| HostAddress { ip, present: true };
        Self {
            addresses: Mutex::new(addresses.into_iter().map(present).collect()),
            changes: AtomicU32::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<HostAddress>> {
        self.addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all addresses.
    pub(crate) fn all(&self) -> Vec<HostAddress> {
        self.lock().clone()
    }

    /// Returns the addresses that the host has.
    pub(crate) fn present(&self) -> Vec<IpAddr> {
        let addresses = self.lock();
        let present = addresses.iter().filter(|address| address.present);
        present.map(|address| address.ip).collect()
    }

    /// Returns the number of changes, which wraps.
    pub(crate) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    /// Appends an address that the host has. Returns whether there was room for it.
    pub(crate) fn add(&self, ip: IpAddr) -> bool {
        let mut addresses = self.lock();
        let fits = addresses.len() < MAX_ADDRESSES;
        if fits {
            addresses.push(HostAddress { ip, present: true });
            self.changes.fetch_add(1, Ordering::Release);
        }
        fits
    }

    /// Sets which addresses the host has. Returns whether any has changed.
    pub(crate) fn set_present(&self, has: impl Fn(IpAddr) -> bool) -> bool {
        let mut changed = false;
        for address in &mut *self.lock() {
            let present = has(address.ip);
            changed |= present != address.present;
            address.present = present;
        }
        if changed {
            self.changes.fetch_add(1, Ordering::Release);
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use roce::packet::gid_of_ip;
    use uverbs::{AsyncEventFile, AsyncEventType};

    use super::*;
    use crate::{Drive, Network};

    /// Programs see address changes in the GID table, and receive events.
    #[test]
    fn the_gid_table_follows_the_addresses() {
        let network = Network::roce(Drive::Caller, "127.46.0.1").unwrap();
        let device = network.device("roce").unwrap();
        let list = Arc::clone(&device.runner.addresses().unwrap().list);
        let context = Arc::new(device.context().unwrap());
        mlx5::DeviceContext::open(&context).unwrap();
        let events = AsyncEventFile::alloc(&context).unwrap();
        let port = || context.query_port(1).unwrap().legacy;
        let table = || {
            let mut entries = [uverbs::GidEntry::default(); 2 * MAX_ADDRESSES];
            let count = context.query_gid_table(&mut entries).unwrap();
            let entries = entries[..count].iter();
            entries.map(|entry| entry.gid_index).collect::<Vec<_>>()
        };
        let entry = |index| {
            let entry = context.query_gid_entry(1, index);
            entry.map(|it| it.gid).map_err(|it| it.errno().raw())
        };
        let ip = |last| IpAddr::from([127, 46, 0, last]);
        let assert_gid_change = || {
            while device.drive() {}
            assert!(events.wait_readable(0).unwrap());
            let event = events.read_event().unwrap();
            assert_eq!(
                (event.event, event.element),
                (AsyncEventType::GID_CHANGE, 1)
            );
            assert!(!events.wait_readable(0).unwrap());
        };
        let length = crate::Embedded::ETHERNET_GIDS as u32;
        assert_eq!(port().gid_tbl_len, length);
        assert_eq!(table(), [0]);
        assert_eq!(entry(1), Err(libc::ENODATA));
        assert_eq!(entry(length), Err(libc::EINVAL));
        assert!(list.add(ip(2)));
        assert_gid_change();
        assert_eq!(table(), [0, 1]);
        assert_eq!(entry(1), Ok(gid_of_ip(ip(2))));
        assert!(list.set_present(|it| it != ip(1)));
        assert_gid_change();
        assert_eq!(table(), [1]);
        assert_eq!(entry(0), Err(libc::ENODATA));
        assert_eq!(device.gids()[..3], [[0; 16], gid_of_ip(ip(2)), [0; 16]]);
        assert!(list.set_present(|_| true));
        assert_gid_change();
        assert_eq!(table(), [0, 1]);
        while device.drive() {}
        assert!(!events.wait_readable(0).unwrap());
    }

    #[test]
    fn an_address_keeps_its_index() {
        let ip = |last| IpAddr::from([192, 0, 2, last]);
        let list = AddressList::new([ip(1), ip(2)]);
        assert!(!list.set_present(|_| true) && list.changes() == 0);
        assert!(list.set_present(|it| it != ip(1)) && list.changes() == 1);
        assert!(list.add(ip(3)) && list.changes() == 2);
        assert_eq!(list.present(), [ip(2), ip(3)]);
        let ips = |list: &AddressList| list.all().iter().map(|it| it.ip).collect::<Vec<_>>();
        assert_eq!(ips(&list), [ip(1), ip(2), ip(3)]);
        assert!(list.set_present(|_| true));
        assert_eq!(list.present(), ips(&list));
        for last in 4..=MAX_ADDRESSES as u8 {
            assert!(list.add(ip(last)));
        }
        assert!(!list.add(ip(100)));
        assert_eq!(list.present().len(), MAX_ADDRESSES);
    }
}
