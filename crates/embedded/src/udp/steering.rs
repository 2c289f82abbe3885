//! Steering of received packets: each goes to the socket of the process whose queue pair it
//! is for, by a BPF program (SO_ATTACH_REUSEPORT_CBPF).
//!
//! The program returns a socket's index in the SO_REUSEPORT group. The kernel appends a new
//! socket, and moves the last one to the index of a closed one. So the owners of the sockets
//! are known, and stored in a file, as long as members join, leave and end one at a time.
//! Without that knowledge the kernel distributes packets by their addresses and ports. A
//! wrong index costs a hop: members forward packets of other members.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use softhca::packet::{ROCE_V2_PORT, gid_of_ip};

use super::group::{MAX_MEMBERS, Member, QPN_BITS, count_sockets, lock_name};
use super::socket::{self, ScopedAddress};
use crate::directory::Directory;

/// Number of attempts to take the lock, or to wait for a socket to be closed.
const MAX_ATTEMPTS: u32 = 50;
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Offset of the most significant byte of the destination QP in a datagram.
const QPN_OFFSET: u32 = 5;

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
        update(member, local.address, socket, Change::Prune);
        Ok(())
    });
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

fn update(member: &Member, address: IpAddr, socket: &OwnedFd, change: Change) {
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
        return;
    }
    owners = owners.filter(|_| counts_match);
    if let (Change::Leave, Some(owners)) = (change, &mut owners) {
        remove(owners, member.number);
    }
    let text = match &owners {
        Some(owners) => owners.iter().map(|it| format!("{it}\n")).collect(),
        None => "?\n".to_owned(),
    };
    if directory.write(&name, &text).is_err() {
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

/// Returns the BPF program: opcode, jumps if true and false, and operand.
fn filter(owners: &[u8]) -> Vec<(u16, u8, u8, u32)> {
    const LOAD_BYTE: u16 = 0x30;
    const SHIFT_RIGHT: u16 = 0x74;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let mut filter = vec![
        (LOAD_BYTE, 0, 0, QPN_OFFSET),
        (SHIFT_RIGHT, 0, 0, QPN_BITS - 16),
    ];
    for (index, member) in owners.iter().enumerate() {
        filter.push((JUMP_IF_EQUAL, 0, 1, u32::from(*member)));
        filter.push((RETURN, 0, 0, index as u32));
    }
    // An invalid index: the kernel distributes.
    filter.push((RETURN, 0, 0, u32::MAX));
    filter
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
        let directory = std::sync::Arc::clone(&members[0].0.directory);
        for (member, socket) in members {
            assert!(directory.read(&file_name(ip, "")).is_some());
            leave(&member, local, socket);
        }
        assert!(directory.read(&file_name(ip, "")).is_none());
    }
}
