//! The two ends of a connection, which carry the messages of two ids: sockets between
//! processes, within a process queues that need no descriptors.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{MsgFlags, recv, send};
use uverbs::Errno;
use zerocopy::IntoBytes;

use super::wire::{Message, MessageKind, SIZE};
use crate::Result;

/// Maximum number of unread messages; further ones are lost, as in a full socket.
const MAX_UNREAD: usize = 64;

/// Result of receiving from a link.
pub(super) enum ReceiveResult {
    Nothing,
    Message(MessageKind, Box<Message>),
    /// The peer has closed its end, or sent a malformed message.
    Closed,
}

/// One end of a connection. Dropping it closes the connection.
#[derive(Debug)]
pub(super) enum Link {
    /// To any process.
    Socket(OwnedFd),
    /// Within this process.
    Memory(End),
}

impl Link {
    /// Sends a message. Errors are ignored: a later receive detects a closed link, and the
    /// deadline an undelivered message.
    pub(super) fn send(&self, message: &Message) {
        self.send_bytes(message.as_bytes());
    }

    pub(super) fn send_bytes(&self, bytes: &[u8]) {
        match self {
            Self::Socket(socket) => {
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                let _ = send(socket.as_raw_fd(), bytes, flags);
            }
            Self::Memory(end) => end.send(bytes),
        }
    }

    pub(super) fn receive(&self) -> ReceiveResult {
        match self {
            Self::Socket(socket) => receive_from(socket),
            Self::Memory(end) => end.receive(),
        }
    }
}

fn receive_from(socket: &OwnedFd) -> ReceiveResult {
    // One more byte, to detect messages that are too long.
    let mut bytes = [0; SIZE + 1];
    loop {
        match recv(socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return ReceiveResult::Closed,
            Ok(length) => return parse(&bytes[..length]),
            Err(nix::Error::EAGAIN) => return ReceiveResult::Nothing,
            // ECONNRESET is reported once, if the peer closed its socket with
            // unread data; messages of the peer can still be read.
            Err(nix::Error::EINTR | nix::Error::ECONNRESET) => {}
            Err(_) => return ReceiveResult::Closed,
        }
    }
}

fn parse(bytes: &[u8]) -> ReceiveResult {
    match Message::parse(bytes) {
        Ok((kind, message)) => ReceiveResult::Message(kind, Box::new(message)),
        Err(error) => {
            tracing::debug!(%error, "malformed message from the peer");
            ReceiveResult::Closed
        }
    }
}

/// Numbers of links that are ready, and a descriptor that is readable while there are any.
#[derive(Debug)]
pub(super) struct ReadyList {
    numbers: Mutex<Vec<u64>>,
    wake: EventFd,
}

impl ReadyList {
    pub(super) fn new() -> Result<Arc<Self>> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = EventFd::from_value_and_flags(0, flags);
        Ok(Arc::new(Self {
            numbers: Mutex::default(),
            wake: wake.map_err(|errno| Errno::new(errno as i32))?,
        }))
    }

    pub(super) fn descriptor(&self) -> &EventFd {
        &self.wake
    }

    fn push(&self, number: u64) {
        let mut numbers = lock(&self.numbers);
        if numbers.is_empty() {
            // Fails only if the counter is full, which also wakes.
            let _ = self.wake.write(1);
        }
        numbers.push(number);
    }

    /// Takes all numbers. A link is in it once for each message, and once for its end.
    pub(super) fn take(&self) -> Vec<u64> {
        let mut numbers = lock(&self.numbers);
        let _ = self.wake.read();
        std::mem::take(&mut numbers)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One end of a connection within this process.
#[derive(Debug)]
pub(super) struct End {
    sides: Arc<Mutex<[Side; 2]>>,
    own: usize,
}

#[derive(Debug, Default)]
struct Side {
    unread: VecDeque<Box<[u8]>>,
    is_closed: bool,
    /// Where the end is reported when it is ready.
    watcher: Option<(Arc<ReadyList>, u64)>,
}

impl Side {
    fn report(&self, times: usize) {
        if let Some((list, number)) = &self.watcher {
            (0..times).for_each(|_| list.push(*number));
        }
    }
}

impl End {
    /// Creates the two ends of a connection.
    pub(super) fn pair() -> (Self, Self) {
        let sides = Arc::<Mutex<[Side; 2]>>::default();
        let end = |own| Self {
            sides: Arc::clone(&sides),
            own,
        };
        (end(0), end(1))
    }

    /// Reports the end in a list, under a number, in place of an earlier one.
    pub(super) fn watch(&self, list: &Arc<ReadyList>, number: u64) {
        let mut sides = lock(&self.sides);
        let is_closed = sides[1 - self.own].is_closed;
        let side = &mut sides[self.own];
        side.watcher = Some((Arc::clone(list), number));
        side.report(side.unread.len() + usize::from(is_closed));
    }

    pub(super) fn send(&self, bytes: &[u8]) {
        let peer = &mut lock(&self.sides)[1 - self.own];
        if !peer.is_closed && peer.unread.len() < MAX_UNREAD {
            peer.unread.push_back(bytes.into());
            peer.report(1);
        }
    }

    pub(super) fn receive(&self) -> ReceiveResult {
        let mut sides = lock(&self.sides);
        match sides[self.own].unread.pop_front() {
            Some(bytes) => parse(&bytes),
            None if sides[1 - self.own].is_closed => ReceiveResult::Closed,
            None => ReceiveResult::Nothing,
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let mut sides = lock(&self.sides);
        let own = &mut sides[self.own];
        own.is_closed = true;
        own.watcher = None;
        own.unread = VecDeque::new();
        sides[1 - self.own].report(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_reported_once_for_each_message_and_for_the_end() {
        let list = ReadyList::new().unwrap();
        let (near, far) = End::pair();
        near.send(b"before it is watched");
        far.watch(&list, 7);
        let message = Message::new(MessageKind::Ready, b"");
        near.send(message.as_bytes());
        assert_eq!(list.take(), [7, 7]);
        assert!(matches!(far.receive(), ReceiveResult::Closed));
        drop(near);
        far.watch(&list, 8);
        assert_eq!(list.take(), [7, 8, 8]);
        assert!(matches!(
            far.receive(),
            ReceiveResult::Message(MessageKind::Ready, _)
        ));
        assert!(matches!(far.receive(), ReceiveResult::Closed));
        far.send(b"to nobody");
        assert_eq!(list.take(), [0; 0]);
    }

    #[test]
    fn unread_messages_are_bounded() {
        let (near, far) = End::pair();
        let message = Message::new(MessageKind::Ready, b"");
        for _ in 0..2 * MAX_UNREAD {
            near.send(message.as_bytes());
        }
        let read = || matches!(far.receive(), ReceiveResult::Message(..));
        assert_eq!((0..).take_while(|_| read()).count(), MAX_UNREAD);
    }
}
