//! All ids and channels of a network in this process, and the commands on them,
//! which behave as in rdma_ucm and rdma_cm.
//!
//! Callers call [`settle`](Ids::settle) after each command and input.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use rdmacm::abi::{self, option};
use rdmacm::param::MAX_REJECT_DATA;
use rdmacm::{Address, EventKind, RejectReason, SidrStatus, address};
use roce::packet::ROCE_V2_PORT;
use uverbs::{AsyncEventType, Errno};
use zerocopy::IntoBytes;

use super::channel::{Channel, QueuedEvent};
use super::connection::ConnectionState;
use super::id::{Id, LocalPort, Phase, QKEY, is_local, multicast_gid, unspecified_to_loopback};
use super::machine::Machine;
use super::message::{Message, MessageKind};
use super::ports::{Binding, PortKey, Ports};
use crate::addresses::AddressList;
use crate::wires::agent::Peer;
use crate::{Result, refuse};

/// Maximum backlog, the default of net.rdma_ucm.max_backlog.
const MAX_BACKLOG: u32 = 1024;
/// Destination queue pair of multicast sends.
const MULTICAST_QPN: u32 = 0xff_ffff;
const MULTICAST_LID: u16 = 0xc000;

/// A membership in a multicast group.
#[derive(Debug)]
struct Membership {
    id: u32,
    reported: u32,
}

/// The clock of the deadlines.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    /// The host's monotonic time, the same in all processes.
    Host,
    /// Nanoseconds.
    Simulated(Arc<AtomicU64>),
}

impl Clock {
    pub(super) fn now(&self) -> Duration {
        match self {
            Self::Host => {
                clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
            }
            Self::Simulated(nanos) => Duration::from_nanos(nanos.load(Ordering::Acquire)),
        }
    }
}

#[derive(Debug)]
pub(super) struct Ids {
    pub(super) ports: Arc<Ports>,
    /// The device's addresses, if peers may be on other hosts.
    pub(super) host_addresses: Option<Arc<AddressList>>,
    pub(super) clock: Clock,
    /// The connections of the ids.
    pub(super) machine: Machine,
    /// Ids by the numbers of their connections.
    pub(super) by_connection: HashMap<u32, u32>,
    /// Listening ids by port.
    pub(super) listeners: HashMap<PortKey, Vec<u32>>,
    pub(super) channels: HashMap<RawFd, Channel>,
    pub(super) ids: BTreeMap<u32, Id>,
    memberships: BTreeMap<u32, Membership>,
    /// Ids by the end of their connections' time in Timewait.
    pub(super) timewaits: BTreeSet<(Duration, u32)>,
    pub(super) last: u32,
}

