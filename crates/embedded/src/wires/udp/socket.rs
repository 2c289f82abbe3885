//! UDP sockets, and sending and receiving several datagrams in one system call.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{size_of, size_of_val, zeroed};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::slice::Chunks;

use nix::cmsg_space;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrStorage, getsockopt, recvmsg, sockopt,
};
use roce::packet::{ROCE_V2_PORT, RecvMeta};

/// Maximum number of datagrams and of messages sent in one call.
pub(super) const MAX_SEND_DATAGRAMS: usize = 128;
pub(super) const MAX_SEND_MESSAGES: usize = 16;
/// Maximum number of messages received in one call, and in the first of several calls: most
/// first calls find nothing, and a smaller array costs less.
pub(super) const MAX_RECV_MESSAGES: usize = 32;
pub(super) const FIRST_RECV_MESSAGES: usize = 4;
/// Maximum number of datagrams of a message: `UDP_MAX_SEGMENTS` of all kernels.
pub(super) const MAX_SEGMENTS: usize = 64;
/// Maximum number of bytes of a message: the payload of an IPv4 datagram.
pub(super) const MAX_MESSAGE_BYTES: usize = 65_507;
/// Requested size of socket buffers in bytes.
const SOCKET_BUFFER_SIZE: libc::c_int = 4 << 20;
/// Maximum number of errors read at once, and of bytes of a datagram that an error contains.
const MAX_ERRORS: usize = 64;
const MAX_QUOTED: usize = 512;
/// Room for three control messages of an int each.
const CONTROL_SIZE: usize = 96;

/// A control message buffer, aligned for `cmsghdr`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct ControlBuffer([u8; CONTROL_SIZE]);

/// A local address with its scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScopedAddress {
    pub(super) address: IpAddr,
    /// Index of the interface, for link-local addresses.
    pub(super) scope: u32,
}

/// A socket address, `sockaddr_in` or `sockaddr_in6`.
union SocketAddress {
    ipv4: libc::sockaddr_in,
    ipv6: libc::sockaddr_in6,
    family: libc::sa_family_t,
}

impl SocketAddress {
    fn new(local: ScopedAddress, port: u16) -> (Self, libc::socklen_t) {
        match local.address {
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
                    sin6_scope_id: local.scope,
                };
                (Self { ipv6 }, size_of::<libc::sockaddr_in6>() as _)
            }
        }
    }

    fn empty() -> Self {
        Self::new(
            ScopedAddress {
                address: Ipv6Addr::UNSPECIFIED.into(),
                scope: 0,
            },
            0,
        )
        .0
    }

    /// Returns the address and the port, if the system has filled in `length` bytes.
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

pub(super) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

pub(super) fn set_option<T>(
    socket: impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &T,
) -> io::Result<()> {
    let length = size_of_val(value) as libc::socklen_t;
    let value = ptr::from_ref(value).cast();
    // SAFETY: the value is readable for its length, which the option's type has.
    check(unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, option, value, length) })
        .map(drop)
}

/// Opens a socket bound to an address; port 0 is any. `sharing` is the option that lets other
/// sockets with this option be bound to it, too.
fn open(local: ScopedAddress, port: u16, sharing: Option<libc::c_int>) -> io::Result<OwnedFd> {
    let (family, level) = match local.address {
        IpAddr::V4(_) => (libc::AF_INET, libc::IPPROTO_IP),
        IpAddr::V6(_) => (libc::AF_INET6, libc::IPPROTO_IPV6),
    };
    let flags = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let fd = check(unsafe { libc::socket(family, flags, 0) })?;
    // SAFETY: the descriptor is new and owned by nothing else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let on: libc::c_int = 1;
    if let Some(option) = sharing {
        set_option(&socket, libc::SOL_SOCKET, option, &on)?;
    }
    if local.address.is_ipv6() {
        set_option(&socket, level, libc::IPV6_V6ONLY, &on)?;
        set_option(
            &socket,
            level,
            libc::IPV6_MTU_DISCOVER,
            &libc::IPV6_PMTUDISC_DO,
        )?;
        set_option(&socket, level, libc::IPV6_RECVTCLASS, &on)?;
        // A peer may omit the UDP checksum, since the ICRC covers more.
        const UDP_NO_CHECK6_RX: libc::c_int = 102;
        set_option(&socket, libc::SOL_UDP, UDP_NO_CHECK6_RX, &on)?;
    } else {
        // With DF set, an unconnected socket sends the identification 0, which the transport
        // assumes.
        set_option(&socket, level, libc::IP_MTU_DISCOVER, &libc::IP_PMTUDISC_DO)?;
        set_option(&socket, level, libc::IP_RECVTOS, &on)?;
    }
    let (name, length) = SocketAddress::new(local, port);
    // SAFETY: the address is initialized for its length.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), length) })?;
    Ok(socket)
}

