//! The addresses and sockets of a device on UDP.

use std::ffi::CString;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::{InterfaceFlags, if_nametoindex};
use softhca::Settings;
use softhca::packet::{Gid, Mtu, ROCE_V2_PORT, gid_of_ip};
use uverbs::{Command, Errno, Error};

use super::DEVICE_MAC;
use super::follow::Follower;
use super::group::{Member, QPN_BITS, sockets_at};
use super::socket::{self, Scoped};
use super::steering;
use crate::addresses::{ADDRESSES, AddressList};
use crate::cm::{SharedPorts, random};

/// Number of source ports. Switches choose among paths by it.
const SOURCES: usize = 8;
/// First of the source ports that RoCE v2 uses.
const FIRST_SOURCE: u16 = 0xc000;
/// The longest headers of a packet without its payload, as Linux counts them: IPv6,
/// UDP, BTH, extended headers, ICRC.
const HEADERS: u32 = 80;

const NO_INTERFACE: &str = "no network interface has this name, and it is no IP address; \
    `ip address` lists both";
const NO_ADDRESS: &str = "the network interface has no usable IP address; give it one, with \
    `ip address add`, and set it up";
const NOT_HERE: &str = "no network interface of this host has this address; `ip address` \
    lists those that it has";
const TAKEN: &str = "UDP port 4791 of this address is in use, by a process of another user or \
    with another $XDG_RUNTIME_DIR, or by rdma_rxe, which takes the port of all addresses \
    (`rdma link`); end that process, remove that device (`rdma link delete NAME`), or name \
    another address";
const MTU_TOO_SMALL: &str = "the MTU of the network interface is below 336, too small for the \
    smallest RDMA packets; raise it, with `ip link set mtu`";
const UNSPECIFIC: &str = "a device needs an address of its own: not an unspecified, multicast \
    or IPv4-mapped one";

/// A socket pair of an address.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(super) at: Scoped,
    /// The host has the address, or had it when it was last looked at.
    pub(super) present: bool,
    pub(super) receiver: OwnedFd,
    /// Source ports, with the sockets that send from them.
    pub(super) senders: Vec<(u16, OwnedFd)>,
}

/// The open sockets of a device.
#[derive(Debug)]
pub(crate) struct UdpPorts {
    pub(super) endpoints: Vec<Endpoint>,
    /// Their addresses.
    pub(super) list: Arc<AddressList>,
    /// The interface, if changes of its addresses are announced.
    pub(super) follower: Option<Follower>,
    /// Membership among the processes that share the addresses; `None` if nobody may.
    pub(super) member: Option<Member>,
    mtu: Mtu,
}

fn invalid(what: &'static str) -> Error {
    Error::Invalid {
        command: Command::Open,
        what,
    }
}