/// Returns the source address that the kernel selects for a destination.
fn source_for(to: SocketAddr) -> Option<IpAddr> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    // Connecting a UDP socket sends nothing.
    socket.connect((to.ip(), ROCE_V2_PORT)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The first port that any program may bind; ip_unprivileged_port_start does not count.
const FIRST_UNPRIVILEGED: u16 = 1024;

/// Returns whether this thread has CAP_NET_BIND_SERVICE.
fn may_bind_services() -> bool {
    const CAP_NET_BIND_SERVICE: u32 = 10;
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let set = status.lines().find_map(|it| it.strip_prefix("CapEff:"));
    let set = set.and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
    set.is_none_or(|set| set >> CAP_NET_BIND_SERVICE & 1 != 0)
}

/// Returns the default of AFONLY, as in rdma_cm.
fn is_family_only(ip: IpAddr) -> bool {
    let setting = || fs::read("/proc/sys/net/ipv6/bindv6only");
    ip.is_ipv4() || setting().is_ok_and(|it| it.starts_with(b"1"))
}

/// Parses an address in the kernel's format.
fn ip_address(bytes: &[u8]) -> Result<Option<SocketAddr>> {
    match address::parse(bytes) {
        Ok(None) => Ok(None),
        Ok(Some(Address::Ip(address))) => {
            // IPv4-mapped IPv6 addresses are IPv4.
            Ok(Some((address.ip().to_canonical(), address.port()).into()))
        }
        _ => refuse(libc::EAFNOSUPPORT),
    }
}

/// Returns the parameters of an event of a connection, with the whole private
/// data field.
pub(super) fn conn_param(kind: MessageKind, message: &Message) -> abi::ConnParam {
    let mut param = abi::ConnParam {
        qp_num: message.qp_num,
        private_data_len: kind.max_private_data() as u8,
        srq: message.srq,
        // Swapped to the receiver's view: the sender's limit as target is this
        // side's limit as initiator.
        responder_resources: message.initiator_depth,
        initiator_depth: message.responder_resources,
        flow_control: message.flow_control,
        retry_count: message.retry_count,
        rnr_retry_count: message.rnr_retry_count,
        ..Default::default()
    };
    let data = message.private_data();
    param.private_data[..data.len()].copy_from_slice(data);
    param
}

impl Ids {
    pub(super) fn new(
        ports: Arc<Ports>,
        host_addresses: Option<Arc<AddressList>>,
        clock: Clock,
        machine: Machine,
    ) -> Self {
        Self {
            ports,
            host_addresses,
            clock,
            machine,
            by_connection: HashMap::new(),
            listeners: HashMap::new(),
            channels: HashMap::new(),
            ids: BTreeMap::new(),
            memberships: BTreeMap::new(),
            timewaits: BTreeSet::new(),
            last: 0,
        }
    }

    pub(super) fn open(&mut self, port: LocalPort) -> Result<RawFd> {
        let (fd, channel) = Channel::new(port)?;
        self.channels.insert(fd, channel);
        Ok(fd)
    }

    pub(super) fn close(&mut self, fd: RawFd) -> Result<()> {
        let claim = &self.channel(fd)?.claim;
        if claim
            .as_ref()
            .is_some_and(|it| it.is_free() || it.is_lost())
        {
            self.leave_channel(fd);
        }
        let of_it: Vec<u32> = (self.ids.iter())
            .filter_map(|(number, id)| (id.channel == fd).then_some(*number))
            .collect();
        for number in of_it {
            // Fails for a request that was destroyed with its listener.
            let _ = self.destroy(number);
        }
        self.channels.remove(&fd);
        Ok(())
    }

    pub(super) fn channel(&mut self, fd: RawFd) -> Result<&mut Channel> {
        self.channels.get_mut(&fd).ok_or(Errno::new(libc::EBADF))
    }

    /// Returns an id of a channel.
    pub(super) fn id(&mut self, fd: RawFd, number: u32) -> Result<&mut Id> {
        match self.ids.get_mut(&number) {
            None => refuse(libc::ENOENT),
            Some(id) if id.channel != fd => refuse(libc::EINVAL),
            Some(id) => Ok(id),
        }
    }

    /// Returns the state of an id's connection.
    pub(super) fn connection_state(&self, number: u32) -> Option<ConnectionState> {
        let connection = self.ids.get(&number)?.connection?;
        self.machine.state(connection)
    }

    /// Returns the connection of an id of a channel that is in one of `states`.
    fn connection_in(&mut self, fd: RawFd, number: u32, states: &[ConnectionState]) -> Result<u32> {
        let connection = self.id(fd, number)?.connection;
        let state = self.connection_state(number);
        match connection.filter(|_| state.is_some_and(|it| states.contains(&it))) {
            Some(connection) => Ok(connection),
            None => refuse(libc::EINVAL),
        }
    }

    /// Separates an id from its connection, which has ended or goes on by itself.
    pub(super) fn detach(&mut self, number: u32, phase: Phase) {
        if let Some(id) = self.ids.get_mut(&number) {
            id.phase = phase;
            id.request = None;
            if let Some(connection) = id.connection.take() {
                self.by_connection.remove(&connection);
            }
        }
    }

    /// Returns an id of a channel that is in one of `phases`.
    fn id_in(&mut self, fd: RawFd, number: u32, phases: &[Phase]) -> Result<&mut Id> {
        let id = self.id(fd, number)?;
        if phases.contains(&id.phase) {
            Ok(id)
        } else {
            refuse(libc::EINVAL)
        }
    }

    pub(super) fn number(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            let used = &self.last;
            if !self.ids.contains_key(used) && !self.memberships.contains_key(used) {
                return self.last;
            }
        }
    }

    /// Queues an event; without effect if the id has no uid.
    pub(super) fn queue_event(&mut self, number: u32, what: EventKind, status: i32, param: &[u8]) {
        let Some(id) = self.ids.get(&number) else {
            return;
        };
        if id.uid == 0 {
            return;
        }
        let event = event((id.uid, number), what, status, param);
        let queued = QueuedEvent {
            id: number,
            membership: None,
            request: None,
            event,
        };
        if let Some(channel) = self.channels.get_mut(&id.channel) {
            channel.push(queued);
        }
    }

    pub(super) fn create(&mut self, fd: RawFd, command: &abi::CreateId) -> Result<u32> {
        let port = self.channel(fd)?.port;
        // Numbers of <rdma/rdma_user_cm.h> and <rdma/ib_user_verbs.h>.
        const IPOIB: u16 = 0x0002;
        const TCP: u16 = 0x0106;
        const UDP: u16 = 0x0111;
        const IB: u16 = 0x013f;
        let datagram = match command.ps {
            TCP => false,
            UDP | IPOIB => true,
            IB => u32::from(command.qp_type) == uverbs::QpType::UD.0,
            _ => return refuse(libc::EINVAL),
        };
        let number = self.number();
        let psn = self.ports.random.next();
        let mut id = Id::new(fd, port, command.ps, datagram, psn);
        id.uid = command.uid;
        id.may_be_remote = self.host_addresses.is_some();
        self.ids.insert(number, id);
        Ok(number)
    }

    /// Destroys an id, which closes its connection. Returns the number of its events that
    /// were read.
    pub(super) fn destroy(&mut self, number: u32) -> Result<u32> {
        let Some(id) = self.ids.remove(&number) else {
            return refuse(libc::ENOENT);
        };
        let unread = match self.channels.get_mut(&id.channel) {
            Some(channel) => channel.take(|queued| queued.id == number),
            None => Vec::new(),
        };
        for request in unread.iter().filter_map(|queued| queued.request) {
            // The id of an unread request exists.
            let _ = self.destroy(request);
        }
        self.memberships.retain(|_, it| it.id != number);
        if let Some(end) = id.timewait_end {
            self.timewaits.remove(&(end, number));
        }
        if id.phase == Phase::Listening {
            self.remove_listener(number, &id);
        }
        if let Some(connection) = id.connection {
            self.by_connection.remove(&connection);
            self.machine.release(self.clock.now(), connection);
        }
        Ok(id.reported)
    }

    pub(super) fn remove_listener(&mut self, number: u32, id: &Id) {
        let port = id.local.map_or(0, |local| local.port());
        let key = (id.space, port);
        if let Some(of_port) = self.listeners.get_mut(&key) {
            of_port.retain(|it| *it != number);
            if of_port.is_empty() {
                self.listeners.remove(&key);
            }
        }
    }

    pub(super) fn bind(&mut self, fd: RawFd, number: u32, address: &[u8]) -> Result<()> {
        let Some(address) = ip_address(address)? else {
            return refuse(libc::EINVAL);
        };
        if !self.may_bind(address.ip()) {
            return refuse(libc::EADDRNOTAVAIL);
        }
        let ports = Arc::clone(&self.ports);
        let hosts = self.host_addresses.clone();
        let id = self.id_in(fd, number, &[Phase::Idle])?;
        let family_only = (id.family_only).unwrap_or_else(|| is_family_only(address.ip()));
        let binding = Binding {
            ip: address.ip(),
            family_only,
        };
        let port = address.port();
        if port != 0 && port < FIRST_UNPRIVILEGED && !may_bind_services() {
            return refuse(libc::EACCES);
        }
        let bound_port = ports.reserve(id.space, port, binding, id.reuses)?;
        id.family_only = Some(family_only);
        id.port = id.port.at(address.ip(), hosts.as_deref());
        id.local = Some((address.ip(), bound_port.port()).into());
        id.bound_port = Some(bound_port);
        id.phase = Phase::Bound;
        Ok(())
    }

    /// Returns whether an id may be bound to an address.
    fn may_bind(&self, ip: IpAddr) -> bool {
        match &self.host_addresses {
            None => is_local(ip),
            // As in the kernel, loopback addresses select no device.
            Some(hosts) => ip.is_unspecified() || ip.is_loopback() || hosts.present().contains(&ip),
        }
    }

    /// Returns both addresses of a connection; `None` if the peer cannot be reached.
    fn route(&self, from: SocketAddr, to: SocketAddr) -> Option<(SocketAddr, SocketAddr)> {
        let Some(hosts) = &self.host_addresses else {
            if !is_local(to.ip()) && !to.ip().is_multicast() {
                return None;
            }
            let to = unspecified_to_loopback(to);
            // As the kernel routes to a local address: from the same address.
            let local = match from.ip().is_unspecified() {
                true if !to.ip().is_multicast() && !to.ip().is_loopback() => {
                    (to.ip(), from.port()).into()
                }
                _ => unspecified_to_loopback(from),
            };
            return Some((local, to));
        };
        let hosts = hosts.present();
        let family = |ip: &&IpAddr| ip.is_ipv4() == to.is_ipv4();
        let own = hosts.iter().filter(family);
        let local = match from.ip() {
            ip if hosts.contains(&ip) => ip,
            // The host no longer has the bound address.
            ip if !ip.is_unspecified() && !ip.is_loopback() => return None,
            // The kernel's choice, if that is an address of the device.
            _ => {
                let routed = source_for(to);
                let chosen = own.clone().find(|ip| routed == Some(**ip));
                *chosen.or(own.clone().next())?
            }
        };
        let peer = match to.ip() {
            ip if ip.is_unspecified() => local,
            // Loopback addresses are remote peers only for a device on a loopback address.
            ip if ip.is_loopback() && !local.is_loopback() => local,
            ip => ip,
        };
        Some(((local, from.port()).into(), (peer, to.port()).into()))
    }

    pub(super) fn listen(&mut self, fd: RawFd, number: u32, backlog: u32) -> Result<()> {
        let ports = Arc::clone(&self.ports);
        let id = self.id_in(fd, number, &[Phase::Idle, Phase::Bound])?;
        if id.bound_port.is_none() {
            let ip = IpAddr::from([0, 0, 0, 0]);
            let family_only = id.family_only.unwrap_or(true);
            let binding = Binding { ip, family_only };
            let bound_port = ports.reserve(id.space, 0, binding, id.reuses)?;
            id.local = Some((ip, bound_port.port()).into());
            id.bound_port = Some(bound_port);
            id.phase = Phase::Bound;
        }
        let backlog = if backlog == 0 {
            MAX_BACKLOG
        } else {
            backlog.min(MAX_BACKLOG)
        };
        let key = match &id.bound_port {
            Some(bound_port) => {
                bound_port.take()?;
                (id.space, bound_port.port())
            }
            None => return refuse(libc::EINVAL),
        };
        id.backlog = backlog;
        id.phase = Phase::Listening;
        self.listeners.entry(key).or_default().push(number);
        Ok(())
    }

    pub(super) fn resolve_address(
        &mut self,
        fd: RawFd,
        number: u32,
        (from, to): (&[u8], &[u8]),
    ) -> Result<()> {
        let from = ip_address(from)?;
        let Some(to) = ip_address(to)? else {
            return refuse(libc::EINVAL);
        };
        let id = self.id_in(fd, number, &[Phase::Idle, Phase::Bound])?;
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let from = from.or(id.local).or_else(|| any.parse().ok());
        let Some(from) = from.filter(|from| from.is_ipv4() == to.is_ipv4()) else {
            return refuse(libc::EINVAL);
        };
        if id.phase == Phase::Idle {
            let bytes = address::Sockaddr::from(&from.into()).bytes;
            self.bind(fd, number, &bytes)?;
        }
        let bound = self.id(fd, number)?.local.unwrap_or(from);
        let Some((local, peer)) = self.route(bound, to) else {
            self.queue_event(number, EventKind::ADDR_ERROR, -libc::ENETUNREACH, &[]);
            return Ok(());
        };
        let hosts = self.host_addresses.clone();
        let id = self.id(fd, number)?;
        (id.local, id.peer) = (Some(local), Some(peer));
        id.port = id.port.at(local.ip(), hosts.as_deref());
        id.phase = Phase::AddressResolved;
        self.queue_event(number, EventKind::ADDR_RESOLVED, 0, &[]);
        Ok(())
    }

    pub(super) fn resolve_route(&mut self, fd: RawFd, number: u32) -> Result<()> {
        self.id_in(fd, number, &[Phase::AddressResolved])?.phase = Phase::RouteResolved;
        self.queue_event(number, EventKind::ROUTE_RESOLVED, 0, &[]);
        Ok(())
    }

    pub(super) fn connect(&mut self, fd: RawFd, number: u32, param: &abi::ConnParam) -> Result<()> {
        let id = self.id_in(fd, number, &[Phase::RouteResolved])?;
        let kind = id.request_kind();
        let (Some(local), Some(peer)) = (id.local, id.peer) else {
            return refuse(libc::EINVAL);
        };
        let data = private_data(param, kind.max_private_data())?;
        let message = build_message(id, kind, data, param).with_addresses(local, peer);
        id.request = Some(Box::new(message));
        if !self.request(number) {
            self.detach(number, Phase::Closed);
            let (reason, status) = (RejectReason::INVALID_SERVICE_ID, SidrStatus::UNSUPPORTED);
            self.queue_failure(number, reason, status, &[]);
        }
        Ok(())
    }

    /// Sends the request of an id to who has the port and has not been asked yet. Returns whether
    /// there is one.
    pub(super) fn request(&mut self, number: u32) -> bool {
        let peer = self.ids.get(&number).and_then(|id| self.peer_of(id));
        let Some(id) = self.ids.get_mut(&number) else {
            return false;
        };
        let (Some(message), Some(peer)) = (&id.request, peer) else {
            return false;
        };
        id.asked.push(peer);
        id.phase = Phase::Connected;
        let (ends, kind) = (id.ends_with(peer), id.request_kind());
        let connection = (self.machine).request(self.clock.now(), ends, kind, message);
        self.set_connection(number, connection);
        true
    }

    /// Sends the request of an id again later, if a child of fork may come to listen on its port.
    /// Returns whether it does.
    pub(super) fn request_later(&mut self, number: u32) -> bool {
        let now = self.clock.now();
        let timeout = self.machine.response_timeout;
        // Of another host it is not known.
        let Some(id) = self.ids.get_mut(&number).filter(|id| !id.may_be_remote) else {
            return false;
        };
        let Some(message) = id.request.as_ref().filter(|it| self.ports.awaits_heir(it)) else {
            return false;
        };
        let until = *id
            .awaits_heir_until
            .get_or_insert(now.saturating_add(timeout));
        id.asked.clear();
        let peer = self.ports.peer_with(message, &[]);
        let Some(peer) = peer.filter(|_| now < until) else {
            return false;
        };
        id.asked.push(peer);
        let (ends, kind) = (id.ends_with(peer), id.request_kind());
        let connection = self.machine.request_later(now, ends, kind, message);
        self.set_connection(number, connection);
        true
    }

    /// Gives an id a new connection.
    fn set_connection(&mut self, number: u32, connection: u32) {
        let id = self.ids.get_mut(&number);
        if let Some(old) = id.and_then(|id| id.connection.replace(connection)) {
            self.by_connection.remove(&old);
        }
        self.by_connection.insert(connection, number);
    }

    /// Returns who may have the port that an id's request is for, and has not been asked yet.
    fn peer_of(&self, id: &Id) -> Option<Peer> {
        let message = id.request.as_ref()?;
        let peer = match self.ports.are_of_nodes() {
            false => self.ports.peer_with(message, &id.asked)?,
            true => {
                let listener = self.listener_for(id.request_kind(), message);
                let node = listener.and_then(|it| Some(self.ids.get(&it)?.port.node));
                let local = id.port.node;
                // If nobody listens, any node says so.
                let remote = node.unwrap_or(local);
                Peer::Node { local, remote }
            }
        };
        (!id.asked.contains(&peer)).then_some(peer)
    }

    /// Reports that a request failed.
    pub(super) fn queue_failure(
        &mut self,
        number: u32,
        reason: RejectReason,
        status: SidrStatus,
        param: &[u8],
    ) {
        match self.ids.get(&number).is_some_and(|id| id.datagram) {
            false => self.queue_event(number, EventKind::REJECTED, reason.0, param),
            true => self.queue_event(number, EventKind::UNREACHABLE, status.0, param),
        }
    }

    pub(super) fn accept(
        &mut self,
        fd: RawFd,
        number: u32,
        uid: u64,
        param: &abi::ConnParam,
    ) -> Result<()> {
        let now = self.clock.now();
        if param.valid == 0 {
            let connection = self.connection_in(fd, number, &[ConnectionState::RepRcvd])?;
            self.machine.establish(now, connection);
            return Ok(());
        }
        let requested = [ConnectionState::ReqRcvd, ConnectionState::SidrReqRcvd];
        let connection = self.connection_in(fd, number, &requested)?;
        let id = self.id(fd, number)?;
        let kind = if id.datagram {
            MessageKind::ServiceReply
        } else {
            MessageKind::Reply
        };
        let data = match private_data(param, kind.max_private_data()) {
            Ok(data) => data,
            Err(errno) => {
                // As in the kernel, the peer is rejected.
                let _ = self.reject(fd, number, 0, &[]);
                return Err(errno);
            }
        };
        id.uid = uid;
        let message = build_message(id, kind, data, param);
        let datagram = id.datagram;
        self.machine.reply(now, connection, &message);
        if datagram {
            self.detach(number, Phase::Connected);
        }
        Ok(())
    }

    pub(super) fn reject(&mut self, fd: RawFd, number: u32, reason: u8, data: &[u8]) -> Result<()> {
        let states = [
            ConnectionState::ReqRcvd,
            ConnectionState::SidrReqRcvd,
            ConnectionState::RepRcvd,
        ];
        let connection = self.connection_in(fd, number, &states)?;
        let consumer = RejectReason::CONSUMER_DEFINED.0;
        let reason = match i32::from(reason) {
            0 => consumer,
            reason => reason,
        };
        let vendor = RejectReason::VENDOR_OPTION_NOT_SUPPORTED.0;
        if data.len() > MAX_REJECT_DATA || reason != consumer && reason != vendor {
            return refuse(libc::EINVAL);
        }
        let now = self.clock.now();
        self.machine.reject(now, connection, reason as u8, data);
        self.detach(number, Phase::Closed);
        Ok(())
    }

    pub(super) fn disconnect(&mut self, fd: RawFd, number: u32) -> Result<()> {
        let state = self.connection_state(number);
        let id = self.id(fd, number)?;
        match id.phase {
            Phase::Connected | Phase::Closed => {}
            _ => return refuse(libc::EINVAL),
        }
        let connection = id.connection;
        id.has_disconnected |= matches!(
            state,
            None | Some(ConnectionState::Established | ConnectionState::DreqRcvd)
        );
        // Without effect if it is not connected yet, or no longer.
        if let Some(connection) = connection {
            self.machine.disconnect(self.clock.now(), connection);
            if state == Some(ConnectionState::DreqRcvd) {
                self.detach(number, Phase::Closed);
            }
        }
        self.enter_timewait(number);
        Ok(())
    }

    /// Handles a queue pair event for traffic that arrived before the peer's RTU.
    pub(super) fn notify(&mut self, fd: RawFd, number: u32, event: u32) -> Result<()> {
        let id = self.id(fd, number)?;
        if event != AsyncEventType::COMM_EST.0 || id.datagram {
            return refuse(libc::EINVAL);
        }
        if self.connection_state(number) == Some(ConnectionState::Established) {
            return refuse(libc::EISCONN);
        }
        let connection = self.connection_in(fd, number, &[ConnectionState::RepSent])?;
        self.machine.notify(connection);
        Ok(())
    }

    pub(super) fn set_option(
        &mut self,
        fd: RawFd,
        command: &abi::SetOption,
        value: &[u8],
    ) -> Result<()> {
        let id = self.id(fd, command.id)?;
        let byte = || <[u8; 1]>::try_from(value).map(|[byte]| byte);
        let flag = || <[u8; 4]>::try_from(value).map(|bytes| i32::from_ne_bytes(bytes) != 0);
        let wrong = |_| Errno::new(libc::EINVAL);
        match (command.level, command.optname) {
            (option::OPTION_ID, option::OPTION_ID_TOS) => id.tos = byte().map_err(wrong)?,
            (option::OPTION_ID, option::OPTION_ID_ACK_TIMEOUT) if !id.datagram => {
                id.ack_timeout = byte().map_err(wrong)? & 31;
            }
            (option::OPTION_ID, option::OPTION_ID_ACK_TIMEOUT) => return refuse(libc::EINVAL),
            (option::OPTION_ID, option::OPTION_ID_REUSEADDR) => {
                let flag = flag().map_err(wrong)?;
                // As in rdma_cm, it is not cleared once the id is bound.
                if id.phase != Phase::Idle && (!flag || id.phase == Phase::Listening) {
                    return refuse(libc::EINVAL);
                }
                id.reuses = flag;
                if let Some(bound_port) = &id.bound_port {
                    bound_port.reuse();
                }
            }
            (option::OPTION_ID, option::OPTION_ID_AFONLY) => {
                let flag = flag().map_err(wrong)?;
                if ![Phase::Idle, Phase::Bound].contains(&id.phase) {
                    return refuse(libc::EINVAL);
                }
                id.family_only = Some(flag);
                if let Some(bound_port) = &id.bound_port {
                    bound_port.set_family_only(flag);
                }
            }
            _ => return refuse(libc::ENOSYS),
        }
        Ok(())
    }

    /// Moves an id to another channel, with its unread events.
    pub(super) fn migrate(&mut self, fd: RawFd, command: &abi::MigrateId) -> Result<u32> {
        let from = RawFd::try_from(command.fd).map_err(|_| Errno::new(libc::EBADF))?;
        self.channel(fd)?;
        self.id(from, command.id)?;
        if from == fd {
            return Ok(self.id(fd, command.id)?.reported);
        }
        let old = self.channel(from)?;
        let events = old.take(|queued| queued.id == command.id);
        for event in events {
            if let Some(request) = event.request.and_then(|it| self.ids.get_mut(&it)) {
                request.channel = fd;
            }
            self.channel(fd)?.push(event);
        }
        let id = self.id(from, command.id)?;
        id.channel = fd;
        Ok(id.reported)
    }

    pub(super) fn write_event(&mut self, fd: RawFd, command: &abi::WriteCmEvent) -> Result<()> {
        self.id(fd, command.id)?;
        if command.event != EventKind::USER.0 && command.event != EventKind::INTERNAL.0 {
            return refuse(libc::EINVAL);
        }
        let (what, status) = (EventKind(command.event), command.status as i32);
        self.queue_event(command.id, what, status, command.arg.as_bytes());
        Ok(())
    }

    pub(super) fn join(
        &mut self,
        fd: RawFd,
        (number, uid): (u32, u64),
        address: &[u8],
        flags: u16,
    ) -> Result<u32> {
        let is_mapped = self.host_addresses.is_some();
        let address = ip_address(address)?.map(|it| it.ip());
        let Some(group) = address.and_then(|it| multicast_gid(it, is_mapped)) else {
            return refuse(libc::EINVAL);
        };
        let id = self.id(fd, number)?;
        if !id.datagram || !id.is_on_device() || flags > 1 {
            return refuse(libc::EINVAL);
        }
        let lid = MULTICAST_LID | u16::from_be_bytes([group[14] & 0x3f, group[15]]);
        let param = abi::UdParam {
            qp_num: MULTICAST_QPN,
            qkey: QKEY,
            ah_attr: id.path_to(group, lid, true),
            ..Default::default()
        };
        let membership = self.number();
        let queued = QueuedEvent {
            id: number,
            membership: Some(membership),
            request: None,
            event: event(
                (uid, membership),
                EventKind::MULTICAST_JOIN,
                0,
                param.as_bytes(),
            ),
        };
        self.channel(fd)?.push(queued);
        let made = Membership {
            id: number,
            reported: 0,
        };
        self.memberships.insert(membership, made);
        Ok(membership)
    }

    pub(super) fn leave(&mut self, fd: RawFd, membership: u32) -> Result<u32> {
        let Some(found) = self.memberships.get(&membership) else {
            return refuse(libc::ENOENT);
        };
        let (of, reported) = (found.id, found.reported);
        self.id(fd, of)?;
        self.channel(fd)?
            .take(|queued| queued.membership == Some(membership));
        self.memberships.remove(&membership);
        Ok(reported)
    }

    /// Returns the channel's next event.
    pub(super) fn next_event(&mut self, fd: RawFd) -> Result<QueuedEvent> {
        let Some(queued) = self.channel(fd)?.pop() else {
            return refuse(libc::EAGAIN);
        };
        self.count_read(&queued);
        Ok(queued)
    }

    /// Counts an event as read.
    fn count_read(&mut self, queued: &QueuedEvent) {
        if let Some(id) = self.ids.get_mut(&queued.id) {
            id.reported = id.reported.wrapping_add(1);
        }
        let membership = queued.membership.as_ref();
        if let Some(membership) = membership.and_then(|it| self.memberships.get_mut(it)) {
            membership.reported = membership.reported.wrapping_add(1);
        }
    }
}

