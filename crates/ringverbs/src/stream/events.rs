//! Event channels that several streams share.
//!
//! A completion queue gets its channel when it is created, and the answer to a connection
//! request contains the number of a queue pair. Passive sides that wait for their peers at the
//! same time share their channels, so a peer that never confirms costs no descriptor. A
//! stream that was accepted alone is alone on its channels.
//!
//! Whoever reads an event marks it as pending for its stream. While a thread waits for the
//! descriptors, no other thread reads them: it would take away what the first one waits for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Instant;

use super::wait;
use crate::cm::manager::{EventChannel, Key};
use crate::{CompletionChannel, Context, cm};

/// A channel of completion events and one of connection events.
pub(super) struct EventChannels {
    completions: CompletionChannel,
    connections: EventChannel,
    state: Mutex<ChannelsState>,
    #[cfg(feature = "tokio")]
    pub registration: super::tokio::SharedRegistration,
}

#[derive(Default)]
struct ChannelsState {
    streams: Vec<Arc<Pending>>,
    /// Whether a thread waits for the descriptors, on behalf of all streams.
    has_watcher: bool,
    /// The streams whose threads wait for that thread.
    followers: Vec<Arc<Pending>>,
}

impl ChannelsState {
    /// Wakes a thread that watches the descriptors from here on.
    fn hand_over(&self) {
        if let Some(next) = self.followers.last().filter(|_| !self.has_watcher) {
            next.cond.notify_one();
        }
    }
}

/// Which events of a stream were read from the channels.
struct Pending {
    /// The id of its completion queue.
    queue: u64,
    connection: Key,
    completions: Event,
    connection_events: Event,
    /// Whether a thread waits for `cond`; changes with the channels locked.
    has_follower: AtomicBool,
    /// Notified when another stream's user has read its event, and to watch.
    cond: Condvar,
    /// Woken when another stream's user has read its event.
    waker: Mutex<Option<Waker>>,
}

/// Whether there is an event of a stream.
#[derive(Default)]
struct Event {
    is_pending: AtomicBool,
    /// Whether the channel must still be read for it.
    is_unread: AtomicBool,
}

impl Event {
    fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Relaxed)
    }

    fn mark(&self, is_unread: bool) {
        self.is_unread.store(is_unread, Ordering::Relaxed);
        self.is_pending.store(true, Ordering::Relaxed);
    }

    /// Takes the event, after `read` has read the channel if it must be.
    fn take<E>(&self, read: impl FnOnce() -> Result<(), E>) -> Result<bool, E> {
        let is_pending = self.is_pending.swap(false, Ordering::Relaxed);
        if is_pending && !self.is_unread.swap(false, Ordering::Relaxed) {
            return Ok(true);
        }
        read()?;
        Ok(self.is_pending.swap(false, Ordering::Relaxed))
    }
}

impl Pending {
    fn is_empty(&self) -> bool {
        !self.completions.is_pending() && !self.connection_events.is_pending()
    }

