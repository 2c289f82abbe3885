//! The shared-memory wire: processes on one host that share a network through a directory
//! with a socket for each process.
//!
//! Each process has a number, from which the addresses of its devices are derived, so that
//! the destination of a frame determines the socket. A process holds its number by a file
//! lock, which the system releases when the process ends. A sender connects to the
//! receiver's socket and passes the shared memory of a ring, which then carries its frames
//! ([`crate::wires::frames`]). No central process is needed.
//!
//! Frames are untrusted, as those of any network: the transport checks them. The resources
//! that other processes can use here are bounded: connections and their rings, frames per
//! turn, frames that wait.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::Flock;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{Backlog, SockFlag, accept4, listen};
use roce::fabric::{Fabric, Port};
use roce::packet::{Gid, Grh, Link, LinkKind, Mac, Packet, Path, Pool, Psn, Template, View};
use roce::pcap::Direction;
use uverbs::Errno;

use crate::Result;
use crate::capture::Recorder;
use crate::directory::{Directory, OTHER_VERSION};
use crate::links::Links;
use crate::management::DropCause;
use crate::peers::{PeerProcesses, ProcessStates};
use crate::wires::agent::{self, Agents, MemberEnd, Outgoing as Datagram, Peer, PortAddress};
use crate::wires::frames::{Incoming, Outgoing, VERSION, is_closed, process_of};
use crate::wires::link_file;
use crate::wires::wire::MAX_FRAME_WAIT;

/// Maximum number of processes of a network.
pub(crate) const MAX_MEMBERS: u16 = 256;
/// Maximum number of devices of a process.
pub(crate) const MAX_DEVICES: u16 = 64;
/// Number of devices that a network can have: fewer than LIDs.
pub(crate) const MAX_NUMBER: u16 = MAX_MEMBERS * MAX_DEVICES;
/// Maximum number of sockets whose events are handled at once.
const MAX_EVENTS: usize = 64;
/// Index of the device whose link messages of the connection manager pass: that of the ids of
/// programs of libibverbs. Those of others are taken for its ids, too.
const MANAGER_DEVICE: usize = 0;
/// Maximum number of management datagrams that wait for room.
const MAX_MANAGEMENT: usize = 1024;
/// Maximum number of frames moved in each direction per turn.
const MAX_FRAMES: usize = 64;
/// Longest time between two polls of the sockets under load. Only opening and closing of
/// connections depends on them.
const SOCKET_INTERVAL: Duration = Duration::from_millis(1);
/// Longest time without a search for processes that frames for all should reach, and the age
/// from which the directory's modification time tells later changes apart.
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);
/// How long a process that has taken a number may need to write its version: it may wait for a
/// processor.
const MAX_VERSION_WAIT: Duration = Duration::from_secs(5);
/// How long it may need to replace that of a killed process, which had the number before.
const MAX_OLD_VERSION_WAIT: Duration = Duration::from_millis(200);
/// First multicast LID.
const MULTICAST_LID: u16 = 0xc000;
const _: () = assert!(MAX_NUMBER < MULTICAST_LID);

/// The listening socket in epoll events. Incoming connections are identified by their
/// indices, outgoing ones by the member's number plus `MEMBER_BASE`.
const LISTENER: u64 = u64::MAX;
const MEMBER_BASE: u64 = 1 << 16;

/// This process's part of the network.
pub(crate) struct Segment {
    port: Port,
    pool: Pool,
    directory: Arc<Directory>,
    number: u16,
    listener: OwnedFd,
    /// Connections from other processes, at most [`MAX_MEMBERS`].
    incoming: Vec<Option<Incoming>>,
    /// Processes that frames are sent to, by number, up to the largest one.
    members: Vec<Member>,
    /// Frames to send.
    outgoing: VecDeque<Packet>,
    /// A frame that the receiver's ring had no room for, with the receiver's number and the
    /// time since when it waits.
    blocked: Option<(Packet, u16, Instant)>,
    /// The links of this process's ports.
    links: Arc<Links>,
    /// Somebody has connected, perhaps since a file that controls this process has changed.
    has_caller: bool,
    processes: Arc<Processes>,
    /// The agents of queue pair 1.
    agents: Agents,
    /// Management datagrams to send, with the receiver's number and the time since when each
    /// waits. One that has waited too long is lost, so that it delays no other.
    management: VecDeque<(Packet, u16, Instant)>,
    /// Sequence number of the next one.
    psn: Psn,
    /// Processes that have ended, of which the agents are told once everything that they have
    /// sent is received.
    ended: Vec<EndedMember>,
    /// An accepted connection, which may be of the successor of a process in `ended`.
    successor: Option<OwnedFd>,
    /// Records management datagrams.
    recorder: Option<Arc<Recorder>>,
    /// Identifier of the network, in MAC addresses.
    network: u16,
    /// When the sockets were last polled.
    sockets_polled: Option<Instant>,
    /// The directory's modification time when all processes in it were connected to, and
    /// when that was.
    searched: Option<(SystemTime, Instant)>,
    /// Dropped last, so that the number is released after the socket is closed.
    _lock: Flock<File>,
}

/// A process that has ended.
#[derive(Debug)]
struct EndedMember {
    number: u16,
    end: MemberEnd,
    /// The process's id if it is known. An id may be 0: of a process that is not visible.
    process: Option<u32>,
    since: Instant,
}

