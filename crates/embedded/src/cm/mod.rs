//! Connection manager for the devices of a network. It executes the commands that
//! `crates/rdmacm` passes to the kernel, with the same results.
//!
//! ```text
//! rdmacm::EventChannel ── Kernel ──► ManagerKernel ── commands ──► Ids ── events, by a channel
//!                                                                   │
//!                                                                Machine ◄── time
//!                                                                   │
//!                                     the wire's queue pair 1 ◄── datagrams
//! ```
//!
//! [`Ids`] are what programs see; a [`Machine`] has their connections, and
//! speaks the protocol of InfiniBand's connection manager by management datagrams (`mad`). Those
//! for this process itself are handled at once; others are sent by the wire, whose agent for
//! them this is. Who has a port is looked up outside the machine (`ports`).
//!
//! Addresses are those of the host's interfaces; on a network that reaches other hosts the
//! device's own, and loopback addresses for itself. Port spaces belong to the network: to a
//! process, or to all processes of a directory.
//!
//! There is no thread: what drives the network takes turns ([`Manager::turn`]).

mod channel;
mod claim;
mod connection;
mod events;
#[cfg(any(test, feature = "test-utils"))]
pub(crate) mod hostile;
mod id;
mod ids;
mod inherited;
pub(crate) mod kernel;
mod machine;
#[cfg(test)]
pub(crate) mod machine_tests;
mod mad;
mod message;
mod ports;
mod query;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::addresses::{AddressList, SharedPorts};
use crate::directory::Directory;
use crate::management::DropLog;
use crate::wires::agent::{
    Agents, CONNECTION_MANAGEMENT, ConnectionChange, HostConnection, ManagementAgent, MemberEnd,
    Outgoing, Peer, PortAddress,
};
use crate::wires::udp::ID_BITS;
pub use id::ConnectionId;
pub(crate) use id::LocalPort;
pub(crate) use ids::Clock;
use ids::Ids;
pub use inherited::InheritedChannel;
use machine::{Machine, Rules};
use mad::{Attribute, Mad};
use ports::Ports;

/// The connection manager of a network in this process.
#[derive(Clone, Debug)]
pub(crate) struct Manager {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    ids: Mutex<Ids>,
    ports: Arc<Ports>,
    clock: Clock,
    drops: Arc<DropLog>,
    /// The machine has datagrams for the wire.
    has_outgoing: AtomicBool,
    /// Other processes of the address must know of changes.
    has_changes: AtomicBool,
    /// Children of fork have channels of this process.
    has_shared_channels: AtomicBool,
    /// When something is due, in nanoseconds; `NEVER` for nothing.
    deadline: AtomicU64,
    /// Until when whoever drives the network may sleep, as far as it knows.
    planned: AtomicU64,
}

const NEVER: u64 = u64::MAX;

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(NEVER - 1)
}

impl Manager {
    /// Creates a manager for addresses of this host, within a process or, with the number of
    /// this process, among those of a directory.
    pub(crate) fn new(directory: Option<(Arc<Directory>, u16)>, clock: Clock) -> Self {
        let own = Peer::Member(directory.as_ref().map_or(0, |it| it.1));
        let rules = Rules::of_members(own);
        Self::of(Arc::new(Ports::new(directory)), None, clock, rules)
    }

    /// Creates a manager for the nodes of a simulated network, with its time in nanoseconds.
    pub(crate) fn of_nodes(time: Arc<AtomicU64>, seed: u64) -> Self {
        let ports = Arc::new(Ports::of_nodes(seed));
        Self::of(ports, None, Clock::Simulated(time), Rules::of_nodes())
    }

    /// Creates a manager for a device that other hosts can reach, with the device's addresses;
    /// `shared` is set if other processes may share the addresses.
    pub(crate) fn of_hosts(
        host_addresses: Arc<AddressList>,
        shared: Option<SharedPorts>,
        clock: Clock,
    ) -> Self {
        // The top bits tell other processes which member has an id.
        let prefix = shared
            .as_ref()
            .map_or(0, |it| u32::from(it.member) << ID_BITS);
        let rules = Rules::of_hosts(prefix, ID_BITS);
        let ports = Arc::new(Ports::of_hosts(shared));
        Self::of(ports, Some(host_addresses), clock, rules)
    }

