//! Which socket of a group receives a packet: that of the process whose queue pair it
//! is for, by a filter of the system (SO_ATTACH_REUSEPORT_CBPF).
//!
//! The filter returns a socket's place in the group. A new socket is the last one; when
//! one closes, the last takes its place. So the places are known as long as members
//! join, leave and end one at a time, and a file has them. Where they are not known, the
//! system spreads packets by their addresses and ports. A wrong place costs a hop:
//! members pass on what is another's.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use softhca::packet::{ROCE_V2_PORT, gid_of_ip};

use super::group::{MEMBERS, Member, QPN_BITS, lock_name, sockets_at};
use super::socket::{self, Scoped};
use crate::directory::Directory;

/// Attempts to take the lock, or to see a socket that is being closed gone.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);
/// Byte of a datagram with the top bits of the queue pair's number.
const QPN_TOP: u32 = 5;

/// The members of a group by their places; `None` if they are not known.
type Places = Option<Vec<u8>>;

/// Reasons to update the places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Join,
    Leave,
    /// Looks for members that were killed.
    Look,
}

fn name_of(address: IpAddr, what: &str) -> String {
    let bits = u128::from_be_bytes(gid_of_ip(address));
    format!("places-{bits:032x}{what}")
}

/// Opens the receiving socket of a member.
pub(super) fn open(member: &Member, at: Scoped) -> io::Result<OwnedFd> {
    let mut socket = None;
    locked(&member.directory, at.address, TRIES, || {
        let opened = socket.insert(socket::open_receiver(at, true)?);
        update(member, at.address, opened, Change::Join);
        Ok(())
    })?;
    // Without the lock nobody knows its place.
    socket.map_or_else(|| socket::open_receiver(at, true), Ok)
}

/// Prepares the group for the end of a member's socket, which must be closed at once.
pub(super) fn leave(member: &Member, at: Scoped, socket: OwnedFd) {
    let _ = locked(&member.directory, at.address, TRIES, || {
        update(member, at.address, &socket, Change::Leave);
        let (directory, places) = (&member.directory, name_of(at.address, ""));
        let text = directory.read(&places).unwrap_or_default();
        // The last one leaves nothing; its lock is held.
        if parse(&text) == Some(Vec::new()) {
            directory.remove_lock(&places);
            directory.remove_lock(&name_of(at.address, ".lock"));
        }
        Ok(())
    });
}

/// Corrects the places after a packet has come to the wrong member. Waits for nobody.
pub(super) fn look(member: &Member, at: Scoped, socket: &OwnedFd) {
    let _ = locked(&member.directory, at.address, 1, || {
        update(member, at.address, socket, Change::Look);
        Ok(())
    });
}

/// Calls `act` with the lock on the places, if it can be had.
fn locked(
    directory: &Directory,
    address: IpAddr,
    tries: u32,
    act: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let name = name_of(address, ".lock");
    for _ in 0..tries {
        match directory.lock(&name) {
            Ok(Some(_lock)) => return act(),
            Ok(None) => thread::sleep(PAUSE),
            Err(_) => break,
        }
    }
    Ok(())
}

fn update(member: &Member, address: IpAddr, socket: &OwnedFd, change: Change) {
    let directory = &member.directory;
    let name = name_of(address, "");
    let alive = |number: u8| {
        let same = number == member.number;
        (same && change != Change::Join) || !same && directory.is_locked(&lock_name(number))
    };
    let sockets = || sockets_at(address, ROCE_V2_PORT);
    let mut places = parse(&directory.read(&name).unwrap_or_default());
    if change == Change::Join && sockets() == Some(1) {
        places = Some(Vec::new());
    }
    let mut places = after_ends(places, alive);
    if let (Change::Join, Some(places)) = (change, &mut places) {
        places.push(member.number);
    }
    // Sockets of members that were killed a moment ago may still be there.
    let count = places.as_ref().map(Vec::len);
    let tries = if change == Change::Look { 1 } else { TRIES };
    let right = (0..tries).any(|attempt| {
        if attempt != 0 {
            thread::sleep(PAUSE);
        }
        count.is_none() || sockets() == count
    });
    if !right && change == Change::Look {
        // Another time.
        return;
    }
    places = places.filter(|_| right);
    if let (Change::Leave, Some(places)) = (change, &mut places) {
        remove(places, member.number);
    }
    let text = match &places {
        Some(places) => places.iter().map(|it| format!("{it}\n")).collect(),
        None => "?\n".to_owned(),
    };
    if directory.write(&name, &text).is_err() {
        places = None;
    }
    // If it cannot be attached, packets are spread and passed on.
    let _ = socket::steer(socket.as_fd(), &filter(places.as_deref().unwrap_or(&[])));
}

