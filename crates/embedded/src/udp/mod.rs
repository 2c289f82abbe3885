//! A wire to other hosts: RoCE v2 in UDP datagrams.
//!
//! ```text
//!  fabric ── uplink ── frames ──► Departure ── sendmmsg ──► a source port of 8
//!     ▲                                                         │ network
//!     └──────────────── frames ◄── Arrival ◄── recvmmsg ◄── port 4791
//! ```
//!
//! Several packets leave or arrive as one message of the socket, which the system
//! divides or puts together.
//!
//! A socket carries what follows the UDP header; the headers before it, which the
//! ICRC covers, are taken off and put back ([`softhca::packet::Arrival`]). Datagrams
//! are untrusted: length and ICRC are checked here, the rest by the transport, as for
//! frames of any network. What the device has not processed yet is bounded by its
//! port's queue, and beyond it by the socket's buffer.

mod follow;
mod group;
mod ports;
mod segmentation;
mod socket;
mod steering;

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use softhca::fabric::{Fabric, Port};
use softhca::packet::{
    Arrival, BTH, Bth, DEFAULT_PKEY, Departure, Deth, Mac, NotRoce, Opcode, Packet, PacketBuilder,
    Path, Pool, Psn, Template, View, gid_of_ip, headroom,
};
use uverbs::Errno;

use crate::Result;
use crate::addresses::{ADDRESSES, AddressList};
use crate::cm::{Gateway, Outgoing, QKEY, QPN, random};
use crate::wire::MAX_FRAME_WAIT;
use follow::Follower;
pub(crate) use group::ID_BITS;
use group::{Group, Kind, Passed, QPN_BITS};
use ports::Endpoint;
pub(crate) use ports::{Addresses, UdpPorts};
use segmentation::{join_acknowledgement, may_be_held};
use socket::{BATCH, FIRST_MESSAGES, Inbox, MESSAGES, Scoped};

/// MAC addresses in frames between the device and the wire: the device's, and that of
/// all others.
pub(crate) const DEVICE_MAC: Mac = [0x02, 0x50, 0x53, 0, 0, 1];
pub(crate) const OTHERS_MAC: Mac = [0x02, 0x50, 0x53, 0, 0, 2];

/// Number of datagrams after which a turn receives no more at an address.
const ENOUGH: usize = 256;
/// The gateway and the group in epoll events; smaller numbers are addresses.
const GATEWAY: u64 = 1 << 32;
const GROUP: u64 = GATEWAY + 1;
const FOLLOWER: u64 = GATEWAY + 2;
/// Longest time between two turns of the gateway while frames come and go.
const MANAGED: Duration = Duration::from_micros(50);
/// Shortest time between two corrections of which process receives what.
const LOOKING: Duration = Duration::from_secs(1);
/// Opcode of a datagram.
const UD_SEND: u8 = 0x64;
/// Source ports are chosen by these bits of the transport's.
const SOURCE_BITS: u16 = 0x3fff;

/// The wire of a device with addresses of this host.
pub(crate) struct UdpWire {
    port: Port,
    pool: Pool,
    endpoints: Vec<Endpoint>,
    /// The same addresses, for the device and the connection manager.
    list: Arc<AddressList>,
    /// The interface whose addresses they are, if changes are announced.
    follower: Option<Follower>,
    /// Other processes with the same addresses; `None` if nobody may have them.
    group: Option<Group>,
    /// Acknowledgements wait for the program's answer.
    held: bool,
    /// The last turn received packets that they have passed on.
    passing: bool,
    /// The address that last received a packet of another process, and when that was
    /// last looked into.
    astray: Option<usize>,
    looked: Option<Instant>,
    /// Frames to send.
    outgoing: VecDeque<Packet>,
    /// Several datagrams are sent as one message; false after the system has refused it.
    segmentation: bool,
    /// Since when the first of them waits for room in its socket.
    waiting: Option<Instant>,
    /// The connection manager's conversations with other hosts.
    gateway: Gateway,
    /// When the gateway last had a turn.
    managed: Option<Instant>,
    /// Sequence number of the next management datagram.
    psn: Psn,
    inbox: Inbox,
    /// Received frames, empty between calls.
    arrived: Vec<Packet>,
}

