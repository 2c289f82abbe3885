//! Event channels: a descriptor that is readable when there may be an event,
//! and a queue of unread events.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use rdmacm::abi;
use uverbs::Errno;

use super::id::Port;
use crate::Result;

/// Maximum number of ready descriptors processed at once.
const LIMIT: usize = 16;

/// A ready descriptor of an epoll instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    /// There are events; nothing else to do.
    Events,
    /// A deadline has passed.
    Time,
    /// The connection of an id.
    Socket(u32),
    /// The listening socket of an id.
    Listener(u32),
    /// A connection to a listening id that has not sent anything yet: the id,
    /// and the connection's index.
    Caller(u32, usize),
}

const EVENTS: u64 = 1;
const TIME: u64 = 2;
const LISTENER: u64 = 3;
const SOCKET: u64 = 4;
const CALLER: u64 = 5;

impl Ready {
    fn number(self) -> u64 {
        let of = |id: u32| u64::from(id) << 32;
        match self {
            Self::Events => EVENTS,
            Self::Time => TIME,
            Self::Socket(id) => of(id) | SOCKET,
            Self::Listener(id) => of(id) | LISTENER,
            Self::Caller(id, place) => of(id) | (CALLER + place as u64),
        }
    }

    fn of(number: u64) -> Self {
        let id = (number >> 32) as u32;
        match number & u64::from(u32::MAX) {
            EVENTS => Self::Events,
            TIME => Self::Time,
            SOCKET => Self::Socket(id),
            LISTENER => Self::Listener(id),
            place => Self::Caller(id, (place - CALLER) as usize),
        }
    }
}

/// An unread event.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    /// The id that it belongs to.
    pub(super) of: u32,
    /// The membership that it belongs to.
    pub(super) membership: Option<u32>,
    /// The id that a connection request created.
    pub(super) request: Option<u32>,
    pub(super) event: Box<abi::EventResp>,
}

/// An event channel.
#[derive(Debug)]
pub(super) struct Channel {
    /// Its descriptor is the channel's.
    epoll: Epoll,
    /// Readable while there are events.
    signal: EventFd,
    timer: TimerFd,
    /// When the timer expires.
    due: Option<Instant>,
    events: VecDeque<Waiting>,
    /// The device port of its ids.
    pub(super) port: Port,
}

fn os(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

impl Channel {
    pub(super) fn new(port: Port) -> Result<(RawFd, Self)> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(os)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let signal = EventFd::from_value_and_flags(0, flags).map_err(os)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).map_err(os)?;
        let channel = Self {
            epoll,
            signal,
            timer,
            due: None,
            events: VecDeque::new(),
            port,
        };
        channel.watch(&channel.signal, Ready::Events)?;
        channel.watch(&channel.timer, Ready::Time)?;
        Ok((channel.epoll.0.as_raw_fd(), channel))
    }

    /// Monitors a descriptor until it is closed or [ignored](Self::ignore).
    pub(super) fn watch(&self, fd: impl AsFd, what: Ready) -> Result<()> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, what.number());
        self.epoll.add(fd, event).map_err(os)
    }

    pub(super) fn ignore(&self, fd: impl AsFd) {
        // Fails if the descriptor was not monitored.
        let _ = self.epoll.delete(fd);
    }

    /// Returns the descriptors that are ready now.
    pub(super) fn ready(&self) -> Vec<Ready> {
        let mut events = [EpollEvent::empty(); LIMIT];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO);
        let events = &events[..count.unwrap_or(0).min(LIMIT)];
        events.iter().map(|event| Ready::of(event.data())).collect()
    }

    /// Makes the timer expire at `at` at the latest.
    pub(super) fn wake_at(&mut self, at: Instant) {
        if self.due.is_some_and(|due| due <= at) {
            return;
        }
        self.due = Some(at);
        // Zero would stop the timer.
        let left = at.saturating_duration_since(Instant::now());
        let left = TimeSpec::from_duration(left.max(Duration::from_nanos(1)));
        // Succeeds for every representable time.
        let _ = (self.timer).set(Expiration::OneShot(left), TimerSetTimeFlags::empty());
    }

    /// Resets the timer after it expired.
    pub(super) fn woken(&mut self) {
        self.due = None;
        let _ = self.timer.unset();
    }

    pub(super) fn push(&mut self, event: Waiting) {
        if self.events.is_empty() {
            // Fails only if the counter is full, which also makes it readable.
            let _ = self.signal.write(1);
        }
        self.events.push_back(event);
    }

    pub(super) fn pop(&mut self) -> Option<Waiting> {
        let event = self.events.pop_front();
        self.settle();
        event
    }

    /// Removes and returns the events selected by `which`.
    pub(super) fn take(&mut self, which: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let (taken, left) = self.events.drain(..).partition(which);
        self.events = left;
        self.settle();
        Vec::from(taken)
    }

    /// Makes the channel unreadable if no events are left.
    fn settle(&mut self) {
        if self.events.is_empty() {
            let _ = self.signal.read();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_values_survive_their_number() {
        for what in [
            Ready::Events,
            Ready::Time,
            Ready::Socket(7),
            Ready::Listener(u32::MAX),
            Ready::Caller(1, 0),
            Ready::Caller(u32::MAX, 63),
        ] {
            assert_eq!(Ready::of(what.number()), what);
        }
    }
}
