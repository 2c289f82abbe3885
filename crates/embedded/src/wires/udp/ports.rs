//! The addresses and sockets of a device on UDP.

use std::ffi::CString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::{InterfaceFlags, if_nametoindex};
use roce::packet::{Gid, Mac, Mtu, ROCE_V2_PORT, gid_of_ip};
use softhca::Settings;
use uverbs::{Command, Errno, Error};

use super::group::{Member, MemberProcesses, OTHER_VERSION, QPN_BITS, count_sockets};
use super::interface_monitor::{InterfaceMonitor, MonitoredAddresses, is_up};
use super::multicast::MulticastGroups;
use super::packets::{PacketPort, PacketSocket};
use super::socket::{self, ScopedAddress};
use super::steering;
use crate::addresses::{
    AddressList, DEVICE_MAC, MAX_ADDRESSES, PacketAccess, PortAddresses, SharedPorts,
};
use crate::links::Links;
use crate::peers::PeerProcesses;
use crate::random::random;

/// Number of source ports of queue pairs: switches select paths by the source port (ECMP).
const SOURCE_PORTS: usize = 8;
/// First of the source ports that RoCE v2 uses.
const FIRST_SOURCE_PORT: u16 = 0xc000;
/// The longest headers of a packet without its payload, as Linux counts them: IPv6,
/// UDP, BTH, extended headers, ICRC.
const MAX_HEADERS: u32 = 80;

const NO_INTERFACE: &str = "no network interface has this name, and it is no IP address; \
    `ip address` lists both";
const NO_ADDRESS: &str = "the network interface has no usable IP address; give it one, with \
    `ip address add`, and set it up";
const NOT_LOCAL: &str = "no network interface of this host has this address; `ip address` \
    lists those that it has";
const PORT_IN_USE: &str = "UDP port 4791 of this address is in use, by a process of another \
    user or with another $XDG_RUNTIME_DIR, or by rdma_rxe, which takes the port of all \
    addresses (`rdma link`); end that process, remove that device (`rdma link delete NAME`), \
    or name another address";
const MTU_TOO_SMALL: &str = "the MTU of the network interface is below 336, too small for the \
    smallest RDMA packets; raise it, with `ip link set mtu`";
const UNSUITABLE_ADDRESS: &str = "a device needs an address of its own: not an unspecified, \
    broadcast, multicast or IPv4-mapped one";

/// The sockets of an address.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(super) local: ScopedAddress,
    /// The host had the address at the last check.
    pub(super) present: bool,
    pub(super) receiver: OwnedFd,
    /// Source ports, with the sockets that send from them. The last one, of at least two, is
    /// for management datagrams, and reports those that hosts refuse.
    pub(super) senders: Vec<(u16, OwnedFd)>,
}

/// The open sockets of a device.
#[derive(Debug)]
pub(crate) struct UdpPorts {
    pub(super) endpoints: Vec<Endpoint>,
    /// Their addresses.
    pub(super) list: Arc<AddressList>,
    /// The link of the device's port, that of the interface.
    pub(super) links: Arc<Links>,
    /// Monitors the interface, if changes are announced.
    pub(super) monitor: Option<InterfaceMonitor>,
    /// Membership among the processes that share the addresses; `None` if they are not
    /// shared.
    pub(super) member: Option<Member>,
    pub(super) multicast: Arc<MulticastGroups>,
    pub(super) packets: Arc<PacketPort>,
    /// Index of the interface; 0 if the addresses have none.
    interface: u32,
    mtu: Mtu,
}

fn invalid(what: &'static str) -> Error {
    Error::Invalid {
        command: Command::Open,
        what,
    }
}

fn refused(error: &io::Error) -> Error {
    Error::refused(
        Command::Open,
        None,
        Errno::new(error.raw_os_error().unwrap_or(libc::EIO)),
    )
}

fn ip_of(entry: &InterfaceAddress) -> Option<ScopedAddress> {
    let address = entry.address.as_ref()?;
    if let Some(ipv4) = address.as_sockaddr_in() {
        return Some(ScopedAddress {
            address: ipv4.ip().into(),
            scope: 0,
        });
    }
    let ipv6 = address.as_sockaddr_in6()?;
    Some(ScopedAddress {
        address: ipv6.ip().into(),
        scope: ipv6.scope_id(),
    })
}

