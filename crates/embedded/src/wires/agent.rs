//! Queue pair 1: management datagrams, and the agents that handle them.
//!
//! ```text
//!  wire ── frame for queue pair 1 ──► Agents ── class, transaction ──► ManagementAgent
//!    ▲                                                                        │
//!    └──────────────────────── Outgoing: peer, datagram ◄─────────────────────┘
//! ```
//!
//! An agent has a management class and, if it shares the class with others that wait for
//! responses, the first half of its transaction ids. One that answers subnet administration, or
//! a program's, is one more entry.

use std::net::IpAddr;
use std::sync::Arc;
#[cfg(test)]
use std::sync::Mutex;
use std::time::Duration;

use roce::packet::{Bth, DEFAULT_PKEY, Deth, Packet, PacketBuilder, Pool, Psn, Template, View};

use crate::management::{DropCause, DropLog};

/// Size of a management datagram in bytes.
pub(crate) const MAD_SIZE: usize = 256;
/// Offset of a management datagram in a UDP datagram: after BTH and DETH.
pub(crate) const MAD: usize = 20;
/// Offsets in a management datagram: the class, the transaction id.
pub(crate) const CLASS: usize = 1;
pub(crate) const TRANSACTION: usize = 8;
/// Offsets in a management datagram of the connection manager: the attribute, the body and the
/// ids at its beginning.
pub(crate) const ATTRIBUTE: usize = 16;
pub(crate) const LOCAL_ID: usize = 24;
pub(crate) const REMOTE_ID: usize = 28;
/// Attributes of requests, which are for no known id, and of the message that names the
/// receiver's id as the sender's.
pub(crate) const REQUEST: u16 = 0x10;
pub(crate) const SERVICE_REQUEST: u16 = 0x17;
pub(crate) const SERVICE_REPLY: u16 = 0x18;
/// The management class of the connection manager.
pub(crate) const CONNECTION_MANAGEMENT: u8 = 0x07;
/// The queue pair of the general services interface, and its queue key.
pub(crate) const QPN: u32 = 1;
pub(crate) const QKEY: u32 = 0x8001_0000;

/// Opcode of an unreliable datagram, SEND Only.
const UD_SEND: u8 = 0x64;

/// Creates the packet of a management datagram.
pub(crate) fn packet(pool: &Pool, template: &Template, psn: Psn, bytes: &[u8]) -> Packet {
    let bth = Bth {
        opcode: UD_SEND,
        solicited: true,
        migrated: true,
        pad: 0,
        version: 0,
        pkey: DEFAULT_PKEY,
        dest_qpn: QPN,
        ack_request: false,
        psn,
    };
    let deth = Deth {
        qkey: QKEY,
        source_qpn: QPN,
    };
    let mut builder = PacketBuilder::new(pool, template, bth, bytes.len());
    builder.put(&deth.bytes());
    builder.put(bytes);
    builder.finish()
}

/// Returns the management datagram in a packet for queue pair 1.
pub(crate) fn management<'a>(view: &View<'a>) -> Option<&'a [u8]> {
    let is_valid = view.bth.opcode == UD_SEND && view.bth.dest_qpn == QPN;
    let is_valid = is_valid && view.deth()?.qkey == QKEY;
    // The default partition, full or limited membership.
    let is_valid = is_valid && view.bth.pkey & 0x7fff == DEFAULT_PKEY & 0x7fff;
    is_valid.then_some(view.payload.bytes())
}

/// Who sends or receives a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Peer {
    /// A process of the network, by its number in the directory; 0 without one.
    Member(u16),
    /// A host, by an address of this device and its own.
    Host {
        /// The address of this device.
        local: IpAddr,
        /// The host's address.
        remote: IpAddr,
    },
    /// A node of a simulated network, by the numbers of this device and its own.
    Node {
        /// The number of this device.
        local: u16,
        /// The node's number.
        remote: u16,
    },
}

/// The addresses of a device's port, as a frame shows those of its sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PortAddress {
    pub(crate) ethernet: bool,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
}

/// A management datagram to send.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    pub(crate) to: Peer,
    /// The port that it leaves from.
    pub(crate) port: PortAddress,
    pub(crate) bytes: [u8; MAD_SIZE],
}

