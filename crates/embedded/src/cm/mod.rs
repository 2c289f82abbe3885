//! Connection manager for the devices of a network. It executes the commands that
//! `crates/rdmacm` passes to the kernel, with the same results.
//!
//! ```text
//! rdmacm::EventChannel ── Kernel ──► ManagerKernel ── commands ──► State ── ids
//!         ▲                                                         │ ▲
//!         └───────────── channel: a signal, and events ◄────────────┘ │
//!                              monitor: an epoll instance ── messages ┘
//! ```
//!
//! Addresses are those of the host's interfaces; on a network that reaches other hosts
//! (`gateway`, `mad`) the device's own, and loopback addresses for itself. Port spaces belong
//! to the network: to a process, or to all processes of a directory. The two ends of a connection
//! find each other by the port (`ports`), and exchange messages (`wire`) through a link
//! (`link`): a socket, or within a process a queue.
//!
//! A thread handles messages and deadlines (`monitor`), so that a channel is readable if and
//! only if it has an event: most messages cause none. The thread starts with the first
//! channel. With [`Drive::Caller`], turns, commands and waits of the caller handle them.

mod channel;
mod gateway;
mod id;
pub(crate) mod kernel;
mod link;
mod mad;
mod monitor;
mod peer;
mod ports;
mod query;
mod state;
#[cfg(test)]
mod tests;
mod wire;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::EpollTimeout;
use uverbs::threads;

use crate::addresses::{AddressList, SharedPorts};
use crate::directory::Directory;
use crate::drive::Drive;
use crate::poll::wait;
use crate::{Result, refuse, scope};
use gateway::Dialer;
pub(crate) use gateway::Gateway;
#[cfg(any(test, feature = "test-utils"))]
pub(crate) use gateway::hostile_messages;
pub use id::ConnectionId;
pub(crate) use id::Port;
use monitor::Monitor;
use ports::{HostPorts, Ports};
use state::State;

/// Maximum number of rounds over the ready sockets in a caller's turn.
const MAX_ROUNDS: usize = 64;
/// Pause after accepting a connection has failed for lack of descriptors, since the listener
/// stays ready.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// The connection manager of a network in this process. Dropping it ends its thread.
#[derive(Debug)]
pub(crate) struct Manager {
    shared: Arc<Shared>,
    drive: Drive,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    monitor: Arc<Monitor>,
    stop: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Manager {
    /// Creates a manager for addresses of this host, within a process or among the processes
    /// of a directory.
    pub(crate) fn new(drive: Drive, directory: Option<Arc<Directory>>) -> Result<Self> {
        Ok(Self::of(drive, Arc::new(Ports::new(directory)), None))
    }

    /// Creates a manager for a device that other hosts can reach, with the device's addresses
    /// and GUID; `shared` is set if other processes may share the addresses.
    pub(crate) fn of_hosts(
        drive: Drive,
        host_addresses: Arc<AddressList>,
        guid: u64,
        shared: Option<SharedPorts>,
    ) -> Result<(Self, Gateway)> {
        let dialer = Arc::new(Dialer::new()?);
        let ports = Arc::new(Ports::Hosts(HostPorts {
            table: Mutex::default(),
            dialer: Arc::clone(&dialer),
            shared,
        }));
        let gateway = Gateway::new(Arc::clone(&ports), dialer, guid)?;
        Ok((Self::of(drive, ports, Some(host_addresses)), gateway))
    }

    fn of(drive: Drive, ports: Arc<Ports>, host_addresses: Option<Arc<AddressList>>) -> Self {
        let monitor = Arc::<Monitor>::default();
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(ports, host_addresses, Arc::clone(&monitor))),
            monitor,
            stop: AtomicBool::new(false),
        });
        Self {
            shared,
            drive,
            thread: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }

    /// Returns the ids that have the device with a node GUID, by number.
    pub(crate) fn ids_on(&self, guid: u64) -> Vec<ConnectionId> {
        let state = self.lock();
        let of_device = |(_, id): &(&u32, &id::Id)| id.port.node_guid == guid && id.is_on_device();
        let ids = state.ids.iter().filter(of_device);
        ids.map(|(number, id)| id.described(*number)).collect()
    }

    /// Opens the monitor and starts the thread, if that was not done before. Called when a
    /// channel is opened.
    fn start(&self) -> Result<()> {
        self.shared.monitor.open()?;
        let mut thread = lock(&self.thread);
        if self.drive != Drive::Caller && thread.is_none() {
            let shared = Arc::clone(&self.shared);
            match threads::spawn("ringverbs-cm", move || shared.run()) {
                Ok(started) => *thread = Some(started),
                Err(error) => return refuse(error.raw_os_error().unwrap_or(libc::EAGAIN)),
            }
        }
        Ok(())
    }

    /// Handles ready descriptors, unless a thread does. Returns whether there were any.
    pub(crate) fn drive(&self) -> bool {
        if self.drive != Drive::Caller || self.lock().channels.is_empty() {
            return false;
        }
        let handled = |_: &usize| self.shared.handle(EpollTimeout::ZERO);
        (0..MAX_ROUNDS).take_while(handled).count() != 0
    }

    /// Waits until a channel is readable, or the time is up. Returns whether the channel is
    /// readable.
    fn wait(&self, channel: BorrowedFd<'_>, timeout: PollTimeout) -> Result<bool> {
        if self.drive != Drive::Caller {
            return wait(channel, timeout);
        }
        // Without a limit `duration` panics (nix 0.31).
        let limit = (timeout.is_some()).then(|| timeout.duration()).flatten();
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            self.drive();
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let timeout = left.map_or(Ok(PollTimeout::NONE), |left| {
                PollTimeout::try_from(left.as_micros().div_ceil(1000))
            });
            let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut fds = [readable(channel), readable(self.shared.monitor.readable()?)];
            if let Err(errno) = poll(&mut fds, timeout.unwrap_or(PollTimeout::MAX)) {
                return refuse(errno as i32);
            }
            let ready = fds[0].any() == Some(true);
            if ready || left == Some(Duration::ZERO) {
                return Ok(ready);
            }
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = lock(&self.thread).take() {
            // The thread checks `stop` after the timer has woken it.
            self.shared.monitor.set_timer(Some(Instant::now()));
            // Fails only if the thread panicked.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The thread's main loop.
    fn run(&self) {
        scope::init_thread();
        while !self.stop.load(Ordering::SeqCst) {
            self.handle(EpollTimeout::NONE);
        }
    }

    /// Handles ready descriptors, waiting for at most `timeout`. Returns whether there were
    /// any.
    fn handle(&self, timeout: EpollTimeout) -> bool {
        let ready = self.monitor.ready(timeout);
        let mut result = Ok(());
        {
            let mut state = lock(&self.state);
            for item in &ready {
                result = result.and(state.handle(*item));
            }
        }
        if let Err(errno) = result {
            tracing::debug!(%errno, "accepting a connection failed");
            thread::sleep(ACCEPT_RETRY_INTERVAL);
        }
        !ready.is_empty()
    }
}
