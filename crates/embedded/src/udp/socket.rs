//! UDP sockets: opening them, and moving several datagrams by one system call.

use std::io::{self, IoSlice};
use std::mem::{size_of, size_of_val, zeroed};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::slice::Chunks;

use softhca::packet::ROCE_V2_PORT;

/// Maximum number of datagrams, and of messages, that are sent by one call.
pub(super) const BATCH: usize = 128;
pub(super) const RUNS: usize = 16;
/// Maximum number of messages that are received by one call, and by the first of several:
/// most calls find none, and cost less the fewer they may receive.
pub(super) const MESSAGES: usize = 32;
pub(super) const FIRST_MESSAGES: usize = 4;
/// Maximum number of datagrams of a message: UDP_MAX_SEGMENTS of every kernel.
pub(super) const SEGMENTS: usize = 64;
/// Maximum number of bytes of a message: of a datagram of IPv4.
pub(super) const LONGEST: usize = 65_507;
/// Requested size of socket buffers in bytes.
const ROOM: libc::c_int = 4 << 20;
/// Room for three control messages of an int each.
const CONTROL: usize = 96;

/// A control message buffer, aligned for `cmsghdr`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scoped {
    pub(super) address: IpAddr,
    /// Index of the interface, for link-local addresses.
    pub(super) scope: u32,
}

/// Address of a socket, as the system represents it.
union Name {
    ipv4: libc::sockaddr_in,
    ipv6: libc::sockaddr_in6,
    family: libc::sa_family_t,
}

impl Name {
    fn new(at: Scoped, port: u16) -> (Self, libc::socklen_t) {
        match at.address {
            IpAddr::V4(address) => {
                let ipv4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: port.to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from(address).to_be(),
                    },
                    sin_zero: [0; 8],
                };
                (Self { ipv4 }, size_of::<libc::sockaddr_in>() as _)
            }
            IpAddr::V6(address) => {
                let ipv6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: port.to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr {
                        s6_addr: address.octets(),
                    },
                    sin6_scope_id: at.scope,
                };
                (Self { ipv6 }, size_of::<libc::sockaddr_in6>() as _)
            }
        }
    }

    fn empty() -> Self {
        Self::new(
            Scoped {
                address: Ipv6Addr::UNSPECIFIED.into(),
                scope: 0,
            },
            0,
        )
        .0
    }

    /// Returns address and port, if it was filled in with `length` bytes.
    fn read(&self, length: libc::socklen_t) -> Option<(IpAddr, u16)> {
        // SAFETY: all bytes were initialized by `new` for the longest member, and any
        // bytes are valid for each.
        unsafe {
            match libc::c_int::from(self.family) {
                libc::AF_INET if length as usize >= size_of::<libc::sockaddr_in>() => {
                    let address = u32::from_be(self.ipv4.sin_addr.s_addr);
                    Some((IpAddr::V4(address.into()), u16::from_be(self.ipv4.sin_port)))
                }
                libc::AF_INET6 if length as usize >= size_of::<libc::sockaddr_in6>() => {
                    let address = self.ipv6.sin6_addr.s6_addr;
                    Some((
                        IpAddr::V6(address.into()),
                        u16::from_be(self.ipv6.sin6_port),
                    ))
                }
                _ => None,
            }
        }
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn set<T>(socket: impl AsFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let length = size_of_val(value) as libc::socklen_t;
    let value = ptr::from_ref(value).cast();
    // SAFETY: the value is readable for its length, which the option's type has.
    checked(unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, option, value, length) })
        .map(drop)
}