/// A connection with another host, as another process of the address must know it to end it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostConnection {
    /// The address of this device.
    pub(crate) local: IpAddr,
    /// The host's address.
    pub(crate) remote: IpAddr,
    /// The communication ids of this end and of the peer.
    pub(crate) local_id: u32,
    pub(crate) remote_id: u32,
    /// The peer's queue pair.
    pub(crate) remote_qpn: u32,
}

/// A connection begins or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionChange {
    Begins(HostConnection),
    /// By this end's communication id.
    Ends(u32),
}

/// How a process of the network is known to have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberEnd {
    /// It had received what was sent to it.
    Ended,
    /// There was none to receive what was sent.
    Absent,
}

/// Handles management datagrams. Nothing blocks, and nothing calls the wire.
pub(crate) trait ManagementAgent: Send + Sync {
    /// Returns whether there are datagrams to send. Costs a load.
    fn has_outgoing(&self) -> bool;

    /// Returns the next datagram to send.
    fn pop(&self) -> Option<Outgoing>;

    /// Handles a datagram from `port` of a peer.
    fn receive(&self, peer: Peer, port: PortAddress, bytes: &[u8]);

    /// Ends all communications, since the process ends.
    fn close(&self);

    /// Called for a new address of the device.
    fn add_address(&self, address: IpAddr);

    /// Returns the number of the other process that a datagram of another host is for; `None`
    /// if it is for this process, or for none that shares the address.
    fn other_member(&self, destination: IpAddr, bytes: &[u8]) -> Option<u8>;

    /// Handles the report that nobody had the port of another host to which a datagram was
    /// sent. Returns when it was sent, for [`end_host`](Self::end_host) of other processes;
    /// `None` if the report is not about a message that waits for an answer.
    fn handle_refusal(&self, peer: Peer, bytes: &[u8]) -> Option<Duration>;

    /// Ends the communications with a host that were last heard before `time`, after which
    /// nobody had its port: the peers' processes have ended.
    fn end_host(&self, peer: Peer, time: Duration);

    /// Ends the communications with a process of the network.
    fn end_member(&self, member: u16, end: MemberEnd);

    /// Returns the next change of the connections with hosts, before what it sends is popped.
    fn next_change(&self) -> Option<ConnectionChange> {
        None
    }

    /// Ends a connection of another process of this address, which has ended without doing so.
    fn end_of_other(&self, _connection: &HostConnection) {}
}

/// An entry of the table.
#[derive(Clone)]
struct Entry {
    class: u8,
    /// First half of the transaction ids that the agent has chosen; `None` for all.
    transactions: Option<u32>,
    agent: Arc<dyn ManagementAgent>,
}

/// The agents of a network's queue pairs 1.
#[derive(Clone, Default)]
pub(crate) struct Agents {
    entries: Vec<Entry>,
    drops: Arc<DropLog>,
}

impl Agents {
    /// Creates an empty table. Its drops are added to `drops`.
    pub(crate) fn new(drops: Arc<DropLog>) -> Self {
        Self {
            entries: Vec::new(),
            drops,
        }
    }

    /// Adds the agent of a class.
    pub(crate) fn with(mut self, class: u8, agent: Arc<dyn ManagementAgent>) -> Self {
        self.entries.push(Entry {
            class,
            transactions: None,
            agent,
        });
        self
    }

    /// Returns the agent that a datagram is for: one with its transactions before one of all.
    ///
    /// # Errors
    /// Why it is dropped.
    pub(crate) fn agent_for(&self, bytes: &[u8]) -> Result<&dyn ManagementAgent, DropCause> {
        let bytes: &[u8; MAD_SIZE] =
            (bytes.try_into()).map_err(|_| DropCause::Length(bytes.len()))?;
        let class = bytes[CLASS];
        let mut first = [0; 4];
        first.copy_from_slice(&bytes[TRANSACTION..TRANSACTION + 4]);
        let transactions = u32::from_be_bytes(first);
        let of_class = || self.entries.iter().filter(|it| it.class == class);
        let own = of_class().find(|it| it.transactions == Some(transactions));
        let found = own.or_else(|| of_class().find(|it| it.transactions.is_none()));
        let found = found.ok_or(DropCause::NoAgent {
            class,
            transactions,
        })?;
        Ok(&*found.agent)
    }