fn os(error: &io::Error) -> Error {
    Error::Refused {
        command: Command::Open,
        handle: None,
        errno: Errno::new(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

fn ip_of(entry: &InterfaceAddress) -> Option<Scoped> {
    let address = entry.address.as_ref()?;
    if let Some(ipv4) = address.as_sockaddr_in() {
        return Some(Scoped {
            address: ipv4.ip().into(),
            scope: 0,
        });
    }
    let ipv6 = address.as_sockaddr_in6()?;
    Some(Scoped {
        address: ipv6.ip().into(),
        scope: ipv6.scope_id(),
    })
}

/// Splits an address from the name of its interface, after a percent sign.
fn parse(name: &str) -> Option<(IpAddr, Option<&str>)> {
    match name.split_once('%') {
        Some((address, interface)) => {
            let address: Ipv6Addr = address.parse().ok()?;
            Some((address.into(), Some(interface)))
        }
        None => Some((name.parse().ok()?, None)),
    }
}

/// Returns the addresses of an interface: IPv4 first, then global before link-local
/// addresses.
pub(super) fn ip_addresses(interface: &str) -> io::Result<Vec<Scoped>> {
    let here = getifaddrs()?.filter(|entry| entry.interface_name == interface);
    let mut found: Vec<Scoped> = here.filter_map(|entry| ip_of(&entry)).collect();
    found.sort_by_key(|it| match it.address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(address) => 1 + u8::from(address.is_unicast_link_local()),
    });
    Ok(found)
}

/// The addresses that the name of a device selects.
struct Named {
    addresses: Vec<Scoped>,
    interface: Option<String>,
    /// Changes of the interface's addresses, if they are announced.
    follower: Option<Follower>,
}

/// Follows the addresses of an interface, or one of them.
fn follow(interface: &str, address: Option<IpAddr>) -> Option<Follower> {
    let follower = Follower::new(interface.to_owned(), address);
    let failed = |error| tracing::debug!(%error, "changes of addresses are not announced");
    follower.map_err(failed).ok()
}

/// Returns the addresses of an interface, or the one address, that a name is.
fn named(name: &str) -> Result<Named, Error> {
    let Some((address, scope)) = parse(name) else {
        return named_interface(name);
    };
    if address.is_unspecified() || address.is_multicast() || address != address.to_canonical() {
        return Err(invalid(UNSPECIFIC));
    }
    let all: Vec<InterfaceAddress> = getifaddrs().map_err(|it| os(&it.into()))?.collect();
    let exact = all.iter().find_map(|entry| {
        let found = ip_of(entry).filter(|it| it.address == address)?;
        let right = scope.is_none_or(|scope| entry.interface_name == scope);
        right.then(|| (found, entry.interface_name.clone()))
    });
    if let Some((found, interface)) = exact {
        return Ok(Named {
            addresses: vec![found],
            follower: follow(&interface, Some(found.address)),
            interface: Some(interface),
        });
    }
    // All of 127.0.0.0/8 is on the loopback interface. Other addresses may be local
    // by a route; the system decides.
    let loopback = all
        .iter()
        .find(|it| it.flags.contains(InterfaceFlags::IFF_LOOPBACK));
    let loopback = loopback.filter(|_| address.is_loopback());
    let scope = scope.and_then(|it| if_nametoindex(it).ok()).unwrap_or(0);
    let found = Scoped { address, scope };
    Ok(Named {
        addresses: vec![found],
        interface: loopback.map(|it| it.interface_name.clone()),
        follower: None,
    })
}

fn named_interface(name: &str) -> Result<Named, Error> {
    let mut all = getifaddrs().map_err(|it| os(&it.into()))?;
    if !all.any(|entry| entry.interface_name == name) {
        return Err(invalid(NO_INTERFACE));
    }
    // Before its addresses are read, so that no change is missed.
    let follower = follow(name, None);
    let mut addresses = ip_addresses(name).map_err(|it| os(&it))?;
    addresses.truncate(ADDRESSES);
    Ok(Named {
        addresses,
        interface: Some(name.to_owned()),
        follower,
    })
}

/// Returns the MTU of an interface.
fn mtu_of(interface: &str, socket: &OwnedFd) -> Option<u32> {
    let name = CString::new(interface).ok()?;
    let name = name.as_bytes_with_nul();
    // SAFETY: zero is a value of each field.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() > request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    // SAFETY: the request reads a name, which ends with a zero, and writes an int.
    let asked = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    if asked < 0 {
        return None;
    }
    // SAFETY: the request has written this member.
    u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}

/// Returns the largest path MTU on an interface with this MTU.
fn path_mtu(mtu: u32) -> Option<Mtu> {
    let fits = |it: &&Mtu| it.bytes() + HEADERS <= mtu;
    Mtu::ALL.iter().rev().find(fits).copied()
}

/// Returns whether all sockets at the port are those of members, who would pass our
/// packets on: others of this user may share the port without knowing of us.
fn has_only_members(at: Scoped, member: &Member, tries: u32) -> bool {
    (0..tries).any(|attempt| {
        if attempt != 0 {
            thread::sleep(Duration::from_millis(10));
        }
        let sockets = sockets_at(at.address, ROCE_V2_PORT);
        sockets.is_none_or(|count| count <= member.count(gid_of_ip(at.address)))
    })
}

/// Attempts to see members alone: one that is being killed has given up its number
/// before its sockets.
const TRIES: u32 = 100;

impl Endpoint {
    /// Opens the sockets of another address of a device, besides those that it has.
    ///
    /// # Errors
    /// Of the system; EADDRINUSE if others than members have the port.
    pub(super) fn add(at: Scoped, member: Option<&Member>, known: &[IpAddr]) -> io::Result<Self> {
        let Some(member) = member else {
            return Self::open(at, None);
        };
        let failed = |errno: Errno| io::Error::from_raw_os_error(errno.raw());
        let mut gids: Vec<Gid> = known.iter().map(|ip| gid_of_ip(*ip)).collect();
        gids.push(gid_of_ip(at.address));
        member.announce(&gids).map_err(failed)?;
        let opened = Self::open(at, Some(member));
        // The wire waits meanwhile, so there is one attempt.
        if opened.is_ok() && has_only_members(at, member, 1) {
            return opened;
        }
        gids.pop();
        member.announce(&gids).map_err(failed)?;
        // As the system says it where it does not let the port be shared.
        opened.and(Err(io::ErrorKind::AddrInUse.into()))
    }

    fn open(at: Scoped, member: Option<&Member>) -> io::Result<Self> {
        let receiver = match member {
            Some(member) => steering::open(member, at)?,
            None => socket::open_receiver(at, false)?,
        };
        let mut senders: Vec<(u16, OwnedFd)> = Vec::with_capacity(SOURCES);
        let first = random() as u16;
        for step in 0..=u16::MAX - FIRST_SOURCE {
            // An odd step visits all ports.
            let port = FIRST_SOURCE | first.wrapping_add(step.wrapping_mul(0x1235));
            match socket::open_sender(at, port) {
                Ok(sender) => senders.push((port, sender)),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(error),
            }
            if senders.len() == SOURCES {
                break;
            }
        }
        if senders.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        Ok(Self {
            at,
            present: true,
            receiver,
            senders,
        })
    }
}

impl UdpPorts {
    /// Opens the sockets of an address, or of all addresses of an interface.
    pub(crate) fn open(name: &str) -> Result<Self, Error> {
        let Named {
            addresses,
            interface,
            follower,
        } = named(name)?;
        let alone = addresses.len() == 1;
        let gids: Vec<Gid> = addresses.iter().map(|at| gid_of_ip(at.address)).collect();
        // Without a directory, or a number in it, the addresses are this process's.
        let member = match Member::join(&gids) {
            Ok(member) => Some(member),
            Err(errno) => {
                tracing::debug!(%errno, "addresses are not shared");
                None
            }
        };
        let mut endpoints = Vec::new();
        for at in addresses {
            match Endpoint::open(at, member.as_ref()) {
                Ok(endpoint) => endpoints.push(endpoint),
                Err(error) => match error.kind() {
                    io::ErrorKind::AddrInUse => return Err(invalid(TAKEN)),
                    io::ErrorKind::AddrNotAvailable if alone => return Err(invalid(NOT_HERE)),
                    // An address that is being checked for duplicates.
                    io::ErrorKind::AddrNotAvailable => {}
                    _ => return Err(os(&error)),
                },
            }
        }
        let Some(first) = endpoints.first() else {
            return Err(invalid(NO_ADDRESS));
        };
        if let Some(member) = &member {
            if !endpoints
                .iter()
                .all(|it| has_only_members(it.at, member, TRIES))
            {
                return Err(invalid(TAKEN));
            }
        }
        const ETHERNET_MTU: u32 = 1500;
        let mtu = interface.and_then(|it| mtu_of(&it, &first.receiver));
        let mtu = path_mtu(mtu.unwrap_or(ETHERNET_MTU)).ok_or(invalid(MTU_TOO_SMALL))?;
        let list = AddressList::new(endpoints.iter().map(|it| it.at.address));
        Ok(Self {
            endpoints,
            list: Arc::new(list),
            follower,
            member,
            mtu,
        })
    }

    /// Returns where ports of the connection manager are taken, if the addresses are
    /// shared.
    pub(crate) fn shared(&self) -> Option<SharedPorts> {
        let member = self.member.as_ref()?;
        Some(SharedPorts {
            directory: Arc::clone(&member.directory),
            member: member.number,
            addresses: Arc::clone(&self.list),
        })
    }

    /// Returns the addresses.
    pub(crate) fn addresses(&self) -> Addresses {
        Addresses {
            list: Arc::clone(&self.list),
            mtu: self.mtu,
            member: self.member.as_ref().map_or(0, |member| member.number),
        }
    }
}

/// The addresses of a device that are the host's.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    pub(crate) list: Arc<AddressList>,
    /// The path MTU of the interface.
    pub(crate) mtu: Mtu,
    /// This process's number among those that share the addresses.
    member: u8,
}

impl Addresses {
    /// Sets what follows from the addresses.
    pub(crate) fn describe(&self, settings: &mut Settings) {
        settings.mac = DEVICE_MAC;
        settings.mtu = self.mtu;
        settings.guid = self.guid();
        // Whoever sends datagrams must guess these. Ranges are those of `Settings`.
        const QUEUES: u64 = 1 << (QPN_BITS - 1);
        const KEYS: u64 = (1 << 24) - (1 << 22);
        let qpn = 0x40 + (random() % (QUEUES - 0x40)) as u32;
        settings.first_qpn = u32::from(self.member) << QPN_BITS | qpn;
        settings.first_mkey = 0x10 + (random() % (KEYS - 0x10)) as u32;
    }

    /// Returns the device's GUID, different on each host: locally administered, with
    /// the first address.
    pub(crate) fn guid(&self) -> u64 {
        let first = self.list.all().first().map(|address| gid_of_ip(address.ip));
        let mut gid = first.iter().flat_map(|gid| gid.chunks_exact(8));
        let mut half = || {
            let half = gid.next().unwrap_or(&[]).iter();
            half.fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte))
        };
        let folded = half().rotate_left(7) ^ half();
        folded & !(3 << 56) | 2 << 56
    }
}