/// Opens a socket at an address; port 0 is any. With `shared`, others of this user may
/// do the same.
fn open(at: Scoped, port: u16, shared: bool) -> io::Result<OwnedFd> {
    let (family, level) = match at.address {
        IpAddr::V4(_) => (libc::AF_INET, libc::IPPROTO_IP),
        IpAddr::V6(_) => (libc::AF_INET6, libc::IPPROTO_IPV6),
    };
    let flags = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let fd = checked(unsafe { libc::socket(family, flags, 0) })?;
    // SAFETY: the descriptor is new and owned by nothing else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let on: libc::c_int = 1;
    if shared {
        set(&socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, &on)?;
    }
    if at.address.is_ipv6() {
        set(&socket, level, libc::IPV6_V6ONLY, &on)?;
        set(
            &socket,
            level,
            libc::IPV6_MTU_DISCOVER,
            &libc::IPV6_PMTUDISC_DO,
        )?;
        set(&socket, level, libc::IPV6_RECVTCLASS, &on)?;
        // A peer may send without a UDP checksum: the ICRC covers more.
        const UDP_NO_CHECK6_RX: libc::c_int = 102;
        set(&socket, libc::SOL_UDP, UDP_NO_CHECK6_RX, &on)?;
    } else {
        // Of a socket that is not connected, with the identification 0, as the
        // transport assumes.
        set(&socket, level, libc::IP_MTU_DISCOVER, &libc::IP_PMTUDISC_DO)?;
        set(&socket, level, libc::IP_RECVTOS, &on)?;
    }
    let (name, length) = Name::new(at, port);
    // SAFETY: the address is initialized for its length.
    checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), length) })?;
    Ok(socket)
}

/// Returns whether the host has an address for sockets: not one that it still checks for
/// duplicates.
pub(super) fn may_bind(at: Scoped) -> bool {
    open(at, 0, false).is_ok()
}

/// Opens the socket that receives, or one of several that share what arrives.
pub(super) fn open_receiver(at: Scoped, shared: bool) -> io::Result<OwnedFd> {
    let socket = open(at, ROCE_V2_PORT, shared)?;
    // Without it, datagrams come one by one.
    let on: libc::c_int = 1;
    let _ = set(&socket, libc::SOL_UDP, libc::UDP_GRO, &on);
    // Beyond the system's limit only with the right to; a smaller one works, too.
    if set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &ROOM).is_err() {
        let _ = set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, &ROOM);
    }
    Ok(socket)
}

/// Opens a socket that sends from a port and receives nothing.
pub(super) fn open_sender(at: Scoped, port: u16) -> io::Result<OwnedFd> {
    let socket = open(at, port, false)?;
    if set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &ROOM).is_err() {
        let _ = set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUF, &ROOM);
    }
    let mut discard = libc::sock_filter {
        // BPF_RET | BPF_K, of no bytes.
        code: 0x06,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let filter = libc::sock_fprog {
        len: 1,
        filter: &raw mut discard,
    };
    set(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)?;
    Ok(socket)
}

/// Attaches a filter, of instructions of classic BPF, that chooses among the sockets that
/// share a port.
pub(super) fn steer(socket: BorrowedFd<'_>, filter: &[(u16, u8, u8, u32)]) -> io::Result<()> {
    let instruction = |&(code, jt, jf, k): &_| libc::sock_filter { code, jt, jf, k };
    let mut filter: Vec<libc::sock_filter> = filter.iter().map(instruction).collect();
    let program = libc::sock_fprog {
        len: filter.len().try_into().unwrap_or(u16::MAX),
        filter: filter.as_mut_ptr(),
    };
    let (level, option) = (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF);
    set(socket, level, option, &program)
}

/// What the system says about a received message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub(super) source: IpAddr,
    pub(super) port: u16,
    pub(super) traffic_class: u8,
}

/// Memory into which messages are received.
pub(super) struct Inbox(Vec<u8>);

impl Inbox {
    /// Bytes of a message: a datagram, or several by UDP_GRO.
    const ROOM: usize = 1 << 16;

    /// Its pages are allocated when messages need them.
    pub(super) fn new() -> Self {
        Self(vec![0; MESSAGES * Self::ROOM])
    }