    fn of(
        ports: Arc<Ports>,
        host_addresses: Option<Arc<AddressList>>,
        clock: Clock,
        rules: Rules,
    ) -> Self {
        let machine = Machine::new(rules, ports.random.split());
        let ids = Ids::new(Arc::clone(&ports), host_addresses, clock.clone(), machine);
        let shared = Arc::new(Shared {
            ids: Mutex::new(ids),
            ports,
            clock,
            drops: Arc::default(),
            has_outgoing: AtomicBool::new(false),
            has_changes: AtomicBool::new(false),
            has_shared_channels: AtomicBool::new(false),
            deadline: AtomicU64::new(NEVER),
            planned: AtomicU64::new(NEVER),
        });
        Self { shared }
    }

    /// Returns the table of queue pair 1 with this manager.
    pub(crate) fn agents(&self) -> Agents {
        let agent: Arc<dyn ManagementAgent> = Arc::clone(&self.shared) as _;
        Agents::new(Arc::clone(&self.shared.drops)).with(CONNECTION_MANAGEMENT, agent)
    }

    /// Returns the management datagrams that were dropped.
    pub(crate) fn drops(&self) -> &Arc<DropLog> {
        &self.shared.drops
    }

    /// Returns the ids that have the device with a node GUID, by number.
    pub(crate) fn ids_on(&self, guid: u64) -> Vec<ConnectionId> {
        self.shared.with(|ids| {
            let of_device =
                |(_, id): &(&u32, &id::Id)| id.port.node_guid == guid && id.is_on_device();
            let found = ids.ids.iter().filter(of_device);
            let described =
                found.map(|(number, id)| id.described(*number, ids.connection_state(*number)));
            described.collect()
        })
    }

    /// Does what is due. Returns the time until something is. With `plans`, the caller sleeps no
    /// longer than that, unless it is woken ([`needs_turn`](Self::needs_turn)).
    pub(crate) fn turn(&self, plans: bool) -> Option<Duration> {
        self.leave_lost();
        let shared = &*self.shared;
        let mut due = shared.deadline.load(Ordering::SeqCst);
        if due == NEVER && shared.planned.load(Ordering::Relaxed) == NEVER {
            return None;
        }
        let time = shared.clock.now();
        let now = nanos(time);
        if due <= now {
            shared.with(|ids| ids.expire(time));
            due = shared.deadline.load(Ordering::SeqCst);
        }
        if plans {
            due = shared.plan(due, now);
        }
        (due != NEVER).then(|| Duration::from_nanos(due.saturating_sub(now)))
    }

    /// Returns when something is due, in nanoseconds of the clock.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let due = self.shared.deadline.load(Ordering::SeqCst);
        (due != NEVER).then_some(due)
    }

    /// Returns whether whoever drives the network must act before it planned to.
    pub(crate) fn needs_turn(&self) -> bool {
        self.shared.has_outgoing.load(Ordering::SeqCst)
            || self.shared.deadline.load(Ordering::SeqCst)
                < self.shared.planned.load(Ordering::SeqCst)
    }

    /// Returns whether a peer has yet to answer that a connection ends.
    pub(crate) fn awaits_end(&self) -> bool {
        self.shared.with(|ids| ids.machine.awaits_end())
    }

    /// Returns the counters of the messages of a device, by its GUID. Messages that belong to no
    /// id are those of the first device.
    pub(crate) fn counters(&self, guid: u64, is_first: bool) -> ManagementCounters {
        let ids = (self.shared.ids.lock()).unwrap_or_else(PoisonError::into_inner);
        let own = ids.machine.counters(guid);
        match is_first {
            true => own.plus(&ids.machine.counters(0)),
            false => own,
        }
    }

    #[cfg(test)]
    fn set_response_timeout(&self, timeout: Duration) {
        self.shared
            .with(|ids| ids.machine.response_timeout = timeout);
    }
}

/// Messages of the connection manager, by attribute: REQ, MRA, REJ, REP, RTU, DREQ, DREP,
/// SIDR REQ, SIDR REP, LAP, APR (the last two are not used).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ManagementCounters {
    /// Messages sent, also repeated ones.
    pub sent: [u64; 11],
    /// Messages sent again, since there was no answer.
    pub retries: [u64; 11],
    /// Messages received, also repeated ones.
    pub received: [u64; 11],
    /// Messages received again.
    pub duplicates: [u64; 11],
}

