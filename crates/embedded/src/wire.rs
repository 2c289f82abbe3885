//! The wire of a network: what moves frames between its devices and those of other
//! processes or hosts.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use uverbs::Errno;

use crate::Result;
use crate::segment::{Pumped, Segment};
use crate::udp::UdpWire;

/// The eventfd that wakes a sleeping thread, in epoll events. Wires use smaller
/// numbers.
pub(crate) const WAKE: u64 = u64::MAX - 1;
/// How long a frame waits for a receiver or a socket without room. The receiver may
/// only be busy, but all others wait as well.
pub(crate) const PATIENCE: Duration = Duration::from_millis(100);

/// What moves frames. Each kind has a port of the network's fabric ([`uplink`]).
///
/// [`uplink`]: softhca::fabric::Fabric::uplink
pub(crate) enum Wire {
    /// To processes of this host that name the same directory. It loses nothing.
    Directory(Box<Segment>),
    /// To other hosts. It loses frames.
    Udp(Box<UdpWire>),
}

impl Wire {
    /// Moves frames in both directions; looks for connections if that is due, or `now`.
    /// With `answers`, the program is about to answer what has arrived.
    fn pump(&mut self, epoll: &Epoll, now: bool, answers: bool) -> Pumped {
        match self {
            Self::Directory(segment) => segment.pump(epoll, now),
            Self::Udp(udp) => Pumped {
                busy: udp.pump(epoll, answers),
                rung: false,
            },
        }
    }

    /// Called before a thread sleeps: asks senders to wake it. Returns whether there is
    /// something to receive already.
    fn arm(&self) -> bool {
        match self {
            Self::Directory(segment) => segment.arm(),
            // Its sockets wake.
            Self::Udp(_) => false,
        }
    }

    /// Called before a timeout takes effect: processes what has arrived, and returns
    /// whether the timeout may be early, since something is unread here or there.
    fn is_behind(&mut self, epoll: &Epoll) -> bool {
        match self {
            Self::Directory(segment) => segment.pump(epoll, true).busy || segment.is_unread(),
            Self::Udp(udp) => udp.is_behind(),
        }
    }

    /// Returns whether there are frames to send.
    fn is_sending(&mut self) -> bool {
        match self {
            Self::Directory(segment) => segment.is_sending(),
            Self::Udp(udp) => udp.is_sending(),
        }
    }
}

/// A wire, and the descriptors that wake the thread that drives it.
pub(crate) struct Link {
    wire: Mutex<Wire>,
    /// Monitors the sockets, and the eventfd that wakes a sleeping thread.
    epoll: Epoll,
    wake: EventFd,
    /// Number of threads that sleep, or are about to.
    sleepers: AtomicU32,
    /// A thread has slept: the epoll instance may have something.
    slept: AtomicBool,
}

fn os(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

/// Sleeps until one of the descriptors is readable, or the time is up. A spurious wakeup is
/// harmless.
pub(crate) fn sleep_until_readable<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    limit: Option<Duration>,
) {
    let mut entries = descriptors.map(|it| PollFd::new(it, PollFlags::POLLIN));
    let _ = ppoll(&mut entries, limit.map(TimeSpec::from_duration), None);
}

/// Creates an epoll instance that reports `wake` as [`WAKE`].
pub(crate) fn epoll(wake: impl AsFd) -> Result<Epoll> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(os)?;
    let event = EpollEvent::new(EpollFlags::EPOLLIN, WAKE);
    epoll.add(wake, event).map_err(os)?;
    Ok(epoll)
}

impl Link {
    /// Creates the wire that `make` makes, which adds its sockets to the epoll
    /// instance.
    pub(crate) fn new(make: impl FnOnce(&Epoll) -> Result<Wire>) -> Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = EventFd::from_value_and_flags(0, flags).map_err(os)?;
        let epoll = epoll(&wake)?;
        Ok(Self {
            wire: Mutex::new(make(&epoll)?),
            epoll,
            wake,
            sleepers: AtomicU32::new(0),
            slept: AtomicBool::new(false),
        })
    }

    /// Calls `act` with the wire; `None` if another thread has it.
    fn with<T>(&self, act: impl FnOnce(&mut Wire, &Epoll) -> T) -> Option<T> {
        match self.wire.try_lock() {
            Ok(mut wire) => Some(act(&mut wire, &self.epoll)),
            Err(TryLockError::Poisoned(mut wire)) => Some(act(wire.get_mut(), &self.epoll)),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// As [`Wire::pump`]. Returns whether there were any, or one is waiting.
    pub(crate) fn pump(&self, answers: bool) -> bool {
        self.with(|wire, epoll| self.pump_wire(wire, epoll, answers))
            .unwrap_or_else(|| {
                // Another thread is driving, and may be waiting for a processor: without
                // a yield, a caller that drives in a loop would occupy it for a tick.
                thread::yield_now();
                false
            })
    }

    fn pump_wire(&self, wire: &mut Wire, epoll: &Epoll, answers: bool) -> bool {
        let slept = self.slept.load(Ordering::Relaxed) && self.slept.swap(false, Ordering::Relaxed);
        let pumped = wire.pump(epoll, slept, answers);
        if pumped.rung && self.sleepers.load(Ordering::Relaxed) != 0 {
            // The wake-ups that were read may have been for a thread that has asked for
            // them and is not asleep yet. It asks while it has the wire, so that either
            // it is counted here, or it asks later.
            return pumped.busy | wire.arm();
        }
        pumped.busy
    }

    /// As [`Wire::is_behind`].
    pub(crate) fn is_behind(&self) -> bool {
        self.with(Wire::is_behind).unwrap_or(true)
    }

    /// Moves frames; returns whether there are frames of this process that no socket
    /// has accepted yet.
    pub(crate) fn is_sending(&self) -> bool {
        let sending = |wire: &mut Wire, epoll: &Epoll| {
            self.pump_wire(wire, epoll, false);
            wire.is_sending()
        };
        self.with(sending).unwrap_or(true)
    }

    /// Tells other hosts that the process ends.
    pub(crate) fn close(&self) {
        self.with(|wire, _| match wire {
            // Its sockets are closed.
            Wire::Directory(_) => {}
            Wire::Udp(udp) => udp.close(),
        });
    }

    /// Sleeps until a frame arrives, [`Link::wake`] is called, or the time is up.
    pub(crate) fn sleep(&self, limit: Option<Duration>) {
        self.sleep_on([self.epoll.0.as_fd()], limit);
        // The eventfd may not be what ended the wait.
        let _ = self.wake.read();
    }

    /// As [`Link::sleep`], by one thread other than the network's; also until `woken` is
    /// readable.
    pub(crate) fn wait(&self, woken: BorrowedFd<'_>, limit: Duration) {
        self.sleep_on([self.epoll.0.as_fd(), woken], Some(limit));
    }

    fn sleep_on<const N: usize>(&self, descriptors: [BorrowedFd<'_>; N], limit: Option<Duration>) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        if !self
            .wire
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .arm()
        {
            sleep_until_readable(descriptors, limit);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        self.slept.store(true, Ordering::Relaxed);
    }

    /// Wakes the thread that sleeps.
    pub(crate) fn wake(&self) {
        // Fails only if the counter is full, which also wakes.
        let _ = self.wake.write(1);
    }
}
