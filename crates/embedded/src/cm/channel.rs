//! Event channels: a queue of unread events, and a descriptor that is readable while the
//! queue is not empty.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use rdmacm::abi;

use super::claim::Claim;
use super::id::LocalPort;
use crate::readiness::Readiness;
use crate::{Result, refuse};

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
    /// Decides which process owns it, since a fork.
    pub(super) claim: Option<Claim>,
    /// It has been left to another process.
    is_left: bool,
}

impl Channel {
    pub(super) fn new(port: LocalPort) -> Result<(RawFd, Self)> {
        Ok(Self::of(Readiness::new()?, port, None))
    }

    /// Returns a channel with the descriptors of that of a parent process.
    pub(super) fn of(readiness: Readiness, port: LocalPort, claim: Option<Claim>) -> (RawFd, Self) {
        let fd = readiness.fd();
        // Events that the parent had not read are not this channel's.
        readiness.clear();
        let channel = Self {
            readiness,
            events: VecDeque::new(),
            port,
            claim,
            is_left: false,
        };
        (fd, channel)
    }

    /// Returns the descriptors that a child of fork needs.
    pub(super) fn descriptors(&self) -> [RawFd; 2] {
        self.readiness.descriptors()
    }

    /// Called before a command uses the channel, which then belongs to this process.
    ///
    /// # Errors
    /// EIO: another process has used it first.
    pub(super) fn take_ownership(&self) -> Result<()> {
        match &self.claim {
            Some(claim) if !claim.take() => refuse(libc::EIO),
            _ => Ok(()),
        }
    }

    /// Returns whether another process has used it first.
    pub(super) fn is_lost(&self) -> bool {
        self.claim.as_ref().is_some_and(Claim::is_lost)
    }

    /// Leaves the channel to another process. Returns the unread events; `None` if that was done
    /// before.
    pub(super) fn leave(&mut self) -> Option<Vec<QueuedEvent>> {
        // The signal is the other process's, too.
        (!std::mem::replace(&mut self.is_left, true)).then(|| self.events.drain(..).collect())
    }

    /// Adds an event.
    pub(super) fn push(&mut self, event: QueuedEvent) {
        if self.is_left {
            return;
        }
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
        if self.events.is_empty() && !self.is_left {
            self.readiness.clear();
        }
    }
}
