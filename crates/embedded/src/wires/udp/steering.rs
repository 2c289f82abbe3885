//! Steering of received packets: each goes to the socket of the process whose queue pair it
//! is for, by a BPF program (SO_ATTACH_REUSEPORT_CBPF).
//!
//! The program returns a socket's index in the SO_REUSEPORT group. The kernel appends a new
//! socket, and moves the last one to the index of a closed one. So the owners of the sockets
//! are known, and stored in a file, as long as members join, leave and end one at a time.
//! Without that knowledge the kernel distributes packets by their addresses and ports. A
//! wrong index costs a hop: members forward packets of other members. A packet that arrives
//! at the wrong member makes it send a [`Probe`] to each index; those who receive them
//! know, and store, their indices.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{MsgFlags, SockaddrStorage, sendto};
use roce::packet::{ROCE_V2_PORT, gid_of_ip};

use super::group::{ID_BITS, MAX_MEMBERS, Member, QPN_BITS, count_sockets, lock_name};
use super::socket::{self, ScopedAddress};
use crate::directory::Directory;
use crate::random::random;
use crate::wires::agent::{self, MAD, QPN};

/// Number of attempts to take the lock, or to wait for a socket to be closed.
const MAX_ATTEMPTS: u32 = 50;
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Offset of the destination QP, after a byte of other bits, in a datagram.
const QPN_OFFSET: u32 = 4;
/// Offsets of a management datagram's fields in a datagram: the last byte of the attribute, and
/// the first of the ids.
const ATTRIBUTE: u32 = (MAD + agent::ATTRIBUTE + 1) as u32;
const LOCAL_ID: u32 = (MAD + agent::LOCAL_ID) as u32;
const REMOTE_ID: u32 = (MAD + agent::REMOTE_ID) as u32;
const REQUEST: u32 = agent::REQUEST as u32;
const SERVICE_REQUEST: u32 = agent::SERVICE_REQUEST as u32;
const SERVICE_REPLY: u32 = agent::SERVICE_REPLY as u32;

/// Number of attempts of a member to take the lock when it has received a probe.
const MAX_RECORD_ATTEMPTS: u32 = 3;
/// First byte of a probe, an opcode of no transport.
const PROBE_OPCODE: u8 = 0xff;

/// A datagram that the program steers to an index. It is shorter than any RoCE packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Probe {
    index: u8,
    /// Tells it from those of earlier attempts.
    token: u64,
}

impl Probe {
    const LENGTH: usize = 10;

    fn bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        (bytes[0], bytes[1]) = (PROBE_OPCODE, self.index);
        bytes[2..].copy_from_slice(&self.token.to_be_bytes());
        bytes
    }

    /// Reads a datagram, which must come from the address of the device; `None` if it is no
    /// probe.
    pub(super) fn parse(datagram: &[u8]) -> Option<Self> {
        let datagram: &[u8; Self::LENGTH] = datagram.try_into().ok()?;
        let [PROBE_OPCODE, index, token @ ..] = *datagram else {
            return None;
        };
        let token = u64::from_be_bytes(token);
        Some(Self { index, token })
    }
}

/// Member numbers by socket index in the group; `None` if they are not known.
type Owners = Option<Vec<u8>>;

/// Reasons to update the owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Join,
    Leave,
    /// Removes members that were killed.
    Prune,
}

fn file_name(address: IpAddr, suffix: &str) -> String {
    let bits = u128::from_be_bytes(gid_of_ip(address));
    format!("places-{bits:032x}{suffix}")
}

/// Opens the receiving socket of a member.
pub(super) fn open(member: &Member, local: ScopedAddress) -> io::Result<OwnedFd> {
    let mut socket = None;
    with_lock(&member.directory, local.address, MAX_ATTEMPTS, || {
        let opened = socket.insert(socket::open_receiver(local, true)?);
        update(member, local.address, opened, Change::Join);
        Ok(())
    })?;
    // Without the lock, a socket whose index is not recorded.
    socket.map_or_else(|| socket::open_receiver(local, true), Ok)
}

/// Updates the group, and closes a member's socket.
pub(super) fn leave(member: &Member, local: ScopedAddress, socket: OwnedFd) {
    let _ = with_lock(&member.directory, local.address, MAX_ATTEMPTS, || {
        update(member, local.address, &socket, Change::Leave);
        let (directory, owners) = (&member.directory, file_name(local.address, ""));
        let text = directory.read(&owners).unwrap_or_default();
        // The last member removes the files, while it holds the lock.
        if parse(&text) == Some(Vec::new()) {
            directory.remove_lock(&owners);
            directory.remove_lock(&file_name(local.address, ".lock"));
        }
        Ok(())
    });
}

