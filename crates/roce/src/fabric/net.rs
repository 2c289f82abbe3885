//! Routing and delivery of frames, under the lock of the fabric.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use super::faults::{Faults, PortCounters};
use super::port_config::PortConfig;
use super::random::Random;
use super::subnet::{self, Subnet};
use super::tap::{Delivery, Tap};
use crate::packet::{LinkKind, Mac, NetworkHeaders, Packet};
use crate::pcap::Capture;

pub(super) type Waker = Arc<dyn Fn() + Send + Sync>;

/// Limit of MAC addresses learned per port. Beyond it, a port's oldest is replaced;
/// those of other ports are kept.
pub(super) const MAX_LEARNED: usize = 64;
/// The first multicast LID.
const MULTICAST_LID: u16 = 0xc000;
/// Offsets of the LIDs in an InfiniBand frame.
const DLID: usize = 2;
const SLID: usize = 6;
const DEFAULT_REORDER_DELAY: u64 = 50_000;

/// A frame that has not arrived yet.
pub(super) struct InFlight {
    due: u64,
    sequence: u64,
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
    /// Reversed, because `BinaryHeap` pops its greatest element: the earliest due
    /// comes first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.sequence).cmp(&(self.due, self.sequence))
    }
}

pub(super) struct PortState {
    pub(super) config: PortConfig,
    /// Leads to another fabric: receives frames of all kinds whose destination is
    /// no port here.
    pub(super) uplink: bool,
    pub(super) faults: Faults,
    pub(super) up: bool,
    pub(super) removed: bool,
    pub(super) learned: Vec<Mac>,
    /// Frames that have arrived.
    pub(super) ready: VecDeque<Packet>,
    /// Frames that have not arrived yet.
    pub(super) in_flight: BinaryHeap<InFlight>,
    /// When the last frame sent in order is due.
    pub(super) last_due: u64,
    pub(super) waker: Option<Waker>,
    pub(super) counters: PortCounters,
}

impl PortState {
    pub(super) fn new(config: PortConfig, uplink: bool) -> Self {
        Self {
            config,
            uplink,
            faults: Faults::default(),
            up: true,
            removed: false,
            learned: Vec::new(),
            ready: VecDeque::new(),
            in_flight: BinaryHeap::new(),
            last_due: 0,
            waker: None,
            counters: PortCounters::default(),
        }
    }

    /// Removes the port from the network; nothing arrives here any more.
    pub(super) fn remove(&mut self) {
        self.removed = true;
        self.up = false;
        self.ready.clear();
        self.in_flight.clear();
        self.waker = None;
    }

    /// The time at which the next frame arrives; 0 if one has arrived.
    pub(super) fn deadline(&self) -> Option<u64> {
        match self.ready.is_empty() {
            false => Some(0),
            true => self.in_flight.peek().map(|f| f.due),
        }
    }

    pub(super) fn queued_frames(&self) -> usize {
        self.ready.len() + self.in_flight.len()
    }

    pub(super) fn deliver_due(&mut self, now: u64) {
        while self.in_flight.peek().is_some_and(|f| f.due <= now) {
            if let Some(frame) = self.in_flight.pop() {
                self.ready.push_back(frame.packet);
            }
        }
    }
}

pub(super) struct Net {
    pub(super) ports: Vec<PortState>,
    pub(super) random: Random,
    pub(super) sequence: u64,
    pub(super) capture: Option<Capture>,
    pub(super) tap: Option<Box<dyn Tap>>,
    pub(super) subnet: Subnet,
}

impl Net {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            ports: Vec::new(),
            random: Random::new(seed),
            sequence: 0,
            capture: None,
            tap: None,
            subnet: Subnet::new(),
        }
    }
}

/// The wakers to call once the lock is released.
#[derive(Default)]
pub(super) struct PendingWakers(Vec<Waker>);

impl PendingWakers {
    fn add(&mut self, port: &PortState) {
        if let Some(waker) = &port.waker {
            if !self.0.iter().any(|w| Arc::ptr_eq(w, waker)) {
                self.0.push(waker.clone());
            }
        }
    }

