//! Monitoring of all sockets of a network's ids, and of their deadlines.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use uverbs::Errno;

use super::link::{Link, ReadyList};
use crate::Result;

/// Maximum number of ready descriptors processed at once.
const MAX_EVENTS: usize = 16;

/// A ready descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    /// A deadline has passed.
    Deadline,
    /// The connection of an id.
    Socket(u32),
    /// The listening socket of an id.
    Listener(u32),
    /// An accepted connection without a request: the listening id, and the connection's
    /// index.
    Pending(u32, usize),
}

const DEADLINE: u64 = 1;
const LISTENER: u64 = 2;
const SOCKET: u64 = 3;
/// Links in memory are ready.
const LINKS: u64 = 4;
const PENDING: u64 = 5;

impl Ready {
    fn number(self) -> u64 {
        let of = |id: u32| u64::from(id) << 32;
        match self {
            Self::Deadline => DEADLINE,
            Self::Socket(id) => of(id) | SOCKET,
            Self::Listener(id) => of(id) | LISTENER,
            Self::Pending(id, index) => of(id) | (PENDING + index as u64),
        }
    }

    fn of(number: u64) -> Self {
        let id = (number >> 32) as u32;
        match number & u64::from(u32::MAX) {
            DEADLINE => Self::Deadline,
            SOCKET => Self::Socket(id),
            LISTENER => Self::Listener(id),
            index => Self::Pending(id, (index - PENDING) as usize),
        }
    }
}

/// An epoll instance with the sockets of all ids, and a timer. Created with the first
/// channel, so that a network without channels needs no descriptors.
#[derive(Debug, Default)]
pub(super) struct Monitor(OnceLock<Descriptors>);

#[derive(Debug)]
struct Descriptors {
    epoll: Epoll,
    timer: TimerFd,
    links: Arc<ReadyList>,
}

pub(super) fn to_errno(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

fn readable(item: Ready) -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN, item.number())
}

impl Descriptors {
    fn new() -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(to_errno)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).map_err(to_errno)?;
        epoll
            .add(&timer, readable(Ready::Deadline))
            .map_err(to_errno)?;
        let links = ReadyList::new()?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, LINKS);
        epoll.add(links.descriptor(), event).map_err(to_errno)?;
        Ok(Self {
            epoll,
            timer,
            links,
        })
    }
}

impl Monitor {
    fn descriptors(&self) -> Result<&Descriptors> {
        if let Some(descriptors) = self.0.get() {
            return Ok(descriptors);
        }
        // Another thread may do so concurrently.
        let descriptors = Descriptors::new()?;
        Ok(self.0.get_or_init(|| descriptors))
    }

    /// Creates the descriptors, unless they exist.
    pub(super) fn open(&self) -> Result<()> {
        self.descriptors().map(drop)
    }

    /// Returns a descriptor that is readable while something is ready.
    pub(super) fn readable(&self) -> Result<BorrowedFd<'_>> {
        Ok(self.descriptors()?.epoll.0.as_fd())
    }

    /// Returns the descriptors that are ready, after at most `timeout`.
    pub(super) fn ready(&self, timeout: EpollTimeout) -> Vec<Ready> {
        let Ok(Descriptors { epoll, links, .. }) = self.descriptors() else {
            return Vec::new();
        };
        let mut events = [EpollEvent::empty(); MAX_EVENTS];
        let count = epoll.wait(&mut events, timeout);
        let events = &events[..count.unwrap_or(0).min(MAX_EVENTS)];
        let mut ready = Vec::new();
        for event in events {
            match event.data() {
                LINKS => ready.extend(links.take().into_iter().map(Ready::of)),
                number => ready.push(Ready::of(number)),
            }
        }
        ready
    }

    fn add(&self, descriptor: &OwnedFd, item: Ready) -> Result<()> {
        let epoll = &self.descriptors()?.epoll;
        epoll.add(descriptor, readable(item)).map_err(to_errno)
    }

    /// Closing is not enough: if a child of fork keeps the file open, it stays monitored.
    fn remove(&self, descriptor: &OwnedFd) {
        if let Some(Descriptors { epoll, .. }) = self.0.get() {
            let _ = epoll.delete(descriptor);
        }
    }

    /// Makes [`Ready::Deadline`] ready from `at` on; `None` for never.
    pub(super) fn set_timer(&self, at: Option<Instant>) {
        // Without descriptors there are no ids with deadlines.
        let Some(Descriptors { timer, .. }) = self.0.get() else {
            return;
        };
        let Some(at) = at else {
            let _ = timer.unset();
            return;
        };
        // Zero would stop the timer.
        let left = at.saturating_duration_since(Instant::now());
        let left = TimeSpec::from_duration(left.max(Duration::from_nanos(1)));
        // Succeeds for every representable time.
        let _ = timer.set(Expiration::OneShot(left), TimerSetTimeFlags::empty());
    }
}

