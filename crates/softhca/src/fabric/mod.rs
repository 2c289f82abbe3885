//! A network in memory: ports that send frames to each other.
//!
//! InfiniBand ports are found by LID, Ethernet ports by MAC address (their own, or
//! learned from what they send); multicast and unknown addresses go to all. A
//! frame for the sender's own address comes back, on Ethernet if it is RDMA. No
//! frame moves an address that is a port's own, and one from another fabric with
//! such an address as its source is discarded. InfiniBand ports find a [`subnet`]
//! manager there. What goes wrong ([`Faults`]) is decided by a generator with a
//! seed: the same calls in the same order give the same losses.
//!
//! A [`Fabric`] is shared among threads behind a lock; with one thread it is
//! deterministic. Time is nanoseconds from any origin, passed in.

mod faults;
mod net;
mod random;
pub mod subnet;
mod trunk;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use faults::{Faults, PortCounters};
pub use trunk::{Trunk, Wire};

use crate::packet::{LinkKind, Mac, Packet};
use crate::pcap::Capture;
use net::{Net, PortState, Woken};

/// Frames that wait at a port at most, unless configured otherwise.
const DEFAULT_QUEUE: usize = 16 * 1024;

type Waker = Arc<dyn Fn() + Send + Sync>;

/// What a port is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortConfig {
    /// The link layer. Ports of different kinds do not see each other.
    pub kind: LinkKind,
    /// The LID (InfiniBand).
    pub lid: u16,
    /// How many low bits of LIDs do not matter (LID mask count).
    pub lmc: u8,
    /// The GUID (InfiniBand), by which the subnet manager knows it.
    pub guid: u64,
    /// The MAC address (Ethernet).
    pub mac: Mac,
    /// How many frames wait here before more are dropped.
    pub queue: usize,
}

impl PortConfig {
    /// An InfiniBand port, with the GUID of its LID ([`subnet::guid`]).
    #[must_use]
    pub fn ib(lid: u16) -> Self {
        Self {
            kind: LinkKind::Ib,
            lid,
            lmc: 0,
            guid: subnet::guid(lid),
            mac: [0; 6],
            queue: DEFAULT_QUEUE,
        }
    }

    /// An Ethernet port.
    #[must_use]
    pub fn ethernet(mac: Mac) -> Self {
        Self {
            kind: LinkKind::Ethernet,
            lid: 0,
            lmc: 0,
            guid: 0,
            mac,
            queue: DEFAULT_QUEUE,
        }
    }
}

/// The network. Cheap to clone; all clones are one network.
#[derive(Clone)]
pub struct Fabric {
    net: Arc<Mutex<Net>>,
}

impl Fabric {
    /// An empty network whose faults come from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            net: Arc::new(Mutex::new(Net::new(seed))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Net> {
        self.net.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new port, up and without faults.
    #[must_use]
    pub fn port(&self, config: PortConfig) -> Port {
        self.add(config, false)
    }

    /// A port that leads elsewhere: it gets frames of both kinds that are for nobody
    /// here, and multicast. What it sends does not go to other such ports.
    #[must_use]
    pub fn uplink(&self) -> Port {
        self.add(PortConfig::ethernet([0; 6]), true)
    }

    fn add(&self, config: PortConfig, uplink: bool) -> Port {
        let state = PortState::new(config, uplink);
        let mut net = self.lock();
        let free = net.ports.iter().position(|p| p.gone);
        let index = match free {
            Some(index) => {
                net.ports[index] = state;
                index
            }
            None => {
                net.ports.push(state);
                net.ports.len() - 1
            }
        };
        Port {
            fabric: self.clone(),
            index,
        }
    }

    /// Writes all frames that are sent from now on, before anything happens to
    /// them. Replaces an earlier capture; none ends it.
    pub fn capture(&self, capture: Option<Capture>) {
        self.lock().capture = capture;
    }

    /// The faults of all ports that there are.
    pub fn set_faults(&self, faults: Faults) {
        for port in &mut self.lock().ports {
            port.faults = faults;
        }
    }
}