#[cfg(test)]
mod tests {
    use super::super::group::MEMBERS;
    use super::*;

    #[test]
    fn path_mtus_are_those_of_rdma_rxe() {
        let of = |mtu| path_mtu(mtu).map(Mtu::bytes);
        assert_eq!(of(335), None);
        assert_eq!(of(336), Some(256));
        assert_eq!(of(1280), Some(1024));
        assert_eq!(of(1500), Some(1024));
        assert_eq!(of(4200), Some(4096));
        assert_eq!(of(9000), Some(4096));
        assert_eq!(of(65536), Some(4096));
    }

    #[test]
    fn a_name_is_an_address_or_an_interface() {
        let scoped = "fe80::1%eth0";
        assert_eq!(
            parse(scoped),
            Some(("fe80::1".parse().unwrap(), Some("eth0")))
        );
        assert_eq!(
            parse("192.0.2.7"),
            Some(("192.0.2.7".parse().unwrap(), None))
        );
        assert_eq!(parse("eth0"), None);
        assert_eq!(parse("192.0.2.7%eth0"), None);
        for (name, what) in [
            ("", NO_INTERFACE),
            ("no such", NO_INTERFACE),
            ("0.0.0.0", UNSPECIFIC),
            ("224.0.0.1", UNSPECIFIC),
            ("::ffff:127.0.0.1", UNSPECIFIC),
            // Documentation addresses: no host has them.
            ("192.0.2.77", NOT_HERE),
            ("2001:db8::77", NOT_HERE),
        ] {
            assert_eq!(UdpPorts::open(name).unwrap_err(), invalid(what), "{name}");
        }
    }

