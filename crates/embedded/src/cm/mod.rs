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
//! Addresses are those of the loopback interface, 127.0.0.0/8 and ::1, or the device's
//! own on a network that reaches other hosts (`gateway`, `mad`). Port spaces belong to
//! the network: to a process, or to all processes of a directory. The two ends of a
//! connection exchange messages (`wire`) through a socket, and find each other by the
//! port (`ports`). There is no thread:
//! messages are processed when a program reads events. A channel is readable
//! when there may be events, since its descriptor is an epoll instance with all
//! sockets of its ids.

mod channel;
mod gateway;
mod id;
mod kernel;
mod mad;
mod ports;
mod query;
mod state;
mod talk;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::addresses::AddressList;
use crate::directory::Directory;
use gateway::Dialer;
#[cfg(any(test, feature = "test-utils"))]
pub(crate) use gateway::hostile_messages;
pub(crate) use gateway::{Gateway, Outgoing};
pub(crate) use mad::{QKEY, QPN};
use ports::{Hosts, Ports};
pub(crate) use ports::{SharedPorts, random};
use state::State;

/// The connection manager of a network in this process.
#[derive(Debug)]
pub(crate) struct Manager(Mutex<State>);

impl Manager {
    /// Creates a manager of addresses on this host, for a process or for all that share
    /// a directory.
    pub(crate) fn new(directory: Option<Arc<Directory>>) -> Self {
        let ports = Arc::new(Ports::new(directory));
        Self(Mutex::new(State::new(ports, None)))
    }

    /// Creates a manager whose addresses, those of the device with this GUID, other
    /// hosts reach, and other processes may share.
    pub(crate) fn of_hosts(
        hosts: Arc<AddressList>,
        guid: u64,
        shared: Option<SharedPorts>,
    ) -> Result<(Self, Gateway)> {
        let dialer = Arc::new(Dialer::new()?);
        let ports = Arc::new(Ports::Hosts(Hosts {
            table: Mutex::default(),
            dialer: Arc::clone(&dialer),
            shared,
        }));
        let gateway = Gateway::new(Arc::clone(&ports), dialer, guid)?;
        Ok((Self(Mutex::new(State::new(ports, Some(hosts)))), gateway))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
