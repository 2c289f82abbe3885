//! Wait objects of blocking reads.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use ring::Epoch;
use uverbs::AsyncEventFile;

use crate::context::Ctx;
use crate::{CompletionChannel, Context, Error, Result};

/// The object that blocking reads of a reader wait on (`enum fi_wait_obj`).
#[derive(Clone, Debug, Default)]
pub enum WaitObject {
    /// None: the reader cannot block.
    None,
    /// The library chooses.
    #[default]
    Unspecified,
    /// A file descriptor, also for `poll` and similar calls: readable when a
    /// completion has arrived since the reader was armed, or a signaler was used.
    Fd,
    /// A mutex and a condition variable, which a thread of the library notifies.
    Condvar,
    /// Yields the processor and polls again.
    Yield,
    /// A set that several queues share.
    Set(WaitSet),
}

/// A mutex and a condition variable (`FI_WAIT_MUTEX_COND`). It is notified, and
/// the count incremented, when a completion has arrived since the reader was
/// armed, or a signaler was used.
#[derive(Debug, Default)]
pub struct MutexCond {
    /// Number of notifications.
    pub wakes: Mutex<u64>,
    /// Notified with each increment.
    pub cond: Condvar,
    waker: Mutex<Option<Waker>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The values are consistent after each store.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MutexCond {
    fn wake(&self) {
        *lock(&self.wakes) += 1;
        self.cond.notify_all();
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    #[cfg(feature = "stream")]
    pub(super) fn register(&self, waker: &Waker) {
        let waker = waker.clone();
        let replaced = lock(&self.waker).replace(waker);
        // Without the lock, because this runs code of the task.
        drop(replaced);
    }
}

/// Returns the remaining time; `None` without a deadline.
pub(crate) fn remaining(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|at| at.saturating_duration_since(Instant::now()))
}

/// Returns whether the deadline has passed.
pub(crate) fn is_over(deadline: Option<Instant>) -> bool {
    remaining(deadline).is_some_and(|time| time.is_zero())
}

/// Returns the end of a timeout; `None`, unlimited, if it is beyond the range of
/// the clock.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(timeout?)
}

pub(super) fn system(what: &'static str, errno: Errno) -> Error {
    Error::System {
        what,
        errno: errno as i32,
    }
}

/// Sleeps until a descriptor is readable, the deadline has passed, or a signal handler ran.
fn sleep_on(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<()> {
    let timeout = match remaining(deadline) {
        None => PollTimeout::NONE,
        // Rounded up, so that it does not repeatedly wake before the deadline.
        Some(time) => i32::try_from(time.as_micros().div_ceil(1000))
            .ok()
            .and_then(|millis| PollTimeout::try_from(millis).ok())
            .unwrap_or(PollTimeout::MAX),
    };
    match poll(fds, timeout) {
        Ok(_) | Err(Errno::EINTR | Errno::EAGAIN) => Ok(()),
        Err(errno) => Err(system("poll of a completion queue's descriptors", errno)),
    }
}

/// Resets an eventfd.
fn drain(event: &EventFd) {
    // The eventfd is non-blocking; EAGAIN means that it was already reset.
    let _ = event.read();
}

fn event_fd() -> Result<EventFd> {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
        .map_err(|errno| system("eventfd", errno))
}

fn epoll() -> Result<Epoll> {
    Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|errno| system("epoll_create1", errno))
}

fn watch(epoll: &Epoll, fd: BorrowedFd<'_>) -> Result<()> {
    epoll
        .add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))
        .map_err(|errno| system("epoll_ctl", errno))
}

/// A set of queues that are waited for together (`FI_WAIT_SET`). A handle: clones
/// refer to the same set.
#[derive(Clone)]
pub struct WaitSet {
    epoll: Arc<Epoll>,
}

impl WaitSet {
    /// Creates an empty set. Readers join it when they are built.
    ///
    /// # Errors
    /// [`Error::System`]: EMFILE, ENFILE, ENOMEM.
    pub fn new() -> Result<Self> {
        Ok(Self {
            epoll: Arc::new(epoll()?),
        })
    }

