//! Changes of network interfaces and their addresses, announced by the kernel (rtnetlink).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::{InterfaceFlags, if_indextoname};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

use super::ports::ip_addresses;
use super::socket::ScopedAddress;

/// The addresses that a monitor returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MonitoredAddresses {
    All,
    One(IpAddr),
    /// The device has an address that belongs to the interface by a route.
    None,
}

/// Monitors an interface, which keeps its index if it is renamed. One that is removed does not
/// return.
#[derive(Debug)]
pub(super) struct InterfaceMonitor {
    index: u32,
    monitored: MonitoredAddresses,
    socket: OwnedFd,
}

/// The state of an interface.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InterfaceState {
    /// The interface is up and has a carrier, as mlx5_ib and rdma_rxe require of an active port.
    pub(super) up: bool,
    /// The monitored addresses; `None` if none are.
    pub(super) addresses: Option<Vec<ScopedAddress>>,
}

/// Returns whether an interface is up, from the entries of its addresses.
pub(super) fn is_up(interface: &str, all: &[InterfaceAddress]) -> bool {
    let required = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_LOWER_UP;
    let mut of_interface = all.iter().filter(|it| it.interface_name == interface);
    of_interface.any(|it| it.flags.contains(required))
}

impl InterfaceMonitor {
    /// Reports changes from now on.
    pub(super) fn new(index: u32, monitored: MonitoredAddresses) -> io::Result<Self> {
        const GROUPS: libc::c_int =
            libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkRoute,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUPS as u32))?;
        Ok(Self {
            index,
            monitored,
            socket,
        })
    }

    /// Returns the state of the interface.
    pub(super) fn state(&self) -> io::Result<InterfaceState> {
        let all: Vec<InterfaceAddress> = getifaddrs()?.collect();
        // An interface that was removed has no name.
        let name = if_indextoname(self.index).ok();
        let name = name.as_ref().and_then(|name| name.to_str().ok());
        let listed = || name.map_or_else(Vec::new, |name| ip_addresses(name, &all));
        let addresses = match self.monitored {
            MonitoredAddresses::None => None,
            MonitoredAddresses::All => Some(listed()),
            MonitoredAddresses::One(one) => {
                let mut addresses = listed();
                addresses.retain(|it| it.address == one);
                Some(addresses)
            }
        };
        Ok(InterfaceState {
            up: name.is_some_and(|name| is_up(name, &all)),
            addresses,
        })
    }

    /// Returns the descriptor that is readable when [`has_changed`](Self::has_changed)
    /// returns true.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether interfaces of this host or their addresses have changed since the last
    /// call, whichever they are.
    pub(super) fn has_changed(&self) -> bool {
        let mut changed = false;
        // The content of the messages is not used, since the state is read again, so
        // truncated and dropped messages do no harm.
        let mut buffer = [0; 16];
        loop {
            match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(_) | Err(nix::Error::ENOBUFS | nix::Error::EINTR) => changed = true,
                Err(_) => return changed,
            }
        }
    }
}
