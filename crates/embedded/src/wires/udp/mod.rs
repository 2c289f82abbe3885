//! A wire to other hosts: RoCE v2 in UDP datagrams.
//!
//! ```text
//!  fabric ── uplink ── frames ──► Transmit ─── sendmmsg ──► a source port of 8
//!     ▲                                                         │ network
//!     └──────────────── frames ◄── RecvMeta ◄── recvmmsg ◄── port 4791
//! ```
//!
//! Segmentation and receive offload: several packets leave or arrive as one message of the
//! socket ([`segmentation`]).
//!
//! A datagram contains the UDP payload of a frame, which starts at the IP header
//! ([`roce::packet::LinkKind::Ip`]). The headers before the payload, which the ICRC covers, are
//! removed and restored ([`roce::packet::RecvMeta`]). Datagrams are
//! untrusted: length and ICRC are checked here, the rest by the transport, as for frames of
//! any network. The port's queue and the socket's buffer bound the unprocessed datagrams.

mod connection_table;
mod group;
mod interface_monitor;
mod multicast;
mod packets;
mod ports;
mod segmentation;
mod socket;
mod steering;

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags, EpollTimeout};
use roce::fabric::{Fabric, Port};
use roce::packet::{
    BTH_BYTES, DatagramError, Headers, LinkKind, MULTICAST_QPN, Opcode, Packet, Path, Pool, Psn,
    RecvMeta, Template, Transmit, View, gid_of_ip, headroom,
};
use roce::pcap::Direction;
use uverbs::Errno;

use crate::Result;
use crate::addresses::{AddressList, MAX_ADDRESSES};
use crate::capture::Recorder;
use crate::links::Links;
use crate::management::DropCause;
use crate::random::random;
use crate::wires::agent::{self, Agents, HostConnection, MAD, MAD_SIZE, Peer, PortAddress, QPN};
use crate::wires::wire::{self, MAX_FRAME_WAIT};
use group::{Forwarded, Group, MessageKind};
pub(crate) use group::{ID_BITS, QPN_BITS, group_directory, has_left_connections};
use interface_monitor::{InterfaceMonitor, InterfaceState};
use multicast::MulticastGroups;
use packets::{MAX_SEND_FRAMES, PacketPort};
use ports::Endpoint;
pub(crate) use ports::{HostAddresses, UdpPorts, interface_of};
use segmentation::{join_acknowledgement, may_hold};
use socket::{
    FIRST_RECV_MESSAGES, MAX_RECV_MESSAGES, MAX_SEND_DATAGRAMS, ReceiveBuffers, ScopedAddress,
};

/// Number of datagrams after which a turn receives no more at an address.
const MAX_DATAGRAMS: usize = 256;
/// The errors of sockets, the group, the interface monitor, the multicast groups and the packet
/// socket in epoll events; smaller numbers are indices of addresses.
const ERRORS: u64 = 1 << 32;
const GROUP: u64 = ERRORS + 1;
const INTERFACE_MONITOR: u64 = ERRORS + 2;
const MULTICAST: u64 = ERRORS + 3;
const PACKETS: u64 = ERRORS + 4;
/// Interval between two looks at these under load.
const CONTROL_INTERVAL: Duration = Duration::from_micros(50);
/// Maximum number of sockets' errors handled, and of management datagrams sent, in a turn.
const MAX_ERRORS: usize = 32;
const MAX_MANAGEMENT: usize = 8192;
/// Maximum number of raw packets that wait for room in their socket.
const MAX_WAITING_FRAMES: usize = 4096;
/// Shortest time between two corrections of the steering of packets to processes.
const STEERING_INTERVAL: Duration = Duration::from_secs(1);
/// Bits of the transport's source port that select the socket's.
const SOURCE_PORT_MASK: u16 = 0x3fff;