    /// Waits until one of `readers` has something to read or was signalled.
    /// Returns false after the timeout. `readers` must contain all readers of the set to wait
    /// for; other armed readers of the set wake this call too.
    ///
    /// Each reader is armed and checked again before the call sleeps.
    ///
    /// # Errors
    /// Those of arming; [`Error::Invalid`] for a reader of another set.
    pub fn wait(
        &self,
        readers: &mut [&mut dyn Waitable],
        timeout: Option<Duration>,
    ) -> Result<bool> {
        let deadline = deadline(timeout);
        loop {
            let mut ready = false;
            for reader in readers.iter_mut() {
                if !reader.is_in(self) {
                    return Err(Error::Invalid {
                        what: "the reader is not in this wait set",
                    });
                }
                ready |= reader.has_entries()?;
            }
            if ready {
                return Ok(true);
            }
            if is_over(deadline) {
                return Ok(false);
            }
            sleep_on(
                &mut [PollFd::new(self.epoll.0.as_fd(), PollFlags::POLLIN)],
                deadline,
            )?;
            for reader in readers.iter_mut() {
                reader.consume_events()?;
            }
        }
    }
}

impl AsFd for WaitSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

impl fmt::Debug for WaitSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitSet").finish_non_exhaustive()
    }
}

pub(super) mod sealed {
    use super::{Result, WaitSet};

    /// The interface of a reader to a wait set.
    pub trait WaitSetMember {
        /// Returns whether the reader is in that set.
        fn is_in(&self, set: &WaitSet) -> bool;
        /// Returns whether there is something to read; otherwise the reader is
        /// armed now.
        fn has_entries(&mut self) -> Result<bool>;
        /// Consumes the events that ended the wait.
        fn consume_events(&mut self) -> Result<()>;
    }
}

/// A type that a [`WaitSet`] can wait for: a
/// [`CompletionReader`](super::CompletionReader) of any format.
pub trait Waitable: sealed::WaitSetMember {}

/// The wait object of a reader. Any thread may signal it.
pub(super) struct Waiter {
    object: Object,
    signals: Epoch,
    /// Asynchronous events of this queue only, so that no events of other objects
    /// are consumed.
    events: AsyncEventFile<Ctx>,
}

enum Object {
    None,
    Yield,
    Fd(Files),
    Condvar {
        files: Arc<Files>,
        shared: Arc<MutexCond>,
        thread: Mutex<Option<JoinHandle<()>>>,
    },
}

/// The files that become readable when the queue must be checked.
struct Files {
    channel: CompletionChannel,
    /// Written by signals; for the condition variable's thread, the request to exit.
    event: EventFd,
    /// All of them as one descriptor.
    epoll: Arc<Epoll>,
    set: Option<WaitSet>,
}

impl Files {
    fn new(context: &Context, events: BorrowedFd<'_>, set: Option<WaitSet>) -> Result<Self> {
        let channel = context.completion_channel()?;
        let event = event_fd()?;
        let epoll = Arc::new(epoll()?);
        watch(&epoll, channel.as_fd())?;
        watch(&epoll, event.as_fd())?;
        watch(&epoll, events)?;
        if let Some(set) = &set {
            watch(&set.epoll, epoll.0.as_fd())?;
        }
        Ok(Self {
            channel,
            event,
            epoll,
            set,
        })
    }

    fn consume_events(&self) -> Result<()> {
        while self.channel.try_event()?.is_some() {}
        drain(&self.event);
        Ok(())
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        if let Some(set) = &self.set {
            let _ = set.epoll.delete(self.epoll.0.as_fd());
        }
    }
}

impl Waiter {
    pub fn new(context: &Context, object: &WaitObject) -> Result<Self> {
        let events = AsyncEventFile::alloc(context.uverbs())?;
        events.set_nonblocking(true)?;
        let events_fd = events.as_fd();
        let object = match object {
            WaitObject::None => Object::None,
            WaitObject::Yield => Object::Yield,
            WaitObject::Unspecified | WaitObject::Fd => {
                Object::Fd(Files::new(context, events_fd, None)?)
            }
            WaitObject::Set(set) => Object::Fd(Files::new(context, events_fd, Some(set.clone()))?),
            WaitObject::Condvar => {
                let files = Arc::new(Files::new(context, events_fd, None)?);
                let shared = Arc::new(MutexCond::default());
                let thread = uverbs::threads::spawn("completions", {
                    let (files, shared) = (Arc::clone(&files), Arc::clone(&shared));
                    move || notify(&files, &shared)
                })
                .map_err(|error| Error::System {
                    what: "the thread that notifies a condition variable",
                    errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
                })?;
                Object::Condvar {
                    files,
                    shared,
                    thread: Mutex::new(Some(thread)),
                }
            }
        };
        Ok(Self {
            object,
            events,
            signals: Epoch::new(),
        })
    }

