//! The connection manager of a device.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use nix::poll::PollTimeout;
use uverbs::kernel::Kernel;

use crate::Result;
use crate::cm::kernel::{ManagerKernel, ManagerOwner};
use crate::cm::{InheritedChannel, LocalPort, Manager};
use crate::poll::wait;
use crate::runtime::embedded::Embedded;
use crate::runtime::time::{self, Limit};
use crate::wires::wire::sleep_until_readable;

impl ManagerOwner for Embedded {
    fn manager(&self) -> &Manager {
        self.runner.manager()
    }

    fn turn(&self) {
        if !self.runner.has_thread() {
            self.runner.turn();
        }
    }

    fn wake(&self) {
        if !self.runner.has_thread() {
            if self.runner.time().is_some() {
                // Tasks and threads that wait find something to do.
                self.runner.wake_thread();
            }
            self.runner.turn();
        } else {
            self.runner.send_management();
        }
    }

    fn wait(&self, channel: BorrowedFd<'_>, timeout: PollTimeout) -> Result<bool> {
        if self.runner.has_thread() {
            return wait(channel, timeout);
        }
        // Without a limit `duration` panics (nix 0.31).
        let limit = (timeout.is_some()).then(|| timeout.duration()).flatten();
        if let Some(time) = self.runner.time() {
            let limit = limit.and_then(|limit| Limit::new(&self.runner, limit));
            loop {
                let is_over = limit.as_ref().is_some_and(Limit::is_over);
                if wait(channel, PollTimeout::ZERO)? {
                    return Ok(true);
                }
                if is_over {
                    return Ok(false);
                }
                time::idle(&self.runner, time);
            }
        }
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut result = Ok(false);
        let mut sleep = |others: &[BorrowedFd<'_>], due: Option<Duration>| {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let limit = [left, due].into_iter().flatten().min();
            match *others {
                [other] => sleep_until_readable([channel, other], limit),
                _ => sleep_until_readable([channel], limit),
            }
            result = wait(channel, PollTimeout::ZERO);
            result.as_ref().map_or(true, |ready| *ready) || left == Some(Duration::ZERO)
        };
        self.runner.wait_for(&mut sleep);
        result
    }
}

impl Embedded {
    /// Returns the connection manager of its network, for
    /// `rdmacm::EventChannel::open_on`: the ids of that channel belong to this
    /// device. Addresses are those of the host's interfaces; on a network that reaches other
    /// hosts the device's own, and loopback addresses for itself. Port spaces belong to the
    /// network, which is that of a process or of all processes of a directory.
    ///
    /// A channel is readable if and only if it has an event. Messages of other processes and
    /// hosts become events on the network's thread; with
    /// [`Drive::Caller`](crate::Drive::Caller), in [`drive`](Self::drive), commands, and waits
    /// for events.
    ///
    /// It behaves as rdma_cm does for the same commands, except that it does
    /// not support `AF_IB` addresses and `RDMA_OPTION_IB_PATH`, and does not
    /// report ADDR_CHANGE and DEVICE_REMOVAL. If the peer's
    /// process ends, the event is DISCONNECTED, or REJECTED before the peer has
    /// accepted.
    pub fn connection_manager(&self) -> Box<dyn Kernel> {
        Box::new(ManagerKernel::new(self.clone(), self.local_port()))
    }

    /// Returns a channel of the connection manager, by its descriptor, for a child of fork, which
    /// can have it in the place of this process: ids without a connection. `None` also if the
    /// manager is busy for too long.
    pub fn inheritable_channel(&self, fd: RawFd, until: Instant) -> Option<InheritedChannel> {
        let wake = self.runner.wake_descriptor();
        self.runner.manager().inheritable(fd, wake, until)
    }

    /// Makes a channel of the parent process this one's, unless another process has used it
    /// since the fork. Returns the connection manager and the channel's descriptor, which events
    /// make readable together with that of the parent.
    ///
    /// # Errors
    /// EIO: another process has used it first. EMFILE; errors of the directory.
    pub fn adopt_channel(&self, inherited: &InheritedChannel) -> Result<(Box<dyn Kernel>, RawFd)> {
        let manager = self.connection_manager();
        let fd = self.runner.manager().adopt(inherited, self.local_port())?;
        inherited.wake_parent();
        Ok((manager, fd))
    }

    fn local_port(&self) -> LocalPort {
        let state = self.device.lock();
        let settings = state.hca.settings();
        let own = state.own_gids();
        LocalPort {
            ethernet: state.is_ethernet(),
            gid: state.gid(),
            lid: settings.lid,
            node_guid: state.node_guid,
            // After the GID of RoCE v1, if there is one.
            gid_index: own.map_or(0, |own| own.link_local.1),
            own,
            mtu: state.mtu(),
            node: self.device.number() as u16,
        }
    }
}