/// The wire of a device with addresses of this host.
pub(crate) struct UdpWire {
    port: Port,
    pool: Pool,
    endpoints: Vec<Endpoint>,
    /// The same addresses, for the device and the connection manager.
    list: Arc<AddressList>,
    /// The link of the device's port.
    links: Arc<Links>,
    /// Monitors the interface, if changes are announced.
    monitor: Option<InterfaceMonitor>,
    /// Other processes with the same addresses; `None` if the addresses are not shared.
    group: Option<Group>,
    multicast: Arc<MulticastGroups>,
    packets: Arc<PacketPort>,
    /// Raw packets to send.
    outgoing_frames: VecDeque<Packet>,
    /// Since when the first of them waits for room in the socket.
    frames_blocked_since: Option<Instant>,
    /// Acknowledgements are held back, to leave with the program's answer.
    acks_held: bool,
    /// Other processes may have forwarded packets: the last turn received some, or has not
    /// looked for a while.
    may_have_forwarded: bool,
    /// The address that last received a packet for another process, and when steering was
    /// last corrected.
    misrouted: Option<usize>,
    steering_checked: Option<Instant>,
    /// Frames to send.
    outgoing: VecDeque<Packet>,
    /// UDP segmentation offload is used; false once the system has refused it.
    segmentation: bool,
    /// Since when the first frame to send waits for room in its socket.
    blocked_since: Option<Instant>,
    /// The agents of queue pair 1.
    agents: Agents,
    /// Monitors the sockets of management datagrams for errors.
    errors: Epoll,
    /// When errors, other processes and the addresses were last looked at.
    controlled: Option<Instant>,
    /// Sequence number of the next management datagram.
    psn: Psn,
    buffers: ReceiveBuffers,
    /// Received frames, empty between calls.
    arrived: Vec<Packet>,
    /// Records what no device sees: management datagrams, and those with a wrong ICRC.
    recorder: Option<Arc<Recorder>>,
}

impl UdpWire {
    pub(crate) fn new(
        ports: UdpPorts,
        agents: Agents,
        fabric: &Fabric,
        pool: Pool,
        epoll: &Epoll,
    ) -> Result<Self> {
        let errors = wire::epoll()?;
        for (index, endpoint) in ports.endpoints.iter().enumerate() {
            watch(epoll, &endpoint.receiver, index as u64)?;
            watch_errors(&errors, endpoint.management_sender().as_fd(), index)?;
        }
        watch(epoll, &errors.0, ERRORS)?;
        let group = ports.member.map(Group::new).transpose()?;
        if let Some(group) = &group {
            watch(epoll, &group.descriptor().0, GROUP)?;
        }
        if let Some(monitor) = &ports.monitor {
            watch(epoll, monitor.descriptor(), INTERFACE_MONITOR)?;
        }
        watch(epoll, &ports.multicast.descriptor().0, MULTICAST)?;
        watch(epoll, &ports.packets.descriptor().0, PACKETS)?;
        Ok(Self {
            port: fabric.uplink(),
            pool,
            endpoints: ports.endpoints,
            list: ports.list,
            links: ports.links,
            monitor: ports.monitor,
            group,
            multicast: ports.multicast,
            packets: ports.packets,
            outgoing_frames: VecDeque::new(),
            frames_blocked_since: None,
            acks_held: false,
            may_have_forwarded: false,
            misrouted: None,
            steering_checked: None,
            outgoing: VecDeque::new(),
            segmentation: true,
            blocked_since: None,
            agents,
            errors,
            controlled: None,
            psn: Psn::new(random() as u32),
            buffers: ReceiveBuffers::new(),
            arrived: Vec::with_capacity(MAX_SEND_DATAGRAMS),
            recorder: None,
        })
    }

    /// Moves frames in both directions. Returns whether frames were moved, or a frame waits.
    /// With `answer_expected`, acknowledgements wait for the next call, to leave with the
    /// program's answer.
    pub(crate) fn pump(&mut self, now: Instant, epoll: &Epoll, answer_expected: bool) -> bool {
        let mut changed = false;
        if self
            .controlled
            .is_none_or(|last| now - last >= CONTROL_INTERVAL)
        {
            self.handle_refusals();
            self.may_have_forwarded = true;
            changed = self.update_interface(epoll);
            self.controlled = Some(now);
        }
        self.send_management();
        self.acks_held = answer_expected && !self.acks_held && {
            self.take_outgoing();
            may_hold(&self.outgoing)
        };
        if self.acks_held {
            return true;
        }
        let sent = self.send_all();
        let (received, _) = self.receive_all();
        let awaits_end = self.group.as_ref().is_some_and(Group::has_ended);
        if awaits_end {
            // The process that ends may need this processor.
            thread::yield_now();
        }
        received || sent || changed || awaits_end
    }