fn parse(text: &str) -> Places {
    let number = |line: &str| line.parse().ok().filter(|it| *it < MEMBERS);
    let places: Places = text.lines().map(number).collect();
    places.filter(|it| it.len() <= MEMBERS.into())
}

/// Takes a member out, as the system takes its socket out.
fn remove(places: &mut Vec<u8>, member: u8) {
    if let Some(place) = places.iter().position(|it| *it == member) {
        places.swap_remove(place);
    }
}

/// Returns the places after the end of members that are no longer alive. Of several,
/// the order in which they ended is not known, and would matter.
fn after_ends(places: Places, alive: impl Fn(u8) -> bool) -> Places {
    let mut places = places?;
    let ended: Vec<u8> = places.iter().copied().filter(|it| !alive(*it)).collect();
    match ended[..] {
        [] => {}
        [one] => remove(&mut places, one),
        _ => return None,
    }
    Some(places)
}

/// Returns the filter: instructions of code, jumps if true and false, and operand.
fn filter(places: &[u8]) -> Vec<(u16, u8, u8, u32)> {
    const LOAD_BYTE: u16 = 0x30;
    const SHIFT_RIGHT: u16 = 0x74;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let mut filter = vec![
        (LOAD_BYTE, 0, 0, QPN_TOP),
        (SHIFT_RIGHT, 0, 0, QPN_BITS - 16),
    ];
    for (place, member) in places.iter().enumerate() {
        filter.push((JUMP_IF_EQUAL, 0, 1, u32::from(*member)));
        filter.push((RETURN, 0, 0, place as u32));
    }
    // No place: the system spreads.
    filter.push((RETURN, 0, 0, u32::MAX));
    filter
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn the_last_socket_takes_the_place_of_one_that_ends() {
        let alive = |dead: &'static [u8]| move |number: u8| !dead.contains(&number);
        let places = || Some(vec![5, 3, 9, 1]);
        assert_eq!(after_ends(places(), alive(&[])), places());
        assert_eq!(after_ends(places(), alive(&[3])), Some(vec![5, 1, 9]));
        assert_eq!(after_ends(places(), alive(&[1])), Some(vec![5, 3, 9]));
        assert_eq!(after_ends(places(), alive(&[1, 9])), None);
        assert_eq!(after_ends(None, alive(&[])), None);
        assert_eq!(parse("5\n3\n"), Some(vec![5, 3]));
        assert_eq!(parse(""), Some(vec![]));
        for unknown in ["?\n", "5\n?\n", "64\n"] {
            assert_eq!(parse(unknown), None);
        }
    }

    /// A member's socket receives what is for its queue pairs, whatever members joined
    /// and ended before.
    #[test]
    fn packets_arrive_at_the_member_that_they_are_for() {
        let ip = IpAddr::from([127, 49, 0, 20]);
        let at = Scoped {
            address: ip,
            scope: 0,
        };
        let join = || {
            let member = Member::join(&[gid_of_ip(ip)]).unwrap();
            let socket = open(&member, at).unwrap();
            (member, socket)
        };
        let arrive = |members: &[(Member, OwnedFd)]| {
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
        arrive(&members);
        let (member, socket) = members.remove(1);
        leave(&member, at, socket);
        drop(member);
        arrive(&members);
        // Killed: nobody is told.
        drop(members.remove(0));
        let (member, socket) = &members[0];
        look(member, at, socket);
        arrive(&members);
        drop(members.remove(1));
        // The number may be the same again.
        members.push(join());
        arrive(&members);
        let directory = std::sync::Arc::clone(&members[0].0.directory);
        for (member, socket) in members {
            assert!(directory.read(&name_of(ip, "")).is_some());
            leave(&member, at, socket);
        }
        assert!(directory.read(&name_of(ip, "")).is_none());
    }
}