/// Parses an address with an optional scope: the name of an interface after a percent sign.
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
pub(super) fn ip_addresses(interface: &str, all: &[InterfaceAddress]) -> Vec<ScopedAddress> {
    let here = all.iter().filter(|it| it.interface_name == interface);
    let mut found: Vec<ScopedAddress> = here.filter_map(ip_of).collect();
    found.sort_by_key(|it| match it.address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(address) => 1 + u8::from(address.is_unicast_link_local()),
    });
    found
}

/// The addresses that a name stands for.
struct ResolvedName {
    addresses: Vec<ScopedAddress>,
    interface: Option<String>,
    /// The interface is up, or there is none.
    up: bool,
    /// Monitors the interface, if changes are announced.
    monitor: Option<InterfaceMonitor>,
}

/// Monitors an interface with its addresses.
fn monitor(interface: &str, monitored: MonitoredAddresses) -> Option<InterfaceMonitor> {
    let index = if_nametoindex(interface).map_err(io::Error::from);
    let monitor = index.and_then(|index| InterfaceMonitor::new(index, monitored));
    let failed = |error| tracing::debug!(%error, "changes of the interface are not announced");
    monitor.map_err(failed).ok()
}

/// Returns the addresses of all interfaces.
fn all_addresses() -> Result<Vec<InterfaceAddress>, Error> {
    Ok(getifaddrs().map_err(|it| refused(&it.into()))?.collect())
}

/// Resolves a name: an address, or an interface with all its addresses.
fn resolve_name(name: &str) -> Result<ResolvedName, Error> {
    let Some((address, scope)) = parse(name) else {
        return resolve_interface(name);
    };
    let names_no_host = address.is_unspecified()
        || address.is_multicast()
        || address == IpAddr::V4(Ipv4Addr::BROADCAST);
    if names_no_host || address != address.to_canonical() {
        return Err(invalid(UNSUITABLE_ADDRESS));
    }
    let all = all_addresses()?;
    let exact = all.iter().find_map(|entry| {
        let found = ip_of(entry).filter(|it| it.address == address)?;
        let in_scope = scope.is_none_or(|scope| entry.interface_name == scope);
        in_scope.then(|| (found, entry.interface_name.clone()))
    });
    if let Some((found, interface)) = exact {
        return Ok(ResolvedName {
            addresses: vec![found],
            up: is_up(&interface, &all),
            monitor: monitor(&interface, MonitoredAddresses::One(found.address)),
            interface: Some(interface),
        });
    }
    // All of 127.0.0.0/8 is on the loopback interface. Other addresses may be local by a
    // route: `bind` decides.
    let loopback = all
        .iter()
        .find(|it| it.flags.contains(InterfaceFlags::IFF_LOOPBACK));
    let loopback = loopback.filter(|_| address.is_loopback());
    let scope = scope.and_then(|it| if_nametoindex(it).ok()).unwrap_or(0);
    let found = ScopedAddress { address, scope };
    Ok(ResolvedName {
        addresses: vec![found],
        up: loopback.is_none_or(|it| is_up(&it.interface_name, &all)),
        monitor: loopback.and_then(|it| monitor(&it.interface_name, MonitoredAddresses::None)),
        interface: loopback.map(|it| it.interface_name.clone()),
    })
}

/// Returns the interface that has the addresses of a name.
pub(crate) fn interface_of(name: &str) -> Option<String> {
    resolve_name(name).ok()?.interface
}

fn resolve_interface(name: &str) -> Result<ResolvedName, Error> {
    // Created before the addresses are read, so that no change is missed.
    let monitor = monitor(name, MonitoredAddresses::All);
    let all = all_addresses()?;
    if !all.iter().any(|entry| entry.interface_name == name) {
        return Err(invalid(NO_INTERFACE));
    }
    let mut addresses = ip_addresses(name, &all);
    addresses.truncate(MAX_ADDRESSES);
    Ok(ResolvedName {
        addresses,
        interface: Some(name.to_owned()),
        up: is_up(name, &all),
        monitor,
    })
}