    /// Returns whether somebody has connected since the last call.
    pub(crate) fn take_caller(&mut self) -> bool {
        self.group.as_mut().is_some_and(Group::take_caller)
    }

    /// Sets what records the frames that no device sees.
    pub(crate) fn record_frames(&mut self, recorder: Option<Arc<Recorder>>) {
        self.recorder = recorder;
    }

    /// Updates link and addresses if the kernel has announced a change. Returns whether there is
    /// one.
    fn update_interface(&mut self, epoll: &Epoll) -> bool {
        let Some(monitor) = self.monitor.as_ref().filter(|it| it.has_changed()) else {
            return false;
        };
        let Ok(InterfaceState { up, addresses }) = monitor.state() else {
            return false;
        };
        let changed = self.links.set_down(u64::from(!up));
        changed | addresses.is_some_and(|found| self.update_addresses(found, epoll))
    }

    /// Updates the addresses. The sockets of a removed address stay open, in case it returns.
    /// Returns whether the list has changed.
    fn update_addresses(&mut self, found: Vec<ScopedAddress>, epoll: &Epoll) -> bool {
        for endpoint in &mut self.endpoints {
            let local = endpoint.local;
            let listed = found.iter().any(|it| it.address == local.address);
            endpoint.present = listed && (endpoint.present || socket::may_bind(local));
        }
        let endpoints = &self.endpoints;
        let mut changed = self.list.set_present(|ip| has_address(endpoints, ip));
        for local in found {
            if self
                .endpoints
                .iter()
                .any(|it| it.local.address == local.address)
            {
                continue;
            }
            match self.add_address(local, epoll) {
                Ok(()) => changed = true,
                // Duplicate address detection is in progress; its end is announced.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
                Err(error) => {
                    let address = local.address;
                    tracing::warn!(%address, %error, "new address not used");
                }
            }
        }
        changed
    }

    fn add_address(&mut self, local: ScopedAddress, epoll: &Epoll) -> io::Result<()> {
        let known: Vec<IpAddr> = self.endpoints.iter().map(|it| it.local.address).collect();
        if known.len() >= MAX_ADDRESSES {
            let message = format!("a device has at most {MAX_ADDRESSES} addresses");
            return Err(io::Error::other(message));
        }
        let member = self.group.as_ref().map(Group::member);
        let interface = self.multicast.interface;
        let endpoint = Endpoint::open_additional(local, interface, member, &known)?;
        let failed = |errno: Errno| io::Error::from_raw_os_error(errno.raw());
        watch(epoll, &endpoint.receiver, known.len() as u64).map_err(failed)?;
        let management = endpoint.management_sender();
        watch_errors(&self.errors, management.as_fd(), known.len()).map_err(failed)?;
        self.endpoints.push(endpoint);
        self.list.add(local.address);
        let agents = self.agents.all();
        agents.for_each(|agent| agent.add_address(local.address));
        Ok(())
    }

    /// Receives datagrams before a timeout takes effect. Returns whether there may be more.
    pub(crate) fn is_backlogged(&mut self) -> bool {
        self.receive_all().1 || self.is_blocked()
    }

    /// Reports datagrams that hosts have refused to the agents, and to other processes with the
    /// same addresses: a host limits the rate of its refusals.
    fn handle_refusals(&mut self) {
        let mut events = [EpollEvent::empty(); MAX_ERRORS];
        let count = self.errors.wait(&mut events, EpollTimeout::ZERO);
        for event in &events[..count.unwrap_or(0).min(MAX_ERRORS)] {
            let Some(endpoint) = self.endpoints.get(event.data() as usize) else {
                continue;
            };
            let local = endpoint.local.address;
            for (remote, payload) in socket::refusals(endpoint.management_sender()) {
                let mad = payload.get(MAD..MAD + MAD_SIZE).unwrap_or(&[]);
                let Ok(agent) = self.agents.agent_for(mad) else {
                    continue;
                };
                let refused = agent.handle_refusal(Peer::Host { local, remote }, mad);
                if let (Some(sent), Some(group)) = (refused, &mut self.group) {
                    let forwarded = Forwarded {
                        kind: MessageKind::Refusal,
                        source: remote,
                        port: 0,
                        destination: local,
                        traffic_class: 0,
                    };
                    group.broadcast(&forwarded, &(sent.as_nanos() as u64).to_be_bytes());
                }
            }
        }
    }

