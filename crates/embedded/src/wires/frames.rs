//! A unidirectional connection between two processes: a ring of frames in shared memory,
//! and a socket.
//!
//! The sender connects and passes the memory of the ring with the first message. From then
//! on the socket carries wake-ups, which have no content, and its end tells each side that
//! the other process has ended. The sender never reads from the socket.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use nix::sys::socket::{ControlMessage, MsgFlags, getsockopt, recv, send, sendmsg, sockopt};
use ring::{FrameReceiver, FrameSender, ProtocolViolation};
use roce::packet::{LinkKind, Packet, Pool};
use softhca::ancillary;

use crate::directory::{Directory, OTHER_VERSION};

/// Flags of a frame in the ring: its link type, whether it lacks the ICRC, which shared
/// memory does not need, and whether it is for the process's queue pair 1.
const ETHERNET: u8 = 1;
const UNSEALED: u8 = 2;
const MANAGEMENT: u8 = 4;
const FLAGS: u8 = ETHERNET | UNSEALED | MANAGEMENT;

/// Version of what processes send each other, in the first message of a connection and in the
/// lock files of a directory. It changes with the ring, the flags above, and what is not as the
/// specification of InfiniBand defines it.
pub(crate) const VERSION: u8 = 2;

/// Maximum number of wake-ups read at a time, which bounds the cost of a hostile sender.
const MAX_WAKE_UPS: usize = 64;

const NONBLOCKING: MsgFlags = MsgFlags::MSG_DONTWAIT.union(MsgFlags::MSG_NOSIGNAL);

/// The sending side.
pub(crate) struct Outgoing {
    socket: OwnedFd,
    ring: FrameSender,
    /// Frames were pushed since the last call of `wake`.
    pushed: bool,
}

impl Outgoing {
    /// Connects to the socket of a process, if it exists. Anything that becomes readable
    /// there is reported to `epoll` as `id`, and means that the process has ended.
    pub(crate) fn connect(
        directory: &Directory,
        name: &str,
        epoll: &Epoll,
        id: u64,
    ) -> Option<Self> {
        let socket = directory.connect(name).ok()??;
        let (ring, memory) = FrameSender::create().ok()?;
        let memory = [memory.as_raw_fd()];
        let handed = [ControlMessage::ScmRights(&memory)];
        sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(&[VERSION])],
            &handed,
            NONBLOCKING,
            None,
        )
        .ok()?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, id);
        epoll.add(&socket, event).ok()?;
        Some(Self {
            socket,
            ring,
            pushed: false,
        })
    }

    /// Sends a frame for a device. Returns false if there is no room.
    pub(crate) fn push(&mut self, packet: &Packet) -> Result<bool, ProtocolViolation> {
        self.push_tagged(packet, 0)
    }

    /// As above, for queue pair 1 of the process.
    pub(crate) fn push_management(&mut self, packet: &Packet) -> Result<bool, ProtocolViolation> {
        self.push_tagged(packet, MANAGEMENT)
    }

    fn push_tagged(&mut self, packet: &Packet, flag: u8) -> Result<bool, ProtocolViolation> {
        let kind = match packet.kind() {
            LinkKind::Ib => 0,
            LinkKind::Ethernet => ETHERNET,
            // Names no process: it is for none.
            LinkKind::Ip => return Ok(true),
        };
        let tag = kind | flag | if packet.has_icrc() { 0 } else { UNSEALED };
        let pushed = self.ring.push(tag, packet.frame())?;
        self.pushed |= pushed;
        Ok(pushed)
    }

    /// Wakes the receiver if it sleeps and frames were sent.
    pub(crate) fn wake(&mut self) {
        if std::mem::take(&mut self.pushed) && self.ring.takes_wake_up() {
            // A full socket has unread wake-ups; epoll reports a closed one.
            let _ = send(self.socket.as_raw_fd(), &[0], NONBLOCKING);
        }
    }

    /// Returns whether the receiver has not read all frames.
    pub(crate) fn is_unread(&mut self) -> bool {
        self.ring.is_unread().unwrap_or(false)
    }

    /// Returns the id of the process that listens, 0 if it is not visible.
    pub(crate) fn process(&self) -> u32 {
        process_of(&self.socket)
    }

    /// Closes the connection. A child of fork may keep the socket open, so it must be removed
    /// from the epoll instance explicitly.
    pub(crate) fn close(self, epoll: &Epoll) {
        let _ = epoll.delete(&self.socket);
    }
}

