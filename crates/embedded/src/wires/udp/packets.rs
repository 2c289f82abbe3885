//! Raw packets of a device on an interface: a packet socket (packet(7)).
//!
//! Unlike a card, which takes what a flow matches from the host, a packet socket receives
//! copies. What the kernel leaves to network cards in frames that stay in the host, checksums
//! and segmentation, is done here.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::epoll::{Epoll, EpollCreateFlags};
use roce::packet::{LinkKind, Mac, NetworkHeaders};
use softhca::engine::ethernet::{checksum, segment_frame};
use uverbs::Errno;

use super::socket::{self, MAX_RECV_MESSAGES, ReceiveBuffers, check, set_option};
use super::watch;
use crate::Result;

/// Maximum number of frames sent in one call.
pub(super) const MAX_SEND_FRAMES: usize = 32;
/// Options of packet sockets.
const PACKET_AUXDATA: libc::c_int = 8;
const PACKET_VNET_HDR: libc::c_int = 15;
/// Length of `struct virtio_net_hdr`, which precedes each frame with PACKET_VNET_HDR.
const VNET_HEADER: usize = 10;
/// Its flag: the checksum is not computed.
const NEEDS_CSUM: u8 = 1;
/// A flag in its type of segmentation.
const GSO_ECN: u8 = 0x80;
/// Offset of a UDP checksum in the header.
const UDP_CHECKSUM: usize = 6;
/// Room for `struct tpacket_auxdata` and its header.
const CONTROL_SIZE: usize = 64;
const AUXDATA: usize = 20;

/// The interface whose raw packets a device exchanges.
#[derive(Debug)]
pub(crate) struct PacketPort {
    /// Index of the interface.
    interface: u32,
    /// Its address; `None` if it is no Ethernet interface.
    mac: Option<Mac>,
    socket: Mutex<Option<Arc<PacketSocket>>>,
    /// There is a socket.
    opened: AtomicBool,
    /// Monitors the socket.
    epoll: Epoll,
}

/// A packet socket. It receives frames as long as it is open, so that queue pairs own it. Once
/// these are destroyed, it sends what they have completed, and is closed.
#[derive(Debug)]
pub(crate) struct PacketSocket(OwnedFd);

impl PacketPort {
    pub(super) fn new(interface: u32, mac: Option<Mac>) -> io::Result<Self> {
        Ok(Self {
            interface,
            mac,
            socket: Mutex::default(),
            opened: AtomicBool::new(false),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        })
    }

    /// Returns the address of an Ethernet interface.
    pub(super) fn mac(&self) -> Option<Mac> {
        self.mac
    }

    /// Returns the descriptor that is readable while frames wait.
    pub(super) fn descriptor(&self) -> &Epoll {
        &self.epoll
    }

    /// Returns the socket; opens it if nothing has it open.
    ///
    /// # Errors
    /// EPERM without CAP_NET_RAW; those of the socket calls.
    pub(super) fn open(&self) -> Result<Arc<PacketSocket>> {
        let mut current = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(socket) = &*current {
            return Ok(Arc::clone(socket));
        }
        let opened = PacketSocket::open(self.interface)
            .map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EIO)))?;
        watch(&self.epoll, opened.0.as_fd(), 0)?;
        let socket = Arc::new(opened);
        *current = Some(Arc::clone(&socket));
        self.opened.store(true, Ordering::Release);
        Ok(socket)
    }

    /// Returns the socket if it is open.
    pub(super) fn current(&self) -> Option<Arc<PacketSocket>> {
        if !self.opened.load(Ordering::Acquire) {
            return None;
        }
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        socket.clone()
    }

    /// Closes the socket if no queue pair owns it. Called when no frame waits for it.
    pub(super) fn close_unused(&self) {
        if !self.opened.load(Ordering::Acquire) {
            return;
        }
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        if socket.as_ref().is_some_and(|it| Arc::strong_count(it) == 1) {
            *socket = None;
            self.opened.store(false, Ordering::Release);
        }
    }

    /// Returns whether the device receives a frame of the interface.
    fn receives(&self, kind: u8, frame: &[u8]) -> bool {
        let to_device = match kind {
            libc::PACKET_HOST | libc::PACKET_BROADCAST | libc::PACKET_MULTICAST => true,
            // Sent by this host: a card loops back what is for its own port.
            libc::PACKET_OUTGOING => {
                let to = frame.first_chunk::<6>();
                to.is_some_and(|to| to[0] & 1 != 0 || Some(*to) == self.mac)
            }
            _ => false,
        };
        // RoCE packets arrive by the sockets of their addresses.
        to_device && NetworkHeaders::read(LinkKind::Ethernet, frame).is_err()
    }

    /// Receives frames from the socket. Returns the number of messages.
    pub(super) fn receive(
        &self,
        socket: &PacketSocket,
        buffers: &mut ReceiveBuffers,
        mut each: impl FnMut(&[u8]),
    ) -> usize {
        socket.receive(buffers, |kind, vlan, message| {
            for_each_frame(message, vlan, |frame| {
                if self.receives(kind, frame) {
                    each(frame);
                }
            });
        })
    }
}