    #[test]
    fn an_address_is_shared_with_members_alone() {
        let name = "127.41.0.1";
        let ports = UdpPorts::open(name).unwrap();
        assert_eq!(ports.list.present(), [IpAddr::from([127, 41, 0, 1])]);
        assert_eq!(ports.endpoints[0].senders.len(), SOURCES);
        let more = UdpPorts::open(name).unwrap();
        assert_ne!(ports.addresses().member, more.addresses().member);
        // A socket of the group whose process would pass nothing on.
        let at = ports.endpoints[0].at;
        let stranger = socket::open_receiver(at, true).unwrap();
        assert_eq!(UdpPorts::open(name).unwrap_err(), invalid(TAKEN));
        drop((ports, more));
        assert_eq!(UdpPorts::open(name).unwrap_err(), invalid(TAKEN));
        drop(stranger);
        // As rdma_rxe has it.
        let alone = socket::open_receiver(at, false).unwrap();
        assert_eq!(UdpPorts::open(name).unwrap_err(), invalid(TAKEN));
        drop(alone);
        UdpPorts::open(name).unwrap();
    }

    #[test]
    fn numbers_stay_in_the_range_of_a_member() {
        for member in [0, 1, MEMBERS - 1] {
            let addresses = Addresses {
                list: Arc::new(AddressList::new([IpAddr::from([127, 41, 0, 2])])),
                mtu: Mtu::B1024,
                member,
            };
            let profile = softhca::profile::Profile::named("roce").unwrap();
            for _ in 0..100 {
                let mut settings = Settings::numbered(profile, 0);
                addresses.describe(&mut settings);
                let last = settings.first_qpn + (1 << 17) - 1;
                for qpn in [settings.first_qpn, last] {
                    assert_eq!(qpn >> QPN_BITS, u32::from(member));
                }
                assert!(settings.first_mkey + (1 << 22) <= 1 << 24);
            }
        }
    }
}
