//! Event channels: a queue of unread events, and a descriptor that is readable while the
//! queue is not empty.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use rdmacm::abi;

use super::id::LocalPort;
use crate::Result;
use crate::readiness::Readiness;

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
    /// Its descriptor is the channel's.
    readiness: Readiness,
    events: VecDeque<QueuedEvent>,
    /// The device port of its ids.
    pub(super) port: LocalPort,
}

impl Channel {
    pub(super) fn new(port: LocalPort) -> Result<(RawFd, Self)> {
        let readiness = Readiness::new()?;
        let fd = readiness.fd();
        let channel = Self {
            readiness,
            events: VecDeque::new(),
            port,
        };
        Ok((fd, channel))
    }

    /// Adds an event.
    pub(super) fn push(&mut self, event: QueuedEvent) {
        self.readiness.raise();
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
            self.readiness.clear();
        }
    }
}
