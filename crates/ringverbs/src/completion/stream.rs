//! Completion readers for asynchronous programs.
//!
//! Futures and streams own no memory of operations, which is in the table of operations in
//! flight or in a returned entry. Dropping a future or stream loses no entry and frees no
//! buffer.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll};

use futures_core::Stream;

use super::wait::MutexCond;
use super::{CompletionReader, ErrorEntry, Format, ReadError};
use crate::{Error, Result};

/// A stream of entries, for any executor. It requires a reader with the wait object
/// [`Condvar`](super::WaitObject::Condvar), whose thread wakes the task.
///
/// An item is an entry or a failed operation. The stream ends when the queue was
/// overrun or cannot be read; [`CompletionStream::error`] returns the reason.
#[derive(Debug)]
pub struct CompletionStream<F: Format> {
    reader: CompletionReader<F>,
    condvar: Arc<MutexCond>,
    ended: Option<ReadError>,
}

/// The item of a [`CompletionStream`].
pub type StreamItem<F> = std::result::Result<<F as Format>::Entry, ErrorEntry>;

impl<F: Format> CompletionStream<F> {
    /// Creates a stream of the entries of `reader`.
    ///
    /// # Errors
    /// Returns the reader if it has another wait object.
    pub fn new(reader: CompletionReader<F>) -> Result<Self, (CompletionReader<F>, Error)> {
        match reader.condvar() {
            Some(condvar) => Ok(Self {
                reader,
                condvar,
                ended: None,
            }),
            None => {
                let what = "a stream requires a reader with the wait object Condvar";
                Err((reader, Error::Invalid { what }))
            }
        }
    }

    /// Returns the reason why the stream has ended.
    pub fn error(&self) -> Option<&ReadError> {
        self.ended.as_ref()
    }

    /// Returns the reader, to create queue pairs on its queue.
    pub fn reader(&self) -> &CompletionReader<F> {
        &self.reader
    }

    /// Converts back to the reader.
    pub fn into_reader(self) -> CompletionReader<F> {
        self.reader
    }

    /// Polls for the next item; `None` at the end.
    pub fn poll_item(&mut self, task: &mut Task<'_>) -> Poll<Option<StreamItem<F>>> {
        if self.ended.is_some() {
            return Poll::Ready(None);
        }
        loop {
            match self.reader.read_one() {
                Ok(Some(entry)) => return Poll::Ready(Some(Ok(entry))),
                Ok(None) => {}
                Err(ReadError::ErrorAvailable) => {
                    if let Some(entry) = self.reader.read_err() {
                        return Poll::Ready(Some(Err(entry)));
                    }
                }
                Err(error) => {
                    self.ended = Some(error);
                    return Poll::Ready(None);
                }
            }
            // Registered before arming, so that later completions wake this task.
            self.condvar.register(task.waker());
            match self.reader.try_wait() {
                Ok(true) => return Poll::Pending,
                Ok(false) => {}
                Err(error) => {
                    self.ended = Some(error);
                    return Poll::Ready(None);
                }
            }
        }
    }
}

impl<F: Format> Stream for CompletionStream<F> {
    type Item = StreamItem<F>;

    fn poll_next(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_item(task)
    }
}

impl<F: Format> Unpin for CompletionStream<F> {}

#[cfg(feature = "tokio")]
mod on_tokio {
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;

    use super::*;
    use crate::completion::wait::Waiter;

    /// A reader on tokio. It requires a reader with the wait object
    /// [`Fd`](super::super::WaitObject::Fd).
    #[derive(Debug)]
    pub struct TokioReader<F: Format> {
        // Declared before the reader, so that it leaves the reactor first.
        fd: AsyncFd<WaitFd>,
        reader: CompletionReader<F>,
        /// The waiter of the reader, which a caller of `reader()` can replace.
        waiter: Arc<Waiter>,
        ended: Option<ReadError>,
    }

    /// A duplicate of a reader's descriptor.
    #[derive(Debug)]
    pub(crate) struct WaitFd(OwnedFd);

    impl AsRawFd for WaitFd {
        fn as_raw_fd(&self) -> RawFd {
            self.0.as_raw_fd()
        }
    }