    /// Corrects the steering after a packet has arrived at the wrong process.
    fn correct_steering(&mut self) {
        let Some(index) = self.misrouted.take() else {
            return;
        };
        if self
            .steering_checked
            .is_some_and(|last| last.elapsed() < STEERING_INTERVAL)
        {
            return;
        }
        self.steering_checked = Some(Instant::now());
        if let (Some(group), Some(endpoint)) = (&self.group, self.endpoints.get(index)) {
            let (local, receiver) = (endpoint.local, &endpoint.receiver);
            steering::correct(group.member(), local, receiver);
        }
    }

    /// Receives packets that other processes have forwarded.
    fn receive_forwarded(&mut self) {
        self.may_have_forwarded = false;
        self.correct_steering();
        let Self {
            endpoints,
            group: Some(group),
            arrived,
            pool,
            agents,
            ..
        } = self
        else {
            return;
        };
        self.may_have_forwarded = group.receive(|forwarded, bytes| {
            if !has_address(endpoints, forwarded.destination) {
                return;
            }
            if forwarded.kind == MessageKind::Management {
                return pass_management(agents, forwarded.source, forwarded.destination, bytes);
            }
            if forwarded.kind == MessageKind::Refusal {
                let (local, remote) = (forwarded.destination, forwarded.source);
                if let Ok(nanos) = bytes.try_into().map(u64::from_be_bytes) {
                    let (peer, time) = (Peer::Host { local, remote }, Duration::from_nanos(nanos));
                    agents.all().for_each(|agent| agent.end_host(peer, time));
                }
                return;
            }
            let meta = RecvMeta {
                source: forwarded.source,
                port: forwarded.port,
                destination: forwarded.destination,
                traffic_class: forwarded.traffic_class,
            };
            let headers = meta.headers();
            if let Some(Ok(packet)) = headers.map(|it| it.frame(pool, bytes)) {
                if !is_management(packet.frame()) {
                    arrived.push(packet);
                }
            }
        });
        self.deliver_arrived();
        self.handle_ended_members();
    }

    /// Tells the peers of processes of this address that have ended, and steers their packets
    /// no longer.
    fn handle_ended_members(&mut self) {
        let endpoints = &self.endpoints;
        let Some(group) = self.group.as_mut().filter(|it| it.has_ended()) else {
            return;
        };
        for connection in group.take_left() {
            end_of_other(&self.agents, &connection);
        }
        while let Some(table) = group.take_over(|ip| has_address(endpoints, ip)) {
            for connection in &table.connections {
                end_of_other(&self.agents, connection);
            }
            store_changes(&self.agents, group);
            group.finish(table);
        }
        for endpoint in &self.endpoints {
            steering::correct(group.member(), endpoint.local, &endpoint.receiver);
        }
        self.send_management();
    }

    /// Handles a management datagram for an address of the device, or forwards it to the
    /// process that it is for.
    fn receive_management(
        agents: &Agents,
        group: Option<&mut Group>,
        (source, destination): (IpAddr, IpAddr),
        bytes: &[u8],
    ) {
        let other = group.and_then(|group| {
            let agent = agents.agent_for(bytes).ok()?;
            Some((agent.other_member(destination, bytes)?, group))
        });
        if let Some((member, group)) = other {
            let forwarded = Forwarded {
                kind: MessageKind::Management,
                source,
                port: 0,
                destination,
                traffic_class: 0,
            };
            if group.forward(member, &forwarded, bytes) {
                return;
            }
        }
        pass_management(agents, source, destination, bytes);
    }

