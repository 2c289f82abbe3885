//! Processes of a user that share an address.
//!
//! Each process has a receiving socket in a SO_REUSEPORT group, which the kernel restricts
//! to one user. A BPF program steers each packet to the process whose queue pair it is for
//! ([`super::steering`]); a packet that arrives at another process is forwarded. No process
//! owns the port, so any of them may end.
//!
//! A member holds a number by a file lock in a directory of this user and network namespace.
//! The number is in the top bits of the member's queue pair numbers and communication ids,
//! and names the socket by which other members forward packets to it.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{IoSlice, IoSliceMut};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::Flock;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{
    Backlog, MsgFlags, SockFlag, accept4, getsockopt, listen, recvmsg, sendmsg, sockopt,
};
use nix::unistd::geteuid;
use roce::packet::{Gid, Path, gid_of_ip, ip_of_gid};
use uverbs::Errno;

use super::connection_table::{self, ConnectionTable, LeftTable};
use crate::directory::{Directory, Sharing};
use crate::peers::{PeerProcesses, ProcessStates};
use crate::wires::agent::{ConnectionChange, HostConnection};
use crate::wires::wire::MAX_FRAME_WAIT;
use crate::{Result, refuse};

/// Maximum number of members.
pub(crate) const MAX_MEMBERS: u8 = 64;
/// Bits of a queue pair number below the member's.
pub(crate) const QPN_BITS: u32 = 18;
/// Bits of a communication id below the member's.
pub(crate) const ID_BITS: u32 = 26;
/// Version of the messages between members, of the top bits that name them, and of the files
/// that they share. Changed with each of these.
const VERSION: u8 = 1;
/// How long a member that has taken a number may need to write its version.
const MAX_VERSION_WAIT: Duration = Duration::from_millis(200);
/// The error if a member has another version.
pub(crate) const OTHER_VERSION: &str = "a process of another version of ringverbs has this \
    address; end it, run the same version, or name another address";
/// Length of a message's header: version and kind, traffic class, port, addresses.
const HEADER: usize = 36;
/// Maximum length of a message's payload.
pub(crate) const MAX_PAYLOAD: usize = 5000;
/// Messages received per turn.
const MAX_MESSAGES_PER_TURN: usize = 256;
/// The listening socket in epoll events; smaller numbers are connections.
const LISTENER: u64 = 1 << 32;
/// Marks a connection by which the end of a member becomes known, by its number.
const WATCHED: u64 = 1 << 34;
/// How long a member that has ended may need to release its locks, and another one to tell its
/// peers.
const MAX_RELEASE_WAIT: Duration = Duration::from_secs(2);
/// Marks a link, by the number of its member, that has room again.
const ROOM: u64 = 1 << 33;
/// Maximum number of packets that wait for a member that does not receive, and how long they
/// do: later, nobody expects them.
const MAX_STALLED: usize = 1024;
const MAX_STALL: Duration = Duration::from_secs(5);

/// Kinds of messages between members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageKind {
    /// A datagram of RoCE v2.
    Packet = 1,
    /// A management datagram for queue pair 1.
    Management = 2,
    /// A host has refused a management datagram: nobody had its port. The message is the time.
    Refusal = 3,
    /// The sender's number is the port; its end ends the connection.
    Hello = 4,
}

/// Header of a forwarded packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forwarded {
    pub(crate) kind: MessageKind,
    pub(crate) source: IpAddr,
    pub(crate) port: u16,
    pub(crate) destination: IpAddr,
    pub(crate) traffic_class: u8,
}

fn address_of(gid: &[u8]) -> Option<IpAddr> {
    Some(ip_of_gid(gid.try_into().ok()?))
}

impl Forwarded {
    fn header(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[0] = VERSION << 4 | self.kind as u8;
        header[1] = self.traffic_class;
        header[2..4].copy_from_slice(&self.port.to_be_bytes());
        header[4..20].copy_from_slice(&gid_of_ip(self.source));
        header[20..36].copy_from_slice(&gid_of_ip(self.destination));
        header
    }

    /// Returns the version of a header.
    fn version(header: &[u8; HEADER]) -> u8 {
        header[0] >> 4
    }