/// A place in the network. Dropping it takes it out.
pub struct Port {
    fabric: Fabric,
    index: usize,
}

impl Port {
    fn with<T>(&self, act: impl FnOnce(&mut PortState) -> T) -> T {
        act(&mut self.fabric.lock().ports[self.index])
    }

    /// Sends a frame. A frame for the other kind of link is discarded.
    pub fn send(&self, now: u64, packet: Packet) {
        let mut wake = Woken::default();
        let mut net = self.fabric.lock();
        net.send(self.index, now, packet, &mut wake);
        // Wakers run without the lock: they may look at their port.
        drop(net);
        wake.call();
    }

    /// Sends several frames, under one lock.
    pub fn send_all(&self, now: u64, packets: impl IntoIterator<Item = Packet>) {
        let mut wake = Woken::default();
        let mut net = self.fabric.lock();
        for packet in packets {
            net.send(self.index, now, packet, &mut wake);
        }
        drop(net);
        wake.call();
    }

    /// The next frame that has arrived by `now`.
    #[must_use]
    pub fn recv(&self, now: u64) -> Option<Packet> {
        self.with(|port| {
            port.arrive(now);
            let packet = port.ready.pop_front()?;
            port.counters.received += 1;
            port.counters.received_bytes += packet.frame().len() as u64;
            Some(packet)
        })
    }

    /// Moves up to `limit` frames that have arrived to the end of `into`.
    pub fn recv_all(&self, now: u64, limit: usize, into: &mut VecDeque<Packet>) {
        self.with(|port| {
            port.arrive(now);
            let count = port.ready.len().min(limit);
            for packet in port.ready.drain(..count) {
                port.counters.received += 1;
                port.counters.received_bytes += packet.frame().len() as u64;
                into.push_back(packet);
            }
        });
    }

    /// When the next frame arrives; one that has arrived is due at 0.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.with(|port| port.deadline())
    }

    /// How many frames can be sent before some port has no place for them.
    #[must_use]
    pub fn room(&self) -> usize {
        let net = self.fabric.lock();
        let room = |p: &PortState| p.config.queue.saturating_sub(p.waiting());
        net.ports
            .iter()
            .filter(|p| !p.gone)
            .map(room)
            .min()
            .unwrap_or(0)
    }

    /// Called, without locks held, whenever a frame was sent to this port: by the
    /// thread that sends.
    pub fn set_waker(&self, waker: impl Fn() + Send + Sync + 'static) {
        self.with(|port| port.waker = Some(Arc::new(waker)));
    }

    /// What is known about the port.
    #[must_use]
    pub fn config(&self) -> PortConfig {
        self.with(|port| port.config)
    }

    /// Gives the port another LID or MAC address. Its kind stays, and so does its
    /// MAC address if the new one is another port's.
    pub fn configure(&self, config: PortConfig) {
        let mut net = self.fabric.lock();
        let taken = net.owner_of(&config.mac).is_some();
        let old = &mut net.ports[self.index].config;
        *old = PortConfig {
            kind: old.kind,
            mac: if taken { old.mac } else { config.mac },
            ..config
        };
    }

    /// What happens to the frames that this port sends.
    pub fn set_faults(&self, faults: Faults) {
        self.with(|port| port.faults = faults);
    }

    /// Plugs the cable in, or pulls it: what is on its way here is lost.
    pub fn set_link(&self, up: bool) {
        let waker = self.with(|port| {
            port.up = up;
            if !up {
                port.ready.clear();
                port.coming.clear();
            }
            port.waker.clone()
        });
        if let Some(waker) = waker {
            waker();
        }
    }

    /// Whether the link is up.
    #[must_use]
    pub fn link(&self) -> bool {
        self.with(|port| port.up)
    }

    /// What the port has seen.
    #[must_use]
    pub fn counters(&self) -> PortCounters {
        self.with(|port| port.counters)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let config = self.with(|port| {
            port.leave();
            port.config
        });
        if config.kind == LinkKind::Ib {
            self.fabric.lock().subnet.forget(config.guid);
        }
    }
}