/// Returns whether a socket can be bound to an address: not before duplicate address
/// detection has ended.
pub(super) fn may_bind(local: ScopedAddress) -> bool {
    open(local, 0, None).is_ok()
}

/// Opens a receiving socket; with `shared`, it is one of a SO_REUSEPORT group.
pub(super) fn open_receiver(local: ScopedAddress, shared: bool) -> io::Result<OwnedFd> {
    let socket = open(local, ROCE_V2_PORT, shared.then_some(libc::SO_REUSEPORT))?;
    set_receive_options(&socket);
    Ok(socket)
}

/// Opens a socket that receives the datagrams for a multicast group on an interface. Other
/// sockets may do the same, also those of other users.
pub(super) fn open_multicast(group: IpAddr, interface: u32) -> io::Result<OwnedFd> {
    let local = ScopedAddress {
        address: group,
        scope: interface,
    };
    let socket = open(local, ROCE_V2_PORT, Some(libc::SO_REUSEADDR))?;
    let off: libc::c_int = 0;
    match group {
        IpAddr::V4(group) => {
            let group = libc::in_addr {
                s_addr: u32::from(group).to_be(),
            };
            let membership = interface_request(group, interface);
            let (level, option) = (libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP);
            set_option(&socket, level, option, &membership)?;
            // Not what other sockets of the host have joined, on other interfaces.
            set_option(&socket, level, libc::IP_MULTICAST_ALL, &off)?;
        }
        IpAddr::V6(group) => {
            let membership = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr {
                    s6_addr: group.octets(),
                },
                ipv6mr_interface: interface,
            };
            let (level, option) = (libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP);
            set_option(&socket, level, option, &membership)?;
            // Since Linux 4.20.
            let _ = set_option(&socket, level, libc::IPV6_MULTICAST_ALL, &off);
        }
    }
    set_receive_options(&socket);
    Ok(socket)
}

/// Returns the argument of multicast options of IPv4.
fn interface_request(group: libc::in_addr, interface: u32) -> libc::ip_mreqn {
    libc::ip_mreqn {
        imr_multiaddr: group,
        imr_address: libc::in_addr { s_addr: 0 },
        imr_ifindex: interface as libc::c_int,
    }
}

/// Sets the options of a receiving socket that are not required.
pub(super) fn set_receive_options(socket: &OwnedFd) {
    // Optional: without it, each message has one datagram.
    let on: libc::c_int = 1;
    let _ = set_option(socket, libc::SOL_UDP, libc::UDP_GRO, &on);
    request_buffer(socket, [libc::SO_RCVBUFFORCE, libc::SO_RCVBUF]);
}

/// Requests [`SOCKET_BUFFER_SIZE`] by the first option that the kernel accepts. Only
/// CAP_NET_ADMIN may exceed the system's limit; a smaller buffer works, too.
pub(super) fn request_buffer(socket: &OwnedFd, options: [libc::c_int; 2]) {
    let request = |&option: &_| {
        let set = set_option(socket, libc::SOL_SOCKET, option, &SOCKET_BUFFER_SIZE);
        set.is_ok()
    };
    options.iter().any(request);
}