/// Builds an event.
pub(super) fn event(
    (uid, id): (u64, u32),
    what: EventKind,
    status: i32,
    param: &[u8],
) -> Box<abi::EventResp> {
    let mut event = Box::new(abi::EventResp {
        uid,
        id,
        event: what.0,
        status: status as u32,
        ..Default::default()
    });
    for (to, from) in event.param.iter_mut().zip(param) {
        *to = *from;
    }
    event
}

fn private_data(param: &abi::ConnParam, max_private_data: usize) -> Result<&[u8]> {
    let length = usize::from(param.private_data_len);
    if length > max_private_data {
        return refuse(libc::EINVAL);
    }
    Ok(&param.private_data[..length])
}

/// Builds a message from a program's parameters, and stores them in the id.
fn build_message(id: &mut Id, kind: MessageKind, data: &[u8], param: &abi::ConnParam) -> Message {
    let port = id.port;
    let mut message = Message::new(kind, data).with_port(port.address());
    if param.qkey != 0 {
        id.qkey = param.qkey;
    }
    id.depths.responder_resources = param.responder_resources;
    id.depths.initiator_depth = param.initiator_depth;
    if kind == MessageKind::Request {
        // Applies to both ends; the accepting side has no influence.
        id.depths.retry_count = param.retry_count & 7;
    }
    message.space = id.space;
    message.mtu = port.mtu;
    message.traffic_class = id.tos;
    id.queue_pair = param.qp_num & 0xff_ffff;
    message.qp_num = id.queue_pair;
    message.qkey = id.qkey;
    message.psn = id.psn;
    message.responder_resources = param.responder_resources;
    message.initiator_depth = param.initiator_depth;
    message.retry_count = param.retry_count & 7;
    message.rnr_retry_count = param.rnr_retry_count & 7;
    message.flow_control = param.flow_control;
    message.srq = param.srq;
    message
}