impl UdpWire {
    pub(crate) fn new(
        ports: UdpPorts,
        gateway: Gateway,
        fabric: &Fabric,
        pool: Pool,
        epoll: &Epoll,
    ) -> Result<Self> {
        for (place, endpoint) in ports.endpoints.iter().enumerate() {
            watch(epoll, &endpoint.receiver, place as u64)?;
        }
        watch(epoll, &gateway.descriptor().0, GATEWAY)?;
        let group = ports.member.map(Group::new).transpose()?;
        if let Some(group) = &group {
            watch(epoll, &group.descriptor().0, GROUP)?;
        }
        if let Some(follower) = &ports.follower {
            watch(epoll, follower.descriptor(), FOLLOWER)?;
        }
        Ok(Self {
            port: fabric.uplink(),
            pool,
            endpoints: ports.endpoints,
            list: ports.list,
            follower: ports.follower,
            group,
            held: false,
            passing: false,
            astray: None,
            looked: None,
            outgoing: VecDeque::new(),
            segmentation: true,
            waiting: None,
            gateway,
            managed: None,
            psn: Psn::new(random() as u32),
            inbox: Inbox::new(),
            arrived: Vec::with_capacity(BATCH),
        })
    }

    /// Moves frames in both directions. Returns whether there were any, or one is
    /// waiting. If the program is about to answer what has arrived, acknowledgements wait
    /// for the next call, to leave with the answer.
    pub(crate) fn pump(&mut self, epoll: &Epoll, answers: bool) -> bool {
        let mut changed = false;
        if self.managed.is_none_or(|last| last.elapsed() >= MANAGED) {
            self.manage();
            changed = self.follow(epoll);
        }
        self.held = answers && !self.held && {
            self.port.recv_all(0, BATCH, &mut self.outgoing);
            may_be_held(&self.outgoing)
        };
        if self.held {
            return true;
        }
        let sent = self.send_all();
        let (received, _) = self.receive_all();
        received || sent || changed
    }

    /// Looks at the addresses of the interface if the system has announced a change. The
    /// sockets of an address that is gone stay, for its return. Returns whether the list
    /// has changed.
    fn follow(&mut self, epoll: &Epoll) -> bool {
        let Some(follower) = self.follower.as_ref().filter(|it| it.has_changed()) else {
            return false;
        };
        let Ok(found) = follower.addresses() else {
            return false;
        };
        for endpoint in &mut self.endpoints {
            let at = endpoint.at;
            let listed = found.iter().any(|it| it.address == at.address);
            endpoint.present = listed && (endpoint.present || socket::may_bind(at));
        }
        let endpoints = &self.endpoints;
        let mut changed = self.list.set_present(|ip| has_address(endpoints, ip));
        for at in found {
            if self.endpoints.iter().any(|it| it.at.address == at.address) {
                continue;
            }
            match self.add_address(at, epoll) {
                Ok(()) => changed = true,
                // It is being checked for duplicates, the end of which is announced.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
                Err(error) => {
                    let address = at.address;
                    tracing::warn!(%address, %error, "a new address is not used");
                }
            }
        }
        changed
    }

    fn add_address(&mut self, at: Scoped, epoll: &Epoll) -> io::Result<()> {
        let known: Vec<IpAddr> = self.endpoints.iter().map(|it| it.at.address).collect();
        if known.len() >= ADDRESSES {
            let many = format!("a device has at most {ADDRESSES} addresses");
            return Err(io::Error::other(many));
        }
        let member = self.group.as_ref().map(Group::member);
        let endpoint = Endpoint::add(at, member, &known)?;
        watch(epoll, &endpoint.receiver, known.len() as u64)
            .map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
        self.endpoints.push(endpoint);
        self.list.add(at.address);
        self.gateway.add_address(at.address);
        Ok(())
    }

    /// Receives what has arrived before a timeout takes effect. Returns whether there
    /// may be more.
    pub(crate) fn is_backlogged(&mut self) -> bool {
        self.receive_all().1
    }

    /// Handles the connection manager's messages.
    fn manage(&mut self) {
        // A turn handles a limited number of sockets.
        while self.gateway.turn() {}
        self.receive_passed();
        self.send_management();
        self.managed = Some(Instant::now());
    }

