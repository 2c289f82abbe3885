//! Completion counters.

use std::time::Duration;

use ringverbs::completion::{CompletionReader, ContextFormat, ErrorEntry, ReadError, Signaler};
use ringverbs::{CloseError, CompletionQueue, Payload};

use crate::deadline::Deadline;

/// Counts of completed and of failed operations (`fi_cntr`), in place of entries.
/// A counter has its own completion queue, and counts the operations of the
/// queue pairs created on it.
///
/// Unsignalled operations count too, once a later completion of their queue retires
/// them.
pub struct Counter {
    reader: CompletionReader<ContextFormat>,
    successes: u64,
    errors: u64,
    last_error: Option<ErrorEntry>,
}

/// The reason why waiting for a counter ended early.
#[derive(Debug)]
#[non_exhaustive]
pub enum CounterError {
    /// The timeout has passed, or a signaler was used.
    Timeout,
    /// An operation failed during the wait.
    Failed,
    /// The queue could not be read.
    Read(ReadError),
}

impl std::fmt::Display for CounterError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Timeout => f.write_str("the counter did not reach its threshold in time"),
            Self::Failed => f.write_str("an operation failed during the wait for a counter"),
            Self::Read(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CounterError {}

impl Counter {
    /// Creates a counter of the completions that `reader` has not read.
    pub fn new(reader: CompletionReader<ContextFormat>) -> Self {
        Self {
            reader,
            successes: 0,
            errors: 0,
            last_error: None,
        }
    }

    /// Returns the queue, to create queue pairs on.
    pub fn queue(&self) -> &CompletionQueue {
        self.reader.queue()
    }

    /// Counts new completions and releases the memory of their operations.
    ///
    /// # Errors
    /// [`ReadError::Overrun`], [`ReadError::Queue`].
    pub fn progress(&mut self) -> Result<(), ReadError> {
        self.progress_with(|_, _| ())
    }

    /// Counts new completions. The token and memory of each operation are passed
    /// to `released`, also of unsignalled operations.
    ///
    /// # Errors
    /// As [`Counter::progress`].
    pub fn progress_with(
        &mut self,
        mut released: impl FnMut(u64, Payload),
    ) -> Result<(), ReadError> {
        let Self {
            reader,
            successes,
            errors,
            last_error,
        } = self;
        loop {
            let result = reader.retire(&mut |token, payload| {
                *successes = successes.wrapping_add(1);
                released(token, payload);
            });
            match result {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(ReadError::ErrorAvailable) => {
                    *errors = errors.wrapping_add(1);
                    if let Some(mut entry) = reader.read_err() {
                        released(entry.token, std::mem::take(&mut entry.payload));
                        *last_error = Some(entry);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the number of successful operations (`fi_cntr_read`) at the last
    /// progress.
    pub fn successes(&self) -> u64 {
        self.successes
    }

    /// Returns the number of failed operations (`fi_cntr_readerr`) at the last
    /// progress.
    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// Takes the last failed operation, without its memory.
    pub fn last_error(&mut self) -> Option<ErrorEntry> {
        self.last_error.take()
    }

    /// Adds to the number of successes (`fi_cntr_add`), wrapping.
    pub fn add(&mut self, count: u64) {
        self.successes = self.successes.wrapping_add(count);
    }

    /// Adds to the number of errors (`fi_cntr_adderr`), wrapping.
    pub fn add_errors(&mut self, count: u64) {
        self.errors = self.errors.wrapping_add(count);
    }

    /// Sets the number of successes (`fi_cntr_set`).
    pub fn set(&mut self, count: u64) {
        self.successes = count;
    }

    /// Sets the number of errors (`fi_cntr_seterr`).
    pub fn set_errors(&mut self, count: u64) {
        self.errors = count;
    }

    /// Blocks until there are at least `threshold` successes (`fi_cntr_wait`).
    ///
    /// # Errors
    /// [`CounterError::Timeout`]; [`CounterError::Failed`] as soon as an
    /// operation fails; [`CounterError::Read`], as [`CompletionReader::wait`] and
    /// [`Counter::progress`].
    pub fn wait(&mut self, threshold: u64, timeout: Option<Duration>) -> Result<(), CounterError> {
        let deadline = Deadline::after(timeout);
        let errors = self.errors;
        loop {
            self.progress().map_err(CounterError::Read)?;
            if self.errors != errors {
                return Err(CounterError::Failed);
            }
            if self.successes >= threshold {
                return Ok(());
            }
            let has_entries = self.reader.wait(deadline.remaining());
            if !has_entries.map_err(CounterError::Read)? {
                return Err(CounterError::Timeout);
            }
        }
    }

    /// Returns a signaler, which wakes a waiting thread from any other.
    pub fn signaler(&self) -> Signaler {
        self.reader.signaler()
    }

    /// Closes the counter and its queue.
    ///
    /// # Errors
    /// As [`CompletionReader::close`].
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let Self {
            reader,
            successes,
            errors,
            last_error,
        } = self;
        reader.close().map_err(|refused| {
            refused.map(|reader| Self {
                reader,
                successes,
                errors,
                last_error,
            })
        })
    }
}

impl std::fmt::Debug for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counter")
            .field("successes", &self.successes)
            .field("errors", &self.errors)
            .finish_non_exhaustive()
    }
}
