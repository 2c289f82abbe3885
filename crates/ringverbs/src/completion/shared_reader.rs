//! Completion readers for any thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::reader::CompletionReader;
use super::wait::{self, Signaler};
use super::{CompletionQueueRef, ErrorEntry, Format, MessageFormat, ReadError};
use crate::{CloseError, Result};

/// A [`CompletionReader`] that any thread may read, blocking or not. Each call
/// takes and releases a lock, which is not held while a thread sleeps.
///
/// One of the blocked threads sleeps on the wait object, the others on a condition variable.
/// A thread that returns wakes the next one, so remaining entries are not missed.
#[derive(Debug)]
pub struct SharedCompletionReader<F: Format = MessageFormat> {
    state: Mutex<SharedReaderState<F>>,
    cond: Condvar,
    signaler: Signaler,
}

#[derive(Debug)]
struct SharedReaderState<F: Format> {
    reader: CompletionReader<F>,
    /// Whether a thread sleeps on the wait object.
    has_waiter: bool,
    /// Number of signals for which readers have returned.
    signals_seen: u32,
}

impl<F: Format> SharedCompletionReader<F> {
    /// Makes a reader shareable.
    pub fn new(reader: CompletionReader<F>) -> Self {
        let signaler = reader.signaler();
        Self {
            state: Mutex::new(SharedReaderState {
                signals_seen: signaler.waiter.signals(),
                reader,
                has_waiter: false,
            }),
            cond: Condvar::new(),
            signaler,
        }
    }

    fn lock(&self) -> MutexGuard<'_, SharedReaderState<F>> {
        // A panic in a read leaves the reader consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads entries; see [`CompletionReader::read`]. Threads that read
    /// concurrently get different entries, each in order.
    ///
    /// # Errors
    /// As [`CompletionReader::read`].
    pub fn read(&self, out: &mut [F::Entry]) -> Result<usize, ReadError> {
        self.lock().reader.read(out)
    }

    /// Returns the failed operation; see [`CompletionReader::read_err`].
    pub fn read_err(&self) -> Option<ErrorEntry> {
        self.lock().reader.read_err()
    }

    /// Reads entries, blocking; see [`CompletionReader::read_timeout`]. A signal
    /// wakes all blocked threads.
    ///
    /// # Errors
    /// As [`CompletionReader::read_timeout`].
    pub fn read_timeout(
        &self,
        out: &mut [F::Entry],
        timeout: Option<Duration>,
    ) -> Result<usize, ReadError> {
        let deadline = wait::deadline(timeout);
        let waiter = Arc::clone(&self.signaler.waiter);
        let mut state = self.lock();
        let want = state.reader.limit().min(out.len());
        let signals_before = waiter.signals();
        let signalled_before =
            std::mem::replace(&mut state.signals_seen, signals_before) != signals_before;
        let mut done = 0;
        let result = loop {
            match state.reader.read(&mut out[done..]) {
                Ok(count) => done += count,
                Err(error) => break state.reader.entries_before_error(done, error),
            }
            if done >= want {
                break Ok(done);
            }
            let now = waiter.signals();
            if signalled_before || now != signals_before || wait::is_over(deadline) {
                state.signals_seen = now;
                break if done > 0 {
                    Ok(done)
                } else {
                    Err(ReadError::Again)
                };
            }
            if !waiter.can_wait() {
                break Err(waiter
                    .sleep(0, deadline)
                    .err()
                    .map_or(ReadError::Again, Into::into));
            }
            if let Err(error) = state.reader.check_waiter(&waiter) {
                break state.reader.entries_before_error(done, error.into());
            }
            state = if state.has_waiter {
                // The thread on the wait object wakes this one when it wakes up.
                match wait::remaining(deadline) {
                    None => self
                        .cond
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner),
                    Some(time) => {
                        let result = self.cond.wait_timeout(state, time);
                        result.unwrap_or_else(PoisonError::into_inner).0
                    }
                }
            } else {
                let before = waiter.wakeups();
                match state.reader.arm_for_wait() {
                    Ok(true) => continue,
                    Ok(false) => {}
                    Err(error) => break state.reader.entries_before_error(done, error.into()),
                }
                state.has_waiter = true;
                drop(state);
                let slept = waiter
                    .sleep(before, deadline)
                    .and_then(|()| waiter.consume_events());
                let mut state = self.lock();
                state.has_waiter = false;
                state.reader.recheck_events();
                if waiter.signals() != signals_before {
                    // A signal makes all of them return.
                    self.cond.notify_all();
                }
                if let Err(error) = slept {
                    self.cond.notify_one();
                    return state.reader.entries_before_error(done, error.into());
                }
                state
            };
        };
        drop(state);
        // The next thread reads the remaining entries or sleeps on the wait
        // object.
        self.cond.notify_one();
        result
    }

    /// Returns a signaler, which wakes all blocking reads.
    pub fn signaler(&self) -> Signaler {
        self.signaler.clone()
    }

    /// Returns a handle of the queue; see [`CompletionReader::handle`].
    pub fn handle(&self) -> CompletionQueueRef {
        self.lock().reader.handle()
    }

    /// Calls `f` with the reader under the lock. If `f` replaces the reader,
    /// blocking reads fail with [`Error::Invalid`](crate::Error::Invalid).
    pub fn with<R>(&self, f: impl FnOnce(&mut CompletionReader<F>) -> R) -> R {
        f(&mut self.lock().reader)
    }

    /// Returns the reader, for a single owner.
    pub fn into_inner(self) -> CompletionReader<F> {
        let state = self.state.into_inner();
        state.unwrap_or_else(PoisonError::into_inner).reader
    }

    /// Closes the reader; see [`CompletionReader::close`].
    ///
    /// # Errors
    /// As [`CompletionReader::close`].
    pub fn close(self) -> Result<(), CloseError<Self>> {
        self.into_inner()
            .close()
            .map_err(|refused| refused.map(Self::new))
    }
}