    fn waker(&self) -> MutexGuard<'_, Option<Waker>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A system call.
        if self.has_follower.load(Ordering::Relaxed) {
            self.cond.notify_one();
        }
        let waker = self.waker().clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl EventChannels {
    /// Creates a completion channel for one or several streams.
    pub fn new(context: &Context, connections: EventChannel) -> crate::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            completions: context.completion_channel()?,
            connections,
            state: Mutex::default(),
            #[cfg(feature = "tokio")]
            registration: Default::default(),
        }))
    }

    pub fn completions(&self) -> &CompletionChannel {
        &self.completions
    }

    pub fn connections(&self) -> &EventChannel {
        &self.connections
    }

    /// Returns whether no established stream uses them.
    pub fn are_unused(&self) -> bool {
        self.lock().streams.is_empty()
    }

    /// Adds a stream, with the id of its completion queue and the key of its connection,
    /// before there can be events of it.
    pub fn add(self: &Arc<Self>, queue: u64, connection: Key) -> StreamEvents {
        let pending = Arc::new(Pending {
            queue,
            connection,
            completions: Event::default(),
            connection_events: Event::default(),
            has_follower: AtomicBool::new(false),
            cond: Condvar::new(),
            waker: Mutex::default(),
        });
        self.lock().streams.push(Arc::clone(&pending));
        StreamEvents {
            channels: Arc::clone(self),
            pending,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ChannelsState> {
        // A panic leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_completions(&self, read: &mut Read<'_>) -> crate::Result<()> {
        while let Some(event) = self.completions.try_event()? {
            read.mark(|it| it.queue == event.queue, |it| &it.completions);
        }
        Ok(())
    }

    fn read_connections(&self, read: &mut Read<'_>) -> cm::Result<()> {
        while let Some(event) = self.connections.try_event()? {
            let key = event.key();
            read.mark(|it| it.connection == key, |it| &it.connection_events);
        }
        Ok(())
    }

    /// Reads events for the stream of `reader`, unless a thread waits for them; wakes the
    /// others.
    fn read<E>(
        &self,
        reader: &Arc<Pending>,
        read: impl FnOnce(&mut Read<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let state = self.lock();
        if state.has_watcher {
            return Ok(());
        }
        self.read_locked(state, Some(reader), read)
    }

    fn read_locked<R>(
        &self,
        state: MutexGuard<'_, ChannelsState>,
        reader: Option<&Arc<Pending>>,
        read: impl FnOnce(&mut Read<'_>) -> R,
    ) -> R {
        let mut marked = Read {
            streams: &state.streams,
            reader,
            others: Vec::new(),
        };
        let outcome = read(&mut marked);
        let others = marked.others;
        drop(state);
        // Without the lock, because this runs code of tasks.
        for stream in others {
            stream.wake();
        }
        outcome
    }

    /// Handles readable channels, of completions and of connections: wakes the streams that
    /// have events.
    #[cfg(feature = "tokio")]
    pub fn dispatch(&self, readable: [bool; 2]) {
        let state = self.lock();
        if !state.has_watcher {
            self.read_locked(state, None, |read| self.mark_readable(read, readable));
        }
    }

    /// Marks the events of readable channels. A stream that is alone reads them itself, after
    /// it has done its work. An error counts as an event of each stream, which gets it
    /// when it takes the event.
    fn mark_readable(&self, read: &mut Read<'_>, [completions, connections]: [bool; 2]) {
        let is_alone = read.streams.len() == 1;
        if completions && (is_alone || self.read_completions(read).is_err()) {
            read.mark_all(|it| &it.completions);
        }
        if connections && (is_alone || self.read_connections(read).is_err()) {
            read.mark_all(|it| &it.connection_events);
        }
    }

    /// Wakes all streams.
    #[cfg(feature = "tokio")]
    pub fn wake_all(&self) {
        let streams = self.lock().streams.clone();
        streams.iter().for_each(|stream| stream.wake());
    }
}

/// Events that are being read.
struct Read<'a> {
    streams: &'a [Arc<Pending>],
    reader: Option<&'a Arc<Pending>>,
    /// The other streams of which there were events.
    others: Vec<Arc<Pending>>,
}

impl Read<'_> {
    /// Marks an event. One that matches no stream is stale.
    fn mark(&mut self, is_of: impl Fn(&Pending) -> bool, event: impl Fn(&Pending) -> &Event) {
        if let Some(stream) = self.streams.iter().find(|it| is_of(it)) {
            event(stream).mark(false);
            self.add(stream);
        }
    }

    /// Marks an event of each stream, for which it must read the channel.
    fn mark_all(&mut self, event: impl Fn(&Pending) -> &Event) {
        for stream in self.streams {
            event(stream).mark(true);
            self.add(stream);
        }
    }

    fn add(&mut self, stream: &Arc<Pending>) {
        if !self
            .reader
            .is_some_and(|reader| Arc::ptr_eq(reader, stream))
        {
            self.others.push(Arc::clone(stream));
        }
    }
}

/// The events of one stream.
pub(super) struct StreamEvents {
    channels: Arc<EventChannels>,
    pending: Arc<Pending>,
}

impl StreamEvents {
    #[cfg(feature = "tokio")]
    pub fn channels(&self) -> &Arc<EventChannels> {
        &self.channels
    }

    /// Returns the descriptors to poll: of completions, of connections. They stay open
    /// and do not change while this lives. Another stream's user may read an event:
    /// [`set_waker`](Self::set_waker).
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        let channels = &*self.channels;
        [channels.completions.as_fd(), channels.connections.as_fd()]
    }

    /// Sets what is woken when another stream's user has read an event of this one.
    pub fn set_waker(&self, waker: Waker) {
        let replaced = self.pending.waker().replace(waker);
        drop(replaced);
    }

    /// Returns whether there are events that were read, but not taken.
    pub fn are_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// As [`are_pending`](Self::are_pending), of the connection.
    pub fn has_connection_event(&self) -> bool {
        self.pending.connection_events.is_pending()
    }

    /// Returns whether there was a completion event since the last call.
    pub fn take_completions(&self) -> crate::Result<bool> {
        let (channels, pending) = (&self.channels, &self.pending);
        let read = || channels.read(pending, |read| channels.read_completions(read));
        pending.completions.take(read)
    }

    /// As [`take_completions`](Self::take_completions), of the connection.
    pub fn take_connection_event(&self) -> cm::Result<bool> {
        let (channels, pending) = (&self.channels, &self.pending);
        let read = || channels.read(pending, |read| channels.read_connections(read));
        pending.connection_events.take(read)
    }

    /// Waits until there are events to take, or until the deadline. One thread of a stream
    /// waits at a time.
    pub fn wait(&self, deadline: Option<Instant>) -> io::Result<()> {
        let (channels, pending) = (&*self.channels, &self.pending);
        let mut state = channels.lock();
        loop {
            let left = deadline.map(|it| it.saturating_duration_since(Instant::now()));
            if self.are_pending() || left.is_some_and(|left| left.is_zero()) {
                state.hand_over();
                return Ok(());
            }
            if state.has_watcher {
                state.followers.push(Arc::clone(pending));
                pending.has_follower.store(true, Ordering::Relaxed);
                state = match left {
                    None => {
                        let waited = pending.cond.wait(state);
                        waited.unwrap_or_else(PoisonError::into_inner)
                    }
                    Some(left) => {
                        let waited = pending.cond.wait_timeout(state, left);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                };
                pending.has_follower.store(false, Ordering::Relaxed);
                state.followers.retain(|it| !Arc::ptr_eq(it, pending));
                continue;
            }
            state.has_watcher = true;
            drop(state);
            let ready = wait::readable(self.fds(), deadline);
            state = channels.lock();
            state.has_watcher = false;
            let ready = match ready {
                Ok(ready) => ready,
                Err(error) => {
                    state.hand_over();
                    return Err(error);
                }
            };
            channels.read_locked(state, Some(pending), |read| {
                channels.mark_readable(read, ready);
            });
            state = channels.lock();
        }
    }
}

impl Drop for StreamEvents {
    fn drop(&mut self) {
        let mut state = self.channels.lock();
        state.streams.retain(|it| !Arc::ptr_eq(it, &self.pending));
    }
}
