//! What a blocking read sleeps on.

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

/// What a reader's blocking reads sleep on (`enum fi_wait_obj`).
#[derive(Clone, Debug, Default)]
pub enum WaitObject {
    /// Nothing: the reader does not block.
    None,
    /// Whatever the library thinks best.
    #[default]
    Unspecified,
    /// A file descriptor, which `poll` and its like take as well: readable when
    /// something came since the reader was armed, or somebody signalled.
    Fd,
    /// A mutex and a condition variable, which a thread of the library
    /// notifies.
    Condvar,
    /// The processor is offered to others, and the queue looked at again.
    Yield,
    /// A set that several queues share.
    Set(WaitSet),
}

/// A mutex and a condition variable: notified, with the count raised, when
/// something came since the reader was armed, or somebody signalled
/// (`FI_WAIT_MUTEX_COND`).
#[derive(Debug, Default)]
pub struct MutexCond {
    /// How often there was a reason to look.
    pub wakes: Mutex<u64>,
    /// Notified at each.
    pub cond: Condvar,
    waker: Mutex<Option<Waker>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is in there is consistent after each store.
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
        *lock(&self.waker) = Some(waker.clone());
    }
}

/// The time left; `None` for ever.
pub(super) fn left(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|at| at.saturating_duration_since(Instant::now()))
}

/// Whether the time is up.
pub(super) fn is_over(deadline: Option<Instant>) -> bool {
    left(deadline).is_some_and(|time| time.is_zero())
}

/// When a timeout ends; one that the clock cannot tell is for ever.
pub(super) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(timeout?)
}

pub(super) fn system(what: &'static str, errno: Errno) -> Error {
    Error::System {
        what,
        errno: errno as i32,
    }
}

/// Sleeps until one is readable, the time is up, or a signal handler has run.
fn sleep_on(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<()> {
    let timeout = match left(deadline) {
        None => PollTimeout::NONE,
        // Rounded up: not to wake before the time is up, again and again.
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

/// Empties an event descriptor.
fn empty(event: &EventFd) {
    // It is non-blocking, and says EAGAIN when it is empty.
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

/// A set of queues that are waited for together (`FI_WAIT_SET`). A handle:
/// clones refer to the same set.
#[derive(Clone)]
pub struct WaitSet {
    epoll: Arc<Epoll>,
}

impl WaitSet {
    /// An empty set. Readers join it when they are made.
    ///
    /// # Errors
    /// [`Error::System`]: EMFILE, ENFILE, ENOMEM.
    pub fn new() -> Result<Self> {
        Ok(Self {
            epoll: Arc::new(epoll()?),
        })
    }

    /// Waits until one of `readers` has something to read, or was signalled.
    /// False when the time is up. They must be all of the set's that are to be
    /// waited for; another one that is armed wakes this too.
    ///
    /// Each is armed and looked at again before this sleeps.
    ///
    /// # Errors
    /// What arming says; [`Error::Invalid`] for a reader of another set.
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
                        what: "the reader is not of this wait set",
                    });
                }
                ready |= reader.has_something()?;
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
                reader.settle()?;
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

    /// What a wait set asks of a reader.
    pub trait InSet {
        /// Whether it is of that set.
        fn is_in(&self, set: &WaitSet) -> bool;
        /// Whether it has something to read; else it is armed now.
        fn has_something(&mut self) -> Result<bool>;
        /// Takes the events that have woken us.
        fn settle(&mut self) -> Result<()>;
    }
}

/// What a [`WaitSet`] can wait for: a
/// [`CompletionReader`](super::CompletionReader) of any format.
pub trait Waitable: sealed::InSet {}

/// The waiting side of a reader. Any thread may signal.
pub(super) struct Waiter {
    object: Object,
    signals: Epoch,
    /// Events of the queue alone, so that nobody else's are taken.
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

/// What is readable when there is a reason to look.
struct Files {
    channel: CompletionChannel,
    /// Signals; of the condition variable's thread: to end.
    event: EventFd,
    /// All of it, as one descriptor.
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

    fn settle(&self) -> Result<()> {
        while self.channel.try_event()?.is_some() {}
        empty(&self.event);
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
        let raised = events.as_fd();
        let object = match object {
            WaitObject::None => Object::None,
            WaitObject::Yield => Object::Yield,
            WaitObject::Unspecified | WaitObject::Fd => {
                Object::Fd(Files::new(context, raised, None)?)
            }
            WaitObject::Set(set) => Object::Fd(Files::new(context, raised, Some(set.clone()))?),
            WaitObject::Condvar => {
                let files = Arc::new(Files::new(context, raised, None)?);
                let shared = Arc::new(MutexCond::default());
                let thread = std::thread::Builder::new()
                    .name("completions".into())
                    .spawn({
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

    /// The channel that the queue has to be made with.
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

    /// Signals so far.
    pub fn signals(&self) -> u32 {
        self.signals.now()
    }

    /// Wakes whoever waits.
    pub fn signal(&self) {
        self.signals.advance();
        match &self.object {
            Object::None | Object::Yield => {}
            Object::Fd(files) => {
                // It fails only if it is full, and so readable already.
                let _ = files.event.write(1);
            }
            Object::Condvar { shared, .. } => shared.wake(),
        }
    }

    /// To be called before the queue is armed; [`Waiter::sleep`] takes the
    /// answer.
    pub fn before_arming(&self) -> u64 {
        match &self.object {
            Object::Condvar { shared, .. } => *lock(&shared.wakes),
            _ => 0,
        }
    }

    /// Sleeps until there is a reason to look: an event since the queue was
    /// armed, a signal since it was looked for, the end of time, or none.
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
                match left(deadline) {
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

    /// Takes the events that have woken us.
    pub fn settle(&self) -> Result<()> {
        match &self.object {
            Object::Fd(files) => files.settle(),
            // The thread does it.
            _ => Ok(()),
        }
    }
}

/// The thread behind a condition variable.
fn notify(files: &Files, shared: &MutexCond) {
    loop {
        let channel = PollFd::new(files.channel.as_fd(), PollFlags::POLLIN);
        let end = PollFd::new(files.event.as_fd(), PollFlags::POLLIN);
        let mut fds = [channel, end];
        if sleep_on(&mut fds, None).is_err() || fds[1].any().unwrap_or(true) {
            return;
        }
        let gone = loop {
            match files.channel.try_event() {
                Ok(Some(_)) => {}
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        shared.wake();
        if gone {
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

/// Wakes the readers of a queue, from any thread (`fi_cq_signal`). Clones
/// signal the same queue.
///
/// A signal is not lost: if nobody blocks, the next blocking read returns at
/// once.
#[derive(Clone, Debug)]
pub struct Signaler {
    pub(super) waiter: Arc<Waiter>,
}

impl Signaler {
    /// Wakes them.
    pub fn signal(&self) {
        self.waiter.signal();
    }
}
