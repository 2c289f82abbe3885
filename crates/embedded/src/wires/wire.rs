//! The wire of a network: what moves frames between its devices and those of other
//! processes or hosts.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use uverbs::Errno;

use crate::Result;
use crate::capture::Recorder;
use crate::cleanup::with_cleanup;
use crate::wires::segment::{PumpResult, Segment};
use crate::wires::udp::UdpWire;

/// How long a frame waits for a receiver or a socket without room. All later frames wait
/// behind it.
pub(crate) const MAX_FRAME_WAIT: Duration = Duration::from_millis(100);

/// A transport for frames. Each kind has a port of the network's fabric ([`uplink`]).
///
/// [`uplink`]: roce::fabric::Fabric::uplink
pub(crate) enum Wire {
    /// Shared memory, to the processes of this host that use the same directory. Lossless.
    Directory(Box<Segment>),
    /// UDP, to other hosts. Lossy.
    Udp(Box<UdpWire>),
}

impl Wire {
    /// Moves frames in both directions; handles the sockets if that is due, or if
    /// `poll_sockets` is true. With `answer_expected`, the program is about to post an answer
    /// to received messages.
    fn pump(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        poll_sockets: bool,
        answer_expected: bool,
    ) -> PumpResult {
        match self {
            Self::Directory(segment) => segment.pump(now, epoll, poll_sockets),
            Self::Udp(udp) => PumpResult {
                busy: udp.pump(now, epoll, answer_expected),
                wakeups_read: false,
            },
        }
    }

    /// Returns whether all frames that the fabric has for the wire have left this process.
    fn has_sent_all(&mut self) -> bool {
        match self {
            Self::Directory(segment) => !segment.is_sending(),
            Self::Udp(udp) => udp.has_sent_all(),
        }
    }

    /// Called before a thread sleeps: asks senders to wake it. Returns whether there is
    /// something to receive already.
    fn arm(&self) -> bool {
        match self {
            Self::Directory(segment) => segment.arm(),
            // A datagram makes its socket readable, which wakes the thread.
            Self::Udp(_) => false,
        }
    }

    /// Called before a timeout of the transport takes effect: processes the received
    /// frames, and returns whether this process or a receiver still has unread frames, so
    /// that the timeout is premature.
    fn is_backlogged(&mut self, epoll: &Epoll) -> bool {
        match self {
            Self::Directory(segment) => {
                segment.pump(Instant::now(), epoll, true).busy || segment.is_unread()
            }
            Self::Udp(udp) => udp.is_backlogged(),
        }
    }

    /// Returns whether somebody has connected since the last call.
    fn take_caller(&mut self) -> bool {
        match self {
            Self::Directory(segment) => segment.take_caller(),
            Self::Udp(udp) => udp.take_caller(),
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

/// The result of a call of [`Link::pump`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pumped {
    /// Frames were moved, or a frame waits.
    pub(crate) busy: bool,
    /// All frames that the fabric had for the wire have left this process, if that was asked.
    pub(crate) sent_all: bool,
    /// A file that controls this process may have changed.
    pub(crate) has_caller: bool,
}

/// A wire, and the descriptors that wake the thread that drives it.
pub(crate) struct Link {
    wire: Mutex<Wire>,
    /// Monitors the sockets.
    epoll: Epoll,
    /// Wakes the network's thread.
    wake: EventFd,
    /// Number of threads that wait for frames, or are about to.
    sleepers: AtomicU32,
    /// A thread has slept, so the epoll instance may have events.
    slept: AtomicBool,
}

fn to_errno(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

/// Sleeps until one of the descriptors is readable, or the time is up. A spurious wakeup is
/// harmless.
pub(crate) fn sleep_until_readable<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    limit: Option<Duration>,
) {
    /// How long the program's threads alone drive the devices if it has closed descriptors by
    /// system calls of its own: nothing would wait any more.
    const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(10);
    let mut entries = descriptors.map(|it| PollFd::new(it, PollFlags::POLLIN));
    let _ = ppoll(&mut entries, limit.map(TimeSpec::from_duration), None);
    let is_closed = |entry: &PollFd<'_>| {
        let found = entry.revents();
        found.is_some_and(|found| found.contains(PollFlags::POLLNVAL))
    };
    if entries.iter().any(is_closed) {
        let limit = limit.unwrap_or(WITHOUT_DESCRIPTORS);
        thread::sleep(limit.min(WITHOUT_DESCRIPTORS));
    }
}

/// Creates an epoll instance.
pub(crate) fn epoll() -> Result<Epoll> {
    Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(to_errno)
}

impl Link {
    /// Creates a wire with `create`, which adds its sockets to the epoll instance.
    pub(crate) fn new(create: impl FnOnce(&Epoll) -> Result<Wire>) -> Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = EventFd::from_value_and_flags(0, flags).map_err(to_errno)?;
        let epoll = epoll()?;
        Ok(Self {
            wire: Mutex::new(create(&epoll)?),
            epoll,
            wake,
            sleepers: AtomicU32::new(0),
            slept: AtomicBool::new(false),
        })
    }

