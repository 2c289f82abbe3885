//! A manager that gets the datagrams of a hostile host, for tests and fuzzing.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmacm::abi;
use rdmacm::{EventKind, address};

use super::id::{LocalPort, MTU};
use super::ids::Clock;
use super::machine::{MAX_ENDED, MAX_OUTGOING, MAX_REQUESTS};
use super::mad::Mad;
use super::{Manager, NEVER};
use crate::addresses::AddressList;
use crate::wires::agent::{MAD_SIZE, ManagementAgent, Peer, PortAddress};

const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The port of the listening ids.
const PORT: u16 = 7471;
const TCP: u16 = 0x106;
const UDP: u16 = 0x111;

/// A manager with listening ids, and a program that answers requests.
pub(crate) struct Target {
    manager: Manager,
    time: Arc<AtomicU64>,
    channel: RawFd,
    /// Ids of requests and of own connections.
    ids: Vec<u32>,
}

fn sockaddr(ip: Ipv4Addr, port: u16) -> [u8; 128] {
    address::Sockaddr::from(&SocketAddr::from((ip, port)).into()).bytes
}

impl Target {
    /// Creates a target; `None` if no descriptors are left.
    pub(crate) fn new() -> Option<Self> {
        let hosts = Arc::new(AddressList::new([OWN.into()]));
        let time = Arc::new(AtomicU64::new(1));
        let clock = Clock::Simulated(Arc::clone(&time));
        let manager = Manager::of_hosts(hosts, None, clock);
        let port = LocalPort {
            ethernet: true,
            gid: [0; 16],
            lid: 0,
            node_guid: 1,
            gid_index: 0,
            own: None,
            mtu: MTU,
            node: 0,
        };
        let channel = manager.shared.with(|ids| {
            let channel = ids.open(port).ok()?;
            for ps in [TCP, UDP] {
                let id = Self::create(ids, channel, ps)?;
                let address = sockaddr(Ipv4Addr::UNSPECIFIED, PORT);
                ids.bind(channel, id, &address).ok()?;
                ids.listen(channel, id, 4).ok()?;
            }
            Some(channel)
        })?;
        Some(Self {
            manager,
            time,
            channel,
            ids: Vec::new(),
        })
    }

    fn create(ids: &mut super::Ids, channel: RawFd, ps: u16) -> Option<u32> {
        let command = abi::CreateId {
            uid: 1,
            ps,
            ..Default::default()
        };
        ids.create(channel, &command).ok()
    }

    /// Requests a connection with a peer.
    fn connect(&mut self, peer: Ipv4Addr) -> Option<()> {
        let channel = self.channel;
        let id = self.manager.shared.with(|ids| {
            let id = Self::create(ids, channel, TCP)?;
            let (from, to) = (sockaddr(OWN, 0), sockaddr(peer, 6));
            ids.resolve_address(channel, id, (&from, &to)).ok()?;
            ids.resolve_route(channel, id).ok()?;
            let param = abi::ConnParam {
                valid: 1,
                ..Default::default()
            };
            ids.connect(channel, id, &param).ok()?;
            Some(id)
        })?;
        self.ids.push(id);
        Some(())
    }