/// Returns the address of an Ethernet interface.
fn mac_of(interface: &str, all: &[InterfaceAddress]) -> Option<Mac> {
    let of_interface = |it: &&InterfaceAddress| it.interface_name == interface;
    let link = all.iter().filter(of_interface).find_map(|it| {
        let address = it.address.as_ref()?.as_link_addr()?;
        (address.hatype() == libc::ARPHRD_ETHER).then(|| address.addr())
    });
    link?
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
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    if result < 0 {
        return None;
    }
    // SAFETY: the request has written this member.
    u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}

/// Returns the largest path MTU on an interface with this MTU.
fn path_mtu(mtu: u32) -> Option<Mtu> {
    let fits = |it: &&Mtu| it.bytes() + MAX_HEADERS <= mtu;
    Mtu::ALL.iter().rev().find(fits).copied()
}

/// Returns whether all sockets at the port belong to members, which forward packets of other
/// members. Another program of this user could share the port without being a member.
fn has_only_members(local: ScopedAddress, member: &Member, checks: u32) -> bool {
    (0..checks).any(|check| {
        if check != 0 {
            thread::sleep(Duration::from_millis(10));
        }
        let sockets = count_sockets(local.address, ROCE_V2_PORT);
        sockets.is_none_or(|count| count <= member.count(gid_of_ip(local.address)))
    })
}

/// Number of checks for sockets of non-members: a member that is being killed releases its
/// number before its sockets.
const MAX_CHECKS: u32 = 100;

impl Endpoint {
    /// Returns the socket that sends management datagrams.
    pub(super) fn management_sender(&self) -> BorrowedFd<'_> {
        let last = self.senders.last().map(|sender| &sender.1);
        last.unwrap_or(&self.receiver).as_fd()
    }

    /// Opens the sockets of an additional address of a device.
    ///
    /// # Errors
    /// Those of the socket calls; EADDRINUSE if a non-member has the port.
    pub(super) fn open_additional(
        local: ScopedAddress,
        interface: u32,
        member: Option<&Member>,
        known: &[IpAddr],
    ) -> io::Result<Self> {
        let Some(member) = member else {
            return Self::open(local, interface, None);
        };
        let failed = |errno: Errno| io::Error::from_raw_os_error(errno.raw());
        let mut gids: Vec<Gid> = known.iter().map(|ip| gid_of_ip(*ip)).collect();
        gids.push(gid_of_ip(local.address));
        member.announce(&gids).map_err(failed)?;
        let opened = Self::open(local, interface, Some(member));
        // One attempt only: the wire waits meanwhile.
        if opened.is_ok() && has_only_members(local, member, 1) {
            return opened;
        }
        gids.pop();
        member.announce(&gids).map_err(failed)?;
        // The error of `bind` for a port that cannot be shared.
        opened.and(Err(io::ErrorKind::AddrInUse.into()))
    }

    fn open(local: ScopedAddress, interface: u32, member: Option<&Member>) -> io::Result<Self> {
        let receiver = match member {
            Some(member) => steering::open(member, local)?,
            None => socket::open_receiver(local, false)?,
        };
        let mut senders: Vec<(u16, OwnedFd)> = Vec::with_capacity(SOURCE_PORTS + 1);
        let first = random() as u16;
        for step in 0..=u16::MAX - FIRST_SOURCE_PORT {
            // An odd step visits all ports.
            let port = FIRST_SOURCE_PORT | first.wrapping_add(step.wrapping_mul(0x1235));
            match socket::open_sender(local, port, interface) {
                Ok(sender) => senders.push((port, sender)),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(error),
            }
            if senders.len() > SOURCE_PORTS {
                break;
            }
        }
        match &senders[..] {
            [_, .., (_, management)] => socket::report_refusals(management, local.address)?,
            _ => return Err(io::Error::from_raw_os_error(libc::EAGAIN)),
        }
        Ok(Self {
            local,
            present: true,
            receiver,
            senders,
        })
    }
}

