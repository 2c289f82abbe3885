//! A connection manager for the devices of a network: what `crates/rdmacm` asks
//! of the kernel's, by the same commands and with the same answers.
//!
//! ```text
//! rdmacm::EventChannel ── Kernel ──► ManagerKernel ── commands ──► State ── ids
//!                                                                   │  ▲
//!                      channel: an epoll instance ◄── sockets ──────┘  │
//!                                                        └─ messages ──┘
//! ```
//!
//! The addresses are those of the machine itself, 127.0.0.0/8 and ::1, and the
//! port spaces are the network's: of a process, or of all who meet in a
//! directory. Two ends have a socket between them for their messages
//! (`wire`), found by the port (`ports`). There is no thread: messages are read
//! when a program reads events, and a channel is readable when there may be
//! some, since its descriptor is an epoll instance with all of its ids' sockets.

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

/// The connection manager of a network, in this process.
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
    /// The connection manager of its network, for
    /// `rdmacm::EventChannel::open_on`: the ids of that channel are on this
    /// device. Addresses are 127.0.0.0/8 and ::1; ports are the network's, which
    /// is a process's or that of all processes of a directory.
    ///
    /// It does what rdma_cm does with the same commands but for `AF_IB`
    /// addresses and `RDMA_OPTION_IB_PATH`, and gives no ADDR_CHANGE,
    /// DEVICE_REMOVAL or TIMEWAIT_EXIT. A peer whose process has ended is
    /// DISCONNECTED, or REJECTED while it has not accepted.
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
