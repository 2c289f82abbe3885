//! Delivery of a dropped stream's data.
//!
//! A drop on a runtime never waits. A thread delivers the data of all dropped streams; it
//! ends when there are none.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::engine::Engine;
use super::wait;

/// Time that a drop outside of a runtime waits, and a runtime that shuts down; the peer's
/// device normally answers within microseconds.
const HERE: Duration = Duration::from_millis(100);
/// Time that the thread waits afterwards.
const BEHIND: Duration = Duration::from_secs(5);
/// Maximum number of streams that linger; beyond it the oldest are reset.
const MAX_LINGERING: usize = 256;

/// An engine that, when dropped, is kept until the written data and the end mark have
/// arrived.
pub(super) struct LingeringEngine {
    engine: ManuallyDrop<Box<Engine>>,
}

impl LingeringEngine {
    pub fn new(engine: Engine) -> Self {
        Self {
            engine: ManuallyDrop::new(Box::new(engine)),
        }
    }
}

impl Drop for LingeringEngine {
    fn drop(&mut self) {
        // SAFETY: taken only here, and not used afterwards.
        let mut engine = unsafe { ManuallyDrop::take(&mut self.engine) };
        engine.finish();
        if !matches!(engine.try_flush(), Ok(None)) {
            return engine.disconnect();
        }
        if is_on_runtime() {
            LINGERING.push(engine);
            return hold_runtime();
        }
        match engine.flush_until(Instant::now().checked_add(HERE)) {
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut && !engine.is_broken() => {
                LINGERING.push(engine);
            }
            _ => engine.disconnect(),
        }
    }
}

impl Deref for LingeringEngine {
    type Target = Engine;
    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for LingeringEngine {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

#[cfg(not(feature = "tokio"))]
fn is_on_runtime() -> bool {
    false
}

#[cfg(not(feature = "tokio"))]
fn hold_runtime() {}

#[cfg(feature = "tokio")]
fn is_on_runtime() -> bool {
    ::tokio::runtime::Handle::try_current().is_ok()
}

/// Makes the runtime wait for the streams, should it shut down: it waits for its blocking
/// threads.
#[cfg(feature = "tokio")]
fn hold_runtime() {
    let Ok(runtime) = ::tokio::runtime::Handle::try_current() else {
        return;
    };
    if std::mem::replace(&mut LINGERING.lock().is_held, true) {
        return;
    }
    // Panics if no thread can be created, which must not happen in a drop.
    let hold = || runtime.spawn_blocking(|| LINGERING.wait());
    let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(hold));
    match held {
        // The runtime is already shutting down, and has no other task to run.
        Ok(task) if task.is_finished() => LINGERING.wait(),
        Ok(_) => {}
        Err(_) => LINGERING.lock().is_held = false,
    }
}

/// The dropped streams whose data has not arrived.
static LINGERING: Lingering = Lingering {
    state: Mutex::new(LingerState {
        added: Vec::new(),
        count: 0,
        last: None,
        wake: None,
        #[cfg(feature = "tokio")]
        is_held: false,
    }),
    cond: Condvar::new(),
};

struct Lingering {
    state: Mutex<LingerState>,
    /// Notified when streams have ended.
    cond: Condvar,
}

struct LingerState {
    /// Streams that the thread does not have yet.
    added: Vec<Stream>,
    /// Number of all streams.
    count: usize,
    /// When the last stream was added.
    last: Option<Instant>,
    /// Wakes the thread; `None` if there is none.
    wake: Option<Arc<EventFd>>,
    /// Whether a runtime's thread waits.
    #[cfg(feature = "tokio")]
    is_held: bool,
}

/// Wakes the thread when another stream's user has read an event.
struct WakeThread(Arc<EventFd>);

impl Wake for WakeThread {
    fn wake(self: Arc<Self>) {
        // Fails only if the counter is full, which also wakes.
        let _ = self.0.write(1);
    }
}

struct Stream {
    engine: Box<Engine>,
    deadline: Instant,
}

impl Stream {
    /// Disconnects and returns true if the data has arrived, or cannot arrive.
    fn has_ended(&mut self, now: Instant) -> bool {
        let ended = self.deadline <= now || !matches!(self.engine.try_flush(), Ok(None));
        if ended {
            self.engine.disconnect();
        }
        ended
    }
}

impl Lingering {
    fn lock(&self) -> MutexGuard<'_, LingerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a stream. If no thread can be created, the peer sees a reset.
    fn push(&'static self, engine: Box<Engine>) {
        let now = Instant::now();
        let stream = Stream {
            engine,
            deadline: now + BEHIND,
        };
        let mut state = self.lock();
        let wake = if let Some(wake) = &state.wake {
            // Fails only if the counter is full, which also wakes.
            let _ = wake.write(1);
            Arc::clone(wake)
        } else {
            let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
            let Ok(wake) = EventFd::from_value_and_flags(0, flags).map(Arc::new) else {
                return;
            };
            let of_thread = Arc::clone(&wake);
            if uverbs::threads::spawn("ringverbs-linger", move || self.run(&of_thread)).is_err() {
                return;
            }
            state.wake = Some(Arc::clone(&wake));
            wake
        };
        let waker = Waker::from(Arc::new(WakeThread(wake)));
        stream.engine.events().set_waker(waker);
        state.added.push(stream);
        state.count += 1;
        state.last = Some(now);
    }