    pub(super) fn call(self) {
        for waker in self.0 {
            waker();
        }
    }
}

fn lid_at(frame: &[u8], at: usize) -> Option<u16> {
    let lid = frame.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*lid))
}

/// The source address of an Ethernet frame.
fn source_mac(frame: &[u8]) -> Option<&Mac> {
    frame.get(6..)?.first_chunk()
}

/// The destination of a frame.
enum Destination {
    Port(usize),
    /// All uplinks; with `local` also all ports of the frame's kind, except the
    /// sender without `loopback`.
    Flood {
        loopback: bool,
        local: bool,
    },
    SubnetManager,
    /// The frame is discarded.
    None,
}

impl Net {
    pub(super) fn send(
        &mut self,
        from: usize,
        now: u64,
        mut packet: Packet,
        wake: &mut PendingWakers,
    ) {
        let kind = packet.kind();
        let faults = self.ports[from].faults != Faults::default();
        if faults || self.capture.is_some() || self.tap.is_some() {
            packet.add_icrc();
        }
        let length = packet.frame().len();
        if let Some(capture) = &mut self.capture {
            capture.write(now, &packet);
        }
        let sender = &mut self.ports[from];
        sender.counters.sent += 1;
        sender.counters.sent_bytes += length as u64;
        let (up, uplink) = (sender.up, sender.uplink);
        let wrong_kind = !sender.config.carries(kind) && !uplink;
        if !up || wrong_kind || (uplink && self.has_local_source(&packet)) {
            self.ports[from].counters.discarded += 1;
            return;
        }
        match self.route(from, &packet) {
            Destination::None => self.ports[from].counters.discarded += 1,
            Destination::Port(to) => self.transfer(from, to, now, packet, wake),
            Destination::SubnetManager => self.send_to_subnet_manager(from, now, packet, wake),
            Destination::Flood { loopback, local } => {
                let mut delivered = false;
                for to in 0..self.ports.len() {
                    let port = &self.ports[to];
                    let receives = if port.uplink {
                        !uplink && !port.removed
                    } else {
                        local && port.config.kind == kind && (to != from || loopback)
                    };
                    if receives {
                        delivered = true;
                        self.transfer(from, to, now, packet.clone(), wake);
                    }
                }
                if !delivered {
                    self.ports[from].counters.discarded += 1;
                }
            }
        }
    }

    fn route(&mut self, from: usize, packet: &Packet) -> Destination {
        let frame = packet.frame();
        match packet.kind() {
            LinkKind::Ib => {
                let Some(lid) = lid_at(frame, DLID) else {
                    return Destination::None;
                };
                if lid >= MULTICAST_LID {
                    return Destination::Flood {
                        loopback: true,
                        local: true,
                    };
                }
                if lid == subnet::LID {
                    // Each fabric has its own subnet manager, so requests do not
                    // cross an uplink.
                    return match self.ports[from].uplink {
                        true => Destination::None,
                        false => Destination::SubnetManager,
                    };
                }
                let found = self.port_with_lid(lid);
                let uplinks = Destination::Flood {
                    loopback: false,
                    local: false,
                };
                found.map_or(uplinks, Destination::Port)
            }
            LinkKind::Ethernet => {
                let (Some(to), Some(source)) = (frame.first_chunk::<6>(), source_mac(frame)) else {
                    return Destination::None;
                };
                if self.is_end_of_link(from) {
                    return self.other_end(from);
                }
                self.learn(from, source);
                // An RDMA frame may be for another queue pair of the sender, or for
                // a member of a multicast group there; other frames do not come
                // back.
                let rdma = || NetworkHeaders::read(LinkKind::Ethernet, frame).is_ok();
                if to[0] & 1 != 0 {
                    return Destination::Flood {
                        loopback: rdma(),
                        local: true,
                    };
                }
                let found = self.port_with_mac(to).or_else(|| self.learned_at(to));
                let flood = Destination::Flood {
                    loopback: false,
                    local: true,
                };
                match found {
                    Some(to) if to == from && !rdma() => Destination::None,
                    Some(to) => Destination::Port(to),
                    None => flood,
                }
            }
            LinkKind::Ip => self.route_ip(from, frame),
        }
    }

