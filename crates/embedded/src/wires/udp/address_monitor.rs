//! Changes of the addresses of network interfaces, announced by the kernel (rtnetlink).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

use super::ports::ip_addresses;
use super::socket::ScopedAddress;

/// Monitors the addresses of an interface, or one of them.
#[derive(Debug)]
pub(super) struct AddressMonitor {
    interface: String,
    /// The monitored address; `None` for all.
    address: Option<IpAddr>,
    socket: OwnedFd,
}

impl AddressMonitor {
    /// Reports changes from now on.
    pub(super) fn new(interface: String, address: Option<IpAddr>) -> io::Result<Self> {
        const GROUPS: libc::c_int = libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkRoute,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUPS as u32))?;
        Ok(Self {
            interface,
            address,
            socket,
        })
    }

    /// Returns the monitored addresses that the host has.
    pub(super) fn addresses(&self) -> io::Result<Vec<ScopedAddress>> {
        let mut addresses = ip_addresses(&self.interface)?;
        addresses.retain(|local| self.address.is_none_or(|address| address == local.address));
        Ok(addresses)
    }

    /// Returns the descriptor that is readable when [`has_changed`](Self::has_changed)
    /// returns true.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether addresses of this host have changed since the last call, whichever
    /// interface they belong to.
    pub(super) fn has_changed(&self) -> bool {
        let mut changed = false;
        // The content of the messages is not used, since the addresses are read again, so
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
