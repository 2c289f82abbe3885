//! Event files: completion channels, and files of asynchronous events.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uverbs::Errno;

use crate::readiness::Readiness;

/// Number of events of an object that were read from a file.
pub(crate) type EventCounter = Arc<AtomicU32>;

/// An unread event.
#[derive(Debug)]
pub(crate) struct Event {
    /// Record that a read returns.
    pub(crate) record: Vec<u8>,
    /// Counter of the event's object; `None` for events of the device.
    pub(crate) counter: Option<EventCounter>,
}

/// Type of the events of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// Completion events: a completion channel.
    Completions,
    /// Events of objects of verbs, and of the device.
    Async,
    /// Answers to commands of a program.
    DevxAnswers,
    /// Events of objects that a program created by commands.
    DevxEvents {
        /// Records do not contain the event queue entry.
        omit_data: bool,
    },
}

/// A file from which events are read: a queue, and a descriptor that is readable while the
/// queue is not empty.
///
/// Objects that use the file keep it after its descriptor was closed.
#[derive(Debug)]
pub(crate) struct EventFile {
    inner: Mutex<Inner>,
    nonblocking: AtomicBool,
    kind: FileKind,
    /// The context that created it
    /// ([`ContextFile::id`](crate::driver::files::ContextFile)).
    context: u64,
}

#[derive(Debug)]
struct Inner {
    readiness: Option<Readiness>,
    events: VecDeque<Event>,
    /// The device has failed: reads fail after the last event.
    failed: bool,
}

impl EventFile {
    /// Creates a file. Returns it with its descriptor, which the file owns.
    pub(crate) fn new(kind: FileKind, context: u64) -> Result<(Arc<Self>, RawFd), Errno> {
        let readiness = Readiness::new()?;
        let fd = readiness.fd();
        let inner = Inner {
            readiness: Some(readiness),
            events: VecDeque::new(),
            failed: false,
        };
        let file = Self {
            inner: Mutex::new(inner),
            nonblocking: AtomicBool::new(false),
            kind,
            context,
        };
        Ok((Arc::new(file), fd))
    }

    /// Returns whether the file has this type and belongs to this context.
    pub(crate) fn matches(&self, kind: FileKind, context: u64) -> bool {
        let same = std::mem::discriminant(&self.kind) == std::mem::discriminant(&kind);
        same && self.context == context
    }

    /// Returns whether records do not contain the event queue entry.
    pub(crate) fn omits_data(&self) -> bool {
        self.kind == FileKind::DevxEvents { omit_data: true }
    }

    /// Returns the bytes of unread records.
    pub(crate) fn unread(&self) -> usize {
        let inner = self.lock();
        inner.events.iter().map(|event| event.record.len()).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets whether reads block; the descriptor itself is always non-blocking.
    pub(crate) fn set_nonblocking(&self, nonblocking: bool) {
        self.nonblocking.store(nonblocking, Ordering::Relaxed);
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Adds an event. Without effect if the descriptor was closed.
    pub(crate) fn push(&self, event: Event) {
        self.push_coalesced(event, false);
    }

    /// As [`push`](Self::push); with `coalesce`, without effect while an event of the same
    /// object is unread.
    pub(crate) fn push_coalesced(&self, event: Event, coalesce: bool) {
        let mut inner = self.lock();
        let Some(readiness) = &inner.readiness else {
            return;
        };
        let is_same = |it: &Event| match (&it.counter, &event.counter) {
            (Some(it), Some(of)) => Arc::ptr_eq(it, of),
            _ => false,
        };
        if coalesce && inner.events.iter().any(is_same) {
            return;
        }
        readiness.raise();
        inner.events.push_back(event);
    }

    /// Writes the first event to `buffer` and counts it as read. Returns its
    /// length, or `None` if there is no event.
    ///
    /// # Errors
    /// EINVAL if the buffer is too short (ENOSPC for an answer to a command); EIO after the
    /// last event of a failed device.
    pub(crate) fn pop(&self, buffer: &mut [u8]) -> Result<Option<usize>, Errno> {
        let mut inner = self.lock();
        let Some(event) = inner.events.pop_front() else {
            return match inner.failed {
                true => Err(Errno::new(libc::EIO)),
                false => Ok(None),
            };
        };
        let Some(room) = buffer.get_mut(..event.record.len()) else {
            inner.events.push_front(event);
            let short = match self.kind {
                FileKind::DevxAnswers => libc::ENOSPC,
                _ => libc::EINVAL,
            };
            return Err(Errno::new(short));
        };
        room.copy_from_slice(&event.record);
        if let Some(of) = &event.counter {
            of.fetch_add(1, Ordering::Relaxed);
        }
        inner.update_readiness();
        Ok(Some(event.record.len()))
    }

    /// Removes the events of a destroyed object.
    pub(crate) fn forget(&self, of: &EventCounter) {
        let mut inner = self.lock();
        let before = inner.events.len();
        let other = |event: &Event| !event.counter.as_ref().is_some_and(|it| Arc::ptr_eq(it, of));
        inner.events.retain(other);
        if before != 0 {
            inner.update_readiness();
        }
    }

    /// Handles failure of the device: the descriptor stays readable.
    pub(crate) fn fail(&self) {
        let mut inner = self.lock();
        inner.failed = true;
        if let Some(readiness) = &inner.readiness {
            readiness.raise();
        }
    }

    /// Closes the descriptor and discards unread events.
    pub(crate) fn close(&self) -> Option<Readiness> {
        let mut inner = self.lock();
        inner.events.clear();
        inner.readiness.take()
    }
}

impl Inner {
    /// Makes the descriptor unreadable if no events are left.
    fn update_readiness(&mut self) {
        if self.events.is_empty() && !self.failed {
            if let Some(readiness) = &self.readiness {
                readiness.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::BorrowedFd;

    use super::*;

    fn readable(fd: RawFd) -> bool {
        // SAFETY: open until the end of the test.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn the_file_is_readable_while_events_are_queued() {
        let (file, fd) = EventFile::new(FileKind::Async, 1).unwrap();
        let (a, b) = (EventCounter::default(), EventCounter::default());
        let event = |of: &EventCounter, byte| Event {
            record: vec![byte; 8],
            counter: Some(Arc::clone(of)),
        };
        assert!(!readable(fd));
        file.push(event(&a, 1));
        file.push(event(&b, 2));
        file.push(event(&a, 3));
        let mut buffer = [0; 8];
        assert!(file.pop(&mut buffer[..4]).is_err());
        assert_eq!(file.pop(&mut buffer), Ok(Some(8)));
        assert_eq!((buffer, readable(fd)), ([1; 8], true));
        file.forget(&a);
        assert!(readable(fd));
        assert_eq!(file.pop(&mut buffer), Ok(Some(8)));
        assert_eq!((buffer, readable(fd)), ([2; 8], false));
        assert_eq!(file.pop(&mut buffer), Ok(None));
        assert_eq!(a.load(Ordering::Relaxed), 1);
        file.push(event(&a, 4));
        file.forget(&a);
        assert!(!readable(fd));
        drop(file.close());
        file.push(event(&a, 5));
        assert_eq!(file.pop(&mut buffer), Ok(None));
    }
}