/// The processes to which this one is connected.
#[derive(Debug)]
struct Processes {
    /// Identifier of the network, in MAC addresses.
    network: u16,
    /// Process ids by member, 0 if there is no connection.
    ids: Vec<AtomicU32>,
    states: ProcessStates,
}

impl Processes {
    fn new(network: u16) -> Self {
        Self {
            network,
            ids: (0..MAX_MEMBERS).map(|_| AtomicU32::new(0)).collect(),
            states: ProcessStates::default(),
        }
    }

    fn set(&self, member: u16, id: u32) {
        if let Some(entry) = self.ids.get(usize::from(member)) {
            entry.store(id, Ordering::Relaxed);
        }
    }
}

impl PeerProcesses for Processes {
    fn process(&self, path: &Path, _qpn: u32) -> Option<u32> {
        let number = match path.link {
            Link::Ib { dlid, .. } => dlid,
            Link::Ether { dmac, .. } => {
                let number = u16::from_be_bytes([dmac[4], dmac[5]]);
                if dmac != mac(self.network, number) {
                    return None;
                }
                number
            }
            Link::Ip => return None,
        };
        let FrameTarget::Member(member) = owner(number) else {
            return None;
        };
        let id = self.ids.get(usize::from(member))?.load(Ordering::Relaxed);
        (id != 0).then_some(id)
    }

    fn states(&self) -> &ProcessStates {
        &self.states
    }

    fn is_of_this_host(&self, _path: &Path) -> bool {
        true
    }
}

#[derive(Default)]
struct Member {
    link: Option<Outgoing>,
    /// A frame has waited too long for this member. It receives no more until it has read
    /// everything, so that a slow reader does not delay the other members.
    stalled: bool,
}

/// The result of a turn of the segment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PumpResult {
    /// Frames were moved, or a frame waits.
    pub(crate) busy: bool,
    /// Wake-ups may have been read that were meant for sleeping threads.
    pub(crate) wakeups_read: bool,
}

/// Destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameTarget {
    Member(u16),
    All,
    None,
}