/// Corrects the owners after a packet has arrived at the wrong member. Does not wait.
pub(super) fn correct(member: &Member, local: ScopedAddress, socket: &OwnedFd) {
    let _ = with_lock(&member.directory, local.address, 1, || {
        if !update(member, local.address, socket, Change::Prune) {
            let _ = probe(member, local, socket);
        }
        Ok(())
    });
}

/// Sends a probe to each index, if the number of sockets is that of the members.
fn probe(member: &Member, local: ScopedAddress, socket: &OwnedFd) -> io::Result<()> {
    let count = count_sockets(local.address, ROCE_V2_PORT);
    let members = member.count(gid_of_ip(local.address));
    let Some(count) = count.filter(|it| *it == members) else {
        return Ok(());
    };
    socket::attach_steering(socket.as_fd(), &probe_filter())?;
    let token = random();
    let text = Findings {
        token,
        members: vec![None; count],
    };
    let written = member
        .directory
        .write(&file_name(local.address, ""), &text.text());
    written.map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
    let to = match local.address {
        IpAddr::V4(address) => SocketAddr::from((address, ROCE_V2_PORT)),
        IpAddr::V6(address) => SocketAddrV6::new(address, ROCE_V2_PORT, 0, local.scope).into(),
    };
    let to = SockaddrStorage::from(to);
    for index in 0..count {
        let bytes = Probe {
            index: index as u8,
            token,
        }
        .bytes();
        sendto(socket.as_raw_fd(), &bytes, &to, MsgFlags::MSG_DONTWAIT)?;
    }
    Ok(())
}

/// Stores the index of a member's socket, at which a probe has arrived. With all indices,
/// packets are steered again.
pub(super) fn record(member: &Member, local: ScopedAddress, socket: &OwnedFd, probe: Probe) {
    let _ = with_lock(
        &member.directory,
        local.address,
        MAX_RECORD_ATTEMPTS,
        || {
            let name = file_name(local.address, "");
            let found = Findings::parse(&member.directory.read(&name).unwrap_or_default());
            let Some(mut found) = found.filter(|it| it.token == probe.token) else {
                return Ok(());
            };
            if let Some(at) = found.members.get_mut(usize::from(probe.index)) {
                *at = Some(member.number);
            }
            let owners: Owners = found.members.iter().copied().collect();
            let count = count_sockets(local.address, ROCE_V2_PORT);
            match owners.filter(|it| Some(it.len()) == count) {
                Some(owners) => write(&member.directory, &name, socket, Some(owners)),
                None => {
                    let _ = member.directory.write(&name, &found.text());
                }
            }
            Ok(())
        },
    );
}

/// Results of probes: the members by socket index.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Findings {
    token: u64,
    members: Vec<Option<u8>>,
}

impl Findings {
    fn text(&self) -> String {
        let members = self.members.iter().map(|it| match it {
            Some(member) => format!("{member}\n"),
            None => "?\n".to_owned(),
        });
        format!("? {:x}\n", self.token) + &members.collect::<String>()
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let token = lines.next()?.strip_prefix("? ")?;
        let token = u64::from_str_radix(token, 16).ok()?;
        let member = |line: &str| line.parse().ok().filter(|it| *it < MAX_MEMBERS);
        let members = lines.map(member).take(MAX_MEMBERS.into()).collect();
        Some(Self { token, members })
    }
}

/// Calls `act` with the owners' lock held; does nothing if the lock cannot be taken.
fn with_lock(
    directory: &Directory,
    address: IpAddr,
    attempts: u32,
    act: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let name = file_name(address, ".lock");
    for _ in 0..attempts {
        match directory.lock(&name) {
            Ok(Some(_lock)) => return act(),
            Ok(None) => thread::sleep(RETRY_INTERVAL),
            Err(_) => break,
        }
    }
    Ok(())
}

/// Updates the owners for a change. Returns false if they are not known.
fn update(member: &Member, address: IpAddr, socket: &OwnedFd, change: Change) -> bool {
    let directory = &member.directory;
    let name = file_name(address, "");
    let alive = |number: u8| {
        let same = number == member.number;
        (same && change != Change::Join) || !same && directory.is_locked(&lock_name(number))
    };
    let sockets = || count_sockets(address, ROCE_V2_PORT);
    let mut owners = parse(&directory.read(&name).unwrap_or_default());
    if change == Change::Join && sockets() == Some(1) {
        owners = Some(Vec::new());
    }
    let mut owners = remove_ended(owners, alive);
    if let (Change::Join, Some(owners)) = (change, &mut owners) {
        owners.push(member.number);
    }
    // The kernel may not have closed the sockets of a killed member yet.
    let count = owners.as_ref().map(Vec::len);
    let attempts = if change == Change::Prune {
        1
    } else {
        MAX_ATTEMPTS
    };
    let counts_match = (0..attempts).any(|attempt| {
        if attempt != 0 {
            thread::sleep(RETRY_INTERVAL);
        }
        count.is_none() || sockets() == count
    });
    if !counts_match && change == Change::Prune {
        // The next misrouted packet causes another attempt.
        return true;
    }
    owners = owners.filter(|_| counts_match);
    if let (Change::Leave, Some(owners)) = (change, &mut owners) {
        remove(owners, member.number);
    }
    let known = owners.is_some();
    write(directory, &name, socket, owners);
    known
}