impl UdpPorts {
    /// Opens the sockets of an address, or of all addresses of an interface.
    pub(crate) fn open(name: &str) -> Result<Self, Error> {
        let ResolvedName {
            addresses,
            interface,
            up,
            monitor,
        } = resolve_name(name)?;
        let is_single = addresses.len() == 1;
        let gids: Vec<Gid> = addresses
            .iter()
            .map(|local| gid_of_ip(local.address))
            .collect();
        // Without membership, this process has the addresses exclusively.
        let member = match Member::join(&gids) {
            Ok(member) => Some(member),
            Err(errno) if errno.raw() == libc::EPROTONOSUPPORT => {
                return Err(invalid(OTHER_VERSION));
            }
            Err(errno) => {
                tracing::debug!(%errno, "addresses not shared with other processes");
                None
            }
        };
        let index = interface.as_deref().and_then(|it| if_nametoindex(it).ok());
        let index = index.unwrap_or(0);
        let multicast = MulticastGroups::new(index).map_err(|it| refused(&it))?;
        let mac = match &interface {
            Some(name) => mac_of(name, &all_addresses()?),
            None => None,
        };
        let packets = PacketPort::new(index, mac).map_err(|it| refused(&it))?;
        let mut endpoints = Vec::new();
        for local in addresses {
            match Endpoint::open(local, index, member.as_ref()) {
                Ok(endpoint) => endpoints.push(endpoint),
                Err(error) => match error.kind() {
                    io::ErrorKind::AddrInUse => return Err(invalid(PORT_IN_USE)),
                    io::ErrorKind::AddrNotAvailable if is_single => return Err(invalid(NOT_LOCAL)),
                    // Duplicate address detection is in progress.
                    io::ErrorKind::AddrNotAvailable => {}
                    _ => return Err(refused(&error)),
                },
            }
        }
        let Some(first) = endpoints.first() else {
            return Err(invalid(NO_ADDRESS));
        };
        if let Some(member) = &member {
            if !endpoints
                .iter()
                .all(|it| has_only_members(it.local, member, MAX_CHECKS))
            {
                return Err(invalid(PORT_IN_USE));
            }
        }
        const ETHERNET_MTU: u32 = 1500;
        let mtu = interface.and_then(|it| mtu_of(&it, &first.receiver));
        let mtu = path_mtu(mtu.unwrap_or(ETHERNET_MTU)).ok_or(invalid(MTU_TOO_SMALL))?;
        let list = AddressList::new(endpoints.iter().map(|it| it.local.address));
        let links = Arc::new(Links::default());
        links.set_down(u64::from(!up));
        Ok(Self {
            endpoints,
            list: Arc::new(list),
            links,
            monitor,
            member,
            multicast: Arc::new(multicast),
            packets: Arc::new(packets),
            interface: index,
            mtu,
        })
    }

    /// Returns where ports of the connection manager are reserved, if the addresses are
    /// shared.
    pub(crate) fn shared(&self) -> Option<SharedPorts> {
        let member = self.member.as_ref()?;
        Some(SharedPorts {
            directory: Arc::clone(&member.directory),
            member: member.number,
            addresses: Arc::clone(&self.list),
        })
    }

    /// Returns the processes that share the addresses of this host, if they are shared.
    pub(crate) fn processes(&self) -> Option<Arc<dyn PeerProcesses>> {
        let member = self.member.as_ref()?;
        Some(Arc::new(MemberProcesses::new(member)))
    }

    /// Returns the link of the device's port, of which the index is 0.
    pub(crate) fn links(&self) -> Arc<Links> {
        Arc::clone(&self.links)
    }

    /// Returns the addresses.
    pub(crate) fn addresses(&self) -> HostAddresses {
        HostAddresses {
            list: Arc::clone(&self.list),
            multicast: Arc::clone(&self.multicast),
            packets: Arc::clone(&self.packets),
            interface: self.interface,
            mtu: self.mtu,
            member: self.member.as_ref().map_or(0, |member| member.number),
        }
    }
}

/// The addresses of a device that has those of the host.
#[derive(Clone, Debug)]
pub(crate) struct HostAddresses {
    pub(crate) list: Arc<AddressList>,
    pub(crate) multicast: Arc<MulticastGroups>,
    packets: Arc<PacketPort>,
    /// Index of the interface; 0 if the addresses have none.
    pub(crate) interface: u32,
    /// The path MTU of the interface.
    pub(crate) mtu: Mtu,
    /// This process's number among those that share the addresses.
    member: u8,
}