/// Returns the id of the process at the other end of a connection, 0 if it is not visible.
pub(crate) fn process_of(socket: &OwnedFd) -> u32 {
    let peer = getsockopt(socket, sockopt::PeerCredentials);
    peer.map_or(0, |it| it.pid().try_into().unwrap_or(0))
}

/// Returns whether the other end of a connection is closed.
pub(crate) fn is_closed(socket: &OwnedFd) -> bool {
    let mut found = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let _ = poll(&mut found, PollTimeout::ZERO);
    let events = found[0].revents();
    events.is_some_and(|events| events.contains(PollFlags::POLLHUP))
}

/// The receiving side.
pub(crate) struct Incoming {
    /// `None` once the sender has closed it; the remaining frames are still read.
    socket: Option<OwnedFd>,
    /// `None` until it was received.
    ring: Option<FrameReceiver>,
}

impl Incoming {
    /// Wraps an accepted connection, which is reported to `epoll` as `id`.
    pub(crate) fn new(socket: OwnedFd, epoll: &Epoll, id: u64) -> Option<Self> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, id);
        epoll.add(&socket, event).ok()?;
        Some(Self {
            socket: Some(socket),
            ring: None,
        })
    }

    /// Reads from the socket: the ring, and wake-ups.
    pub(crate) fn read_socket(&mut self, epoll: &Epoll) {
        for _ in 0..MAX_WAKE_UPS {
            let Some(socket) = &self.socket else {
                return;
            };
            let open = match self.ring {
                Some(_) => {
                    recv(socket.as_raw_fd(), &mut [0], NONBLOCKING).map(|length| length != 0)
                }
                None => take_ring(socket).map(|ring| {
                    self.ring = ring;
                    self.ring.is_some()
                }),
            };
            match open {
                Ok(true) | Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => return,
                Ok(false) | Err(_) => self.disconnect(epoll),
            }
        }
    }

    fn disconnect(&mut self, epoll: &Epoll) {
        if let Some(socket) = self.socket.take() {
            // As in `Outgoing::close`.
            let _ = epoll.delete(&socket);
        }
    }

    /// Returns whether the sender has ended and all its frames were read.
    pub(crate) fn is_finished(&self) -> bool {
        let empty = |ring: &FrameReceiver| !ring.has_frames();
        self.socket.is_none() && self.ring.as_ref().is_none_or(empty)
    }

    /// Returns whether there are frames to receive.
    pub(crate) fn has_frames(&self) -> bool {
        self.ring.as_ref().is_some_and(FrameReceiver::has_frames)
    }

    /// Receives a frame, and whether it is for queue pair 1. A sender that corrupts the ring is
    /// disconnected.
    pub(crate) fn receive(&mut self, pool: &Pool, epoll: &Epoll) -> Option<(Packet, bool)> {
        if !self.has_frames() {
            return None;
        }
        let mut packet = pool.get(LinkKind::Ib);
        match self.ring.as_mut()?.pop(packet.buffer_mut()) {
            Ok(Some((tag, length))) if tag & !FLAGS == 0 => {
                packet.set_length(length);
                if tag & ETHERNET != 0 {
                    packet.set_kind(LinkKind::Ethernet);
                }
                if tag & UNSEALED != 0 {
                    packet.mark_without_icrc();
                }
                Some((packet, tag & MANAGEMENT != 0))
            }
            Ok(None) => None,
            Ok(Some(_)) | Err(ProtocolViolation) => {
                self.ring = None;
                self.disconnect(epoll);
                None
            }
        }
    }

    /// Requests a wake-up from the sender with its next frame. Returns whether there are
    /// frames already.
    pub(crate) fn arm(&self) -> bool {
        self.ring.as_ref().is_some_and(FrameReceiver::arm)
    }
}

/// Receives the first message of a connection, with the ring; `None` if it has none, or other
/// descriptors beside it, which are closed, or another version.
fn take_ring(socket: &OwnedFd) -> nix::Result<Option<FrameReceiver>> {
    let mut version = [0];
    let received = ancillary::receive(socket.as_fd(), &mut version, NONBLOCKING.bits());
    let received = received.map_err(|error| {
        let number = error.raw_os_error();
        number.map_or(nix::Error::EIO, nix::Error::from_raw)
    })?;
    if !received.fds.is_empty() && version != [VERSION] {
        tracing::warn!(version = version[0], "connection refused: {OTHER_VERSION}");
        return Ok(None);
    }
    let ring = match &received.fds[..] {
        [memory] if !received.is_cut => FrameReceiver::new(memory.as_fd()).ok(),
        _ => None,
    };
    Ok(ring)
}