/// Stores the owners, and steers packets to them.
fn write(directory: &Directory, name: &str, socket: &OwnedFd, mut owners: Owners) {
    let text = match &owners {
        Some(owners) => owners.iter().map(|it| format!("{it}\n")).collect(),
        None => "?\n".to_owned(),
    };
    if directory.write(name, &text).is_err() {
        owners = None;
    }
    // Without the program, the kernel distributes packets and members forward them.
    let _ = socket::attach_steering(socket.as_fd(), &filter(owners.as_deref().unwrap_or(&[])));
}

fn parse(text: &str) -> Owners {
    let number = |line: &str| line.parse().ok().filter(|it| *it < MAX_MEMBERS);
    let owners: Owners = text.lines().map(number).collect();
    owners.filter(|it| it.len() <= MAX_MEMBERS.into())
}

/// Removes a member as the kernel removes its socket: the last one takes its index.
fn remove(owners: &mut Vec<u8>, member: u8) {
    if let Some(index) = owners.iter().position(|it| *it == member) {
        owners.swap_remove(index);
    }
}

/// Removes a member that is no longer alive. For several the result is unknown, since it
/// depends on the order in which they ended.
fn remove_ended(owners: Owners, alive: impl Fn(u8) -> bool) -> Owners {
    let mut owners = owners?;
    let ended: Vec<u8> = owners.iter().copied().filter(|it| !alive(*it)).collect();
    match ended[..] {
        [] => {}
        [one] => remove(&mut owners, one),
        _ => return None,
    }
    Some(owners)
}

/// Returns the number of the process whose communication a management datagram is for, as the
/// program of [`filter`] does; that of a request is unknown.
pub(super) fn management_member(datagram: &[u8]) -> Option<u8> {
    let byte = |at: u32| datagram.get(at as usize).copied();
    let id = match byte(ATTRIBUTE)?.into() {
        REQUEST | SERVICE_REQUEST => return None,
        SERVICE_REPLY => byte(LOCAL_ID)?,
        _ => byte(REMOTE_ID)?,
    };
    Some(id >> (ID_BITS - 24))
}

/// Returns the BPF program: opcode, jumps if true and false, and operand. The member is in the
/// destination QP, or in a communication id of a management datagram.
fn filter(owners: &[u8]) -> Vec<(u16, u8, u8, u32)> {
    const LOAD_WORD: u16 = 0x20;
    const LOAD_BYTE: u16 = 0x30;
    const AND: u16 = 0x54;
    const SHIFT_RIGHT: u16 = 0x74;
    const JUMP: u16 = 0x05;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let mut filter = vec![
        (LOAD_WORD, 0, 0, QPN_OFFSET),
        (AND, 0, 0, 0xff_ffff),
        (JUMP_IF_EQUAL, 2, 0, QPN),
        (SHIFT_RIGHT, 0, 0, QPN_BITS),
        (JUMP, 0, 0, 9),
        (LOAD_BYTE, 0, 0, ATTRIBUTE),
        // Requests are for any member.
        (JUMP_IF_EQUAL, 1, 0, REQUEST),
        (JUMP_IF_EQUAL, 0, 1, SERVICE_REQUEST),
        (RETURN, 0, 0, u32::MAX),
        (JUMP_IF_EQUAL, 0, 2, SERVICE_REPLY),
        (LOAD_BYTE, 0, 0, LOCAL_ID),
        (JUMP, 0, 0, 1),
        (LOAD_BYTE, 0, 0, REMOTE_ID),
        (SHIFT_RIGHT, 0, 0, ID_BITS - 24),
    ];
    for (index, member) in owners.iter().enumerate() {
        filter.push((JUMP_IF_EQUAL, 0, 1, u32::from(*member)));
        filter.push((RETURN, 0, 0, index as u32));
    }
    // An invalid index: the kernel distributes.
    filter.push((RETURN, 0, 0, u32::MAX));
    filter
}