    /// Passes a message to the manager, with valid headers and existing ids depending on
    /// `flags`, and lets the program and time act.
    ///
    /// # Panics
    /// If bounds are passed, or what is sent is malformed.
    pub(crate) fn receive(&mut self, flags: u8, script: &[u8]) {
        let peer = Ipv4Addr::new(192, 0, 2, 2 + (flags >> 6));
        let mut bytes = [0; MAD_SIZE];
        for (to, from) in bytes.iter_mut().zip(script) {
            *to = *from;
        }
        let choice = usize::from(flags >> 3);
        if flags & 4 != 0 {
            // A valid header, and the id of an existing connection.
            bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
            (bytes[16], bytes[17]) = (0, 0x10 + bytes[17] % 9);
            if bytes[17] != 0x10 && bytes[17] != 0x17 {
                let numbers = self.manager.shared.with(|ids| ids.machine.all_numbers());
                let number = numbers.get(choice % numbers.len().max(1));
                let number = number.copied().unwrap_or(1).to_be_bytes();
                let at = if bytes[17] == 0x18 { 24 } else { 28 };
                bytes[at..at + 4].copy_from_slice(&number);
            } else {
                // To the listening ids, in IPv4.
                let ps: u16 = if bytes[17] == 0x10 { TCP } else { UDP };
                bytes[32..36].fill(0);
                bytes[36..38].copy_from_slice(&ps.to_be_bytes());
                bytes[38..40].copy_from_slice(&PORT.to_be_bytes());
                let header = if bytes[17] == 0x10 { 164 } else { 40 };
                bytes[header..header + 2].copy_from_slice(&[0, 0x40]);
                bytes[header + 32..header + 36].copy_from_slice(&OWN.octets());
            }
        }
        let shared = Arc::clone(&self.manager.shared);
        let host = Peer::Host {
            local: OWN.into(),
            remote: IpAddr::from(peer),
        };
        let port = PortAddress {
            ethernet: true,
            ..PortAddress::default()
        };
        shared.receive(host, port, &bytes);
        if flags & 8 != 0 {
            self.connect(peer);
        }
        self.act(choice);
        while let Some(outgoing) = shared.pop() {
            assert!(Mad::parse(&outgoing.bytes).is_some());
            if choice % 5 == 4 {
                shared.handle_refusal(outgoing.to, &outgoing.bytes);
            }
        }
        self.check();
        // Time passes to what is due next.
        if flags & 16 != 0 {
            let due = shared.deadline.load(Ordering::Relaxed);
            if due != NEVER {
                self.time.fetch_max(due, Ordering::Relaxed);
            }
            self.manager.turn(false);
            self.check();
        }
    }

    /// The program reads its events, answers requests and ends connections.
    fn act(&mut self, choice: usize) {
        let channel = self.channel;
        let Self {
            manager, ids: own, ..
        } = self;
        manager.shared.with(|ids| {
            while let Ok(queued) = ids.next_event(channel) {
                let Some(id) = queued.request else {
                    if queued.event.event == EventKind::CONNECT_RESPONSE.0 {
                        let _ = ids.accept(channel, queued.id, 0, &abi::ConnParam::default());
                    }
                    continue;
                };
                own.push(id);
                let param = abi::ConnParam {
                    valid: 1,
                    ..Default::default()
                };
                let _ = match choice % 4 {
                    0 | 1 => ids.accept(channel, id, 1, &param),
                    2 => ids.reject(channel, id, 0, &[]),
                    _ => Ok(()),
                };
            }
            if !own.is_empty() && (own.len() > 8 || choice % 7 == 6) {
                let id = own.swap_remove(choice % own.len());
                let _ = match choice % 2 {
                    0 => ids.disconnect(channel, id),
                    _ => ids.destroy(id).map(drop),
                };
            }
        });
    }

    fn check(&self) {
        self.manager.shared.with(|ids| {
            let [all, by_peer, requests, ended] = ids.machine.sizes();
            assert!(requests <= MAX_REQUESTS && ended <= MAX_ENDED && by_peer <= all);
            assert!(ids.machine.queued() <= MAX_OUTGOING);
            // An id has at most one connection, and a connection at most one id.
            assert!(ids.by_connection.len() <= ids.ids.len());
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random bytes, and valid datagrams in every state.
    #[test]
    fn hostile_datagrams_are_handled() {
        let mut random = 7u64;
        let mut next = || {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) as u8
        };
        for _ in 0..20 {
            let mut target = Target::new().unwrap();
            for _ in 0..2000 {
                let (flags, kind) = (next() | (next() & 1) << 2, next());
                let script: [u8; MAD_SIZE] = std::array::from_fn(|at| match at {
                    17 => kind,
                    // Few peers' ids, so that requests are repeated.
                    24..=27 => kind >> 4,
                    _ => next(),
                });
                target.receive(flags, &script);
            }
        }
    }
}
