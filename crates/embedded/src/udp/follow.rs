//! Changes of the addresses of network interfaces, as the system announces them
//! (rtnetlink).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

use super::ports::ip_addresses;
use super::socket::Scoped;

/// An interface whose addresses are followed, or one of them.
#[derive(Debug)]
pub(super) struct Follower {
    interface: String,
    /// The address that is followed; `None` for all.
    address: Option<IpAddr>,
    announcements: OwnedFd,
}

impl Follower {
    /// Follows the changes from now on.
    pub(super) fn new(interface: String, address: Option<IpAddr>) -> io::Result<Self> {
        const GROUPS: libc::c_int = libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        let announcements = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkRoute,
        )?;
        bind(
            announcements.as_raw_fd(),
            &NetlinkAddr::new(0, GROUPS as u32),
        )?;
        Ok(Self {
            interface,
            address,
            announcements,
        })
    }

    /// Returns those of the followed addresses that the host has.
    pub(super) fn addresses(&self) -> io::Result<Vec<Scoped>> {
        let mut addresses = ip_addresses(&self.interface)?;
        addresses.retain(|at| self.address.is_none_or(|address| address == at.address));
        Ok(addresses)
    }

    /// Returns the descriptor that is readable when [`has_changed`](Self::has_changed)
    /// returns true.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.announcements.as_fd()
    }

    /// Returns whether addresses of this host have changed since the last call, whichever
    /// interface they belong to.
    pub(super) fn has_changed(&self) -> bool {
        let mut changed = false;
        // The content of the messages is not used, since the addresses are read again. So
        // truncated messages, and those that the socket had no room for, lose nothing.
        let mut start = [0; 16];
        loop {
            match recv(
                self.announcements.as_raw_fd(),
                &mut start,
                MsgFlags::MSG_DONTWAIT,
            ) {
                Ok(_) | Err(nix::Error::ENOBUFS | nix::Error::EINTR) => changed = true,
                Err(_) => return changed,
            }
        }
    }
}