/// The tag that the kernel has removed from a frame.
type VlanTag = [u8; 4];

/// Calls `each` with the frames of a message: as they would be on a cable.
fn for_each_frame(message: &mut [u8], vlan: Option<VlanTag>, mut each: impl FnMut(&[u8])) {
    let Some((header, frame)) = message.split_at_mut_checked(VNET_HEADER) else {
        return;
    };
    let word = |at: usize| usize::from(u16::from_ne_bytes([header[at], header[at + 1]]));
    let (flags, segmentation, size) = (header[0], header[1] & !GSO_ECN, word(4));
    let mut each = |frame: &[u8]| match (vlan, frame.split_at_checked(12)) {
        (Some(tag), Some((addresses, rest))) => each(&[addresses, &tag, rest].concat()),
        _ => each(frame),
    };
    if segmentation != 0 {
        return segment_frame(frame, size).iter().for_each(|it| each(it));
    }
    if flags & NEEDS_CSUM != 0 {
        add_checksum(frame, word(6), word(8));
    }
    each(frame);
}

/// Computes a checksum, whose field contains the sum of the pseudo header.
fn add_checksum(frame: &mut [u8], start: usize, offset: usize) {
    let Some(covered) = frame.get_mut(start..) else {
        return;
    };
    let value = match (checksum(covered), offset) {
        (0, UDP_CHECKSUM) => 0xffff,
        (value, _) => value,
    };
    if let Some(field) = covered.get_mut(offset..offset + 2) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}

/// A control message buffer, aligned for `cmsghdr`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct ControlBuffer([u8; CONTROL_SIZE]);

impl ControlBuffer {
    /// Returns the VLAN tag of the `tpacket_auxdata` in it.
    fn vlan(&self, length: usize) -> Option<VlanTag> {
        const HEADER: usize = size_of::<libc::cmsghdr>();
        const STATUS_VLAN_VALID: u32 = 1 << 4;
        const STATUS_VLAN_TPID_VALID: u32 = 1 << 6;
        const STATUS: usize = 0;
        const TCI: usize = 16;
        const TPID: usize = 18;
        let data = self.0.get(..length)?.get(HEADER..HEADER + AUXDATA)?;
        let status = u32::from_ne_bytes(*data[STATUS..].first_chunk()?);
        let half = |at: usize| Some(u16::from_ne_bytes(*data[at..].first_chunk()?));
        if status & STATUS_VLAN_VALID == 0 {
            return None;
        }
        let tpid = match status & STATUS_VLAN_TPID_VALID {
            0 => libc::ETH_P_8021Q as u16,
            _ => half(TPID)?,
        };
        let ([a, b], [c, d]) = (tpid.to_be_bytes(), half(TCI)?.to_be_bytes());
        Some([a, b, c, d])
    }
}

