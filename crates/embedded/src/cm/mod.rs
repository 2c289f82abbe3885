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

use crate::directory::Directory;
use ports::Ports;
pub(crate) use ports::random;
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