    /// Returns the channel that the queue must be created with.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        match &self.object {
            Object::None | Object::Yield => None,
            Object::Fd(files) => Some(&files.channel),
            Object::Condvar { files, .. } => Some(&files.channel),
        }
    }

    pub fn can_wait(&self) -> bool {
        !matches!(self.object, Object::None)
    }

    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.object {
            Object::Fd(files) => Some(files.epoll.0.as_fd()),
            _ => None,
        }
    }

    pub fn condvar(&self) -> Option<&Arc<MutexCond>> {
        match &self.object {
            Object::Condvar { shared, .. } => Some(shared),
            _ => None,
        }
    }

    pub fn is_in(&self, set: &WaitSet) -> bool {
        matches!(&self.object, Object::Fd(Files { set: Some(mine), .. })
            if Arc::ptr_eq(&mine.epoll, &set.epoll))
    }

    pub fn events(&self) -> &AsyncEventFile<Ctx> {
        &self.events
    }

    pub fn events_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Returns the number of signals so far.
    pub fn signals(&self) -> u32 {
        self.signals.now()
    }

    /// Wakes the waiting threads.
    pub fn signal(&self) {
        self.signals.advance();
        match &self.object {
            Object::None | Object::Yield => {}
            Object::Fd(files) => {
                // A write fails only if the counter is at its maximum, and so
                // readable already.
                let _ = files.event.write(1);
            }
            Object::Condvar { shared, .. } => shared.wake(),
        }
    }

    /// Returns the number of wakeups so far, for [`Waiter::sleep`]. Must be called before the
    /// queue is armed.
    pub fn wakeups(&self) -> u64 {
        match &self.object {
            Object::Condvar { shared, .. } => *lock(&shared.wakes),
            _ => 0,
        }
    }

    /// Sleeps until the queue must be checked: an event since it was armed, a signal since the
    /// last check, the deadline, or a spurious wakeup.
    pub fn sleep(&self, before: u64, deadline: Option<Instant>) -> Result<()> {
        match &self.object {
            Object::None => Err(Error::Invalid {
                what: "a reader made without a wait object does not block",
            }),
            Object::Yield => {
                std::thread::yield_now();
                Ok(())
            }
            Object::Fd(files) => sleep_on(
                &mut [
                    PollFd::new(files.channel.as_fd(), PollFlags::POLLIN),
                    PollFd::new(files.event.as_fd(), PollFlags::POLLIN),
                    PollFd::new(self.events_fd(), PollFlags::POLLIN),
                ],
                deadline,
            ),
            Object::Condvar { shared, .. } => {
                let wakes = lock(&shared.wakes);
                match remaining(deadline) {
                    None => drop(shared.cond.wait_while(wakes, |wakes| *wakes == before)),
                    Some(time) => drop(
                        shared
                            .cond
                            .wait_timeout_while(wakes, time, |wakes| *wakes == before),
                    ),
                }
                Ok(())
            }
        }
    }

    /// Consumes the events that ended the wait.
    pub fn consume_events(&self) -> Result<()> {
        match &self.object {
            Object::Fd(files) => files.consume_events(),
            // The notifying thread consumes them.
            _ => Ok(()),
        }
    }
}

/// The thread that notifies the condition variable.
fn notify(files: &Files, shared: &MutexCond) {
    loop {
        let channel = PollFd::new(files.channel.as_fd(), PollFlags::POLLIN);
        let end = PollFd::new(files.event.as_fd(), PollFlags::POLLIN);
        let mut fds = [channel, end];
        if sleep_on(&mut fds, None).is_err() || fds[1].any().unwrap_or(true) {
            return;
        }
        let device_gone = loop {
            match files.channel.try_event() {
                Ok(Some(_)) => {}
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        shared.wake();
        if device_gone {
            return;
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Object::Condvar { files, thread, .. } = &self.object {
            let _ = files.event.write(1);
            if let Some(thread) = lock(thread).take() {
                let _ = thread.join();
            }
        }
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.object {
            Object::None => "None",
            Object::Yield => "Yield",
            Object::Fd(_) => "Fd",
            Object::Condvar { .. } => "Condvar",
        })
    }
}

/// Wakes the readers of a queue from any thread (`fi_cq_signal`). Clones signal
/// the same queue.
///
/// A signal is never lost: if no reader blocks, the next blocking read returns at once.
#[derive(Clone, Debug)]
pub struct Signaler {
    pub(super) waiter: Arc<Waiter>,
}

impl Signaler {
    /// Returns the descriptor that is readable when the queue must be checked.
    pub(crate) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.waiter.fd().unwrap_or_else(|| self.waiter.events_fd())
    }

    /// Sleeps until the queue must be checked.
    pub(crate) fn wait(&self) -> Result<()> {
        self.waiter.sleep(self.waiter.wakeups(), None)
    }

    /// Wakes the readers.
    pub fn signal(&self) {
        self.waiter.signal();
    }
}