    /// Receives up to `MOST` messages, at most [`MESSAGES`]. Calls `each` with the datagrams
    /// of each, and returns how many messages there were.
    pub(super) fn receive<const MOST: usize>(
        &mut self,
        socket: BorrowedFd<'_>,
        mut each: impl FnMut(Received, Chunks<'_, u8>),
    ) -> usize {
        let mut names: [Name; MOST] = std::array::from_fn(|_| Name::empty());
        let mut controls = [Control([0; CONTROL]); MOST];
        // SAFETY: zero is a value of each field: null pointers and lengths of 0.
        let (mut parts, mut headers): ([libc::iovec; MOST], [libc::mmsghdr; MOST]) =
            unsafe { (zeroed(), zeroed()) };
        let most = MOST.min(MESSAGES);
        for (index, room) in self.0.chunks_exact_mut(Self::ROOM).take(most).enumerate() {
            parts[index].iov_base = room.as_mut_ptr().cast();
            parts[index].iov_len = room.len();
            let header = &mut headers[index].msg_hdr;
            header.msg_name = (&raw mut names[index]).cast();
            header.msg_namelen = size_of::<Name>() as _;
            header.msg_iov = &raw mut parts[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut controls[index]).cast();
            header.msg_controllen = CONTROL as _;
        }
        let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT);
        let none = ptr::null_mut();
        // SAFETY: each of the `most` headers names an address, a part of this memory and a
        // control buffer with their lengths, which live until the end of this function.
        let got = unsafe { libc::recvmmsg(fd, headers.as_mut_ptr(), most as _, flags, none) };
        let got = usize::try_from(got).unwrap_or(0).min(most);
        let rooms = self.0.chunks_exact(Self::ROOM);
        for (index, (header, room)) in headers[..got].iter().zip(rooms).enumerate() {
            let message = &header.msg_hdr;
            let cut = message.msg_flags & libc::MSG_TRUNC != 0;
            let (Some((source, port)), false) = (names[index].read(message.msg_namelen), cut)
            else {
                continue;
            };
            let said = Said::read(&controls[index].0, message.msg_controllen as _);
            let length = (header.msg_len as usize).min(room.len());
            let received = Received {
                source,
                port,
                traffic_class: said.traffic_class,
            };
            each(
                received,
                room[..length].chunks(said.segment.unwrap_or(room.len())),
            );
        }
        got
    }
}

/// Length of the header of a control message, and the alignment of messages.
const HEADER: usize = size_of::<libc::cmsghdr>();
const ALIGNMENT: usize = size_of::<usize>();

/// What the system says in control messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Said {
    traffic_class: u8,
    /// Length of the datagrams in the message but the last, if there are several.
    segment: Option<usize>,
}

impl Said {
    fn read(control: &[u8], length: usize) -> Self {
        let mut said = Self::default();
        let mut rest = &control[..length.min(control.len())];
        while let Some((header, after)) = rest.split_at_checked(HEADER) {
            let (length, kind) = header.split_at(ALIGNMENT);
            let length = length
                .first_chunk()
                .map_or(0, |it| usize::from_ne_bytes(*it));
            let word = |bytes: &[u8], at: usize| {
                let bytes = bytes.get(at..)?.first_chunk()?;
                Some(libc::c_int::from_ne_bytes(*bytes))
            };
            let data = after.get(..length.saturating_sub(HEADER)).unwrap_or(&[]);
            let int = word(data, 0).unwrap_or(0);
            match (word(kind, 0), word(kind, 4)) {
                // A byte.
                (Some(libc::IPPROTO_IP), Some(libc::IP_TOS)) => {
                    said.traffic_class = *data.first().unwrap_or(&0);
                }
                (Some(libc::IPPROTO_IPV6), Some(libc::IPV6_TCLASS)) => {
                    said.traffic_class = int as u8;
                }
                (Some(libc::SOL_UDP), Some(libc::UDP_GRO)) => {
                    said.segment = usize::try_from(int).ok().filter(|it| *it != 0);
                }
                _ => {}
            }
            let next = length.max(HEADER).next_multiple_of(ALIGNMENT);
            rest = rest.get(next..).unwrap_or(&[]);
        }
        said
    }
}

/// Datagrams to one receiver that are passed to the system as one message. All but the
/// last are equally long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    pub(super) datagrams: &'a [IoSlice<'a>],
    pub(super) to: Scoped,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
}

