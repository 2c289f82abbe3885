//! Multicast groups of a device on UDP: a socket for each group that queue pairs have joined.
//!
//! The kernel passes a datagram for a group to every socket of the host that has joined it,
//! so processes need not forward such packets. A device does not receive its own: the
//! fabric has delivered them already.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::slice::Chunks;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout};
use roce::packet::{Gid, RecvMeta, ip_of_gid};
use uverbs::Errno;

use super::socket::{self, FIRST_RECV_MESSAGES, ReceiveBuffers};
use super::watch;
use crate::{Result, refuse};

/// Maximum number of groups, each of which takes a descriptor.
const MAX_GROUPS: usize = 256;
/// Maximum number of sockets that a turn reads.
const MAX_READY: usize = 16;

#[derive(Debug)]
struct JoinedGroup {
    address: IpAddr,
    queue_pairs: usize,
    socket: OwnedFd,
}

/// The groups that queue pairs of a device have joined.
///
/// Lock order: this lock is taken last.
#[derive(Debug)]
pub(crate) struct MulticastGroups {
    /// Index of the network interface; 0 lets the kernel choose.
    pub(super) interface: u32,
    groups: Mutex<Vec<JoinedGroup>>,
    /// Number of groups.
    count: AtomicUsize,
    /// The sockets, by descriptor.
    epoll: Epoll,
}

impl MulticastGroups {
    pub(super) fn new(interface: u32) -> std::io::Result<Self> {
        Ok(Self {
            interface,
            groups: Mutex::default(),
            count: AtomicUsize::new(0),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<JoinedGroup>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the descriptor that is readable when [`receive`](Self::receive) has something
    /// to do.
    pub(super) fn descriptor(&self) -> &Epoll {
        &self.epoll
    }

    /// Adds a queue pair to a group.
    ///
    /// # Errors
    /// ENOMEM for too many groups; those of the socket calls.
    pub(crate) fn join(&self, group: &Gid) -> Result<()> {
        let address = ip_of_gid(*group);
        let mut groups = self.lock();
        if let Some(group) = groups.iter_mut().find(|it| it.address == address) {
            group.queue_pairs += 1;
            return Ok(());
        }
        if groups.len() >= MAX_GROUPS {
            return refuse(libc::ENOMEM);
        }
        let socket = socket::open_multicast(address, self.interface)
            .map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EIO)))?;
        watch(&self.epoll, &socket, socket.as_raw_fd() as u64)?;
        groups.push(JoinedGroup {
            address,
            queue_pairs: 1,
            socket,
        });
        self.count.store(groups.len(), Ordering::Release);
        Ok(())
    }

    /// Removes a queue pair from a group.
    pub(crate) fn leave(&self, group: &Gid) {
        let address = ip_of_gid(*group);
        let mut groups = self.lock();
        let Some(index) = groups.iter().position(|it| it.address == address) else {
            return;
        };
        groups[index].queue_pairs -= 1;
        if groups[index].queue_pairs == 0 {
            groups.swap_remove(index);
            self.count.store(groups.len(), Ordering::Release);
        }
    }

    /// Receives messages. Calls `each` with the datagrams of each message, and returns whether
    /// there were any.
    pub(super) fn receive(
        &self,
        buffers: &mut ReceiveBuffers,
        mut each: impl FnMut(RecvMeta, Chunks<'_, u8>),
    ) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let groups = self.lock();
        let mut events = [EpollEvent::empty(); MAX_READY];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO);
        let mut any = false;
        for event in &events[..count.unwrap_or(0).min(MAX_READY)] {
            let is_ready = |it: &&JoinedGroup| it.socket.as_raw_fd() as u64 == event.data();
            let Some(group) = groups.iter().find(is_ready) else {
                continue;
            };
            let socket = group.socket.as_fd();
            let messages = buffers.receive::<FIRST_RECV_MESSAGES>(socket, group.address, &mut each);
            any |= messages != 0;
        }
        any
    }
}