    /// Ports without a link layer have no addresses: each is one end of a link to another
    /// such port, or to an uplink.
    fn route_ip(&self, from: usize, frame: &[u8]) -> Destination {
        let multicast = match frame.first().map(|byte| byte >> 4) {
            Some(4) => frame.get(16).is_some_and(|byte| byte >> 4 == 0xe),
            _ => frame.get(24) == Some(&0xff),
        };
        if multicast {
            return Destination::Flood {
                loopback: true,
                local: true,
            };
        }
        self.other_end(from)
    }

    /// Returns whether Ethernet frames of a port are those of a link without a link layer: it
    /// is such a port, or leads to no others.
    fn is_end_of_link(&self, from: usize) -> bool {
        let has = |kind| {
            let mut local = self.ports.iter().filter(|p| !p.uplink && !p.removed);
            local.any(|p| p.config.kind == kind)
        };
        match self.ports[from].uplink {
            true => has(LinkKind::Ip) && !has(LinkKind::Ethernet),
            false => self.ports[from].config.kind == LinkKind::Ip,
        }
    }

    /// Returns the other end of a port's link.
    fn other_end(&self, from: usize) -> Destination {
        let is_end = |(at, port): &(usize, &PortState)| {
            let kind = port.config.kind == LinkKind::Ip || port.uplink;
            let crosses = port.uplink && self.ports[from].uplink;
            *at != from && !port.removed && kind && !crosses
        };
        let other = self.ports.iter().enumerate().find(is_end);
        other.map_or(Destination::None, |(at, _)| Destination::Port(at))
    }

    /// The Ethernet port that has this address as its own.
    pub(super) fn port_with_mac(&self, mac: &Mac) -> Option<usize> {
        self.ports.iter().position(|p| {
            let macs = p.config.kind == LinkKind::Ethernet && !p.removed && !p.uplink;
            macs && p.config.mac == *mac
        })
    }

    /// The port at which this address was learned.
    fn learned_at(&self, mac: &Mac) -> Option<usize> {
        let mut ports = self.ports.iter();
        ports.position(|p| !p.removed && p.learned.contains(mac))
    }

    /// Whether the source of a frame is an address of this fabric. Such a frame
    /// from an uplink is forged.
    fn has_local_source(&self, packet: &Packet) -> bool {
        let frame = packet.frame();
        match packet.kind() {
            LinkKind::Ib => lid_at(frame, SLID)
                .is_some_and(|lid| lid == subnet::LID || self.port_with_lid(lid).is_some()),
            LinkKind::Ethernet => {
                source_mac(frame).is_some_and(|mac| self.port_with_mac(mac).is_some())
            }
            LinkKind::Ip => false,
        }
    }

    /// The InfiniBand port that has this LID.
    fn port_with_lid(&self, lid: u16) -> Option<usize> {
        self.ports.iter().position(|p| {
            let lids = p.config.kind == LinkKind::Ib && !p.removed && !p.uplink;
            lids && p.config.has_lid(lid)
        })
    }

    /// Passes a frame to the subnet manager, which responds immediately. The response
    /// is due after twice the delay of the sender's link; it is never lost.
    fn send_to_subnet_manager(
        &mut self,
        from: usize,
        now: u64,
        mut packet: Packet,
        wake: &mut PendingWakers,
    ) {
        // A port can only send requests for itself: the source LID must be its own.
        let requester = lid_at(packet.frame(), SLID).and_then(|lid| self.port_with_lid(lid));
        if requester != Some(from) {
            self.ports[from].counters.discarded += 1;
            return;
        }
        if self.apply_loss_and_corruption(from, &mut packet) {
            return;
        }
        let ports = self.ports.iter().filter(|p| !p.removed);
        let ports = subnet::Ports {
            has_remote: ports.clone().any(|p| p.uplink),
            local: ports
                .filter(|p| p.config.kind == LinkKind::Ib && !p.uplink)
                .map(|p| (p.config.guid, p.config.lid))
                .collect(),
        };
        let due = now + 2 * self.ports[from].faults.delay;
        for response in self.subnet.receive(&packet, &ports) {
            if let Some(capture) = &mut self.capture {
                capture.write(now, &response);
            }
            if let Destination::Port(to) = self.route(from, &response) {
                self.enqueue(to, now, due, response, wake);
            }
        }
    }