    /// Corrects which process receives what, after a packet has come to the wrong one.
    fn look(&mut self) {
        let Some(place) = self.astray.take() else {
            return;
        };
        if self.looked.is_some_and(|last| last.elapsed() < LOOKING) {
            return;
        }
        self.looked = Some(Instant::now());
        if let (Some(group), Some(endpoint)) = (&self.group, self.endpoints.get(place)) {
            let (at, receiver) = (endpoint.at, &endpoint.receiver);
            steering::look(group.member(), at, receiver);
        }
    }

    /// Receives what other processes have passed on.
    fn receive_passed(&mut self) {
        self.look();
        let Self {
            endpoints,
            group: Some(group),
            arrived,
            pool,
            gateway,
            ..
        } = self
        else {
            return;
        };
        self.passing = group.receive(|passed, bytes| {
            if !has_address(endpoints, passed.destination) {
                return;
            }
            if passed.kind == Kind::Management {
                return gateway.receive(passed.source, passed.destination, bytes);
            }
            let arrival = Arrival {
                source: passed.source,
                port: passed.port,
                destination: passed.destination,
                traffic_class: passed.traffic_class,
            };
            let headers = arrival.headers(OTHERS_MAC, DEVICE_MAC);
            if let Some(Ok(packet)) = headers.map(|it| it.frame(pool, bytes)) {
                if !is_management(packet.frame()) {
                    arrived.push(packet);
                }
            }
        });
        if !self.arrived.is_empty() {
            self.port.send_all(0, self.arrived.drain(..));
        }
    }

    /// Handles a management datagram for an address of the device, or passes it to the
    /// process that it is for.
    fn receive_management(
        gateway: &mut Gateway,
        group: Option<&mut Group>,
        (source, destination): (IpAddr, IpAddr),
        bytes: &[u8],
    ) {
        let other =
            group.and_then(|group| Some((gateway.other_member(destination, bytes)?, group)));
        if let Some((member, group)) = other {
            let passed = Passed {
                kind: Kind::Management,
                source,
                port: 0,
                destination,
                traffic_class: 0,
            };
            if group.pass(member, &passed, bytes) {
                return;
            }
        }
        gateway.receive(source, destination, bytes);
    }

    /// Takes the first frame, which is for an address of the device, back, or passes it
    /// to the process whose queue pair it is for.
    fn turn_around(&mut self, departure: &Departure) {
        let Some(mut packet) = self.outgoing.pop_front() else {
            return;
        };
        let other = self.group.as_mut().and_then(|group| {
            let member = member_of(packet.frame()).filter(|it| *it != group.number());
            Some((member?, group))
        });
        let Some((member, group)) = other else {
            // The fabric refuses frames whose source is not beyond the wire.
            let (to, rest) = packet.buffer_mut().split_at_mut(DEVICE_MAC.len());
            to.copy_from_slice(&DEVICE_MAC);
            rest[..OTHERS_MAC.len()].copy_from_slice(&OTHERS_MAC);
            return self.port.send_all(0, [packet]);
        };
        let passed = Passed {
            kind: Kind::Packet,
            source: departure.source,
            port: departure.port,
            destination: departure.destination,
            traffic_class: departure.traffic_class,
        };
        packet.seal();
        // If there is none, the packet is lost, as on a network.
        group.pass(member, &passed, &packet.frame()[departure.payload.clone()]);
    }

    /// Ends the connections of the connection manager, since the process ends.
    pub(crate) fn close(&mut self) {
        self.gateway.close();
        self.send_management();
        self.send_all();
    }

    /// Makes packets of the connection manager's messages.
    fn send_management(&mut self) {
        while let Some(Outgoing { from, to, bytes }) = self.gateway.pop() {
            if has_address(&self.endpoints, to) {
                // To the device itself.
                let group = self.group.as_mut();
                Self::receive_management(&mut self.gateway, group, (from, to), &bytes);
                continue;
            }
            let (sgid, dgid) = (gid_of_ip(from), gid_of_ip(to));
            let path = Path::roce_v2(DEVICE_MAC, OTHERS_MAC, sgid, dgid);
            let template = Template::new(&path);
            let bth = Bth {
                opcode: UD_SEND,
                solicited: true,
                migrated: true,
                pad: 0,
                version: 0,
                pkey: DEFAULT_PKEY,
                dest_qpn: QPN,
                ack_request: false,
                psn: self.psn,
            };
            self.psn = self.psn.plus(1);
            let mut builder = PacketBuilder::new(&self.pool, &template, bth, bytes.len());
            let deth = Deth {
                qkey: QKEY,
                source_qpn: QPN,
            };
            builder.put(&deth.bytes());
            builder.put(&bytes);
            self.outgoing.push_back(builder.finish());
        }
    }