    /// Passes a datagram to its agent.
    pub(crate) fn receive(&self, peer: Peer, port: PortAddress, bytes: &[u8]) {
        match self.agent_for(bytes) {
            Ok(agent) => agent.receive(peer, port, bytes),
            Err(cause) => self.drop_datagram(cause),
        }
    }

    /// Reports that a management datagram was dropped.
    pub(crate) fn drop_datagram(&self, cause: DropCause) {
        self.drops.add(cause);
    }

    /// Returns all agents.
    pub(crate) fn all(&self) -> impl Iterator<Item = &dyn ManagementAgent> {
        self.entries.iter().map(|it| &*it.agent)
    }

    /// Returns whether an agent has datagrams to send.
    pub(crate) fn has_outgoing(&self) -> bool {
        self.all().any(ManagementAgent::has_outgoing)
    }

    /// Returns the next datagram to send.
    pub(crate) fn pop(&self) -> Option<Outgoing> {
        self.all().find_map(ManagementAgent::pop)
    }
}

/// An agent that records what it is called for, and sends what it is given.
#[cfg(test)]
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) outgoing: Mutex<Vec<Outgoing>>,
    pub(crate) calls: Mutex<Vec<&'static str>>,
}

#[cfg(test)]
impl Recorder {
    pub(crate) fn calls(&self) -> Vec<&'static str> {
        self.calls.lock().unwrap().clone()
    }
}

#[cfg(test)]
impl ManagementAgent for Recorder {
    fn has_outgoing(&self) -> bool {
        !self.outgoing.lock().unwrap().is_empty()
    }
    fn pop(&self) -> Option<Outgoing> {
        self.outgoing.lock().unwrap().pop()
    }
    fn receive(&self, _: Peer, _: PortAddress, _: &[u8]) {
        self.calls.lock().unwrap().push("receive");
    }
    fn close(&self) {}
    fn add_address(&self, _: IpAddr) {}
    fn other_member(&self, _: IpAddr, _: &[u8]) -> Option<u8> {
        None
    }
    fn handle_refusal(&self, _: Peer, _: &[u8]) -> Option<Duration> {
        None
    }
    fn end_host(&self, _: Peer, _: Duration) {}
    fn end_member(&self, _: u16, _: MemberEnd) {
        self.calls.lock().unwrap().push("end");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_goes_to_the_agent_of_its_class_and_transaction() {
        let [all, one, other] = [(); 3].map(|()| Arc::<Recorder>::default());
        let mut agents = Agents::default()
            .with(7, Arc::<Recorder>::clone(&all) as _)
            .with(3, Arc::<Recorder>::clone(&other) as _);
        agents.entries.push(Entry {
            class: 7,
            transactions: Some(0x0102_0304),
            agent: Arc::<Recorder>::clone(&one) as _,
        });
        let receive = |class: u8, first: u8| {
            let mut bytes = [0; MAD_SIZE];
            bytes[CLASS] = class;
            bytes[TRANSACTION..TRANSACTION + 4].copy_from_slice(&[first, 2, 3, 4]);
            agents.receive(Peer::Member(0), PortAddress::default(), &bytes);
            [&all, &one, &other].map(|it| it.calls().len())
        };
        assert_eq!(receive(7, 1), [0, 1, 0]);
        assert_eq!(receive(7, 9), [1, 1, 0]);
        assert_eq!(receive(3, 1), [1, 1, 1]);
        assert_eq!(receive(4, 1), [1, 1, 1]);
        let cause = |bytes: &[u8]| agents.agent_for(bytes).err();
        assert_eq!(cause(&[7; 255]), Some(DropCause::Length(255)));
        let nobody = DropCause::NoAgent {
            class: 9,
            transactions: 0x0909_0909,
        };
        assert_eq!(cause(&[9; MAD_SIZE]), Some(nobody));
    }
}