impl ManagementCounters {
    /// Returns the sums.
    fn plus(self, other: &Self) -> Self {
        let sums = |a: [u64; 11], b: &[u64; 11]| std::array::from_fn(|index| a[index] + b[index]);
        Self {
            sent: sums(self.sent, &other.sent),
            retries: sums(self.retries, &other.retries),
            received: sums(self.received, &other.received),
            duplicates: sums(self.duplicates, &other.duplicates),
        }
    }
}

impl Shared {
    /// Plans to act when something is due. Returns when, which may be earlier: a plan is kept
    /// until its time, since to wake once in vain is cheaper than to be woken for each
    /// connection.
    fn plan(&self, mut due: u64, now: u64) -> u64 {
        loop {
            let planned = self.planned.load(Ordering::Relaxed);
            if due == planned || planned > now && planned < due {
                return planned;
            }
            self.planned.store(due, Ordering::SeqCst);
            // Whoever sets an earlier deadline reads the plan afterwards.
            due = self.deadline.load(Ordering::SeqCst);
        }
    }

    /// Calls `act` with the ids, and lets what it causes take effect.
    fn with<T>(&self, act: impl FnOnce(&mut Ids) -> T) -> T {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut ids);
        ids.settle();
        if !self.ports.is_shared() {
            while ids.machine.next_change().is_some() {}
        } else if ids.machine.has_changes() {
            self.has_changes.store(true, Ordering::SeqCst);
        }
        while let Some(cause) = ids.machine.next_dropped() {
            self.drops.add(cause);
        }
        self.has_outgoing
            .store(ids.machine.has_datagrams(), Ordering::SeqCst);
        let due = ids.deadline().map_or(NEVER, nanos);
        self.deadline.store(due, Ordering::SeqCst);
        result
    }

    fn with_clock<T>(&self, act: impl FnOnce(&mut Ids, Duration) -> T) -> T {
        let now = self.clock.now();
        self.with(|ids| act(ids, now))
    }
}

impl ManagementAgent for Shared {
    fn has_outgoing(&self) -> bool {
        self.has_outgoing.load(Ordering::Relaxed)
    }

    fn pop(&self) -> Option<Outgoing> {
        // Without effects: `settle` need not run.
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        let next = ids.machine.next_datagram();
        self.has_outgoing
            .store(ids.machine.has_datagrams(), Ordering::SeqCst);
        next
    }

    fn receive(&self, peer: Peer, port: PortAddress, bytes: &[u8]) {
        self.with_clock(|ids, now| ids.machine.receive(now, peer, port, bytes));
    }

    fn close(&self) {
        self.with_clock(|ids, now| {
            ids.leave_shared();
            ids.machine.close(now);
        });
    }

    fn add_address(&self, address: IpAddr) {
        self.ports.add_address(address);
    }

    fn other_member(&self, destination: IpAddr, bytes: &[u8]) -> Option<u8> {
        let mad = Mad::parse(bytes)?;
        if let Attribute::Request | Attribute::ServiceRequest = mad.attribute {
            return self.ports.other_member(mad.service()?, destination);
        }
        let number = mad.receiver_id();
        let member = (number >> ID_BITS) as u8;
        (number != 0 && member != self.ports.member()).then_some(member)
    }

    fn handle_refusal(&self, peer: Peer, bytes: &[u8]) -> Option<Duration> {
        self.with_clock(|ids, now| ids.machine.handle_refusal(now, peer, bytes))
    }

    fn end_host(&self, peer: Peer, time: Duration) {
        self.with_clock(|ids, now| ids.machine.end_peers(now, peer, Some(time)));
    }

    fn next_change(&self) -> Option<ConnectionChange> {
        if !self.has_changes.load(Ordering::Relaxed) {
            return None;
        }
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        let next = ids.machine.next_change();
        self.has_changes.store(next.is_some(), Ordering::SeqCst);
        next
    }

    fn end_of_other(&self, connection: &HostConnection) {
        self.with_clock(|ids, now| ids.machine.end_of_other(now, connection));
    }

    fn end_member(&self, member: u16, end: MemberEnd) {
        self.with_clock(|ids, now| ids.machine.end_member(now, Peer::Member(member), end));
    }
}
