//! Event channels and ids that a child of fork has, too, as with the kernel's: ids without a
//! connection, with their ports. They belong to the process that uses the channel first
//! ([`Claim`]); another one gets EIO, and what reaches it is left to that process.

use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use super::channel::Channel;
use super::claim::Claim;
use super::id::{Id, LocalPort, Phase};
use super::ids::Ids;
use super::ports::InheritedPort;
use super::{Manager, Shared};
use crate::readiness::Readiness;
use crate::{Result, refuse};

/// An event channel of a parent process.
#[derive(Clone, Debug)]
pub struct InheritedChannel {
    claim: Claim,
    /// Of its readiness.
    descriptors: [RawFd; 2],
    /// Wakes the parent's thread, if there is one.
    wake: Option<RawFd>,
    ids: Vec<InheritedId>,
    /// Number of the parent's last id.
    last: u32,
}

/// An id without a connection.
#[derive(Clone, Debug)]
struct InheritedId {
    number: u32,
    uid: u64,
    space: u16,
    datagram: bool,
    phase: Phase,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    port: Option<InheritedPort>,
    backlog: u32,
    qkey: u32,
    reported: u32,
    family_only: Option<bool>,
    reuses: bool,
    ack_timeout: u8,
    tos: u8,
}

impl InheritedChannel {
    /// Returns the device's descriptors that the child must not close.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let ports = self.ids.iter().filter_map(|id| id.port.as_ref());
        let ports = ports.flat_map(InheritedPort::descriptors);
        self.descriptors.into_iter().chain(self.wake).chain(ports)
    }

    /// Tells the parent process, which may have requests that nobody has read.
    pub(crate) fn wake_parent(&self) {
        if let Some(fd) = self.wake {
            // SAFETY: the caller has left it open.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            // Fails only if the counter is full, which also wakes.
            let _ = nix::unistd::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Returns whether no process has used it since the fork.
    pub fn is_free(&self) -> bool {
        self.claim.is_free()
    }
}

/// Returns whether a child of fork can have an id, too.
fn is_inheritable(id: &Id) -> bool {
    let without_connection = [
        Phase::Idle,
        Phase::Bound,
        Phase::AddressResolved,
        Phase::RouteResolved,
        Phase::Listening,
    ];
    without_connection.contains(&id.phase)
}

impl Ids {
    /// Returns a channel for a child of fork: without ids if it is another process's, which the
    /// child learns when it uses it.
    fn inheritable(&mut self, fd: RawFd, wake: Option<RawFd>) -> Option<InheritedChannel> {
        let channel = self.channels.get_mut(&fd)?;
        let is_lost = channel.is_lost();
        // Children before this one have had their chance if this process has used it since.
        let claim = match channel.claim.take().filter(|it| is_lost || it.is_free()) {
            Some(claim) => claim,
            None => Claim::new().ok()?,
        };
        let inherited = claim.for_child();
        channel.claim = Some(claim);
        let descriptors = channel.descriptors();
        let of_channel = |(_, id): &(&u32, &Id)| !is_lost && id.channel == fd && is_inheritable(id);
        let ids = self.ids.iter().filter(of_channel);
        let ids = ids.map(|(number, id)| InheritedId {
            number: *number,
            uid: id.uid,
            space: id.space,
            datagram: id.datagram,
            phase: id.phase,
            local: id.local,
            peer: id.peer,
            port: (id.bound_port.as_ref())
                .and_then(|port| port.inheritable(id.phase == Phase::Listening)),
            backlog: id.backlog,
            qkey: id.qkey,
            reported: id.reported,
            family_only: id.family_only,
            reuses: id.reuses,
            ack_timeout: id.ack_timeout,
            tos: id.tos,
        });
        Some(InheritedChannel {
            claim: inherited,
            descriptors,
            wake,
            ids: ids.collect(),
            last: self.last,
        })
    }

    /// Makes a channel of the parent process this one's, with its ids. Returns its descriptor.
    fn adopt(&mut self, inherited: &InheritedChannel, port: LocalPort) -> Result<RawFd> {
        if !inherited.claim.take() {
            return refuse(libc::EIO);
        }
        // SAFETY: the caller has left these open.
        let fds = (inherited.descriptors).map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
        let claim = Some(inherited.claim.clone());
        let (fd, channel) = Channel::of(Readiness::inherited(fds)?, port, claim);
        self.channels.insert(fd, channel);
        // The program may still name those of the parent that it cannot have.
        self.last = self.last.max(inherited.last);
        for it in &inherited.ids {
            let psn = self.ports.random.next();
            let mut id = Id::new(fd, port, it.space, it.datagram, psn);
            id.may_be_remote = self.host_addresses.is_some();
            (id.uid, id.local, id.peer) = (it.uid, it.local, it.peer);
            if let Some(local) = it.local {
                id.port = id.port.at(local.ip(), self.host_addresses.as_deref());
            }
            (id.backlog, id.qkey, id.reported) = (it.backlog, it.qkey, it.reported);
            (id.family_only, id.reuses) = (it.family_only, it.reuses);
            (id.ack_timeout, id.tos) = (it.ack_timeout, it.tos);
            id.phase = it.phase;
            if let Some(port) = &it.port {
                let bound_port = self.ports.inherit(port)?;
                if it.phase == Phase::Listening {
                    bound_port.take()?;
                    let key = (id.space, bound_port.port());
                    self.listeners.entry(key).or_default().push(it.number);
                }
                id.bound_port = Some(bound_port);
            }
            self.ids.insert(it.number, id);
        }
        Ok(fd)
    }

    /// Leaves the channels to other processes that these have used first. Returns whether there
    /// are some that no process has used since a fork.
    fn leave_lost(&mut self) -> bool {
        let lost =
            (self.channels.iter()).filter_map(|(fd, channel)| channel.is_lost().then_some(*fd));
        for fd in lost.collect::<Vec<_>>() {
            self.leave_channel(fd);
        }
        let mut claims = self.channels.values().filter_map(|it| it.claim.as_ref());
        claims.any(Claim::is_free)
    }

    /// Leaves the channels that no process has used since a fork, or another one has, since this
    /// process ends: their requests are not rejected.
    pub(super) fn leave_shared(&mut self) {
        let is_shared = |it: &Claim| it.is_free() || it.is_lost();
        let shared = self.channels.iter().filter_map(|(fd, channel)| {
            let claim = channel.claim.as_ref();
            claim.is_some_and(is_shared).then_some(*fd)
        });
        for fd in shared.collect::<Vec<_>>() {
            self.leave_channel(fd);
        }
    }

    /// Leaves a channel to another process: what the peers of its listening ids send again reaches
    /// that one. Connections go on.
    pub(super) fn leave_channel(&mut self, fd: RawFd) {
        let Some(unread) = self.channels.get_mut(&fd).and_then(Channel::leave) else {
            return;
        };
        for request in unread.iter().filter_map(|event| event.request) {
            self.forget_request(request);
        }
        let left =
            |(number, id): (&u32, &Id)| (id.channel == fd && is_inheritable(id)).then_some(*number);
        for number in self.ids.iter().filter_map(left).collect::<Vec<_>>() {
            let Some(mut id) = self.ids.remove(&number) else {
                continue;
            };
            self.remove_listener(number, &id);
            if let Some(port) = id.bound_port.take() {
                port.leave();
            }
        }
    }

    /// Forgets a request that nobody has read.
    fn forget_request(&mut self, number: u32) {
        if let Some(connection) = self.ids.remove(&number).and_then(|id| id.connection) {
            self.by_connection.remove(&connection);
            self.machine.forget(connection);
        }
    }
}

impl Manager {
    /// Returns a channel for a child of fork; `None` also if another thread holds the lock until
    /// then. `wake` wakes the thread that drives the network.
    pub(crate) fn inheritable(
        &self,
        fd: RawFd,
        wake: Option<RawFd>,
        until: Instant,
    ) -> Option<InheritedChannel> {
        let Shared {
            ids,
            has_shared_channels,
            ..
        } = &*self.shared;
        let mut ids = loop {
            match ids.try_lock() {
                Ok(ids) => break ids,
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::yield_now(),
                Err(_) => return None,
            }
        };
        let inherited = ids.inheritable(fd, wake)?;
        has_shared_channels.store(true, Ordering::Relaxed);
        Some(inherited)
    }

    /// Makes a channel of the parent process this one's, with ids of a port. Returns its
    /// descriptor.
    ///
    /// # Errors
    /// EIO: another process has used it first. EMFILE; errors of the directory.
    pub(crate) fn adopt(&self, inherited: &InheritedChannel, port: LocalPort) -> Result<RawFd> {
        self.shared.with(|ids| ids.adopt(inherited, port))
    }

    /// Leaves the channels to other processes that these have used first.
    pub(super) fn leave_lost(&self) {
        if self.shared.has_shared_channels.load(Ordering::Relaxed) {
            // In the lock: a fork may add one.
            self.shared.with(|ids| {
                let undecided = ids.leave_lost();
                let flag = &self.shared.has_shared_channels;
                flag.store(undecided, Ordering::Relaxed);
            });
        }
    }
}
