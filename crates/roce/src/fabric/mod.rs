//! An in-memory network of ports that send frames to each other.
//!
//! InfiniBand frames are routed by LID, Ethernet frames by MAC address (a port's
//! own, or one learned from frames that it sent). Multicast goes to all ports, as
//! do unknown MAC addresses; unknown LIDs go to the uplinks. A frame for the
//! sender's own address is returned to the sender; on Ethernet, only if it is RDMA.
//! A port's own address is never learned at another port, and a frame from another
//! fabric that has such an address as its source is discarded. Ports without a link
//! layer have no addresses: two of them, or one and an uplink, are a link. InfiniBand ports
//! reach a [`subnet`] manager here. Faults ([`Faults`]) are drawn from a seeded
//! generator: the same calls in the same order give the same losses.
//!
//! A [`Fabric`] is shared among threads behind a lock; with one thread it is
//! deterministic. Time is nanoseconds from any origin, passed in by the caller.

mod faults;
mod net;
mod port_config;
mod random;
pub mod subnet;
mod tap;
mod trunk;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use faults::{Faults, PortCounters};
pub use port_config::PortConfig;
pub use random::Random;
pub use tap::{Delivery, Tap};
pub use trunk::{DatagramSocket, Trunk};

use crate::packet::{LinkKind, Packet};
use crate::pcap::Capture;
use net::{Net, PendingWakers, PortState};

/// An in-memory network. Cheap to clone; all clones are one network.
#[derive(Clone)]
pub struct Fabric {
    net: Arc<Mutex<Net>>,
}

impl Fabric {
    /// Creates a network without ports. `seed` determines its faults.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            net: Arc::new(Mutex::new(Net::new(seed))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Net> {
        self.net.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a port, with its link up and without faults.
    #[must_use]
    pub fn port(&self, config: PortConfig) -> Port {
        self.add(config, false)
    }

    /// Adds a port that leads to another fabric. It receives frames of all kinds
    /// whose destination is no port here, and multicast. Frames that it sends do
    /// not go to other uplinks.
    #[must_use]
    pub fn uplink(&self) -> Port {
        self.add(PortConfig::ethernet([0; 6]), true)
    }

    fn add(&self, config: PortConfig, uplink: bool) -> Port {
        let state = PortState::new(config, uplink);
        let mut net = self.lock();
        let free = net.ports.iter().position(|p| p.removed);
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

    /// Captures all frames sent from now on, before faults are applied. Replaces an
    /// earlier capture; `None` ends it.
    pub fn capture(&self, capture: Option<Capture>) {
        self.lock().capture = capture;
    }

    /// Sets the tap, which decides about the delivery of each frame. Replaces an earlier
    /// tap.
    pub fn set_tap(&self, tap: Option<Box<dyn Tap>>) {
        self.lock().tap = tap;
    }

    /// Sets the faults of all existing ports.
    pub fn set_faults(&self, faults: Faults) {
        for port in &mut self.lock().ports {
            port.faults = faults;
        }
    }
}

/// A port of the network. Dropping it removes the port.
pub struct Port {
    fabric: Fabric,
    index: usize,
}

impl Port {
    fn with<T>(&self, act: impl FnOnce(&mut PortState) -> T) -> T {
        act(&mut self.fabric.lock().ports[self.index])
    }

    /// Sends a frame. A frame of another link kind is discarded.
    pub fn send(&self, now: u64, packet: Packet) {
        let mut wake = PendingWakers::default();
        let mut net = self.fabric.lock();
        net.send(self.index, now, packet, &mut wake);
        // Wakers run without the lock, since they may access their port.
        drop(net);
        wake.call();
    }

    /// Sends several frames while holding the lock once.
    pub fn send_all(&self, now: u64, packets: impl IntoIterator<Item = Packet>) {
        let mut wake = PendingWakers::default();
        let mut net = self.fabric.lock();
        for packet in packets {
            net.send(self.index, now, packet, &mut wake);
        }
        drop(net);
        wake.call();
    }

    /// Returns the next frame that has arrived by `now`, with its ICRC.
    #[must_use]
    pub fn recv(&self, now: u64) -> Option<Packet> {
        self.with(|port| {
            port.deliver_due(now);
            let mut packet = port.ready.pop_front()?;
            packet.add_icrc();
            port.counters.received += 1;
            port.counters.received_bytes += packet.frame().len() as u64;
            Some(packet)
        })
    }

    /// Moves up to `limit` arrived frames to the end of `into`. They may lack their ICRC
    /// ([`Packet::has_icrc`]).
    pub fn recv_all(&self, now: u64, limit: usize, into: &mut VecDeque<Packet>) {
        self.with(|port| {
            port.deliver_due(now);
            let count = port.ready.len().min(limit);
            for packet in port.ready.drain(..count) {
                port.counters.received += 1;
                port.counters.received_bytes += packet.frame().len() as u64;
                into.push_back(packet);
            }
        });
    }

    /// The time at which the next frame arrives; 0 if one has arrived.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.with(|port| port.deadline())
    }

    /// The number of frames that can be sent before the fullest port drops one.
    #[must_use]
    pub fn room(&self) -> usize {
        let net = self.fabric.lock();
        let room = |p: &PortState| p.config.queue.saturating_sub(p.queued_frames());
        net.ports
            .iter()
            .filter(|p| !p.removed)
            .map(room)
            .min()
            .unwrap_or(0)
    }

    /// Returns the configuration if frames that this port sends to itself arrive immediately
    /// and unchanged, and neither a capture nor a tap observes them.
    #[must_use]
    pub fn direct_loopback(&self) -> Option<PortConfig> {
        let net = self.fabric.lock();
        let port = &net.ports[self.index];
        let observed = net.capture.is_some() || net.tap.is_some();
        let faultless = port.up && port.faults == Faults::default() && !observed;
        faultless.then_some(port.config)
    }

    /// Sets a function that is called, without locks held, by a thread that sent a
    /// frame to this port or changed its link.
    pub fn set_waker(&self, waker: impl Fn() + Send + Sync + 'static) {
        self.with(|port| port.waker = Some(Arc::new(waker)));
    }

    /// The configuration of the port.
    #[must_use]
    pub fn config(&self) -> PortConfig {
        self.with(|port| port.config)
    }

    /// Changes the LID or MAC address of the port. The link kind does not change;
    /// nor does the MAC address if the new one is another port's.
    pub fn configure(&self, config: PortConfig) {
        let mut net = self.fabric.lock();
        let taken = net.port_with_mac(&config.mac).is_some();
        let old = &mut net.ports[self.index].config;
        *old = PortConfig {
            kind: old.kind,
            mac: if taken { old.mac } else { config.mac },
            ..config
        };
    }

    /// Sets the faults that apply to frames sent by this port.
    pub fn set_faults(&self, faults: Faults) {
        self.with(|port| port.faults = faults);
    }

    /// Sets the link up or down. Taking it down discards the frames that wait here
    /// or are on the way here.
    pub fn set_link(&self, up: bool) {
        let waker = self.with(|port| {
            port.up = up;
            if !up {
                port.ready.clear();
                port.in_flight.clear();
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

    /// The counters of the port.
    #[must_use]
    pub fn counters(&self) -> PortCounters {
        self.with(|port| port.counters)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let config = self.with(|port| {
            port.remove();
            port.config
        });
        if config.kind == LinkKind::Ib {
            self.fabric.lock().subnet.remove_port(config.guid);
        }
    }
}