    /// Delivers the first frame, which is for an address of the device: to the device itself,
    /// or to the process whose queue pair it is for.
    fn loop_back(&mut self, transmit: &Transmit) {
        let Some(mut packet) = self.outgoing.pop_front() else {
            return;
        };
        let other = self.group.as_mut().and_then(|group| {
            let member = member_of(packet.frame()).filter(|it| *it != group.number());
            Some((member?, group))
        });
        let Some((member, group)) = other else {
            return self.port.send_all(0, [packet]);
        };
        let forwarded = Forwarded {
            kind: MessageKind::Packet,
            source: transmit.source,
            port: transmit.port,
            destination: transmit.destination,
            traffic_class: transmit.traffic_class,
        };
        packet.add_icrc();
        // Without such a process the packet is lost, as on a network.
        group.forward(
            member,
            &forwarded,
            &packet.frame()[transmit.payload.clone()],
        );
    }

    /// Ends the connections of the connection manager, since the process ends.
    pub(crate) fn close(&mut self) {
        self.agents.all().for_each(|agent| agent.close());
        self.send_management_now();
    }

    /// Sends the management datagrams of the agents. Returns whether the sockets have no room.
    pub(crate) fn send_management_now(&mut self) -> bool {
        self.send_management();
        self.send_all();
        !self.outgoing.is_empty()
    }

    /// Queues the management datagrams of the agents as packets.
    fn send_management(&mut self) {
        if let Some(group) = &mut self.group {
            store_changes(&self.agents, group);
        }
        if !self.agents.has_outgoing() {
            return;
        }
        for _ in 0..MAX_MANAGEMENT {
            let Some(outgoing) = self.agents.pop() else {
                return;
            };
            let bytes = outgoing.bytes;
            let Peer::Host {
                local: from,
                remote: to,
            } = outgoing.to
            else {
                continue;
            };
            if has_address(&self.endpoints, to) {
                // To the device itself.
                let group = self.group.as_mut();
                Self::receive_management(&self.agents, group, (from, to), &bytes);
                continue;
            }
            let (sgid, dgid) = (gid_of_ip(from), gid_of_ip(to));
            let template = Template::new(&Path::ip(sgid, dgid));
            let packet = agent::packet(&self.pool, &template, self.psn, &bytes);
            self.psn = self.psn.plus(1);
            if let Some(recorder) = &self.recorder {
                recorder.record_management(&packet, Direction::Outbound);
            }
            self.outgoing.push_back(packet);
        }
    }

    /// Returns whether there are frames to send.
    pub(crate) fn is_sending(&mut self) -> bool {
        self.send_management();
        !self.outgoing.is_empty()
            || !self.outgoing_frames.is_empty()
            || self.port.deadline().is_some()
            || self.is_blocked()
    }

    /// Returns whether the sockets have accepted all frames of the fabric.
    pub(crate) fn has_sent_all(&mut self) -> bool {
        self.outgoing.is_empty() && self.port.deadline().is_none() && !self.is_blocked()
    }

    /// Returns whether packets wait for another process of this address.
    fn is_blocked(&mut self) -> bool {
        self.group.as_mut().is_some_and(Group::is_blocked)
    }

    /// Sends as many frames as the sockets accept. Returns whether there were any.
    fn send_all(&mut self) -> bool {
        if self.is_blocked() {
            // The receiver may need this processor to make room.
            thread::yield_now();
            return true;
        }
        let frames = self.take_outgoing();
        let any = frames || !self.outgoing.is_empty();
        while !self.outgoing.is_empty() {
            if let Some(transmit) = self.loopback_transmit() {
                if self.is_blocked() {
                    break;
                }
                self.loop_back(&transmit);
                continue;
            }
            join_acknowledgement(&mut self.outgoing);
            match self.send_batch() {
                Ok(count) => {
                    self.outgoing.drain(..count);
                    self.blocked_since = None;
                }
                Err(error) if is_full(&error) && self.may_wait() => break,
                // No route, too long, or filtered.
                Err(error) => {
                    tracing::debug!(%error, "RoCE packet not sent");
                    self.outgoing.pop_front();
                    self.blocked_since = None;
                }
            }
            if self.outgoing.len() < MAX_SEND_DATAGRAMS {
                self.take_outgoing();
            }
        }
        any
    }