/// Opens a socket that sends from a port and receives nothing. Multicast leaves by an
/// interface, 0 for the kernel's choice.
pub(super) fn open_sender(local: ScopedAddress, port: u16, interface: u32) -> io::Result<OwnedFd> {
    let socket = open(local, port, None)?;
    // An interface without multicast sends the rest.
    let _ = match local.address {
        IpAddr::V4(_) => {
            let request = interface_request(libc::in_addr { s_addr: 0 }, interface);
            set_option(&socket, libc::IPPROTO_IP, libc::IP_MULTICAST_IF, &request)
        }
        IpAddr::V6(_) => {
            let option = libc::IPV6_MULTICAST_IF;
            set_option(
                &socket,
                libc::IPPROTO_IPV6,
                option,
                &(interface as libc::c_int),
            )
        }
    };
    request_buffer(&socket, [libc::SO_SNDBUFFORCE, libc::SO_SNDBUF]);
    let mut discard = libc::sock_filter {
        // BPF_RET | BPF_K: accept 0 bytes.
        code: 0x06,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let filter = libc::sock_fprog {
        len: 1,
        filter: &raw mut discard,
    };
    set_option(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)?;
    Ok(socket)
}

/// Makes a socket report the datagrams that hosts refuse ([`refusals`]).
pub(super) fn report_refusals(socket: &OwnedFd, local: IpAddr) -> io::Result<()> {
    let on: libc::c_int = 1;
    match local {
        IpAddr::V4(_) => set_option(socket, libc::IPPROTO_IP, libc::IP_RECVERR, &on),
        IpAddr::V6(_) => set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, &on),
    }
}

/// Reads and clears the errors of a socket. Returns the hosts that have refused a datagram,
/// since nobody has the port, with as much of its payload as the host has returned.
pub(super) fn refusals(socket: BorrowedFd<'_>) -> Vec<(IpAddr, Vec<u8>)> {
    let mut refusals = Vec::new();
    for _ in 0..MAX_ERRORS {
        let mut bytes = [0; MAX_QUOTED];
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let mut space = cmsg_space!([u8; CONTROL_SIZE]);
        let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
        let fd = socket.as_raw_fd();
        let Ok(message) = recvmsg::<SockaddrStorage>(fd, &mut parts, Some(&mut space), flags)
        else {
            break;
        };
        let is_refusal = |it| match it {
            ControlMessageOwned::Ipv4RecvErr(error, _) => {
                error.ee_origin == libc::SO_EE_ORIGIN_ICMP
                    && error.ee_errno == libc::ECONNREFUSED as u32
            }
            ControlMessageOwned::Ipv6RecvErr(error, _) => {
                error.ee_origin == libc::SO_EE_ORIGIN_ICMP6
                    && error.ee_errno == libc::ECONNREFUSED as u32
            }
            _ => false,
        };
        let is_refused = message.cmsgs().is_ok_and(|mut all| all.any(is_refusal));
        let to = message.address.as_ref().and_then(|it| {
            let ipv4 = it.as_sockaddr_in().map(|it| IpAddr::from(it.ip()));
            ipv4.or_else(|| it.as_sockaddr_in6().map(|it| it.ip().into()))
        });
        let length = message.bytes;
        if let (true, Some(to)) = (is_refused, to) {
            refusals.push((to, bytes[..length.min(MAX_QUOTED)].to_vec()));
        }
    }
    // An error is also pending beside the queue, and would keep the socket ready.
    let _ = getsockopt(&socket, sockopt::SocketError);
    refusals
}

/// Attaches a classic BPF program that selects among the sockets of a SO_REUSEPORT group.
pub(super) fn attach_steering(
    socket: BorrowedFd<'_>,
    filter: &[(u16, u8, u8, u32)],
) -> io::Result<()> {
    let instruction = |&(code, jt, jf, k): &_| libc::sock_filter { code, jt, jf, k };
    let mut filter: Vec<libc::sock_filter> = filter.iter().map(instruction).collect();
    let program = libc::sock_fprog {
        len: filter.len().try_into().unwrap_or(u16::MAX),
        filter: filter.as_mut_ptr(),
    };
    let (level, option) = (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF);
    set_option(socket, level, option, &program)
}

/// Buffers for received messages.
pub(super) struct ReceiveBuffers(pub(super) Vec<u8>);

impl ReceiveBuffers {
    /// Bytes of a buffer: for a datagram, or several with UDP_GRO.
    pub(super) const BUFFER_SIZE: usize = 1 << 16;