/// A listening descriptor that is monitored until it is dropped.
#[derive(Debug)]
pub(super) struct MonitoredListener {
    descriptor: OwnedFd,
    monitor: Arc<Monitor>,
}

impl MonitoredListener {
    pub(super) fn new(monitor: &Arc<Monitor>, descriptor: OwnedFd, item: Ready) -> Result<Self> {
        monitor.add(&descriptor, item)?;
        Ok(Self {
            descriptor,
            monitor: Arc::clone(monitor),
        })
    }
}

impl Deref for MonitoredListener {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.descriptor
    }
}

impl Drop for MonitoredListener {
    fn drop(&mut self) {
        self.monitor.remove(&self.descriptor);
    }
}

/// A link that is monitored until it is dropped.
#[derive(Debug)]
pub(super) struct MonitoredLink {
    link: Link,
    monitor: Arc<Monitor>,
}

impl MonitoredLink {
    pub(super) fn new(monitor: &Arc<Monitor>, link: Link, item: Ready) -> Result<Self> {
        match &link {
            Link::Socket(socket) => monitor.add(socket, item)?,
            Link::Memory(end) => end.watch(&monitor.descriptors()?.links, item.number()),
        }
        Ok(Self {
            link,
            monitor: Arc::clone(monitor),
        })
    }

    /// Changes the item as which the monitor reports the link.
    pub(super) fn set_item(&self, item: Ready) -> Result<()> {
        let Descriptors { epoll, links, .. } = self.monitor.descriptors()?;
        match &self.link {
            Link::Socket(socket) => epoll
                .modify(socket, &mut readable(item))
                .map_err(to_errno)?,
            Link::Memory(end) => end.watch(links, item.number()),
        }
        Ok(())
    }
}

impl Deref for MonitoredLink {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl Drop for MonitoredLink {
    fn drop(&mut self) {
        if let Link::Socket(socket) = &self.link {
            self.monitor.remove(socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;

    /// A copy of the socket, as in a child of fork, must not keep it monitored.
    #[test]
    fn a_dropped_socket_is_not_monitored_though_open_elsewhere() {
        let monitor = Arc::<Monitor>::default();
        let kind = SockType::SeqPacket;
        let pair = socketpair(AddressFamily::Unix, kind, None, SockFlag::empty());
        let (near, far) = pair.unwrap();
        let _copy = near.try_clone().unwrap();
        let socket =
            MonitoredLink::new(&monitor, Link::Socket(near), Ready::Pending(1, 2)).unwrap();
        socket.set_item(Ready::Socket(3)).unwrap();
        assert_eq!(monitor.ready(EpollTimeout::ZERO), []);
        drop(far);
        assert_eq!(monitor.ready(EpollTimeout::ZERO), [Ready::Socket(3)]);
        drop(socket);
        assert_eq!(monitor.ready(EpollTimeout::ZERO), []);
    }

    #[test]
    fn ready_items_are_encoded_in_numbers() {
        for item in [
            Ready::Deadline,
            Ready::Socket(7),
            Ready::Listener(u32::MAX),
            Ready::Pending(1, 0),
            Ready::Pending(u32::MAX, 63),
        ] {
            assert_eq!(Ready::of(item.number()), item);
        }
    }
}