    /// Takes the frames to send from the fabric, and sends those that are raw packets. Returns
    /// whether there were raw packets.
    fn take_outgoing(&mut self) -> bool {
        // The wire has no delay, so the time does not matter.
        self.port
            .recv_all(0, MAX_SEND_DATAGRAMS, &mut self.outgoing);
        let is_raw = |packet: &Packet| packet.kind() == LinkKind::Ethernet;
        if self.outgoing.iter().any(is_raw) {
            let taken = std::mem::take(&mut self.outgoing);
            for packet in taken {
                match is_raw(&packet) {
                    false => self.outgoing.push_back(packet),
                    true if self.outgoing_frames.len() < MAX_WAITING_FRAMES => {
                        self.outgoing_frames.push_back(packet);
                    }
                    true => tracing::debug!("raw packet not sent: too many wait"),
                }
            }
        }
        let any = !self.outgoing_frames.is_empty();
        if any {
            self.send_frames();
        } else if self.outgoing.is_empty() {
            self.packets.close_unused();
        }
        any
    }

    /// Sends as many raw packets as the socket accepts.
    fn send_frames(&mut self) {
        let Some(socket) = self.packets.current() else {
            self.outgoing_frames.clear();
            return;
        };
        while !self.outgoing_frames.is_empty() {
            let frames = self.outgoing_frames.iter().take(MAX_SEND_FRAMES);
            match socket.send(frames.map(Packet::frame)) {
                Ok(count) => {
                    self.outgoing_frames.drain(..count);
                    self.frames_blocked_since = None;
                }
                Err(error) => {
                    let since = self.frames_blocked_since.get_or_insert_with(Instant::now);
                    if is_full(&error) && since.elapsed() < MAX_FRAME_WAIT {
                        break;
                    }
                    tracing::debug!(%error, "raw packet not sent");
                    self.outgoing_frames.pop_front();
                    self.frames_blocked_since = None;
                }
            }
        }
    }

    /// Receives raw packets. Returns whether there were any.
    fn receive_frames(&mut self) -> bool {
        let Some(socket) = self.packets.current() else {
            return false;
        };
        let Self {
            packets,
            buffers,
            arrived,
            pool,
            ..
        } = self;
        let messages = packets.receive(&socket, buffers, |frame| {
            // Longer ones do not fit the device's MTU.
            arrived.extend(pool.copy_of(LinkKind::Ethernet, frame));
        });
        self.deliver_arrived();
        messages != 0
    }

    /// Returns the addresses of the first frame if its destination is the device.
    fn loopback_transmit(&self) -> Option<Transmit> {
        let transmit = Transmit::parse(self.outgoing.front()?)?;
        has_address(&self.endpoints, transmit.destination).then_some(transmit)
    }

    /// Returns whether the first frame may wait longer for room in its socket.
    fn may_wait(&mut self) -> bool {
        self.blocked_since
            .get_or_insert_with(Instant::now)
            .elapsed()
            < MAX_FRAME_WAIT
    }

    /// Receives datagrams. Returns whether there were any, and whether there may be
    /// more.
    fn receive_all(&mut self) -> (bool, bool) {
        let (mut any, mut more) = (self.receive_multicast(), false);
        any |= self.receive_frames();
        if self.may_have_forwarded {
            self.receive_forwarded();
            any |= self.may_have_forwarded;
        }
        for index in 0..self.endpoints.len() {
            let mut datagrams = 0;
            while !self.is_blocked() {
                let (messages, received, all) = match datagrams {
                    0 => self.receive::<FIRST_RECV_MESSAGES>(index),
                    _ => self.receive::<MAX_RECV_MESSAGES>(index),
                };
                any |= messages != 0;
                datagrams += received;
                if all {
                    break;
                }
                if datagrams >= MAX_DATAGRAMS {
                    more = true;
                    break;
                }
            }
        }
        (any, more)
    }