fn to_errno(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

/// Returns the process that owns an address. Addresses are those of
/// `Settings::numbered`, with the network's identifier in a MAC address.
fn owner(number: u16) -> FrameTarget {
    match number.checked_sub(1).map(|number| number / MAX_DEVICES) {
        Some(member) if member < MAX_MEMBERS => FrameTarget::Member(member),
        _ => FrameTarget::None,
    }
}

/// Returns the number of the process that has the other end of a path.
pub(crate) fn member_of_path(path: &Path) -> Option<u16> {
    let number = match path.link {
        Link::Ib { dlid, .. } => dlid,
        Link::Ether { dmac, .. } => u16::from_be_bytes([dmac[4], dmac[5]]),
        Link::Ip => return None,
    };
    match owner(number) {
        FrameTarget::Member(member) => Some(member),
        _ => None,
    }
}

fn destination(kind: LinkKind, frame: &[u8]) -> FrameTarget {
    match (kind, frame) {
        (LinkKind::Ethernet, [first, ..]) if first & 1 != 0 => FrameTarget::All,
        (LinkKind::Ethernet, [0x02, 0x50, _, _, high, low, ..]) => {
            owner(u16::from_be_bytes([*high, *low]))
        }
        (LinkKind::Ib, [_, _, high, low, ..]) => match u16::from_be_bytes([*high, *low]) {
            lid if lid >= MULTICAST_LID => FrameTarget::All,
            lid => owner(lid),
        },
        _ => FrameTarget::None,
    }
}

/// Returns the MAC address of a device of a network.
fn mac(network: u16, number: u16) -> Mac {
    let ([a, b], [high, low]) = (network.to_be_bytes(), number.to_be_bytes());
    [0x02, 0x50, a, b, high, low]
}

/// Returns the link-local GID of a MAC address.
fn link_local([a, b, c, d, e, f]: Mac) -> Gid {
    [
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        a ^ 2,
        b,
        c,
        0xff,
        0xfe,
        d,
        e,
        f,
    ]
}

fn socket_name(number: u16) -> String {
    format!("{number}.socket")
}

fn lock_name(number: u16) -> String {
    format!("{number}.lock")
}

/// Checks that all other processes of this user have this version; those of others are told
/// apart when they connect.
///
/// # Errors
/// EPROTONOSUPPORT.
fn check_versions(directory: &Directory, own: u16) -> Result<()> {
    for number in (0..MAX_MEMBERS).filter(|it| *it != own) {
        let name = lock_name(number);
        let begin = Instant::now();
        while let Some(text) = directory.read(&name) {
            let is_own = text == VERSION.to_string();
            if is_own || !directory.is_locked(&name) {
                break;
            }
            // It may have taken its number just now.
            let max_wait = match text.is_empty() {
                true => MAX_VERSION_WAIT,
                false => MAX_OLD_VERSION_WAIT,
            };
            if begin.elapsed() > max_wait {
                tracing::warn!(process = number, version = text, "{OTHER_VERSION}");
                return Err(Errno::new(libc::EPROTONOSUPPORT));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Takes a free number, and listens on its socket.
fn take_number(directory: &Directory) -> Result<(u16, Flock<File>, OwnedFd)> {
    for number in 0..MAX_MEMBERS {
        if let Some(lock) = directory.lock(&lock_name(number))? {
            directory.write(&lock_name(number), &VERSION.to_string())?;
            check_versions(directory, number)?;
            if let Some(listener) = directory.bind(&socket_name(number))? {
                return Ok((number, lock, listener));
            }
        }
    }
    Err(Errno::new(libc::EUSERS))
}

/// Connects to each process of a directory, which then reads the files that control it. Returns how many
/// there are.
pub(crate) fn connect_to_each(directory: &Directory) -> usize {
    let connects = |number: &u16| matches!(directory.connect(&socket_name(*number)), Ok(Some(_)));
    (0..MAX_MEMBERS).filter(connects).count()
}

impl Segment {
    /// Joins the network of a directory.
    pub(crate) fn join(
        directory: Arc<Directory>,
        fabric: &Fabric,
        pool: Pool,
        epoll: &Epoll,
    ) -> Result<Self> {
        let network = directory.id()?;
        let (number, lock, listener) = take_number(&directory)?;
        let backlog = Backlog::new(MAX_MEMBERS).map_err(to_errno)?;
        listen(&listener, backlog).map_err(to_errno)?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER);
        epoll.add(&listener, event).map_err(to_errno)?;
        Ok(Self {
            port: fabric.uplink(),
            pool,
            directory,
            number,
            listener,
            incoming: Vec::new(),
            members: Vec::new(),
            outgoing: VecDeque::new(),
            blocked: None,
            links: Arc::default(),
            has_caller: false,
            processes: Arc::new(Processes::new(network)),
            agents: Agents::default(),
            management: VecDeque::new(),
            psn: Psn::new(0),
            ended: Vec::new(),
            successor: None,
            recorder: None,
            network,
            sockets_polled: None,
            searched: None,
            _lock: lock,
        })
    }

    /// Returns the number of this process.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Sets the agents of queue pair 1.
    pub(crate) fn set_agents(&mut self, agents: Agents) {
        self.agents = agents;
    }

    /// Sets what records management datagrams, which no device sees.
    pub(crate) fn record_frames(&mut self, recorder: Option<Arc<Recorder>>) {
        self.recorder = recorder;
    }

    /// Returns the processes to which this one is connected.
    pub(crate) fn processes(&self) -> Arc<dyn PeerProcesses> {
        Arc::<Processes>::clone(&self.processes)
    }

    /// Sets where the links of this process's ports are kept.
    pub(crate) fn set_links(&mut self, links: Arc<Links>) {
        link_file::read(&self.directory, &links);
        self.links = links;
    }

    /// Returns the number of this process's first device.
    pub(crate) fn first_device(&self) -> u16 {
        self.number * MAX_DEVICES
    }

    /// Moves frames in both directions. Polls the sockets if that is due, or if
    /// `poll_sockets` is true.
    pub(crate) fn pump(&mut self, now: Instant, epoll: &Epoll, poll_sockets: bool) -> PumpResult {
        let mut result = PumpResult {
            busy: self.send_all(epoll),
            ..PumpResult::default()
        };
        if poll_sockets
            || self
                .sockets_polled
                .is_none_or(|at| now - at >= SOCKET_INTERVAL)
        {
            self.sockets_polled = Some(now);
            self.poll_sockets(epoll, &mut result);
        }
        result.busy |= self.receive_all(epoll);
        result.busy |= self.report_ended();
        result
    }

    /// Returns whether somebody has connected since the last call.
    pub(crate) fn take_caller(&mut self) -> bool {
        std::mem::take(&mut self.has_caller)
    }

    /// Sends the management datagrams of the agents. Returns whether something is left to do.
    pub(crate) fn send_management(&mut self, epoll: &Epoll) -> bool {
        if self.push_management(epoll) {
            self.wake_receivers();
        }
        !self.management.is_empty() || !self.ended.is_empty()
    }

    /// Requests a wake-up with the next frame, before a thread sleeps. Returns whether there
    /// are frames to receive already.
    pub(crate) fn arm(&self) -> bool {
        // No short circuit: every connection must be armed.
        let connections = self.incoming.iter().flatten();
        connections.fold(false, |found, from| from.arm() | found)
    }

    /// Returns whether frames wait here or in the ring of a receiver.
    pub(crate) fn is_unread(&mut self) -> bool {
        let is_sending = self.is_sending();
        let mut links = self.members.iter_mut().filter_map(|it| it.link.as_mut());
        is_sending || links.any(Outgoing::is_unread)
    }

    /// Returns whether there are frames to send.
    pub(crate) fn is_sending(&self) -> bool {
        let waits = self.blocked.is_some() || !self.outgoing.is_empty();
        waits || !self.management.is_empty() || self.port.deadline().is_some()
    }

    fn send_all(&mut self, epoll: &Epoll) -> bool {
        let active = self.push_management(epoll) | self.push_all(epoll);
        if active {
            self.wake_receivers();
        }
        active
    }

    fn wake_receivers(&mut self) {
        let links = self.members.iter_mut().filter_map(|it| it.link.as_mut());
        links.for_each(Outgoing::wake);
    }

    /// Pushes management datagrams. Returns whether there were any.
    fn push_management(&mut self, epoll: &Epoll) -> bool {
        while self.agents.has_outgoing() && self.management.len() < MAX_MANAGEMENT {
            let Some(datagram) = self.agents.pop() else {
                break;
            };
            if !self.links.is_up(MANAGER_DEVICE) {
                self.agents.drop_datagram(DropCause::LinkDown);
                continue;
            }
            if let Peer::Member(to) = datagram.to {
                let packet = self.packet(to, &datagram);
                if let Some(recorder) = &self.recorder {
                    recorder.record_management(&packet, Direction::Outbound);
                }
                self.management.push_back((packet, to, Instant::now()));
            }
        }
        let any = !self.management.is_empty();
        for _ in 0..self.management.len() {
            let Some((packet, to, since)) = self.management.pop_front() else {
                break;
            };
            let Some(link) = self.connect_to(to, epoll) else {
                self.ended.push(EndedMember {
                    number: to,
                    end: MemberEnd::Absent,
                    process: None,
                    since,
                });
                continue;
            };
            match link.push_management(&packet) {
                Ok(true) => {}
                Ok(false) if since.elapsed() >= MAX_FRAME_WAIT => {
                    self.agents.drop_datagram(DropCause::NoRoom { process: to });
                }
                Ok(false) => self.management.push_back((packet, to, since)),
                Err(_) => self.disconnect(to, epoll),
            }
        }
        any
    }

    /// Creates the packet of a management datagram for a process.
    fn packet(&mut self, to: u16, datagram: &Datagram) -> Packet {
        let port = datagram.port;
        let [own, to] = [self.number, to].map(|member| member * MAX_DEVICES + 1);
        let macs = [own, to].map(|number| mac(self.network, number));
        // The port that the peer will answer from is not known yet.
        let dgid = link_local(macs[1]);
        let path = match port.ethernet {
            true => Path::roce_v2(macs[0], macs[1], port.gid, dgid),
            false => {
                let slid = if port.lid == 0 { own } else { port.lid };
                Path {
                    grh: Some(Grh {
                        sgid: port.gid,
                        dgid,
                        hop_limit: 1,
                        ..Grh::default()
                    }),
                    ..Path::ib(slid, to)
                }
            }
        };
        let psn = self.psn;
        self.psn = psn.plus(1);
        agent::packet(&self.pool, &Template::new(&path), psn, &datagram.bytes)
    }

    /// Passes a frame for queue pair 1 to its agent.
    fn receive_management(&mut self, packet: &Packet, epoll: &Epoll) {
        if let Some(recorder) = &self.recorder {
            recorder.record_management(packet, Direction::Inbound);
        }
        if !self.links.is_up(MANAGER_DEVICE) {
            return self.agents.drop_datagram(DropCause::LinkDown);
        }
        let Ok(view) = View::parse_packet(packet) else {
            return self.agents.drop_datagram(DropCause::Packet);
        };
        let gid = view.network.sgid(view.frame).unwrap_or_default();
        let (number, lid) = match view.network.link {
            Link::Ib { slid, .. } => (slid, slid),
            Link::Ether { smac, .. } => (u16::from_be_bytes([smac[4], smac[5]]), 0),
            // Names no process.
            Link::Ip => return self.agents.drop_datagram(DropCause::Sender),
        };
        let FrameTarget::Member(member) = owner(number) else {
            return self.agents.drop_datagram(DropCause::Sender);
        };
        let Some(bytes) = agent::management(&view) else {
            return self.agents.drop_datagram(DropCause::Packet);
        };
        let port = PortAddress {
            ethernet: packet.kind() == LinkKind::Ethernet,
            gid,
            lid,
        };
        // Its end must become known, also before there is an answer.
        if self.connect_to(member, epoll).is_none() {
            self.add_ended(member, None);
        }
        self.agents.receive(Peer::Member(member), port, bytes);
    }

    /// Tells the agents of processes that have ended. Returns whether there are any.
    fn report_ended(&mut self) -> bool {
        if self.ended.is_empty() {
            return false;
        }
        let mut incoming = self.incoming.iter().flatten();
        let unread = incoming.any(Incoming::has_frames);
        // Without the time, not all events of the sockets were handled.
        let unread = unread || self.sockets_polled.is_none();
        // Its process may be about to close it.
        let closing = self.successor.as_ref().map(process_of);
        let is_closing = |it: &EndedMember| it.process.is_some() && it.process == closing;
        let waits =
            |it: &EndedMember| (unread || is_closing(it)) && it.since.elapsed() < MAX_FRAME_WAIT;
        let all = std::mem::take(&mut self.ended).into_iter();
        let (waiting, ended) = all.partition::<Vec<_>, _>(waits);
        self.ended = waiting;
        for it in ended {
            let agents = self.agents.all();
            agents.for_each(|agent| agent.end_member(it.number, it.end));
        }
        if self.successor.is_some() {
            self.sockets_polled = None;
        }
        true
    }

    fn push_all(&mut self, epoll: &Epoll) -> bool {
        let mut active = false;
        let mut search = None;
        if self.outgoing.is_empty() {
            // This network has no delay, so the time does not matter.
            self.port.recv_all(0, MAX_FRAMES, &mut self.outgoing);
        }
        for _ in 0..MAX_FRAMES {
            let (packet, to, since) = match self.blocked.take() {
                Some((packet, to, since)) => (packet, to, Some(since)),
                None => match self.outgoing.pop_front() {
                    Some(packet) => match destination(packet.kind(), packet.frame()) {
                        FrameTarget::Member(to) => (packet, to, None),
                        FrameTarget::All => {
                            // Delivery to all is best effort.
                            let own = self.number;
                            let search = *search.get_or_insert_with(|| self.search_is_due());
                            for to in (0..MAX_MEMBERS).filter(|to| *to != own) {
                                if search || self.is_connected(to) {
                                    self.send(to, &packet, epoll);
                                }
                            }
                            active = true;
                            continue;
                        }
                        FrameTarget::None => continue,
                    },
                    None => break,
                },
            };
            active = true;
            if self.send(to, &packet, epoll) {
                continue;
            }
            let Some(member) = self.members.get_mut(usize::from(to)) else {
                continue;
            };
            let since = since.unwrap_or_else(Instant::now);
            if !member.stalled && since.elapsed() < MAX_FRAME_WAIT {
                self.blocked = Some((packet, to, since));
                // The receiver may need this processor to make room.
                std::thread::yield_now();
                break;
            }
            member.stalled = true;
        }
        active
    }

    /// Returns whether processes may have joined since frames for all were last sent.
    fn search_is_due(&mut self) -> bool {
        let modified = self.directory.modified();
        let done = |(time, at): (SystemTime, Instant)| {
            Some(time) == modified && at.elapsed() < SEARCH_INTERVAL
        };
        if self.searched.is_some_and(done) {
            return false;
        }
        // A younger time could be that of a later change as well.
        let old = |time: &SystemTime| time.elapsed().is_ok_and(|age| age > SEARCH_INTERVAL);
        self.searched = modified.filter(old).map(|time| (time, Instant::now()));
        true
    }

    fn is_connected(&self, to: u16) -> bool {
        let member = self.members.get(usize::from(to));
        member.is_some_and(|member| member.link.is_some())
    }

    /// Sends a frame; drops it if the member does not exist. Returns false if there is no
    /// room.
    fn send(&mut self, to: u16, packet: &Packet, epoll: &Epoll) -> bool {
        if self.connect_to(to, epoll).is_none() {
            return true;
        }
        let Some(member) = self.members.get_mut(usize::from(to)) else {
            return true;
        };
        let Some(link) = &mut member.link else {
            return true;
        };
        if member.stalled && link.is_unread() {
            return false;
        }
        match link.push(packet) {
            Ok(true) => member.stalled = false,
            Ok(false) => return false,
            Err(_) => self.disconnect(to, epoll),
        }
        true
    }

    /// Returns the connection to a process; `None` if there is no such process.
    fn connect_to(&mut self, to: u16, epoll: &Epoll) -> Option<&mut Outgoing> {
        if !self.is_connected(to) {
            let id = MEMBER_BASE + u64::from(to);
            let link = Outgoing::connect(&self.directory, &socket_name(to), epoll, id)?;
            self.processes.set(to, link.process());
            let end = usize::from(to) + 1;
            if self.members.len() < end {
                self.members.resize_with(end, Member::default);
            }
            self.members[usize::from(to)] = Member {
                link: Some(link),
                stalled: false,
            };
        }
        self.members.get_mut(usize::from(to))?.link.as_mut()
    }

    /// Handles the end of a process, or of a connection that violates the protocol. Another
    /// process may take its number later.
    fn disconnect(&mut self, member: u16, epoll: &Epoll) {
        let known = self.members.get_mut(usize::from(member));
        if let Some(link) = known.and_then(|it| it.link.take()) {
            let process = link.process();
            link.close(epoll);
            self.processes.set(member, 0);
            self.add_ended(member, Some(process));
        }
    }

    fn add_ended(&mut self, number: u16, process: Option<u32>) {
        self.ended.push(EndedMember {
            number,
            end: MemberEnd::Ended,
            process,
            since: Instant::now(),
        });
    }

    /// Handles events of the sockets.
    fn poll_sockets(&mut self, epoll: &Epoll, result: &mut PumpResult) {
        let mut events = [EpollEvent::empty(); MAX_EVENTS];
        let count = epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        let mut accepts = false;
        for event in &events[..count] {
            match event.data() {
                LISTENER => accepts = true,
                // Receivers send nothing.
                id @ MEMBER_BASE.. => self.disconnect((id - MEMBER_BASE) as u16, epoll),
                place => {
                    if let Some(Some(from)) = self.incoming.get_mut(place as usize) {
                        from.read_socket(epoll);
                        result.wakeups_read = true;
                    }
                }
            }
        }
        if count == MAX_EVENTS {
            // More processes may have ended.
            result.busy = true;
            self.sockets_polled = None;
        } else if accepts || self.successor.is_some() {
            result.busy = true;
            self.accept_all(epoll);
        }
    }

    /// Accepts connections. A process that has ended may have a successor with its number, which
    /// must not be taken for it, and may have connected before its end, to send its last frames.
    fn accept_all(&mut self, epoll: &Epoll) {
        for _ in 0..MAX_EVENTS {
            let accepted = self.successor.take().or_else(|| self.accept());
            let Some(socket) = accepted else {
                return;
            };
            if !self.ended.is_empty() && !is_closed(&socket) {
                self.successor = Some(socket);
                return;
            }
            self.add_incoming(socket, epoll);
        }
    }

    /// Accepts a connection, if there is one.
    fn accept(&self) -> Option<OwnedFd> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd = accept4(self.listener.as_raw_fd(), flags).ok()?;
        // SAFETY: the descriptor is new and owned by nothing else.
        Some(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Adds a connection, if there is a free index.
    fn add_incoming(&mut self, socket: OwnedFd, epoll: &Epoll) {
        link_file::read(&self.directory, &self.links);
        self.has_caller = true;
        let free = self.incoming.iter().position(Option::is_none);
        let place = free.unwrap_or(self.incoming.len());
        if place < usize::from(MAX_MEMBERS) {
            if free.is_none() {
                self.incoming.push(None);
            }
            let mut from = Incoming::new(socket, epoll, place as u64);
            // The ring was sent with the connection.
            if let Some(from) = &mut from {
                from.read_socket(epoll);
            }
            self.incoming[place] = from;
        }
    }

    /// Receives frames from all connections.
    fn receive_all(&mut self, epoll: &Epoll) -> bool {
        let (mut active, pool) = (false, &self.pool);
        let mut management = Vec::new();
        for place in &mut self.incoming {
            let Some(from) = place else { continue };
            if from.has_frames() {
                active = true;
                let frames = std::iter::from_fn(|| from.receive(pool, epoll)).take(MAX_FRAMES);
                let frames = frames.filter_map(|(packet, is_management)| {
                    if is_management {
                        management.push(packet);
                        return None;
                    }
                    Some(packet)
                });
                self.port.send_all(0, frames);
            }
            if from.is_finished() {
                *place = None;
            }
        }
        for packet in management {
            self.receive_management(&packet, epoll);
        }
        active
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.directory.remove_socket(&socket_name(self.number));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use nix::sys::epoll::EpollCreateFlags;
    use softhca::Settings;
    use softhca::profile::Profile;

    use super::*;
    use crate::directory::Sharing;
    use crate::management::DropLog;
    use crate::wires::agent::Recorder;
    use crate::wires::wire::epoll;

    #[test]
    fn a_frame_goes_to_the_member_with_its_destination() {
        for (member, device) in [(0, 0), (0, 63), (1, 0), (255, 63)] {
            let number = member * MAX_DEVICES + device;
            let settings = Settings::numbered(Profile::named("roce").unwrap(), number);
            let mut frame = settings.mac.to_vec();
            frame.extend([0; 8]);
            assert_eq!(
                destination(LinkKind::Ethernet, &frame),
                FrameTarget::Member(member)
            );
            let [high, low] = settings.lid.to_be_bytes();
            let frame = [0, 0, high, low, 0, 0, 0, 0];
            assert_eq!(
                destination(LinkKind::Ib, &frame),
                FrameTarget::Member(member)
            );
        }
        let nobody = [
            (LinkKind::Ethernet, &[0x02, 0x50, 0x53, 0, 0, 0, 1][..]),
            (LinkKind::Ethernet, &[0x02, 0x50, 0x53, 0, 0x40, 1, 1]),
            (LinkKind::Ethernet, &[0x02, 0x51, 0x53, 0, 0, 1, 1]),
            (LinkKind::Ethernet, &[0x02, 0x50]),
            (LinkKind::Ib, &[0, 0, 0, 0]),
            (LinkKind::Ib, &[0, 0, 0x40, 1]),
            (LinkKind::Ib, &[0, 0]),
            (LinkKind::Ib, &[]),
        ];
        for (kind, frame) in nobody {
            assert_eq!(destination(kind, frame), FrameTarget::None, "{frame:?}");
        }
        assert_eq!(
            destination(LinkKind::Ethernet, &[0xff; 14]),
            FrameTarget::All
        );
        assert_eq!(
            destination(LinkKind::Ib, &[0, 0, 0xc0, 1]),
            FrameTarget::All
        );
    }

    /// Builds a frame from a local device to one of a process.
    fn frame(pool: &Pool, member: u16) -> Packet {
        let [high, low] = (member * MAX_DEVICES + 1).to_be_bytes();
        let mut frame = [0; 4000];
        frame[..6].copy_from_slice(&[0x02, 0x50, 0x53, 0, high, low]);
        frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        pool.copy_of(LinkKind::Ethernet, &frame).unwrap()
    }

    #[test]
    fn a_slow_reader_delays_no_other_member() {
        let name = format!("segment-slow-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let directory = Arc::new(Directory::open(&path, Sharing::Own).unwrap());
        let (fabric, pool) = (Fabric::new(1), Pool::new());
        let poll = epoll().unwrap();
        let mut segment =
            Segment::join(Arc::clone(&directory), &fabric, pool.clone(), &poll).unwrap();
        let listeners = [1, 2].map(|number| {
            let listener = directory.bind(&socket_name(number)).unwrap().unwrap();
            listen(&listener, Backlog::new(1).unwrap()).unwrap();
            listener
        });
        let device = fabric.port(roce::fabric::PortConfig::ethernet([2, 0, 0, 0, 0, 1]));
        while segment.blocked.is_none() {
            device.send(0, frame(&pool, 1));
            segment.pump(Instant::now(), &poll, false);
        }
        std::thread::sleep(MAX_FRAME_WAIT);
        segment.pump(Instant::now(), &poll, false);
        assert!(segment.blocked.is_none() && segment.members[1].stalled);
        let others = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        let accept = |listener: &OwnedFd| {
            let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_NONBLOCK).unwrap();
            // SAFETY: the descriptor is new and owned by nothing else.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            let mut from = Incoming::new(socket, &others, 0).unwrap();
            from.read_socket(&others);
            from
        };
        let mut slow = accept(&listeners[0]);
        let read = |from: &mut Incoming| from.receive(&pool, &others).is_some();
        // The slow member reads some frames: there is room, but not for all that wait.
        for _ in 0..3 {
            assert!(read(&mut slow));
        }
        for _ in 0..20 {
            device.send(0, frame(&pool, 1));
        }
        device.send(0, frame(&pool, 2));
        segment.pump(Instant::now(), &poll, false);
        assert!(
            read(&mut accept(&listeners[1])),
            "the frame to member 2 was delayed"
        );
        // A process that has read everything is treated like any other.
        while read(&mut slow) {}
        device.send(0, frame(&pool, 1));
        segment.pump(Instant::now(), &poll, false);
        assert!(read(&mut slow));
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn frames_for_all_search_for_processes_only_if_some_may_have_joined() {
        let name = format!("segment-search-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let directory = Arc::new(Directory::open(&path, Sharing::Own).unwrap());
        let fabrics = [1, 2].map(Fabric::new);
        let polls = [(); 2].map(|()| epoll().unwrap());
        let join = |at: usize| {
            let directory = Arc::clone(&directory);
            Segment::join(directory, &fabrics[at], Pool::new(), &polls[at]).unwrap()
        };
        let mut first = join(0);
        assert!(first.search_is_due());
        std::thread::sleep(2 * SEARCH_INTERVAL);
        assert!(first.search_is_due());
        // A busy machine may need longer than the interval until here.
        let (time, _) = first.searched.expect("the time is old enough");
        first.searched = Some((time, Instant::now() + Duration::from_secs(60)));
        assert!(!first.search_is_due());
        let mut second = join(1);
        let [sender, receiver] = [(0, 1), (1, 2)].map(|(at, number): (usize, u8)| {
            fabrics[at].port(roce::fabric::PortConfig::ethernet([2, 0, 0, 0, 1, number]))
        });
        let mut everybody = [0xff; 64];
        everybody[6..12].copy_from_slice(&[2, 0, 0, 0, 1, 1]);
        let packet = first.pool.copy_of(LinkKind::Ethernet, &everybody);
        sender.send(0, packet.unwrap());
        first.pump(Instant::now(), &polls[0], true);
        for _ in 0..3 {
            second.pump(Instant::now(), &polls[1], true);
        }
        let mut received = VecDeque::new();
        receiver.recv_all(0, 8, &mut received);
        assert_eq!(received.len(), 1);
        std::fs::remove_dir_all(&path).unwrap();
    }

    /// Its connection was not accepted before its end is known.
    #[test]
    fn the_last_datagram_of_a_process_that_ends_is_received() {
        let path = std::env::temp_dir().join(format!("segment-last-{}", std::process::id()));
        let directory = Arc::new(Directory::open(&path, Sharing::Own).unwrap());
        let fabrics = [1, 2].map(Fabric::new);
        let polls = [(); 2].map(|()| epoll().unwrap());
        let agents = [(); 2].map(|()| Arc::<Recorder>::default());
        let join = |at: usize| {
            let directory = Arc::clone(&directory);
            let mut segment =
                Segment::join(directory, &fabrics[at], Pool::new(), &polls[at]).unwrap();
            let entry = Arc::<Recorder>::clone(&agents[at]);
            segment.set_agents(Agents::default().with(agent::CONNECTION_MANAGEMENT, entry));
            segment
        };
        let send = |from: &mut Segment, at: usize, to: u16| {
            let mut bytes = [0; agent::MAD_SIZE];
            bytes[1] = agent::CONNECTION_MANAGEMENT;
            let port = PortAddress {
                ethernet: true,
                ..PortAddress::default()
            };
            let to = Peer::Member(to);
            let datagram = Datagram { to, port, bytes };
            agents[at].outgoing.lock().unwrap().push(datagram);
            from.pump(Instant::now(), &polls[at], true);
        };
        let mut survivor = join(0);
        let mut ends = join(1);
        send(&mut survivor, 0, 1);
        send(&mut ends, 1, 0);
        drop(ends);
        // The successor of its number connects before its end is known.
        let mut successor = join(1);
        send(&mut successor, 1, 0);
        let calls = || agents[0].calls();
        let began = Instant::now();
        while calls().len() < 3 && began.elapsed() < Duration::from_secs(10) {
            survivor.pump(Instant::now(), &polls[0], true);
        }
        assert_eq!(calls(), ["receive", "end", "receive"]);
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    pub(crate) fn dropped_datagrams_have_causes() {
        // Another test calls this one.
        let thread = std::thread::current().id();
        let name = format!("segment-drops-{}-{thread:?}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let directory = Arc::new(Directory::open(&path, Sharing::Own).unwrap());
        let (fabric, poll, pool) = (Fabric::new(1), epoll().unwrap(), Pool::new());
        let mut segment =
            Segment::join(Arc::clone(&directory), &fabric, pool.clone(), &poll).unwrap();
        let agent = Arc::<Recorder>::default();
        let entry = Arc::<Recorder>::clone(&agent);
        let drops = Arc::<DropLog>::default();
        drops.observe();
        let agents = Agents::new(Arc::clone(&drops));
        segment.set_agents(agents.with(agent::CONNECTION_MANAGEMENT, entry));
        let received = |segment: &mut Segment, packet: &Packet| {
            segment.receive_management(packet, &poll);
            drops.next()
        };
        let junk = pool.copy_of(LinkKind::Ethernet, &[0; 64]).unwrap();
        assert_eq!(received(&mut segment, &junk), Some(DropCause::Packet));
        // Of no process of the network, and of one with bytes for no agent.
        let from = |last: [u8; 2]| {
            let smac = [0x02, 0x50, 0x53, 0, last[0], last[1]];
            let dmac = mac(segment.network, 1);
            let path = Path::roce_v2(smac, dmac, link_local(smac), link_local(dmac));
            let bytes = [0; agent::MAD_SIZE];
            agent::packet(&pool, &Template::new(&path), Psn::new(0), &bytes)
        };
        let [stranger, unknown] = [from([0xff, 0xff]), from([0, 65])];
        assert_eq!(received(&mut segment, &stranger), Some(DropCause::Sender));
        let nobody = DropCause::NoAgent {
            class: 0,
            transactions: 0,
        };
        assert_eq!(received(&mut segment, &unknown), Some(nobody));
        let peer = Peer::Member(1);
        segment
            .agents
            .receive(peer, PortAddress::default(), &[7; 9]);
        assert_eq!(drops.next(), Some(DropCause::Length(9)));
        segment.links.set_down(1 << MANAGER_DEVICE);
        assert_eq!(received(&mut segment, &unknown), Some(DropCause::LinkDown));
        segment.links.set_down(0);
        // A process that accepts no connection.
        let listener = directory.bind(&socket_name(1)).unwrap().unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        while segment.management.is_empty() {
            let datagram = Datagram {
                to: peer,
                port: PortAddress {
                    ethernet: true,
                    ..PortAddress::default()
                },
                bytes: [0; agent::MAD_SIZE],
            };
            agent.outgoing.lock().unwrap().push(datagram);
            segment.push_management(&poll);
        }
        std::thread::sleep(MAX_FRAME_WAIT);
        segment.push_management(&poll);
        assert_eq!(drops.next(), Some(DropCause::NoRoom { process: 1 }));
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn processes_of_another_version_are_refused() {
        let path = std::env::temp_dir().join(format!("segment-version-{}", std::process::id()));
        let directory = Arc::new(Directory::open(&path, Sharing::Own).unwrap());
        let (fabric, poll) = (Fabric::new(1), epoll().unwrap());
        let join = || {
            let directory = Arc::clone(&directory);
            Segment::join(directory, &fabric, Pool::new(), &poll)
        };
        for other in ["1", "3"] {
            let lock = directory.lock(&lock_name(7)).unwrap().unwrap();
            directory.write(&lock_name(7), other).unwrap();
            let refused = join().map(drop).unwrap_err();
            assert_eq!(refused.raw(), libc::EPROTONOSUPPORT, "{other:?}");
            // It has ended.
            drop(lock);
            join().unwrap();
        }
        // It takes some time, in the place of one of another version or of none.
        for (before, time) in [("1", 20), ("", 300)] {
            let lock = directory.lock(&lock_name(7)).unwrap().unwrap();
            directory.write(&lock_name(7), before).unwrap();
            std::thread::scope(|scope| {
                let joined = scope.spawn(|| join().map(drop));
                std::thread::sleep(Duration::from_millis(time));
                directory
                    .write(&lock_name(7), &VERSION.to_string())
                    .unwrap();
                joined.join().unwrap().unwrap();
            });
            drop(lock);
        }
        std::fs::remove_dir_all(&path).unwrap();
    }

    /// Such a process has joined without a look at the versions of others.
    #[test]
    fn connections_of_another_version_are_closed() {
        use std::io::IoSlice;

        use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};
        use ring::FrameSender;

        let path = std::env::temp_dir().join(format!("segment-other-{}", std::process::id()));
        let directory = Arc::new(Directory::open(&path, Sharing::Own).unwrap());
        let (fabric, poll) = (Fabric::new(1), epoll().unwrap());
        let mut segment =
            Segment::join(Arc::clone(&directory), &fabric, Pool::new(), &poll).unwrap();
        for (version, is_open) in [(VERSION, true), (VERSION - 1, false), (0, false)] {
            let socket = directory.connect(&socket_name(0)).unwrap().unwrap();
            let (_ring, memory) = FrameSender::create().unwrap();
            let memory = [memory.as_raw_fd()];
            let handed = [ControlMessage::ScmRights(&memory)];
            let parts = [IoSlice::new(std::slice::from_ref(&version))];
            let flags = MsgFlags::empty();
            sendmsg::<()>(socket.as_raw_fd(), &parts, &handed, flags, None).unwrap();
            segment.pump(Instant::now(), &poll, true);
            let read = recv(socket.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT);
            let expected = if is_open {
                Err(nix::Error::EAGAIN)
            } else {
                Ok(0)
            };
            assert_eq!(read, expected, "version {version}");
        }
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn numbers_are_unique_and_reused() {
        let path = std::env::temp_dir().join(format!("segment-{}", std::process::id()));
        let directory = Arc::new(Directory::open(&path, Sharing::Own).unwrap());
        let fabric = Fabric::new(1);
        let polls: Vec<Epoll> = (0..3).map(|_| epoll().unwrap()).collect();
        let join = |at: usize| {
            let directory = Arc::clone(&directory);
            Segment::join(directory, &fabric, Pool::new(), &polls[at]).unwrap()
        };
        let (first, second) = (join(0), join(1));
        assert_eq!((first.number, second.number), (0, 1));
        drop(first);
        assert!(!path.join("0.socket").exists());
        assert_eq!(join(2).number, 0);
        drop(second);
        std::fs::remove_dir_all(&path).unwrap();
    }
}
