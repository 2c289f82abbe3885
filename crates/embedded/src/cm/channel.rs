//! Event channels: a queue of unread events, and a descriptor that is readable while the
//! queue is not empty.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use rdmacm::abi;

use super::id::Port;
use super::monitor::to_errno;
use crate::Result;

/// An unread event.
#[derive(Clone, Debug)]
pub(super) struct QueuedEvent {
    /// The id of the event.
    pub(super) id: u32,
    /// The multicast membership of the event.
    pub(super) membership: Option<u32>,
    /// The id that a connection request created.
    pub(super) request: Option<u32>,
    pub(super) event: Box<abi::EventResp>,
}

/// An event channel.
#[derive(Debug)]
pub(super) struct Channel {
    /// Contains only the signal; its descriptor is the channel's. As the kernel's file, it is
    /// never writable and cannot be read, and O_NONBLOCK does not apply to the signal.
    epoll: Epoll,
    /// Readable while there are events.
    signal: EventFd,
    events: VecDeque<QueuedEvent>,
    /// The device port of its ids.
    pub(super) port: Port,
}

impl Channel {
    pub(super) fn new(port: Port) -> Result<(RawFd, Self)> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(to_errno)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let signal = EventFd::from_value_and_flags(0, flags).map_err(to_errno)?;
        let readable = EpollEvent::new(EpollFlags::EPOLLIN, 0);
        epoll.add(&signal, readable).map_err(to_errno)?;
        let channel = Self {
            epoll,
            signal,
            events: VecDeque::new(),
            port,
        };
        Ok((channel.epoll.0.as_raw_fd(), channel))
    }

    /// Adds an event. As in the kernel, each event wakes threads that wait for the
    /// descriptor, also edge-triggered ones (EPOLLET).
    pub(super) fn push(&mut self, event: QueuedEvent) {
        // Fails only if the counter is full, which also makes it readable.
        let _ = self.signal.write(1);
        self.events.push_back(event);
    }

    pub(super) fn pop(&mut self) -> Option<QueuedEvent> {
        let event = self.events.pop_front();
        self.settle();
        event
    }

    /// Removes and returns the events selected by `which`.
    pub(super) fn take(&mut self, which: impl Fn(&QueuedEvent) -> bool) -> Vec<QueuedEvent> {
        let (taken, left) = self.events.drain(..).partition(which);
        self.events = left;
        self.settle();
        Vec::from(taken)
    }

    /// Returns the number of unread connection requests to a listening id.
    pub(super) fn requests(&self, listener: u32) -> usize {
        let of_it = |it: &&QueuedEvent| it.id == listener && it.request.is_some();
        self.events.iter().filter(of_it).count()
    }

    /// Makes the channel unreadable if no events are left.
    fn settle(&mut self) {
        if self.events.is_empty() {
            let _ = self.signal.read();
        }
    }
}