    /// Passes the received frames to the device.
    fn deliver_arrived(&mut self) {
        if !self.arrived.is_empty() {
            self.port.send_all(0, self.arrived.drain(..));
        }
    }

    /// Receives datagrams for multicast groups. Returns whether there were any.
    fn receive_multicast(&mut self) -> bool {
        let Self {
            endpoints,
            multicast,
            buffers,
            arrived,
            pool,
            recorder,
            ..
        } = self;
        let any = multicast.receive(buffers, |meta, message| {
            // The kernel returns what this device has sent, and the fabric has delivered.
            let is_own = |it: &Endpoint| {
                let mut ports = it.senders.iter().map(|sender| sender.0);
                it.local.address == meta.source && ports.any(|port| port == meta.port)
            };
            if endpoints.iter().any(is_own) {
                return;
            }
            let headers = meta.headers();
            let packets =
                message.filter_map(|it| frame(headers.as_ref(), pool, it, recorder.as_deref()));
            arrived.extend(packets.filter(|it| qpn_of(it.frame()) == Some(MULTICAST_QPN)));
        });
        self.deliver_arrived();
        any
    }

    /// Receives up to `MAX` messages. Returns the number of messages, the number of
    /// datagrams, and whether there were no more.
    fn receive<const MAX: usize>(&mut self, index: usize) -> (usize, usize, bool) {
        let Self {
            endpoints,
            group,
            buffers,
            arrived,
            misrouted,
            pool,
            agents,
            recorder,
            ..
        } = self;
        let recorder = recorder.as_deref();
        let (mut has_management, mut datagrams) = (false, 0);
        let mut probe = None;
        let endpoint = &endpoints[index];
        let (receiver, address) = (endpoint.receiver.as_fd(), endpoint.local.address);
        let messages = buffers.receive::<MAX>(receiver, address, |meta, message| {
            let headers = meta.headers();
            for datagram in message {
                datagrams += 1;
                if meta.source == address {
                    if let Some(found) = steering::Probe::parse(datagram) {
                        probe = Some(found);
                        continue;
                    }
                }
                let Some(packet) = frame(headers.as_ref(), pool, datagram, recorder) else {
                    continue;
                };
                if is_management(packet.frame()) {
                    has_management = true;
                    if let Some(recorder) = recorder {
                        recorder.record_management(&packet, Direction::Inbound);
                    }
                    let both = (meta.source, meta.destination);
                    match management(&packet) {
                        Some(message) => {
                            Self::receive_management(agents, group.as_mut(), both, message);
                        }
                        None => agents.drop_datagram(DropCause::Packet),
                    }
                    continue;
                }
                let member = member_of(packet.frame());
                if let (Some(group), Some(member)) = (group.as_mut(), member) {
                    if member != group.number() {
                        let forwarded = Forwarded {
                            kind: MessageKind::Packet,
                            source: meta.source,
                            port: meta.port,
                            destination: meta.destination,
                            traffic_class: meta.traffic_class,
                        };
                        group.forward(member, &forwarded, datagram);
                        *misrouted = Some(index);
                        continue;
                    }
                }
                arrived.push(packet);
            }
        });
        self.deliver_arrived();
        if let (Some(probe), Some(group)) = (probe, &self.group) {
            let Endpoint {
                local, receiver, ..
            } = &self.endpoints[index];
            steering::record(group.member(), *local, receiver, probe);
        }
        if has_management {
            self.send_management();
        }
        (messages, datagrams, messages < MAX)
    }
}

impl Drop for UdpWire {
    fn drop(&mut self) {
        let Some(group) = &self.group else { return };
        for Endpoint {
            local, receiver, ..
        } in self.endpoints.drain(..)
        {
            steering::leave(group.member(), local, receiver);
        }
    }
}

/// Adds a descriptor to an epoll instance, for reading.
fn watch(epoll: &Epoll, descriptor: impl AsFd, number: u64) -> Result<()> {
    let event = EpollEvent::new(EpollFlags::EPOLLIN, number);
    let added = epoll.add(descriptor, event);
    added.map_err(|errno| Errno::new(errno as i32))
}