/// Appends a control message. Returns the end of the last.
fn put<const N: usize>(
    control: &mut Control,
    at: usize,
    level: libc::c_int,
    kind: libc::c_int,
    value: [u8; N],
) -> usize {
    let end = at + HEADER + N;
    let Some(message) = control.0.get_mut(at..end) else {
        return at;
    };
    let (header, data) = message.split_at_mut(HEADER);
    header[..ALIGNMENT].copy_from_slice(&(HEADER + N).to_ne_bytes());
    header[ALIGNMENT..ALIGNMENT + 4].copy_from_slice(&level.to_ne_bytes());
    header[ALIGNMENT + 4..ALIGNMENT + 8].copy_from_slice(&kind.to_ne_bytes());
    data.copy_from_slice(&value);
    end.next_multiple_of(ALIGNMENT)
}

/// Sends messages. Returns how many the socket has accepted.
///
/// # Errors
/// The error of the first message, if it was not accepted.
pub(super) fn send(socket: BorrowedFd<'_>, messages: &[Message<'_>]) -> io::Result<usize> {
    let count = messages.len().min(RUNS);
    let mut names: [Name; RUNS] = std::array::from_fn(|_| Name::empty());
    let mut controls = [Control([0; CONTROL]); RUNS];
    // SAFETY: zero is a value of each field: null pointers and lengths of 0.
    let mut headers: [libc::mmsghdr; RUNS] = unsafe { zeroed() };
    for (index, message) in messages[..count].iter().enumerate() {
        let (name, length) = Name::new(message.to, ROCE_V2_PORT);
        names[index] = name;
        let (level, class, limit) = match message.to.address {
            IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        };
        let int = |value: u8| libc::c_int::from(value).to_ne_bytes();
        let control = &mut controls[index];
        let mut end = put(control, 0, level, limit, int(message.hop_limit.max(1)));
        if message.traffic_class != 0 {
            end = put(control, end, level, class, int(message.traffic_class));
        }
        if let [first, _, ..] = message.datagrams {
            let segment = (first.len() as u16).to_ne_bytes();
            end = put(control, end, libc::SOL_UDP, libc::UDP_SEGMENT, segment);
        }
        let header = &mut headers[index].msg_hdr;
        header.msg_name = (&raw mut names[index]).cast();
        header.msg_namelen = length;
        // An `IoSlice` is an iovec.
        header.msg_iov = message.datagrams.as_ptr().cast_mut().cast();
        header.msg_iovlen = message.datagrams.len() as _;
        header.msg_control = (&raw mut controls[index]).cast();
        header.msg_controllen = end as _;
    }
    let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    // SAFETY: each of the `count` headers names an address, bytes and a control buffer
    // with their lengths, which live until the end of this function and are only read.
    let sent = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), count as _, flags) };
    checked(sent).map(|sent| sent as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn control_messages_are_read_as_written() {
        let mut control = Control([0; CONTROL]);
        let end = put(&mut control, 0, libc::IPPROTO_IP, libc::IP_TOS, [0x2e]);
        let end = put(
            &mut control,
            end,
            libc::SOL_UDP,
            libc::UDP_GRO,
            1084i32.to_ne_bytes(),
        );
        let said = Said {
            traffic_class: 0x2e,
            segment: Some(1084),
        };
        assert_eq!(Said::read(&control.0, end), said);
        let class = 7i32.to_ne_bytes();
        let end = put(
            &mut control,
            0,
            libc::IPPROTO_IPV6,
            libc::IPV6_TCLASS,
            class,
        );
        let said = Said {
            traffic_class: 7,
            segment: None,
        };
        assert_eq!(Said::read(&control.0, end), said);
        // No room for it.
        assert_eq!(
            put(&mut control, CONTROL - HEADER, 0, 0, [0; 8]),
            CONTROL - HEADER
        );
    }

    proptest! {
        #[test]
        fn any_control_message_is_read(bytes: [u8; CONTROL], length in 0..2 * CONTROL) {
            prop_assert_ne!(Said::read(&bytes, length).segment, Some(0));
        }
    }
}