    /// Allocates the buffers; their pages are allocated on first use.
    pub(super) fn new() -> Self {
        Self(vec![0; MAX_RECV_MESSAGES * Self::BUFFER_SIZE])
    }

    /// Receives up to `MAX` messages to `destination`, at most [`MAX_RECV_MESSAGES`]. Calls `each` with the
    /// datagrams of each message, and returns the number of messages.
    pub(super) fn receive<const MAX: usize>(
        &mut self,
        socket: BorrowedFd<'_>,
        destination: IpAddr,
        mut each: impl FnMut(RecvMeta, Chunks<'_, u8>),
    ) -> usize {
        let mut names: [SocketAddress; MAX] = std::array::from_fn(|_| SocketAddress::empty());
        let mut controls = [ControlBuffer([0; CONTROL_SIZE]); MAX];
        // SAFETY: zero is a value of each field: null pointers and lengths of 0.
        let (mut parts, mut headers): ([libc::iovec; MAX], [libc::mmsghdr; MAX]) =
            unsafe { (zeroed(), zeroed()) };
        let max = MAX.min(MAX_RECV_MESSAGES);
        for (index, buffer) in self
            .0
            .chunks_exact_mut(Self::BUFFER_SIZE)
            .take(max)
            .enumerate()
        {
            parts[index].iov_base = buffer.as_mut_ptr().cast();
            parts[index].iov_len = buffer.len();
            let header = &mut headers[index].msg_hdr;
            header.msg_name = (&raw mut names[index]).cast();
            header.msg_namelen = size_of::<SocketAddress>() as _;
            header.msg_iov = &raw mut parts[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut controls[index]).cast();
            header.msg_controllen = CONTROL_SIZE as _;
        }
        let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT);
        let none = ptr::null_mut();
        // SAFETY: each of the `max` headers names an address, a part of this memory and a
        // control buffer with their lengths, which live until the end of this function.
        let count = unsafe { libc::recvmmsg(fd, headers.as_mut_ptr(), max as _, flags, none) };
        let count = usize::try_from(count).unwrap_or(0).min(max);
        let buffers = self.0.chunks_exact(Self::BUFFER_SIZE);
        for (index, (header, buffer)) in headers[..count].iter().zip(buffers).enumerate() {
            let message = &header.msg_hdr;
            let cut = message.msg_flags & libc::MSG_TRUNC != 0;
            let (Some((source, port)), false) = (names[index].read(message.msg_namelen), cut)
            else {
                continue;
            };
            let messages = ControlMessages::read(&controls[index].0, message.msg_controllen as _);
            let length = (header.msg_len as usize).min(buffer.len());
            let meta = RecvMeta {
                source,
                port,
                destination,
                traffic_class: messages.traffic_class,
            };
            each(
                meta,
                buffer[..length].chunks(messages.segment.unwrap_or(buffer.len())),
            );
        }
        count
    }
}

/// Length of the header of a control message, and the alignment of messages.
const HEADER: usize = size_of::<libc::cmsghdr>();
const ALIGNMENT: usize = size_of::<usize>();

/// The control messages of a received message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ControlMessages {
    traffic_class: u8,
    /// Length of the datagrams in the message but the last, if there are several.
    segment: Option<usize>,
}

impl ControlMessages {
    fn read(control: &[u8], length: usize) -> Self {
        let mut messages = Self::default();
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
                    messages.traffic_class = *data.first().unwrap_or(&0);
                }
                (Some(libc::IPPROTO_IPV6), Some(libc::IPV6_TCLASS)) => {
                    messages.traffic_class = int as u8;
                }
                (Some(libc::SOL_UDP), Some(libc::UDP_GRO)) => {
                    messages.segment = usize::try_from(int).ok().filter(|it| *it != 0);
                }
                _ => {}
            }
            let next = length.max(HEADER).next_multiple_of(ALIGNMENT);
            rest = rest.get(next..).unwrap_or(&[]);
        }
        messages
    }
}

/// Datagrams to one receiver, sent as one message. All but the last have the same length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    pub(super) datagrams: &'a [IoSlice<'a>],
    pub(super) to: ScopedAddress,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
}