/// Returns the program that steers probes.
fn probe_filter() -> Vec<(u16, u8, u8, u32)> {
    const LOAD_BYTE: u16 = 0x30;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const RETURN_A: u16 = 0x16;
    vec![
        (LOAD_BYTE, 0, 0, 0),
        (JUMP_IF_EQUAL, 0, 2, PROBE_OPCODE.into()),
        (LOAD_BYTE, 0, 0, 1),
        (RETURN_A, 0, 0, 0),
        (RETURN, 0, 0, u32::MAX),
    ]
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn the_last_socket_takes_the_index_of_a_closed_one() {
        let alive = |dead: &'static [u8]| move |number: u8| !dead.contains(&number);
        let owners = || Some(vec![5, 3, 9, 1]);
        assert_eq!(remove_ended(owners(), alive(&[])), owners());
        assert_eq!(remove_ended(owners(), alive(&[3])), Some(vec![5, 1, 9]));
        assert_eq!(remove_ended(owners(), alive(&[1])), Some(vec![5, 3, 9]));
        assert_eq!(remove_ended(owners(), alive(&[1, 9])), None);
        assert_eq!(remove_ended(None, alive(&[])), None);
        assert_eq!(parse("5\n3\n"), Some(vec![5, 3]));
        assert_eq!(parse(""), Some(vec![]));
        for unknown in ["?\n", "5\n?\n", "64\n"] {
            assert_eq!(parse(unknown), None);
        }
    }

    /// A member's socket receives the packets for its queue pairs, whichever members joined
    /// and ended before.
    #[test]
    fn packets_arrive_at_the_owner_of_the_queue_pair() {
        let ip = IpAddr::from([127, 49, 0, 20]);
        let local = ScopedAddress {
            address: ip,
            scope: 0,
        };
        let join = || {
            let member = Member::join(&[gid_of_ip(ip)]).unwrap();
            let socket = open(&member, local).unwrap();
            (member, socket)
        };
        let check_delivery = |members: &[(Member, OwnedFd)]| {
            for (number, (member, receiver)) in members.iter().enumerate() {
                for sender in 0..8 {
                    let from = UdpSocket::bind("127.49.0.21:0").unwrap();
                    let mut datagram = [sender; 20];
                    datagram[5] = member.number << 2 | number as u8 & 3;
                    from.send_to(&datagram, (ip, ROCE_V2_PORT)).unwrap();
                    let receiver = UdpSocket::from(receiver.try_clone().unwrap());
                    let mut room = [0; 64];
                    let got = receiver.recv(&mut room).ok();
                    assert_eq!(got, Some(20), "{} of {}", member.number, members.len());
                    assert_eq!(room[..20], datagram);
                }
                for (attribute, at) in [(0x13, REMOTE_ID), (0x16, REMOTE_ID), (0x18, LOCAL_ID)] {
                    let mut datagram = [0; 280];
                    datagram[7] = QPN as u8;
                    datagram[ATTRIBUTE as usize] = attribute;
                    datagram[at as usize] = member.number << 2 | 3;
                    assert_eq!(management_member(&datagram), Some(member.number));
                    let from = UdpSocket::bind("127.49.0.21:0").unwrap();
                    from.send_to(&datagram, (ip, ROCE_V2_PORT)).unwrap();
                    let receiver = UdpSocket::from(receiver.try_clone().unwrap());
                    assert_eq!(receiver.recv(&mut [0; 300]).ok(), Some(280));
                }
            }
        };
        let mut members: Vec<_> = (0..4).map(|_| join()).collect();
        check_delivery(&members);
        let (member, socket) = members.remove(1);
        leave(&member, local, socket);
        drop(member);
        check_delivery(&members);
        // As if killed: without `leave`.
        drop(members.remove(0));
        let (member, socket) = &members[0];
        correct(member, local, socket);
        check_delivery(&members);
        drop(members.remove(1));
        // The new member may take the number of a former one.
        members.push(join());
        check_delivery(&members);
        // Several are killed: the order decides which socket has which index.
        members.extend([join(), join(), join()]);
        check_delivery(&members);
        let mut killed: Vec<_> = members.drain(..3).collect();
        killed.swap(0, 2);
        drop(killed);
        let (member, socket) = &members[1];
        correct(member, local, socket);
        for (member, socket) in &members {
            let receiver = UdpSocket::from(socket.try_clone().unwrap());
            let mut room = [0; 64];
            let length = receiver.recv(&mut room).unwrap();
            let probe = Probe::parse(&room[..length]).unwrap();
            record(member, local, socket, probe);
        }
        check_delivery(&members);
        members.push(join());
        check_delivery(&members);
        let directory = std::sync::Arc::clone(&members[0].0.directory);
        for (member, socket) in members {
            assert!(directory.read(&file_name(ip, "")).is_some());
            leave(&member, local, socket);
        }
        assert!(directory.read(&file_name(ip, "")).is_none());
    }
}