impl PacketAccess for PacketSocket {}

impl PortAddresses for HostAddresses {
    fn list(&self) -> &AddressList {
        &self.list
    }

    fn interface(&self) -> u32 {
        self.interface
    }

    fn join(&self, group: &Gid) -> crate::Result<()> {
        self.multicast.join(group)
    }

    fn leave(&self, group: &Gid) {
        self.multicast.leave(group);
    }

    fn has_packets(&self) -> bool {
        self.packets.mac().is_some()
    }

    fn open_packets(&self) -> crate::Result<Arc<dyn PacketAccess>> {
        Ok(self.packets.open()?)
    }
}

impl HostAddresses {
    /// Derives settings of the device from the addresses.
    pub(crate) fn apply_to(&self, settings: &mut Settings) {
        settings.mac = self.packets.mac().unwrap_or(DEVICE_MAC);
        settings.starts_at_ip = true;
        settings.mtu = self.mtu;
        settings.guid = self.guid();
        // The upper bits of a number are the member's; half of the rest are the first one's.
        const QUEUES: u32 = 1 << (QPN_BITS - 1);
        let qpn = 0x40 + settings.first_qpn % (QUEUES - 0x40);
        settings.first_qpn = u32::from(self.member) << QPN_BITS | qpn;
    }

    /// Returns the device's GUID, different on each host: locally administered, derived from
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
    use super::super::group::MAX_MEMBERS;
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
            ("0.0.0.0", UNSUITABLE_ADDRESS),
            ("224.0.0.1", UNSUITABLE_ADDRESS),
            ("255.255.255.255", UNSUITABLE_ADDRESS),
            ("::ffff:127.0.0.1", UNSUITABLE_ADDRESS),
            // Documentation addresses: no host has them.
            ("192.0.2.77", NOT_LOCAL),
            ("2001:db8::77", NOT_LOCAL),
        ] {
            assert_eq!(UdpPorts::open(name).unwrap_err(), invalid(what), "{name}");
        }
    }

    #[test]
    fn an_address_is_shared_with_members_only() {
        let name = "127.41.0.1";
        let ports = UdpPorts::open(name).unwrap();
        assert_eq!(ports.list.present(), [IpAddr::from([127, 41, 0, 1])]);
        assert_eq!(ports.endpoints[0].senders.len(), SOURCE_PORTS + 1);
        let more = UdpPorts::open(name).unwrap();
        assert_ne!(ports.addresses().member, more.addresses().member);
        // A socket in the group whose process forwards nothing.
        let local = ports.endpoints[0].local;
        let non_member = socket::open_receiver(local, true).unwrap();
        assert_eq!(UdpPorts::open(name).unwrap_err(), invalid(PORT_IN_USE));
        drop((ports, more));
        assert_eq!(UdpPorts::open(name).unwrap_err(), invalid(PORT_IN_USE));
        drop(non_member);
        // An exclusive socket, as that of rdma_rxe.
        let exclusive = socket::open_receiver(local, false).unwrap();
        assert_eq!(UdpPorts::open(name).unwrap_err(), invalid(PORT_IN_USE));
        drop(exclusive);
        UdpPorts::open(name).unwrap();
    }

    #[test]
    fn numbers_stay_in_the_range_of_a_member() {
        for member in [0, 1, MAX_MEMBERS - 1] {
            let addresses = HostAddresses {
                list: Arc::new(AddressList::new([IpAddr::from([127, 41, 0, 2])])),
                multicast: Arc::new(MulticastGroups::new(0).unwrap()),
                packets: Arc::new(PacketPort::new(0, None).unwrap()),
                interface: 0,
                mtu: Mtu::B1024,
                member,
            };
            let profile = softhca::profile::Profile::named("roce").unwrap();
            for first_qpn in [0x40, 0x1_ffff, 0x2_0000, 0xfd_fffe] {
                let mut settings = Settings::numbered(profile, 0);
                settings.first_qpn = first_qpn;
                addresses.apply_to(&mut settings);
                let last = settings.first_qpn + (1 << 17) - 1;
                for qpn in [settings.first_qpn, last] {
                    assert_eq!(qpn >> QPN_BITS, u32::from(member));
                }
            }
        }
    }
}