    /// Returns whether there are frames to send.
    pub(crate) fn is_sending(&mut self) -> bool {
        self.manage();
        !self.outgoing.is_empty() || self.port.deadline().is_some()
    }

    /// Sends frames, as many as the sockets accept. Returns whether there were any.
    fn send_all(&mut self) -> bool {
        // The wire has no delay, so the time does not matter.
        self.port.recv_all(0, BATCH, &mut self.outgoing);
        let any = !self.outgoing.is_empty();
        while !self.outgoing.is_empty() {
            if let Some(departure) = self.departure_to_itself() {
                self.turn_around(&departure);
                continue;
            }
            join_acknowledgement(&mut self.outgoing);
            match self.send_batch() {
                Ok(count) => {
                    self.outgoing.drain(..count);
                    self.waiting = None;
                }
                Err(error) if is_full(&error) && self.may_wait() => break,
                // The network does not take it: no route, too long, filtered.
                Err(error) => {
                    tracing::debug!(%error, "a RoCE packet was not sent");
                    self.outgoing.pop_front();
                    self.waiting = None;
                }
            }
            if self.outgoing.len() < BATCH {
                self.port.recv_all(0, BATCH, &mut self.outgoing);
            }
        }
        any
    }

    /// Returns the addresses of the first frame if it is for an address of the device.
    fn departure_to_itself(&self) -> Option<Departure> {
        let departure = Departure::of(self.outgoing.front()?.frame())?;
        has_address(&self.endpoints, departure.destination).then_some(departure)
    }

    /// Returns whether the first frame may wait longer for room in its socket.
    fn may_wait(&mut self) -> bool {
        self.waiting.get_or_insert_with(Instant::now).elapsed() < MAX_FRAME_WAIT
    }

    /// Receives datagrams. Returns whether there were any, and whether there may be
    /// more.
    fn receive_all(&mut self) -> (bool, bool) {
        let (mut any, mut more) = (false, false);
        if self.passing {
            self.receive_passed();
            any = self.passing;
        }
        for place in 0..self.endpoints.len() {
            let mut datagrams = 0;
            loop {
                let (messages, received, all) = match datagrams {
                    0 => self.receive::<FIRST_MESSAGES>(place),
                    _ => self.receive::<MESSAGES>(place),
                };
                any |= messages != 0;
                datagrams += received;
                if all {
                    break;
                }
                if datagrams >= ENOUGH {
                    more = true;
                    break;
                }
            }
        }
        (any, more)
    }

    /// Receives up to `MOST` messages. Returns their number, that of datagrams, and whether
    /// there were no more.
    fn receive<const MOST: usize>(&mut self, at_address: usize) -> (usize, usize, bool) {
        let Self {
            endpoints,
            group,
            inbox,
            arrived,
            astray,
            pool,
            gateway,
            ..
        } = self;
        let (mut managed, mut datagrams) = (false, 0);
        let endpoint = &endpoints[at_address];
        let messages = inbox.receive::<MOST>(endpoint.receiver.as_fd(), |received, message| {
            let arrival = Arrival {
                source: received.source,
                port: received.port,
                destination: endpoint.at.address,
                traffic_class: received.traffic_class,
            };
            let headers = arrival.headers(OTHERS_MAC, DEVICE_MAC);
            for datagram in message {
                datagrams += 1;
                let framed = headers.as_ref().ok_or(NotRoce::Length);
                let packet = match framed.and_then(|it| it.frame(pool, datagram)) {
                    Ok(packet) => packet,
                    Err(error) => {
                        tracing::debug!(?error, "a datagram is no RoCE packet");
                        continue;
                    }
                };
                if is_management(packet.frame()) {
                    managed = true;
                    if let Some(message) = management(&packet) {
                        let both = (arrival.source, arrival.destination);
                        Self::receive_management(gateway, group.as_mut(), both, message);
                    }
                    continue;
                }
                let member = member_of(packet.frame());
                if let (Some(group), Some(member)) = (group.as_mut(), member) {
                    if member != group.number() {
                        let passed = Passed {
                            kind: Kind::Packet,
                            source: arrival.source,
                            port: arrival.port,
                            destination: arrival.destination,
                            traffic_class: arrival.traffic_class,
                        };
                        group.pass(member, &passed, datagram);
                        *astray = Some(at_address);
                        continue;
                    }
                }
                arrived.push(packet);
            }
        });
        if !self.arrived.is_empty() {
            self.port.send_all(0, self.arrived.drain(..));
        }
        if managed {
            self.send_management();
        }
        (messages, datagrams, messages < MOST)
    }
}

