//! Counting completions instead of reading them.

use std::time::{Duration, Instant};

use super::wait;
use super::{CompletionReader, ContextFormat, ReadError, ReaderBuilder, Signaler};
use crate::data::Payload;
use crate::{CloseError, CompletionQueue, Result};

/// Counts of completed and of failed operations (`fi_cntr`), in place of
/// entries. It has a completion queue of its own; the queue pairs made on that
/// are what it counts.
///
/// An operation that was posted unsignaled counts as well, as soon as a later
/// one of its queue has brought it to an end.
pub struct Counter {
    reader: CompletionReader<ContextFormat>,
    successes: u64,
    errors: u64,
    last_error: Option<super::ErrorEntry>,
}

/// Why a wait for a counter ended early.
#[derive(Debug)]
#[non_exhaustive]
pub enum CounterError {
    /// The time is up, or somebody signalled.
    Timeout,
    /// An operation has failed meanwhile.
    Failed,
    /// The queue could not be read.
    Read(ReadError),
}

impl std::fmt::Display for CounterError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Timeout => f.write_str("the counter did not reach its threshold in time"),
            Self::Failed => f.write_str("an operation has failed while a counter was waited for"),
            Self::Read(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CounterError {}

impl ReaderBuilder<ContextFormat> {
    /// Makes the queue, to be counted.
    ///
    /// # Errors
    /// As [`ReaderBuilder::build`].
    pub fn counter(self) -> Result<Counter> {
        Ok(Counter {
            reader: self.build()?,
            successes: 0,
            errors: 0,
            last_error: None,
        })
    }
}

impl Counter {
    /// The queue, to make queue pairs on.
    pub fn queue(&self) -> &CompletionQueue {
        self.reader.queue()
    }

    /// Counts what has completed. Memory that comes back is freed.
    ///
    /// # Errors
    /// [`ReadError::Overrun`], [`ReadError::Queue`].
    pub fn progress(&mut self) -> Result<(), ReadError> {
        self.progress_with(|_, _| ())
    }

    /// Counts what has completed. Each operation's token and memory go to
    /// `released`, of those unsignaled as well.
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
            let result = reader.count(&mut |token, payload| {
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

    /// Operations that were done (`fi_cntr_read`), as of the last progress.
    pub fn successes(&self) -> u64 {
        self.successes
    }

    /// Operations that have failed (`fi_cntr_readerr`), as of the last
    /// progress.
    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// The operation that failed last, without its memory, once.
    pub fn last_error(&mut self) -> Option<super::ErrorEntry> {
        self.last_error.take()
    }

    /// Adds to the successes (`fi_cntr_add`), wrapping.
    pub fn add(&mut self, count: u64) {
        self.successes = self.successes.wrapping_add(count);
    }

    /// Adds to the errors (`fi_cntr_adderr`), wrapping.
    pub fn add_errors(&mut self, count: u64) {
        self.errors = self.errors.wrapping_add(count);
    }

    /// Sets the successes (`fi_cntr_set`).
    pub fn set(&mut self, count: u64) {
        self.successes = count;
    }

    /// Sets the errors (`fi_cntr_seterr`).
    pub fn set_errors(&mut self, count: u64) {
        self.errors = count;
    }

    /// Blocks until there were at least `threshold` successes (`fi_cntr_wait`).
    ///
    /// # Errors
    /// [`CounterError::Timeout`]; [`CounterError::Failed`] as soon as one fails;
    /// [`CounterError::Read`].
    pub fn wait(&mut self, threshold: u64, timeout: Option<Duration>) -> Result<(), CounterError> {
        let deadline: Option<Instant> = wait::deadline(timeout);
        let errors = self.errors;
        loop {
            self.progress().map_err(CounterError::Read)?;
            if self.errors != errors {
                return Err(CounterError::Failed);
            }
            if self.successes >= threshold {
                return Ok(());
            }
            if self.reader.signalled() || wait::is_over(deadline) {
                return Err(CounterError::Timeout);
            }
            let slept = self.reader.sleep(deadline);
            slept.map_err(|error| CounterError::Read(error.into()))?;
        }
    }

    /// What wakes a waiting thread, from any other.
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