impl PacketSocket {
    fn open(interface: u32) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // Without a protocol it receives nothing before it is bound.
        // SAFETY: no memory is passed.
        let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
        // SAFETY: the descriptor is new and owned by nothing else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let on: libc::c_int = 1;
        for option in [PACKET_AUXDATA, PACKET_VNET_HDR] {
            set_option(&socket, libc::SOL_PACKET, option, &on)?;
        }
        let groups = libc::packet_mreq {
            mr_ifindex: interface as libc::c_int,
            mr_type: libc::PACKET_MR_ALLMULTI as u16,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        let option = libc::PACKET_ADD_MEMBERSHIP;
        set_option(&socket, libc::SOL_PACKET, option, &groups)?;
        socket::request_buffer(&socket, [libc::SO_RCVBUFFORCE, libc::SO_RCVBUF]);
        // SAFETY: zero is a value of each field.
        let mut name: libc::sockaddr_ll = unsafe { zeroed() };
        name.sll_family = libc::AF_PACKET as u16;
        name.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        name.sll_ifindex = interface as libc::c_int;
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address is initialized for its length.
        check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), length) })?;
        Ok(Self(socket))
    }

    /// Receives up to [`MAX_RECV_MESSAGES`]. Calls `each` with the type of packet, the VLAN tag
    /// and the bytes of each message, and returns the number of messages.
    fn receive(
        &self,
        ReceiveBuffers(memory): &mut ReceiveBuffers,
        mut each: impl FnMut(u8, Option<VlanTag>, &mut [u8]),
    ) -> usize {
        const MAX: usize = MAX_RECV_MESSAGES;
        let size = ReceiveBuffers::BUFFER_SIZE;
        let mut controls = [ControlBuffer([0; CONTROL_SIZE]); MAX];
        // SAFETY: zero is a value of each field: null pointers and lengths of 0.
        let (mut names, mut parts, mut headers): (
            [libc::sockaddr_ll; MAX],
            [libc::iovec; MAX],
            [libc::mmsghdr; MAX],
        ) = unsafe { (zeroed(), zeroed(), zeroed()) };
        for (index, buffer) in memory.chunks_exact_mut(size).take(MAX).enumerate() {
            parts[index].iov_base = buffer.as_mut_ptr().cast();
            parts[index].iov_len = buffer.len();
            let header = &mut headers[index].msg_hdr;
            header.msg_name = (&raw mut names[index]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_ll>() as _;
            header.msg_iov = &raw mut parts[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut controls[index]).cast();
            header.msg_controllen = CONTROL_SIZE as _;
        }
        let (fd, flags) = (self.0.as_raw_fd(), libc::MSG_DONTWAIT);
        let none = ptr::null_mut();
        // SAFETY: each header names an address, a part of this memory (or none) and a control
        // buffer with their lengths, which live until the end of this function.
        let count = unsafe { libc::recvmmsg(fd, headers.as_mut_ptr(), MAX as _, flags, none) };
        let count = usize::try_from(count).unwrap_or(0).min(MAX);
        for (index, buffer) in memory.chunks_exact_mut(size).take(count).enumerate() {
            let header = &headers[index];
            let length = header.msg_len as usize;
            if header.msg_hdr.msg_flags & libc::MSG_TRUNC == 0 && length <= buffer.len() {
                let vlan = controls[index].vlan(header.msg_hdr.msg_controllen as _);
                each(names[index].sll_pkttype, vlan, &mut buffer[..length]);
            }
        }
        count
    }

    /// Sends frames, at most [`MAX_SEND_FRAMES`]. Returns how many the socket has accepted.
    ///
    /// # Errors
    /// The error of the first frame, if it was not accepted.
    pub(super) fn send<'a>(&self, frames: impl Iterator<Item = &'a [u8]>) -> io::Result<usize> {
        let vnet_header = [0u8; VNET_HEADER];
        // SAFETY: zero is a value of each field: null pointers and lengths of 0.
        let (mut parts, mut headers): (
            [[libc::iovec; 2]; MAX_SEND_FRAMES],
            [libc::mmsghdr; MAX_SEND_FRAMES],
        ) = unsafe { (zeroed(), zeroed()) };
        let mut count = 0;
        for (frame, (parts, header)) in frames.zip(parts.iter_mut().zip(&mut headers)) {
            for (part, bytes) in parts.iter_mut().zip([&vnet_header, frame]) {
                part.iov_base = bytes.as_ptr().cast_mut().cast();
                part.iov_len = bytes.len();
            }
            header.msg_hdr.msg_iov = parts.as_mut_ptr();
            header.msg_hdr.msg_iovlen = 2;
            count += 1;
        }
        let (fd, flags) = (self.0.as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        // SAFETY: each of the `count` headers names two parts, whose bytes live until the end
        // of this function and are only read.
        let sent = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), count, flags) };
        check(sent).map(|sent| sent as usize)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 7];

    fn frames(message: &mut [u8], vlan: Option<VlanTag>) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        for_each_frame(message, vlan, |frame| frames.push(frame.to_vec()));
        frames
    }

    /// A message with a UDP packet in IPv4 of `length` bytes of data.
    fn message(flags: u8, segmentation: u8, size: u16, length: usize) -> Vec<u8> {
        let mut message = vec![0; VNET_HEADER + 42 + length];
        message[0] = flags;
        message[1] = segmentation;
        message[4..6].copy_from_slice(&size.to_ne_bytes());
        message[6..8].copy_from_slice(&34u16.to_ne_bytes());
        message[8..10].copy_from_slice(&(UDP_CHECKSUM as u16).to_ne_bytes());
        let frame = &mut message[VNET_HEADER..];
        frame[..6].copy_from_slice(&MAC);
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[16..18].copy_from_slice(&(28 + length as u16).to_be_bytes());
        frame[23] = 17;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[38..40].copy_from_slice(&(8 + length as u16).to_be_bytes());
        // The sum of the pseudo header.
        let pseudo = 0x0a00 + 1 + 0x0a00 + 2 + 17 + 8 + length as u16;
        frame[40..42].copy_from_slice(&pseudo.to_be_bytes());
        frame[42..].fill(7);
        message
    }

    /// The sum of pseudo header and UDP packet, 0xffff if the checksum is right.
    fn sum(frame: &[u8]) -> u32 {
        let words = frame[26..].chunks(2);
        let words = words.map(|it| u32::from(it[0]) << 8 | it.get(1).map_or(0, |it| (*it).into()));
        let mut sum = words.sum::<u32>() + 17 + (frame.len() - 34) as u32;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum
    }

    #[test]
    fn frames_are_as_on_a_cable() {
        let plain = frames(&mut message(0, 0, 0, 5), None);
        assert_eq!(plain, [message(0, 0, 0, 5)[VNET_HEADER..].to_vec()]);
        let with_checksum = frames(&mut message(NEEDS_CSUM, 0, 0, 5), None);
        assert_eq!(sum(&with_checksum[0]), 0xffff);
        let tagged = frames(&mut message(NEEDS_CSUM, 0, 0, 5), Some([0x81, 0, 0, 9]));
        assert_eq!(tagged[0][..12], plain[0][..12]);
        assert_eq!(tagged[0][12..18], [0x81, 0, 0, 9, 8, 0]);
        // UDP segmentation (VIRTIO_NET_HDR_GSO_UDP_L4).
        let segments = frames(&mut message(NEEDS_CSUM, 5, 1000, 2500), None);
        let lengths: Vec<usize> = segments.iter().map(Vec::len).collect();
        assert_eq!(lengths, [1042, 1042, 542]);
        for segment in &segments {
            assert_eq!(sum(segment), 0xffff);
            assert_eq!(segment[38..40], (segment.len() as u16 - 34).to_be_bytes());
        }
    }

    #[test]
    fn a_device_receives_what_its_card_would() {
        let port = PacketPort::new(1, Some(MAC)).unwrap();
        let mut frame = message(0, 0, 0, 20).split_off(VNET_HEADER);
        assert!(port.receives(libc::PACKET_HOST, &frame));
        assert!(port.receives(libc::PACKET_OUTGOING, &frame), "for itself");
        assert!(!port.receives(libc::PACKET_OTHERHOST, &frame));
        // The RoCE port.
        frame[36..38].copy_from_slice(&4791u16.to_be_bytes());
        assert!(!port.receives(libc::PACKET_HOST, &frame));
        frame[36] = 0;
        frame[5] = 8;
        assert!(!port.receives(libc::PACKET_OUTGOING, &frame));
    }

    proptest! {
        #[test]
        fn arbitrary_messages_are_parsed(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            vlan: Option<VlanTag>,
        ) {
            for_each_frame(&mut bytes, vlan, |_| {});
        }
    }
}