impl Drop for UdpWire {
    fn drop(&mut self) {
        let Some(group) = &self.group else { return };
        for Endpoint { at, receiver, .. } in self.endpoints.drain(..) {
            steering::leave(group.member(), at, receiver);
        }
    }
}

/// Has an epoll instance report when a descriptor is readable.
fn watch(epoll: &Epoll, descriptor: impl AsFd, number: u64) -> Result<()> {
    let event = EpollEvent::new(EpollFlags::EPOLLIN, number);
    let added = epoll.add(descriptor, event);
    added.map_err(|errno| Errno::new(errno as i32))
}

/// Returns whether an address is one of the device, and the host has it.
fn has_address(endpoints: &[Endpoint], address: IpAddr) -> bool {
    let mut present = endpoints.iter().filter(|it| it.present);
    present.any(|it| it.at.address == address)
}

/// Returns the BTH of a frame of this wire.
fn bth_of(frame: &[u8]) -> Option<&[u8; BTH]> {
    let ipv6 = frame.get(14).is_some_and(|byte| byte >> 4 == 6);
    frame.get(headroom(ipv6)..)?.first_chunk()
}

/// Returns the opcode of a frame; `None` if it is reserved.
fn opcode_of(frame: &[u8]) -> Option<Opcode> {
    Opcode::decode(bth_of(frame)?[0])
}

/// Returns the number of the queue pair that a frame is for.
fn qpn_of(frame: &[u8]) -> Option<u32> {
    bth_of(frame).map(|&[_, _, _, _, _, a, b, c, ..]| u32::from_be_bytes([0, a, b, c]))
}

/// Returns the number of the process whose queue pair a frame is for.
fn member_of(frame: &[u8]) -> Option<u8> {
    Some((qpn_of(frame)? >> QPN_BITS) as u8)
}

/// Returns whether a frame of this wire is for queue pair 1.
fn is_management(frame: &[u8]) -> bool {
    qpn_of(frame) == Some(QPN)
}

/// Returns the management datagram in a frame for queue pair 1.
fn management(packet: &Packet) -> Option<&[u8]> {
    let view = View::of(packet).ok()?;
    let right = view.bth.opcode == UD_SEND && view.deth()?.qkey == QKEY;
    // Of the default partition, whose members with limited rights take part.
    let right = right && view.bth.pkey & 0x7fff == DEFAULT_PKEY & 0x7fff;
    right.then_some(view.payload.bytes())
}

fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// Returns the address and the source port by which a frame leaves, as indices.
fn sender(endpoints: &[Endpoint], departure: &Departure) -> Option<(usize, usize)> {
    let from = |endpoint: &Endpoint| endpoint.at.address == departure.source;
    let endpoint = endpoints.iter().position(from)?;
    let families = [departure.source, departure.destination].map(|it: IpAddr| it.is_ipv6());
    if families[0] != families[1] || departure.destination.is_multicast() {
        return None;
    }
    let senders = &endpoints[endpoint].senders;
    // A frame that had to wait has its port already.
    let known = senders.iter().position(|sender| sender.0 == departure.port);
    let chosen = usize::from(departure.port & SOURCE_BITS) % senders.len();
    Some((endpoint, known.unwrap_or(chosen)))
}