    /// The thread's main loop. Streams are in the order of their deadlines.
    fn run(&self, wake: &EventFd) {
        let mut all: Vec<Stream> = Vec::new();
        // Of each stream, whether its descriptors are readable.
        let mut readable: Vec<bool> = Vec::new();
        loop {
            let now = Instant::now();
            let mut readable_of = readable.into_iter();
            all.retain_mut(|stream| {
                let [has_completions, has_events] =
                    [readable_of.next(), readable_of.next()].map(|it| it == Some(true));
                let were_read = stream.engine.events().are_pending();
                if has_events || were_read {
                    stream.engine.handle_connection_events();
                }
                let is_due = has_completions || has_events || were_read || stream.deadline <= now;
                !(is_due && stream.has_ended(now))
            });
            let mut state = self.lock();
            let added = std::mem::take(&mut state.added);
            state.count = all.len() + added.len();
            if state.count == 0 {
                state.wake = None;
            }
            let has_ended = state.wake.is_none();
            drop(state);
            self.cond.notify_all();
            if has_ended {
                return;
            }
            // Their last attempt was that of the drop, which armed their queues.
            all.extend(added);
            let excess = all.len().saturating_sub(MAX_LINGERING);
            drop(all.drain(..excess));
            // Events that were read before the waker was set are due.
            let has_due = all
                .iter()
                .any(|stream| stream.engine.events().are_pending());
            let deadline = if has_due {
                Some(now)
            } else {
                all.first().map(|stream| stream.deadline)
            };
            let mut fds: Vec<BorrowedFd<'_>> = vec![wake.as_fd()];
            fds.extend(all.iter().flat_map(|stream| stream.engine.events().fds()));
            // An error, for lack of memory, makes it try all.
            let all_readable = vec![true; fds.len()];
            readable = wait::any_readable(&fds, deadline).unwrap_or(all_readable);
            let _ = wake.read();
            readable.remove(0);
        }
    }

    /// Waits until no stream lingers, or each does for at least `HERE`.
    #[cfg(feature = "tokio")]
    fn wait(&self) {
        let mut state = self.lock();
        loop {
            let until = state.last.map(|last| last + HERE);
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            match left {
                Some(left) if state.count != 0 && !left.is_zero() => {
                    let waited = self.cond.wait_timeout(state, left);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                _ => break,
            }
        }
        state.is_held = false;
    }
}