    /// Calls `act` with the wire; `None` if another thread has locked it.
    fn try_with<T>(&self, act: impl FnOnce(&mut Wire, &Epoll) -> T) -> Option<T> {
        match self.wire.try_lock() {
            Ok(mut wire) => Some(act(&mut wire, &self.epoll)),
            Err(TryLockError::Poisoned(mut wire)) => Some(act(wire.get_mut(), &self.epoll)),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// As [`Wire::pump`]; with `confirm`, tells whether all frames were sent.
    pub(crate) fn pump(&self, now: Instant, answer_expected: bool, confirm: bool) -> Pumped {
        let pump = |wire: &mut Wire, epoll: &Epoll| Pumped {
            busy: self.pump_wire(now, wire, epoll, answer_expected),
            sent_all: confirm && wire.has_sent_all(),
            has_caller: wire.take_caller(),
        };
        self.try_with(pump).unwrap_or_else(|| {
            // The thread that has the wire may be waiting for this processor, which a
            // caller that drives in a loop would occupy until the next tick.
            thread::yield_now();
            Pumped::default()
        })
    }

    fn pump_wire(
        &self,
        now: Instant,
        wire: &mut Wire,
        epoll: &Epoll,
        answer_expected: bool,
    ) -> bool {
        let slept = self.slept.load(Ordering::Relaxed) && self.slept.swap(false, Ordering::Relaxed);
        let result = wire.pump(now, epoll, slept, answer_expected);
        if result.wakeups_read && self.sleepers.load(Ordering::Relaxed) != 0 {
            // These wake-ups may have been for a thread that has armed the wire and is not
            // asleep yet. It arms under the wire's lock, so either it is counted in
            // `sleepers` here, or it arms later.
            return result.busy | wire.arm();
        }
        result.busy
    }

    /// Sends the management datagrams of queue pair 1. Returns whether something is left to do,
    /// also since another thread has the wire.
    pub(crate) fn send_management(&self) -> bool {
        let send = |wire: &mut Wire, epoll: &Epoll| match wire {
            Wire::Directory(segment) => segment.send_management(epoll),
            Wire::Udp(udp) => udp.send_management_now(),
        };
        self.try_with(send).unwrap_or(true)
    }

    /// Sets what records the frames that no device sees.
    pub(crate) fn record_frames(&self, recorder: Option<&Arc<Recorder>>) {
        let mut wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *wire {
            Wire::Directory(segment) => segment.record_frames(recorder.cloned()),
            Wire::Udp(udp) => udp.record_frames(recorder.cloned()),
        }
    }

    /// As [`Wire::is_backlogged`].
    pub(crate) fn is_backlogged(&self) -> bool {
        self.try_with(Wire::is_backlogged).unwrap_or(true)
    }

    /// Moves frames; returns whether this process still has frames to send.
    pub(crate) fn is_sending(&self) -> bool {
        let sending = |wire: &mut Wire, epoll: &Epoll| {
            self.pump_wire(Instant::now(), wire, epoll, false);
            wire.is_sending()
        };
        self.try_with(sending).unwrap_or(true)
    }

    /// Ends the connections with other hosts, since the process ends. Returns false if another
    /// thread has the wire.
    pub(crate) fn close(&self) -> bool {
        let close = |wire: &mut Wire, _: &Epoll| match wire {
            // The system closes its sockets.
            Wire::Directory(_) => {}
            Wire::Udp(udp) => udp.close(),
        };
        self.try_with(close).is_some()
    }

    /// Takes the wire, as a thread that drives it does.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> std::sync::MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until [`Link::wake`] is called, a frame arrives if `frames` is true, or the time
    /// is up. For the network's thread.
    pub(crate) fn sleep(&self, frames: bool, limit: Option<Duration>) {
        let wake = self.wake.as_fd();
        if frames {
            self.wait(|arrived| sleep_until_readable([arrived, wake], limit));
        } else {
            sleep_until_readable([wake], limit);
        }
        // Non-blocking: another descriptor may have ended the sleep.
        let _ = self.wake.read();
    }

    /// Calls `sleep` with a descriptor that becomes readable when a frame arrives, unless
    /// there is one already. One thread at a time.
    pub(crate) fn wait<T>(&self, sleep: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let end = || {
            self.sleepers.fetch_sub(1, Ordering::Relaxed);
            self.slept.store(true, Ordering::Relaxed);
        };
        with_cleanup(end, || {
            let wire = &self.wire;
            let arrived = wire.lock().unwrap_or_else(PoisonError::into_inner).arm();
            (!arrived).then(|| sleep(self.epoll.0.as_fd()))
        })
    }

    /// Returns the eventfd that wakes the network's thread.
    pub(crate) fn wake_descriptor(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Wakes the network's thread.
    pub(crate) fn wake(&self) {
        // Fails only if the counter is full, which also wakes.
        let _ = self.wake.write(1);
    }
}