    /// Learns that `mac` is reached through port `from`. A port's own address is
    /// never learned, and an uplink does not take over an address learned at a port
    /// of this fabric: a peer decides only where its own addresses are.
    fn learn(&mut self, from: usize, mac: &Mac) {
        let sender = &self.ports[from];
        if mac[0] & 1 != 0 || sender.learned.contains(mac) || self.port_with_mac(mac).is_some() {
            return;
        }
        let learned_at_local_port = || {
            let at = self.learned_at(mac);
            at.is_some_and(|at| !self.ports[at].uplink)
        };
        if sender.uplink && learned_at_local_port() {
            return;
        }
        for port in &mut self.ports {
            port.learned.retain(|m| m != mac);
        }
        let learned = &mut self.ports[from].learned;
        if learned.len() >= MAX_LEARNED {
            learned.remove(0);
        }
        learned.push(*mac);
    }

    /// Applies loss and corruption to a frame. Returns whether it is lost.
    fn apply_loss_and_corruption(&mut self, from: usize, packet: &mut Packet) -> bool {
        let faults = self.ports[from].faults;
        if self.random.chance(faults.loss) {
            self.ports[from].counters.lost += 1;
            return true;
        }
        if self.random.chance(faults.corrupt) {
            // Past the link header, which a switch would have checked.
            let start = packet.kind().header_bytes();
            let frame = packet.frame_mut();
            let at = start + self.random.below((frame.len().max(start) - start) as u64) as usize;
            if let Some(byte) = frame.get_mut(at) {
                *byte ^= 1 << self.random.below(8);
            }
            self.ports[from].counters.corrupted += 1;
        }
        false
    }

    /// Sends a frame from one port to another, subject to the sender's faults.
    fn transfer(
        &mut self,
        from: usize,
        to: usize,
        now: u64,
        mut packet: Packet,
        wake: &mut PendingWakers,
    ) {
        let delivery = match &mut self.tap {
            Some(tap) => tap.transfer(now, from, to, &mut packet),
            None => Delivery::default(),
        };
        if delivery.lost {
            self.ports[from].counters.lost += 1;
            return;
        }
        let mut faults = self.ports[from].faults;
        faults.delay += delivery.delay;
        if delivery.duplicated {
            self.ports[from].counters.duplicated += 1;
            self.enqueue(to, now, now + faults.delay, packet.clone(), wake);
        }
        if faults != Faults::default() {
            if self.apply_loss_and_corruption(from, &mut packet) {
                return;
            }
            if self.random.chance(faults.duplicate) {
                self.ports[from].counters.duplicated += 1;
                let due = now + faults.delay + self.random.below(faults.jitter + 1);
                self.enqueue(to, now, due, packet.clone(), wake);
            }
            if self.random.chance(faults.reorder) {
                self.ports[from].counters.reordered += 1;
                let max_delay = match faults.reorder_delay {
                    0 => DEFAULT_REORDER_DELAY,
                    delay => delay,
                };
                let due = now + faults.delay + 1 + self.random.below(max_delay);
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

    fn enqueue(&mut self, to: usize, now: u64, due: u64, packet: Packet, wake: &mut PendingWakers) {
        let sequence = self.sequence;
        self.sequence += 1;
        let port = &mut self.ports[to];
        if !port.up {
            return;
        }
        if port.queued_frames() >= port.config.queue {
            port.counters.overflow += 1;
            return;
        }
        port.deliver_due(now);
        if due <= now {
            port.ready.push_back(packet);
        } else {
            port.in_flight.push(InFlight {
                due,
                sequence,
                packet,
            });
        }
        wake.add(port);
    }
}