/// Appends a control message at `at`. Returns the end of the control messages.
fn put_control<const N: usize>(
    control: &mut ControlBuffer,
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
    let count = messages.len().min(MAX_SEND_MESSAGES);
    let mut names: [SocketAddress; MAX_SEND_MESSAGES] =
        std::array::from_fn(|_| SocketAddress::empty());
    let mut controls = [ControlBuffer([0; CONTROL_SIZE]); MAX_SEND_MESSAGES];
    // SAFETY: zero is a value of each field: null pointers and lengths of 0.
    let mut headers: [libc::mmsghdr; MAX_SEND_MESSAGES] = unsafe { zeroed() };
    for (index, message) in messages[..count].iter().enumerate() {
        let (name, length) = SocketAddress::new(message.to, ROCE_V2_PORT);
        names[index] = name;
        let (level, class, limit) = match message.to.address {
            IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        };
        let int = |value: u8| libc::c_int::from(value).to_ne_bytes();
        let control = &mut controls[index];
        let mut end = put_control(control, 0, level, limit, int(message.hop_limit.max(1)));
        if message.traffic_class != 0 {
            end = put_control(control, end, level, class, int(message.traffic_class));
        }
        if let [first, _, ..] = message.datagrams {
            let segment = (first.len() as u16).to_ne_bytes();
            end = put_control(control, end, libc::SOL_UDP, libc::UDP_SEGMENT, segment);
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
    check(sent).map(|sent| sent as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn refused_datagrams_are_reported() {
        for address in ["127.49.0.30", "::1"] {
            let address = address.parse().unwrap();
            let local = ScopedAddress { address, scope: 0 };
            let Ok(socket) = open_sender(local, 0, 0) else {
                continue;
            };
            report_refusals(&socket, address).unwrap();
            assert_eq!(refusals(socket.as_fd()), []);
            // No process has bound port 4791 of this address, unless a device uses it.
            let to = ScopedAddress {
                address: match address {
                    IpAddr::V4(_) => [127, 49, 0, 31].into(),
                    ipv6 => ipv6,
                },
                scope: 0,
            };
            let payload = [7; 280];
            let datagrams = [IoSlice::new(&payload)];
            let message = Message {
                datagrams: &datagrams,
                to,
                traffic_class: 0,
                hop_limit: 64,
            };
            for _ in 0..3 {
                assert_eq!(send(socket.as_fd(), &[message]).unwrap(), 1);
                assert_eq!(refusals(socket.as_fd()), [(to.address, payload.to_vec())]);
            }
            // Without reading, the next call fails, and only that.
            send(socket.as_fd(), &[message]).unwrap();
            let error = send(socket.as_fd(), &[message]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
            send(socket.as_fd(), &[message]).unwrap();
            assert_eq!(refusals(socket.as_fd()).len(), 2);
        }
    }

    #[test]
    fn control_messages_are_read_as_written() {
        let mut control = ControlBuffer([0; CONTROL_SIZE]);
        let end = put_control(&mut control, 0, libc::IPPROTO_IP, libc::IP_TOS, [0x2e]);
        let end = put_control(
            &mut control,
            end,
            libc::SOL_UDP,
            libc::UDP_GRO,
            1084i32.to_ne_bytes(),
        );
        let messages = ControlMessages {
            traffic_class: 0x2e,
            segment: Some(1084),
        };
        assert_eq!(ControlMessages::read(&control.0, end), messages);
        let class = 7i32.to_ne_bytes();
        let end = put_control(
            &mut control,
            0,
            libc::IPPROTO_IPV6,
            libc::IPV6_TCLASS,
            class,
        );
        let messages = ControlMessages {
            traffic_class: 7,
            segment: None,
        };
        assert_eq!(ControlMessages::read(&control.0, end), messages);
        // Without room, nothing is written.
        assert_eq!(
            put_control(&mut control, CONTROL_SIZE - HEADER, 0, 0, [0; 8]),
            CONTROL_SIZE - HEADER
        );
    }

    proptest! {
        #[test]
        fn arbitrary_control_messages_are_parsed(
            bytes: [u8; CONTROL_SIZE],
            length in 0..2 * CONTROL_SIZE,
        ) {
            prop_assert_ne!(ControlMessages::read(&bytes, length).segment, Some(0));
        }
    }
}
