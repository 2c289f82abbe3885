//! A network in memory: ports that send frames to each other.
//!
//! InfiniBand ports are found by LID, Ethernet ports by MAC address (registered,
//! or learned from what they send); multicast and unknown addresses go to all. A
//! frame for the sender's own address comes back. What goes wrong ([`Faults`]) is
//! decided by a generator with a seed: the same calls in the same order give the
//! same losses.
//!
//! A [`Fabric`] is shared among threads behind a lock; with one thread it is
//! deterministic. Time is nanoseconds from any origin, passed in.

mod faults;
mod random;
mod trunk;

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use faults::{Faults, PortCounters};
pub use trunk::{Trunk, Wire};

use crate::packet::{LinkKind, Mac, Network, Packet};
use crate::pcap::Capture;
use random::Random;

/// Frames that wait at a port at most, unless configured otherwise.
const DEFAULT_QUEUE: usize = 16 * 1024;
/// How many MAC addresses are learned for a port.
const LIMIT_LEARNED: usize = 64;
/// LIDs from here on are multicast.
const MULTICAST_LID: u16 = 0xc000;
const DEFAULT_REORDER_DELAY: u64 = 50_000;

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
    /// The MAC address (Ethernet).
    pub mac: Mac,
    /// How many frames wait here before more are dropped.
    pub queue: usize,
}

impl PortConfig {
    /// An InfiniBand port.
    #[must_use]
    pub fn ib(lid: u16) -> Self {
        Self {
            kind: LinkKind::Ib,
            lid,
            lmc: 0,
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
            mac,
            queue: DEFAULT_QUEUE,
        }
    }
}

/// A frame on its way.
struct InFlight {
    due: u64,
    order: u64,
    packet: Packet,
}

impl PartialEq for InFlight {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for InFlight {}

impl PartialOrd for InFlight {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for InFlight {
    /// The one that is due first is the greatest, as the heap gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.order).cmp(&(self.due, self.order))
    }
}

struct PortState {
    config: PortConfig,
    /// Leads to another fabric: takes frames of both kinds that are for nobody here.
    uplink: bool,
    faults: Faults,
    up: bool,
    gone: bool,
    learned: Vec<Mac>,
    /// Arrived.
    ready: VecDeque<Packet>,
    /// On the way here.
    coming: BinaryHeap<InFlight>,
    /// When the last frame in order is due.
    last_due: u64,
    waker: Option<Waker>,
    counters: PortCounters,
}

impl PortState {
    fn has(&self, mac: &Mac) -> bool {
        self.config.mac == *mac || self.learned.contains(mac)
    }

    fn waiting(&self) -> usize {
        self.ready.len() + self.coming.len()
    }

    fn arrive(&mut self, now: u64) {
        while self.coming.peek().is_some_and(|f| f.due <= now) {
            if let Some(frame) = self.coming.pop() {
                self.ready.push_back(frame.packet);
            }
        }
    }
}

struct Net {
    ports: Vec<PortState>,
    random: Random,
    order: u64,
    capture: Option<Capture>,
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
        let net = Net {
            ports: Vec::new(),
            random: Random::new(seed),
            order: 0,
            capture: None,
        };
        Self {
            net: Arc::new(Mutex::new(net)),
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
        let state = PortState {
            config,
            uplink,
            faults: Faults::default(),
            up: true,
            gone: false,
            learned: Vec::new(),
            ready: VecDeque::new(),
            coming: BinaryHeap::new(),
            last_due: 0,
            waker: None,
            counters: PortCounters::default(),
        };
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
        self.with(|port| match port.ready.is_empty() {
            false => Some(0),
            true => port.coming.peek().map(|f| f.due),
        })
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

    /// Gives the port another LID or MAC address. Its kind stays.
    pub fn configure(&self, config: PortConfig) {
        self.with(|port| {
            port.config = PortConfig {
                kind: port.config.kind,
                ..config
            }
        });
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
        self.with(|port| {
            port.gone = true;
            port.up = false;
            port.ready.clear();
            port.coming.clear();
            port.waker = None;
        });
    }
}

/// Who is to be woken.
#[derive(Default)]
struct Woken(Vec<Waker>);

impl Woken {
    fn add(&mut self, port: &PortState) {
        if let Some(waker) = &port.waker
            && !self.0.iter().any(|w| Arc::ptr_eq(w, waker))
        {
            self.0.push(waker.clone());
        }
    }

