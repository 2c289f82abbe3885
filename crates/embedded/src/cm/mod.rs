//! Connection manager for the devices of a network. It executes the commands
//! that `crates/rdmacm` gives to the kernel, with the same answers.
//!
//! ```text
//! rdmacm::EventChannel ── Kernel ──► ManagerKernel ── commands ──► State ── ids
//!                                                                   │  ▲
//!                      channel: an epoll instance ◄── sockets ──────┘  │
//!                                                        └─ messages ──┘
//! ```
//!
//! Addresses are those of the loopback interface, 127.0.0.0/8 and ::1. Port
//! spaces belong to the network: to a process, or to all processes of a
//! directory. The two ends of a connection exchange messages (`wire`) through a
//! socket, and find each other by the port (`ports`). There is no thread:
//! messages are processed when a program reads events. A channel is readable
//! when there may be events, since its descriptor is an epoll instance with all
//! sockets of its ids.

mod channel;
mod id;
mod kernel;
mod ports;
mod query;
mod state;
mod talk;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uverbs::kernel::Kernel;

use crate::directory::Directory;
use crate::network::Embedded;
use id::Port;
use kernel::ManagerKernel;
use ports::Ports;
use state::State;

/// The connection manager of a network in this process.
#[derive(Debug)]
pub(crate) struct Manager(Mutex<State>);

impl Manager {
    pub(crate) fn new(directory: Option<Arc<Directory>>) -> Self {
        Self(Mutex::new(State::new(Ports::new(directory))))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Embedded {
    /// Returns the connection manager of its network, for
    /// `rdmacm::EventChannel::open_on`: the ids of that channel belong to this
    /// device. Addresses are 127.0.0.0/8 and ::1; port spaces belong to the
    /// network, which is that of a process or of all processes of a directory.
    ///
    /// It behaves as rdma_cm does for the same commands, except that it does
    /// not support `AF_IB` addresses and `RDMA_OPTION_IB_PATH`, and does not
    /// report ADDR_CHANGE, DEVICE_REMOVAL and TIMEWAIT_EXIT. If the peer's
    /// process ends, the event is DISCONNECTED, or REJECTED before the peer has
    /// accepted.
    pub fn connection_manager(&self) -> Box<dyn Kernel> {
        let state = self.device.lock();
        let settings = state.hca.settings();
        let port = Port {
            ethernet: state.is_ethernet(),
            gid: state.gid(),
            lid: settings.lid,
            guid: settings.guid,
        };
        drop(state);
        Box::new(ManagerKernel::new(self.clone(), port))
    }
}