    /// Registers a duplicate of a descriptor with the current runtime.
    pub(crate) fn watch(fd: BorrowedFd<'_>) -> Result<AsyncFd<WaitFd>> {
        let system = |what| {
            move |error: std::io::Error| Error::System {
                what,
                errno: error.raw_os_error().unwrap_or(libc::EIO),
            }
        };
        let copy = fd.try_clone_to_owned();
        let watched = WaitFd(copy.map_err(system("a second descriptor of a reader"))?);
        // SAFETY: the registered value owns the descriptor, which stays open
        // as long as the value lives and never changes.
        unsafe { AsyncFd::register_with_interest(watched, Interest::READABLE) }
            .map_err(|error| system("registering a reader with tokio")(error.into_parts().1))
    }

    impl<F: Format> TokioReader<F> {
        /// Registers `reader` with the current runtime.
        ///
        /// # Errors
        /// [`Error::Invalid`] for a reader with another wait object;
        /// [`Error::System`] if the descriptor cannot be registered.
        ///
        /// # Panics
        /// Outside of a runtime with I/O enabled, as tokio's own types.
        pub fn new(reader: CompletionReader<F>) -> Result<Self> {
            if reader.wait_fd().is_none() {
                return Err(Error::Invalid {
                    what: "tokio requires a reader with the wait object Fd",
                });
            }
            let fd = watch(reader.as_fd())?;
            Ok(Self {
                fd,
                waiter: reader.signaler().waiter,
                reader,
                ended: None,
            })
        }

        /// Reads up to `out.len()` entries, and waits for at least one.
        /// Cancel safe: entries are consumed only in the poll that returns them.
        ///
        /// # Errors
        /// As [`CompletionReader::read`].
        pub async fn read(&mut self, out: &mut [F::Entry]) -> Result<usize, ReadError> {
            loop {
                let count = self.reader.read(out)?;
                if count > 0 || out.is_empty() {
                    return Ok(count);
                }
                std::future::poll_fn(|task| self.poll_armed(task)).await?;
            }
        }

        /// Returns pending if there is nothing to read, and wakes the task when there
        /// is.
        fn poll_armed(&mut self, task: &mut Task<'_>) -> Poll<Result<(), ReadError>> {
            self.reader.check_waiter(&self.waiter)?;
            loop {
                // Events are consumed before arming, so that each later one is a
                // new edge for the reactor.
                self.reader.consume_events()?;
                if !self.reader.try_wait()? {
                    return Poll::Ready(Ok(()));
                }
                match self.fd.poll_read_ready(task) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(mut guard)) => guard.clear_ready(),
                    Poll::Ready(Err(error)) => {
                        return Poll::Ready(Err(ReadError::Queue(Error::System {
                            what: "tokio's reactor",
                            errno: error.raw_os_error().unwrap_or(libc::EIO),
                        })));
                    }
                }
            }
        }

        /// Returns the failed operation that [`ReadError::ErrorAvailable`]
        /// announces.
        pub fn read_err(&mut self) -> Option<ErrorEntry> {
            self.reader.read_err()
        }

        /// Returns the reason why the stream has ended.
        pub fn error(&self) -> Option<&ReadError> {
            self.ended.as_ref()
        }

        /// Returns the reader, to create queue pairs on its queue. If the reader is
        /// replaced through this reference, waiting fails with
        /// [`Error::Invalid`].
        pub fn reader(&mut self) -> &mut CompletionReader<F> {
            &mut self.reader
        }

        /// Converts back to the reader.
        pub fn into_reader(self) -> CompletionReader<F> {
            self.reader
        }
    }

    impl<F: Format> Unpin for TokioReader<F> {}

    impl<F: Format> Stream for TokioReader<F> {
        type Item = StreamItem<F>;

        fn poll_next(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Option<Self::Item>> {
            let this = self.get_mut();
            if this.ended.is_some() {
                return Poll::Ready(None);
            }
            loop {
                let error = match this.reader.read_one() {
                    Ok(Some(entry)) => return Poll::Ready(Some(Ok(entry))),
                    Ok(None) => match this.poll_armed(task) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(Ok(())) => continue,
                        Poll::Ready(Err(error)) => error,
                    },
                    Err(ReadError::ErrorAvailable) => match this.reader.read_err() {
                        Some(entry) => return Poll::Ready(Some(Err(entry))),
                        None => continue,
                    },
                    Err(error) => error,
                };
                this.ended = Some(error);
                return Poll::Ready(None);
            }
        }
    }
}

#[cfg(feature = "tokio")]
pub use on_tokio::TokioReader;
#[cfg(feature = "tokio")]
pub(crate) use on_tokio::{WaitFd, watch};