    fn read(header: &[u8; HEADER]) -> Option<Self> {
        Some(Self {
            kind: match header[0] & 0xf {
                1 => MessageKind::Packet,
                2 => MessageKind::Management,
                3 => MessageKind::Refusal,
                4 => MessageKind::Hello,
                _ => return None,
            },
            traffic_class: header[1],
            port: u16::from_be_bytes([header[2], header[3]]),
            source: address_of(&header[4..20])?,
            destination: address_of(&header[20..36])?,
        })
    }
}

fn to_errno(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

pub(super) fn lock_name(member: u8) -> String {
    format!("{member}.lock")
}

fn socket_name(member: u8) -> String {
    format!("{member}.socket")
}

/// Returns the line of a member's file for its version.
fn version_line() -> String {
    format!("version {VERSION}")
}

/// Returns the line of a member's file for an address.
fn line_of(address: Gid) -> String {
    format!("{:032x}", u128::from_be_bytes(address))
}

/// First word of the line of a member's file with its process id.
const PROCESS: &str = "process ";

/// The processes of this user on the host, by the files of their memberships.
#[derive(Debug)]
pub(super) struct MemberProcesses {
    directory: Arc<Directory>,
    own: u8,
    states: ProcessStates,
}

impl MemberProcesses {
    pub(super) fn new(member: &Member) -> Self {
        Self {
            directory: Arc::clone(&member.directory),
            own: member.number,
            states: ProcessStates::default(),
        }
    }
}

impl PeerProcesses for MemberProcesses {
    fn process(&self, path: &Path, qpn: u32) -> Option<u32> {
        let member = (qpn >> QPN_BITS) as u8;
        let grh = path.grh.filter(|_| member != self.own)?;
        let text = self.directory.read(&lock_name(member)).unwrap_or_default();
        let address = line_of(grh.dgid);
        let mut process = text.lines().filter_map(|it| it.strip_prefix(PROCESS));
        let process: Option<u32> = process.next().and_then(|it| it.parse().ok());
        let has_address = text.lines().any(|it| it == address);
        process.filter(|_| has_address)
    }

    fn states(&self) -> &ProcessStates {
        &self.states
    }

    fn is_of_this_host(&self, path: &Path) -> bool {
        let Some(grh) = path.grh else { return false };
        let address = line_of(grh.dgid);
        (0..MAX_MEMBERS).any(|member| {
            let text = self.directory.read(&lock_name(member)).unwrap_or_default();
            text.lines().any(|it| it == address)
        })
    }
}

/// Returns the path of the directory of the members in the network namespace that a link of
/// `/proc` names, since addresses belong to that.
pub(crate) fn group_directory(parent: &FilePath, namespace: &FilePath) -> PathBuf {
    let namespace = fs::read_link(namespace).unwrap_or_default();
    let namespace = namespace.to_string_lossy();
    let digits: String = namespace.chars().filter(char::is_ascii_digit).collect();
    parent.join(format!("roce-{digits}"))
}

/// Opens the directory of the members.
///
/// # Errors
/// EACCES if it cannot be used.
fn open_directory() -> Result<Directory> {
    let unusable = |_| Errno::new(libc::EACCES);
    let parent = Directory::default_path();
    Directory::open(&parent, Sharing::Own).map_err(unusable)?;
    let path = group_directory(&parent, FilePath::new("/proc/thread-self/ns/net"));
    Directory::open(&path, Sharing::Own).map_err(unusable)
}

/// Returns whether a member has been killed whose peers nobody has told yet.
pub(crate) fn has_left_connections() -> bool {
    let Ok(directory) = open_directory() else {
        return false;
    };
    let is_left = |number: u8| {
        let table = LeftTable::take_over(&directory, number);
        table.is_some_and(|table| !table.connections.is_empty())
    };
    (0..MAX_MEMBERS).any(|number| connection_table::exists(&directory, number) && is_left(number))
}

/// Creates the table of a new member. Another process may be about to take over that of a
/// former one.
fn create_table(
    directory: &Directory,
    number: u8,
) -> Option<(ConnectionTable, Vec<HostConnection>)> {
    let begin = Instant::now();
    loop {
        let created = ConnectionTable::create(directory, number).ok()?;
        if created.is_some() || begin.elapsed() > MAX_VERSION_WAIT {
            return created;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The membership of this process, until dropped.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) directory: Arc<Directory>,
    pub(crate) number: u8,
    /// The addresses that the process joined with.
    addresses: Vec<Gid>,
    listener: OwnedFd,
    /// `None` if it could not be made: nobody tells the peers of this process if it is killed.
    table: Option<Box<ConnectionTable>>,
    /// Connections of a process that had the number before.
    left: Vec<HostConnection>,
    _lock: Flock<File>,
}

impl Member {
    /// Takes a free number. `addresses` are those of the device.
    ///
    /// # Errors
    /// EUSERS if all numbers are taken; EPROTONOSUPPORT if a member with one of the addresses
    /// has another version; errors of the directory.
    pub(crate) fn join(addresses: &[Gid]) -> Result<Self> {
        let directory = open_directory()?;
        for number in 0..MAX_MEMBERS {
            let Some(lock) = directory.lock(&lock_name(number))? else {
                continue;
            };
            // Before the sockets: the system closes it first.
            let mut created = create_table(&directory, number);
            if let Some((table, left)) = &mut created {
                left.retain(|it| {
                    let is_own = addresses.contains(&gid_of_ip(it.local));
                    if !is_own {
                        table.apply(&ConnectionChange::Ends(it.local_id));
                    }
                    is_own
                });
            }
            let (table, left) = created.unzip();
            let Some(listener) = directory.bind(&socket_name(number))? else {
                continue;
            };
            listen(
                &listener,
                Backlog::new(i32::from(MAX_MEMBERS)).map_err(to_errno)?,
            )
            .map_err(to_errno)?;
            let member = Self {
                directory: Arc::new(directory),
                number,
                addresses: addresses.to_vec(),
                listener,
                table: table.map(Box::new),
                left: left.unwrap_or_default(),
                _lock: lock,
            };
            member.announce(addresses)?;
            member.check_versions(addresses)?;
            return Ok(member);
        }
        refuse(libc::EUSERS)
    }

    /// Checks that the other members with these addresses have this version. Of two that join at
    /// once at least one sees the other.
    fn check_versions(&self, addresses: &[Gid]) -> Result<()> {
        let lines: Vec<String> = addresses.iter().map(|it| line_of(*it)).collect();
        let begin = Instant::now();
        for number in (0..MAX_MEMBERS).filter(|it| *it != self.number) {
            let name = lock_name(number);
            loop {
                let text = self.directory.read(&name).unwrap_or_default();
                let is_own = text.lines().next() == Some(&version_line());
                let shares =
                    text.is_empty() || text.lines().any(|it| lines.iter().any(|l| l == it));
                if is_own || !shares || !self.directory.is_locked(&name) {
                    break;
                }
                // Its file may be that of a member that has ended, until it writes.
                if begin.elapsed() > MAX_VERSION_WAIT {
                    if text.is_empty() {
                        break;
                    }
                    tracing::warn!(member = number, "{OTHER_VERSION}");
                    return refuse(libc::EPROTONOSUPPORT);
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Publishes the addresses to other members, which must precede opening a socket there.
    pub(super) fn announce(&self, addresses: &[Gid]) -> Result<()> {
        let lines = addresses.iter().map(|address| line_of(*address));
        let process = format!("{PROCESS}{}", std::process::id());
        let lines = [version_line(), process].into_iter().chain(lines);
        let text = lines.map(|line| line + "\n").collect::<String>();
        self.directory.write(&lock_name(self.number), &text)
    }

    /// Returns the number of members with this address.
    pub(crate) fn count(&self, address: Gid) -> usize {
        let line = line_of(address);
        let has = |number: &u8| {
            let name = lock_name(*number);
            let text = self.directory.read(&name).unwrap_or_default();
            text.lines().any(|it| it == line) && self.directory.is_locked(&name)
        };
        (0..MAX_MEMBERS).filter(has).count()
    }

    /// Returns whether another member has an address of this one.
    fn shares_address(&self, number: u8) -> bool {
        let text = self.directory.read(&lock_name(number)).unwrap_or_default();
        let mut lines = self.addresses.iter().map(|it| line_of(*it));
        lines.any(|line| text.lines().any(|it| it == line))
    }

    /// Connects to another member; `None` if there is no such member.
    fn connect(&self, member: u8) -> Option<OwnedFd> {
        if member == self.number || member >= MAX_MEMBERS {
            return None;
        }
        self.directory.connect(&socket_name(member)).ok()?
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(table) = &mut self.table {
            table.close(&self.directory, self.number);
        }
        self.directory.remove_socket(&socket_name(self.number));
        self.directory.remove_lock(&lock_name(self.number));
    }
}

/// A connection to another member; it is only written.
#[derive(Debug, Default)]
struct Link {
    socket: Option<OwnedFd>,
    /// Messages that the socket had no room for, and since when the first one waits.
    waiting: VecDeque<Box<[u8]>>,
    since: Option<Instant>,
    /// A message has waited too long: until there is room again, the device does not wait for
    /// it, so that a member that does not run does not delay the others. Only then the socket
    /// is watched for room, and the number of messages limited.
    is_stalled: bool,
}

/// Result of sending to another member.
enum Sent {
    Yes,
    NoRoom,
    NoMember,
}

impl Link {
    fn send(&mut self, member: &Member, to: u8, parts: &[IoSlice<'_>]) -> Sent {
        // The second attempt is for a connection to a member that has ended.
        for _ in 0..2 {
            if self.socket.is_none() {
                self.socket = member.connect(to);
            }
            let Some(socket) = &self.socket else {
                break;
            };
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<()>(socket.as_raw_fd(), parts, &[], flags, None) {
                Ok(_) => return Sent::Yes,
                Err(nix::Error::EAGAIN | nix::Error::ENOBUFS) => return Sent::NoRoom,
                Err(_) => self.socket = None,
            }
        }
        Sent::NoMember
    }

    /// Sends the messages that wait, in order, and watches the socket if it has no room for
    /// long.
    fn flush(&mut self, member: &Member, to: u8, epoll: &Epoll) {
        while let Some(first) = self.waiting.pop_front() {
            match self.send(member, to, &[IoSlice::new(&first)]) {
                Sent::Yes => {
                    self.since = None;
                    self.unwatch(epoll);
                }
                Sent::NoRoom => {
                    self.waiting.push_front(first);
                    let since = *self.since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= MAX_FRAME_WAIT {
                        self.watch(to, epoll);
                    }
                    return;
                }
                Sent::NoMember => self.waiting.clear(),
            }
        }
        self.since = None;
        self.unwatch(epoll);
    }

    fn watch(&mut self, to: u8, epoll: &Epoll) {
        if let (false, Some(socket)) = (self.is_stalled, &self.socket) {
            let event = EpollEvent::new(EpollFlags::EPOLLOUT, ROOM | u64::from(to));
            if epoll.add(socket, event).is_err() {
                self.waiting.clear();
                self.since = None;
                return;
            }
            self.is_stalled = true;
        }
    }

    /// A closed socket is not watched any more.
    fn unwatch(&mut self, epoll: &Epoll) {
        if std::mem::take(&mut self.is_stalled) {
            if let Some(socket) = &self.socket {
                let _ = epoll.delete(socket);
            }
        }
    }

    /// Called when a watched socket has room, or its member has ended.
    fn resume(&mut self, member: &Member, to: u8, epoll: &Epoll) {
        self.unwatch(epoll);
        if self.since.is_some_and(|it| it.elapsed() >= MAX_STALL) {
            tracing::debug!(
                to,
                lost = self.waiting.len(),
                "packets have waited too long"
            );
            self.waiting.clear();
        }
        self.since = None;
        self.flush(member, to, epoll);
    }
}

/// Connections to and from the other members.
#[derive(Debug)]
pub(crate) struct Group {
    member: Member,
    /// Connections to other members, by number.
    outgoing: Vec<Link>,
    /// Connections from other members; they are only read. With the number of those that tell
    /// of its end.
    incoming: Vec<Option<(OwnedFd, Option<u8>)>>,
    /// Connections to the members that joined before, which tell of their end.
    watched: Vec<Option<OwnedFd>>,
    /// Members that may have ended, and whose connections are not taken over yet.
    ended: Vec<(u8, Instant)>,
    /// A link that is not stalled may have messages that wait.
    has_waiting: bool,
    /// Somebody has connected, perhaps since a file that controls this process has changed.
    has_caller: bool,
    epoll: Epoll,
}

impl Group {
    pub(crate) fn new(member: Member) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(to_errno)?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER);
        epoll.add(&member.listener, event).map_err(to_errno)?;
        let mut group = Self {
            member,
            outgoing: (0..MAX_MEMBERS).map(|_| Link::default()).collect(),
            incoming: (0..2 * MAX_MEMBERS).map(|_| None).collect(),
            watched: (0..MAX_MEMBERS).map(|_| None).collect(),
            ended: Vec::new(),
            has_waiting: false,
            has_caller: false,
            epoll,
        };
        (0..MAX_MEMBERS).for_each(|number| group.watch_member(number));
        Ok(group)
    }

    /// Watches for the end of a member; one that has ended already is noticed at once. Those
    /// that join later watch this one.
    fn watch_member(&mut self, number: u8) {
        if number == self.number() {
            return;
        }
        let is_member = self.member.directory.is_locked(&lock_name(number));
        if is_member && !self.member.shares_address(number) {
            return;
        }
        let connect = || self.member.connect(number);
        let Some(socket) = is_member.then(connect).flatten() else {
            if connection_table::exists(&self.member.directory, number) {
                self.ended.push((number, Instant::now()));
            }
            return;
        };
        let hello = Forwarded {
            kind: MessageKind::Hello,
            source: IpAddr::from([0; 4]),
            port: self.number().into(),
            destination: IpAddr::from([0; 4]),
            traffic_class: 0,
        };
        let header = hello.header();
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let sent = sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(&header)],
            &[],
            flags,
            None,
        );
        let event = EpollEvent::new(EpollFlags::EPOLLRDHUP, WATCHED | u64::from(number));
        if sent.is_ok() && self.epoll.add(&socket, event).is_ok() {
            self.watched[usize::from(number)] = Some(socket);
        }
    }

    /// Stores a change of the connections of this process.
    pub(crate) fn store(&mut self, change: &ConnectionChange) {
        if let Some(table) = &mut self.member.table {
            table.apply(change);
        }
    }

    /// Returns the connections of a process that had this one's number before.
    pub(crate) fn take_left(&mut self) -> Vec<HostConnection> {
        std::mem::take(&mut self.member.left)
    }

    /// Returns the table of a member that has ended without telling its peers, if this process
    /// `has` its addresses. They are told by this process, or by another one if this one ends
    /// before [`finish`](Self::finish).
    pub(crate) fn take_over(&mut self, has: impl Fn(IpAddr) -> bool) -> Option<LeftTable> {
        let directory = &self.member.directory;
        let mut found = None;
        self.ended.retain(|(number, since)| {
            if found.is_some() {
                return true;
            }
            if !connection_table::exists(directory, *number) {
                return false;
            }
            let table = LeftTable::take_over(directory, *number);
            let is_other = |table: &LeftTable| table.connections.iter().any(|it| !has(it.local));
            if table.as_ref().is_some_and(is_other) {
                // For a process that has these addresses.
                return false;
            }
            found = table;
            // The system may not have released its lock yet, or another process tells.
            found.is_none() && since.elapsed() < MAX_RELEASE_WAIT
        });
        found
    }

    /// Removes a table whose connections were [stored](Self::store).
    pub(crate) fn finish(&self, table: LeftTable) {
        table.finish(&self.member.directory);
    }

    /// Returns whether somebody has connected since the last call.
    pub(crate) fn take_caller(&mut self) -> bool {
        std::mem::take(&mut self.has_caller)
    }

    /// Returns whether a member has ended, and peers may have to be told.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty() || !self.member.left.is_empty()
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    pub(crate) fn number(&self) -> u8 {
        self.member.number
    }

    /// Returns the descriptor that is readable when [`receive`](Self::receive) has
    /// something to do.
    pub(crate) fn descriptor(&self) -> &Epoll {
        &self.epoll
    }

    /// Forwards a packet to another member. Returns false if there is no such member. Without
    /// room the packet waits ([`is_blocked`](Self::is_blocked)).
    pub(crate) fn forward(&mut self, to: u8, forwarded: &Forwarded, bytes: &[u8]) -> bool {
        let Some(link) = self.outgoing.get_mut(usize::from(to)) else {
            return false;
        };
        let header = forwarded.header();
        if link.waiting.is_empty() {
            let parts = [IoSlice::new(&header), IoSlice::new(bytes)];
            match link.send(&self.member, to, &parts) {
                Sent::Yes => return true,
                Sent::NoMember => return false,
                Sent::NoRoom => {}
            }
        }
        if link.is_stalled {
            if link.waiting.len() >= MAX_STALLED {
                tracing::debug!(to, "packet for a process that does not receive");
                return true;
            }
        } else {
            // Bounded by what the callers have at hand: they take no more while it waits.
            self.has_waiting = true;
        }
        link.waiting.push_back([&header, bytes].concat().into());
        true
    }

    /// Sends a message to all members with addresses of this process.
    pub(crate) fn broadcast(&mut self, forwarded: &Forwarded, bytes: &[u8]) {
        for member in 0..MAX_MEMBERS {
            if self.shares_addresses(member) {
                self.forward(member, forwarded, bytes);
            }
        }
    }

    /// Returns whether a member has addresses of this process, and one of both watches the other.
    fn shares_addresses(&self, member: u8) -> bool {
        let mut later = self.incoming.iter().flatten().map(|it| it.1);
        self.watched[usize::from(member)].is_some() || later.any(|it| it == Some(member))
    }

    /// Sends packets that wait. Returns whether there still are any, for a process that
    /// receives; then the caller should take no more packets, neither of this device nor of its
    /// sockets.
    pub(crate) fn is_blocked(&mut self) -> bool {
        if self.has_waiting {
            self.has_waiting = false;
            for (to, link) in self.outgoing.iter_mut().enumerate() {
                if !link.is_stalled {
                    link.flush(&self.member, to as u8, &self.epoll);
                    self.has_waiting |= !link.is_stalled && !link.waiting.is_empty();
                }
            }
        }
        self.has_waiting
    }

    /// Receives forwarded packets. Returns whether there were any.
    pub(crate) fn receive(&mut self, mut each: impl FnMut(Forwarded, &[u8])) -> bool {
        let mut events = [EpollEvent::empty(); 16];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO);
        let count = count.unwrap_or(0).min(events.len());
        for event in &events[..count] {
            match event.data() {
                LISTENER => self.accept(),
                room if room & ROOM != 0 => self.resume((room & !ROOM) as u8),
                watched if watched & WATCHED != 0 => {
                    let number = (watched & !WATCHED) as u8;
                    self.watched[usize::from(number)] = None;
                    self.ended.push((number, Instant::now()));
                }
                number => self.read(number as usize, &mut each),
            }
        }
        count != 0
    }

    fn resume(&mut self, to: u8) {
        if let Some(link) = self.outgoing.get_mut(usize::from(to)) {
            link.resume(&self.member, to, &self.epoll);
            self.has_waiting |= !link.waiting.is_empty();
        }
    }

    fn accept(&mut self) {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        for _ in 0..MAX_MESSAGES_PER_TURN {
            let Ok(fd) = accept4(self.member.listener.as_raw_fd(), flags) else {
                return;
            };
            // SAFETY: the descriptor is new and owned by nothing else.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            // Defense in depth: the directory's permissions already keep other users out.
            let own = geteuid().as_raw();
            let peer = getsockopt(&socket.as_fd(), sockopt::PeerCredentials);
            let same_user = peer.is_ok_and(|it| it.uid() == own);
            let free = self.incoming.iter().position(Option::is_none);
            let Some(slot) = free.filter(|_| same_user) else {
                continue;
            };
            let event = EpollEvent::new(EpollFlags::EPOLLIN, slot as u64);
            if self.epoll.add(&socket, event).is_ok() {
                self.incoming[slot] = Some((socket, None));
            }
            self.has_caller = true;
        }
    }

    fn read(&mut self, number: usize, each: &mut impl FnMut(Forwarded, &[u8])) {
        let Some(slot) = self.incoming.get_mut(number) else {
            return;
        };
        for _ in 0..MAX_MESSAGES_PER_TURN {
            let Some((socket, watched)) = slot else {
                return;
            };
            let (mut header, mut bytes) = ([0; HEADER], [0; MAX_PAYLOAD]);
            let mut parts = [IoSliceMut::new(&mut header), IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_DONTWAIT;
            let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, None, flags);
            let received = received.map(|it| (it.bytes, it.flags.contains(MsgFlags::MSG_TRUNC)));
            match received {
                Err(nix::Error::EAGAIN | nix::Error::EINTR) => return,
                // The member has ended.
                Ok((0, _)) | Err(_) => {
                    let ended = watched.take().map(|number| (number, Instant::now()));
                    self.ended.extend(ended);
                    *slot = None;
                }
                Ok((length, _)) if length < HEADER || Forwarded::version(&header) != VERSION => {
                    tracing::warn!(version = Forwarded::version(&header), "{OTHER_VERSION}");
                    *slot = None;
                }
                Ok((length, false)) => {
                    let Some(forwarded) = Forwarded::read(&header) else {
                        continue;
                    };
                    if forwarded.kind == MessageKind::Hello {
                        let number = u8::try_from(forwarded.port).ok();
                        *watched = number.filter(|it| *it < MAX_MEMBERS);
                    } else {
                        each(forwarded, &bytes[..length - HEADER]);
                    }
                }
                Ok(_) => {}
            }
        }
    }
}

/// Returns the number of sockets bound to an address and UDP port, from `/proc/net`; `None`
/// if that cannot be read.
pub(super) fn count_sockets(address: IpAddr, port: u16) -> Option<usize> {
    let table = match address {
        IpAddr::V4(_) => "/proc/thread-self/net/udp",
        IpAddr::V6(_) => "/proc/thread-self/net/udp6",
    };
    let mut name = String::new();
    let bytes = match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    for word in bytes.chunks_exact(4) {
        // The table has native-endian words.
        let word = word.try_into().map_or(0, u32::from_ne_bytes);
        name += &format!("{word:08X}");
    }
    name += &format!(":{port:04X}");
    let table = fs::read_to_string(table).ok()?;
    let local = |line: &&str| line.split_whitespace().nth(1) == Some(&name);
    Some(table.lines().filter(local).count())
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn sockets_of_an_address_are_counted() {
        let one = UdpSocket::bind("127.49.0.1:0").unwrap();
        let at = one.local_addr().unwrap();
        assert_eq!(count_sockets(at.ip(), at.port()), Some(1));
        assert_eq!(count_sockets([127, 49, 0, 2].into(), at.port()), Some(0));
        let Ok(six) = UdpSocket::bind("[::1]:0") else {
            return;
        };
        let at = six.local_addr().unwrap();
        assert_eq!(count_sockets(at.ip(), at.port()), Some(1));
    }

    /// One without a version is of one that had none.
    #[test]
    fn members_of_another_version_are_refused() {
        let [ip, other] = [30, 31].map(|byte| IpAddr::from([127, 49, 0, byte]));
        let [gid, elsewhere] = [ip, other].map(gid_of_ip);
        let old = Member::join(&[gid]).unwrap();
        let name = lock_name(old.number);
        for version in ["", "version 0\n", "version 2\n"] {
            let text = format!("{version}{}\n", line_of(gid));
            old.directory.write(&name, &text).unwrap();
            let refused = Member::join(&[elsewhere, gid]).unwrap_err();
            assert_eq!(refused.raw(), libc::EPROTONOSUPPORT);
            Member::join(&[elsewhere]).unwrap();
        }
        let error = crate::wires::udp::UdpPorts::open(&ip.to_string()).unwrap_err();
        assert!(error.to_string().contains(OTHER_VERSION), "{error}");
        old.announce(&[gid]).unwrap();
        Member::join(&[gid]).unwrap();
        // Of a killed member.
        let directory = Arc::clone(&old.directory);
        drop(old);
        directory.write(&name, &line_of(gid)).unwrap();
        Member::join(&[gid]).unwrap();
    }

    /// Such a member has joined without a look at the versions of others.
    #[test]
    fn messages_of_another_version_end_their_connection() {
        let gid = gid_of_ip([127, 49, 0, 32].into());
        let [one, two] = [(); 2].map(|()| Member::join(&[gid]).unwrap());
        let mut group = Group::new(two).unwrap();
        let forwarded = Forwarded {
            kind: MessageKind::Packet,
            source: [127, 49, 0, 33].into(),
            port: 0xc001,
            destination: [127, 49, 0, 32].into(),
            traffic_class: 0,
        };
        for (version, expected) in [(VERSION - 1, 0), (VERSION + 1, 0), (VERSION, 1)] {
            let socket = one.connect(group.number()).unwrap();
            let mut header = forwarded.header();
            header[0] = version << 4 | header[0] & 0xf;
            let send = || {
                let parts = [IoSlice::new(&header), IoSlice::new(b"bytes")];
                let flags = MsgFlags::MSG_NOSIGNAL;
                sendmsg::<()>(socket.as_raw_fd(), &parts, &[], flags, None)
            };
            send().unwrap();
            let mut count = 0;
            // The connection, its message, and those of other tests.
            for _ in 0..10 {
                group.receive(|it, _| count += usize::from(it == forwarded));
            }
            assert_eq!(count, expected, "version {version}");
            assert_eq!(send().is_ok(), expected == 1);
        }
    }

    #[test]
    fn packets_are_forwarded_to_a_member_until_it_ends() {
        let gid = gid_of_ip([127, 49, 0, 9].into());
        let (one, two) = (Member::join(&[gid]).unwrap(), Member::join(&[gid]).unwrap());
        assert_ne!(one.number, two.number);
        assert_eq!(two.count(gid), 2);
        let (mut one, mut two) = (Group::new(one).unwrap(), Group::new(two).unwrap());
        let forwarded = Forwarded {
            kind: MessageKind::Packet,
            source: "fe80::7".parse().unwrap(),
            port: 0xc001,
            destination: [127, 49, 0, 9].into(),
            traffic_class: 2,
        };
        assert!(one.forward(two.number(), &forwarded, b"bytes"));
        let mut received = Vec::new();
        while received.is_empty() {
            two.receive(|forwarded, bytes| received.push((forwarded, bytes.to_vec())));
        }
        assert_eq!(received, [(forwarded, b"bytes".to_vec())]);
        let gone = two.number();
        assert!(!two.forward(gone, &forwarded, b"to itself"));
        // Refusals of other tests' hosts are told to all members.
        let is_of_this_test = |it: &Forwarded| it.kind != MessageKind::Refusal;
        // More than its socket has room for.
        for number in 0..1000u32 {
            assert!(one.forward(gone, &forwarded, &[number.to_ne_bytes(); 256].concat()));
        }
        let mut numbers = Vec::new();
        while numbers.len() < 1000 {
            let sending = one.is_blocked();
            let any = two.receive(|forwarded, bytes| {
                if is_of_this_test(&forwarded) {
                    numbers.push(bytes[..4].to_vec());
                }
            });
            assert!(sending || any, "{} of 1000", numbers.len());
        }
        assert!(
            numbers
                .iter()
                .map(|it| &it[..])
                .eq((0..1000u32).map(|it| it.to_ne_bytes()))
        );
        // A member that does not receive.
        let started = Instant::now();
        let mut count = 0u32;
        let send = |one: &mut Group, count: &mut u32| {
            one.forward(gone, &forwarded, &[count.to_ne_bytes(); 256].concat());
            *count += 1;
        };
        while !one.is_blocked() {
            send(&mut one, &mut count);
        }
        while one.is_blocked() {}
        assert!(started.elapsed() < 10 * MAX_FRAME_WAIT);
        for _ in 0..100 {
            send(&mut one, &mut count);
            assert!(!one.is_blocked());
        }
        // When it receives again, it has lost nothing.
        let mut next = 0u32;
        let end = Instant::now() + Duration::from_secs(30);
        while next < count {
            assert!(Instant::now() < end, "{next} of {count}");
            two.receive(|forwarded, bytes| {
                if is_of_this_test(&forwarded) {
                    assert_eq!(bytes[..4], next.to_ne_bytes());
                    next += 1;
                }
            });
            one.receive(|_, _| {});
            one.is_blocked();
        }
        // There is a limit.
        while !one.is_blocked() {
            send(&mut one, &mut count);
        }
        while one.is_blocked() {}
        for _ in 0..2 * MAX_STALLED {
            send(&mut one, &mut count);
        }
        assert_eq!(one.outgoing[usize::from(gone)].waiting.len(), MAX_STALLED);
        drop(two);
        one.receive(|_, _| {});
        assert!(!one.forward(gone, &forwarded, b"bytes"));
        assert_eq!(one.member.count(gid), 1);
    }
}