/// Adds a socket to an epoll instance, for errors, which are reported unasked.
fn watch_errors(errors: &Epoll, socket: impl AsFd, index: usize) -> Result<()> {
    let event = EpollEvent::new(EpollFlags::empty(), index as u64);
    let added = errors.add(socket, event);
    added.map_err(|errno| Errno::new(errno as i32))
}

/// Stores changes of connections for other processes, before datagrams that follow from them
/// are sent.
fn store_changes(agents: &Agents, group: &mut Group) {
    for agent in agents.all() {
        while let Some(change) = agent.next_change() {
            group.store(&change);
        }
    }
}

/// Ends a connection of a process of this address that has ended.
fn end_of_other(agents: &Agents, connection: &HostConnection) {
    agents
        .all()
        .for_each(|agent| agent.end_of_other(connection));
}

/// Passes a management datagram of a host to its agent.
fn pass_management(agents: &Agents, remote: IpAddr, local: IpAddr, bytes: &[u8]) {
    let port = PortAddress {
        ethernet: true,
        gid: gid_of_ip(remote),
        lid: 0,
    };
    agents.receive(Peer::Host { local, remote }, port, bytes);
}

/// Creates the frame of a datagram; `None` if it is not a RoCE packet. One with a wrong ICRC is
/// recorded.
fn frame(
    headers: Option<&Headers>,
    pool: &Pool,
    datagram: &[u8],
    recorder: Option<&Recorder>,
) -> Option<Packet> {
    let not_roce = |error| {
        tracing::debug!(?error, "datagram is not a RoCE packet");
        if let (Some(recorder), Some(headers)) = (recorder, headers) {
            let packet = headers.unchecked_frame(pool, datagram);
            _ = packet.map(|packet| recorder.record_corrupted(&packet));
        }
    };
    let packet = headers.ok_or(DatagramError::Length);
    let packet = packet.and_then(|it| it.frame(pool, datagram));
    packet.map_err(not_roce).ok()
}

/// Returns whether the device has an address, and the host has it, too.
fn has_address(endpoints: &[Endpoint], address: IpAddr) -> bool {
    let mut present = endpoints.iter().filter(|it| it.present);
    present.any(|it| it.local.address == address)
}

/// Returns the UDP payload of a frame of this wire.
fn payload_of(frame: &[u8]) -> Option<&[u8]> {
    let ipv6 = frame.first().is_some_and(|byte| byte >> 4 == 6);
    frame.get(headroom(ipv6)..)
}

/// Returns the BTH of a frame of this wire.
fn bth_of(frame: &[u8]) -> Option<&[u8; BTH_BYTES]> {
    payload_of(frame)?.first_chunk()
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

/// Returns the number of the process to which a frame is steered.
fn receiving_member(frame: &[u8]) -> Option<u8> {
    if !is_management(frame) {
        return member_of(frame);
    }
    steering::management_member(payload_of(frame)?)
}

/// Returns whether a frame of this wire is for queue pair 1.
fn is_management(frame: &[u8]) -> bool {
    qpn_of(frame) == Some(QPN)
}

/// Returns the management datagram in a frame for queue pair 1.
fn management(packet: &Packet) -> Option<&[u8]> {
    agent::management(&View::parse_packet(packet).ok()?)
}

fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// Returns the indices of the endpoint and of the source port by which a frame leaves.
fn sender(
    endpoints: &[Endpoint],
    transmit: &Transmit,
    is_management: bool,
) -> Option<(usize, usize)> {
    let from = |endpoint: &Endpoint| endpoint.local.address == transmit.source;
    let endpoint = endpoints.iter().position(from)?;
    let families = [transmit.source, transmit.destination].map(|it: IpAddr| it.is_ipv6());
    if families[0] != families[1] {
        return None;
    }
    let (_, senders) = endpoints[endpoint].senders.split_last()?;
    if is_management {
        return Some((endpoint, senders.len()));
    }
    // A frame that was not accepted before has its port already.
    let known = senders.iter().position(|sender| sender.0 == transmit.port);
    let chosen = usize::from(transmit.port & SOURCE_PORT_MASK) % senders.len();
    Some((endpoint, known.unwrap_or(chosen)))
}