    fn call(self) {
        for waker in self.0 {
            waker();
        }
    }
}

/// Where a frame is to go.
enum Destination {
    One(usize),
    /// All uplinks, and with `here` all ports of this kind, with `own` the sender too.
    All {
        own: bool,
        here: bool,
    },
    Nobody,
}

impl Net {
    fn send(&mut self, from: usize, now: u64, packet: Packet, wake: &mut Woken) {
        let kind = packet.kind();
        let length = packet.frame().len();
        if let Some(capture) = &mut self.capture {
            capture.write(now, &packet);
        }
        let destination = self.route(from, &packet);
        let sender = &mut self.ports[from];
        sender.counters.sent += 1;
        sender.counters.sent_bytes += length as u64;
        let uplink = sender.uplink;
        if !sender.up || (kind != sender.config.kind && !uplink) {
            sender.counters.discarded += 1;
            return;
        }
        match destination {
            Destination::Nobody => self.ports[from].counters.discarded += 1,
            Destination::One(to) => self.transfer(from, to, now, packet, wake),
            Destination::All { own, here } => {
                let mut taken = false;
                for to in 0..self.ports.len() {
                    let port = &self.ports[to];
                    let takes = if port.uplink {
                        !uplink && !port.gone
                    } else {
                        here && port.config.kind == kind && (to != from || own)
                    };
                    if takes {
                        taken = true;
                        self.transfer(from, to, now, packet.clone(), wake);
                    }
                }
                if !taken {
                    self.ports[from].counters.discarded += 1;
                }
            }
        }
    }

    fn route(&mut self, from: usize, packet: &Packet) -> Destination {
        let frame = packet.frame();
        match packet.kind() {
            LinkKind::Ib => {
                let Some(&[a, b]) = frame.get(2..4).and_then(|b| b.first_chunk()) else {
                    return Destination::Nobody;
                };
                let lid = u16::from_be_bytes([a, b]);
                if lid >= MULTICAST_LID {
                    return Destination::All {
                        own: true,
                        here: true,
                    };
                }
                let found = self.ports.iter().position(|p| {
                    let mask = u16::MAX << p.config.lmc.min(7);
                    let lids = p.config.kind == LinkKind::Ib && !p.gone && !p.uplink;
                    lids && p.config.lid & mask == lid & mask
                });
                let elsewhere = Destination::All {
                    own: false,
                    here: false,
                };
                found.map_or(elsewhere, Destination::One)
            }
            LinkKind::Ethernet => {
                let (Some(to), Some(source)) = (
                    frame.first_chunk::<6>(),
                    frame.get(6..).and_then(|f| f.first_chunk::<6>()),
                ) else {
                    return Destination::Nobody;
                };
                self.learn(from, source);
                if to[0] & 1 != 0 {
                    // A multicast group's members may be at the sender, too; other
                    // frames do not come back.
                    let rdma = Network::read(LinkKind::Ethernet, frame).is_ok();
                    return Destination::All {
                        own: rdma,
                        here: true,
                    };
                }
                let found = self
                    .ports
                    .iter()
                    .position(|p| p.config.kind == LinkKind::Ethernet && !p.gone && p.has(to));
                let everybody = Destination::All {
                    own: false,
                    here: true,
                };
                found.map_or(everybody, Destination::One)
            }
        }
    }

    fn learn(&mut self, from: usize, mac: &Mac) {
        if self.ports[from].has(mac) {
            return;
        }
        for port in &mut self.ports {
            port.learned.retain(|m| m != mac);
        }
        let learned = &mut self.ports[from].learned;
        if learned.len() >= LIMIT_LEARNED {
            learned.remove(0);
        }
        learned.push(*mac);
    }

    /// From one port to another, with whatever happens on the way.
    fn transfer(&mut self, from: usize, to: usize, now: u64, mut packet: Packet, wake: &mut Woken) {
        let faults = self.ports[from].faults;
        if faults != Faults::default() {
            if self.random.chance(faults.loss) {
                self.ports[from].counters.lost += 1;
                return;
            }
            if self.random.chance(faults.corrupt) {
                // Past the link header, which a switch would have checked.
                let start = if packet.kind() == LinkKind::Ib { 8 } else { 14 };
                let frame = packet.frame_mut();
                let at =
                    start + self.random.below((frame.len().max(start) - start) as u64) as usize;
                if let Some(byte) = frame.get_mut(at) {
                    *byte ^= 1 << self.random.below(8);
                }
                self.ports[from].counters.corrupted += 1;
            }
            if self.random.chance(faults.duplicate) {
                self.ports[from].counters.duplicated += 1;
                let due = now + faults.delay + self.random.below(faults.jitter + 1);
                self.enqueue(to, now, due, packet.clone(), wake);
            }
            if self.random.chance(faults.reorder) {
                self.ports[from].counters.reordered += 1;
                let held = match faults.reorder_delay {
                    0 => DEFAULT_REORDER_DELAY,
                    delay => delay,
                };
                let due = now + faults.delay + 1 + self.random.below(held);
                self.enqueue(to, now, due, packet, wake);
                return;
            }
        }
        let mut due = now + faults.delay;
        if faults.jitter != 0 {
            due += self.random.below(faults.jitter + 1);
            due = due.max(self.ports[to].last_due);
            self.ports[to].last_due = due;
        }
        self.enqueue(to, now, due, packet, wake);
    }

    fn enqueue(&mut self, to: usize, now: u64, due: u64, packet: Packet, wake: &mut Woken) {
        let order = self.order;
        self.order += 1;
        let port = &mut self.ports[to];
        if !port.up {
            return;
        }
        if port.waiting() >= port.config.queue {
            port.counters.overflow += 1;
            return;
        }
        port.arrive(now);
        if due <= now {
            port.ready.push_back(packet);
        } else {
            port.coming.push(InFlight { due, order, packet });
        }
        wake.add(port);
    }
}
