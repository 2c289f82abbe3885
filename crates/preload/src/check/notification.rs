//! Completion queues for which a program asks for an event, and does not poll again before it
//! waits.
//!
//! A completion that was in the queue before the request causes no event by the specification;
//! ConnectX posts one if no earlier event has reported it.

use std::os::fd::RawFd;
use std::sync::Mutex;

use crate::explain::{Origin, lock};

/// The last request for an event, and what was polled.
#[derive(Debug, Default)]
pub(crate) struct Notification(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    request: Option<Request>,
    poller: Poller,
}

/// The threads that have polled a completion queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Poller {
    #[default]
    Nobody,
    Thread(i32),
    Several,
}

/// A request for an event.
#[derive(Debug)]
struct Request {
    /// The device's descriptor of the channel.
    channel: RawFd,
    /// Completions that were in the queue, and were not polled since.
    unread: u32,
    origin: Origin,
}

impl Notification {
    /// Notes a request, when there were so many completions in the queue.
    pub(crate) fn requested(&self, channel: RawFd, unread: u32, origin: impl FnOnce() -> Origin) {
        lock(&self.0).request = (unread != 0).then(|| Request {
            channel,
            unread,
            origin: origin(),
        });
    }

    /// Notes a poll by a thread that has found so many completions.
    pub(crate) fn polled(&self, thread: i32, found: u32) {
        let state = &mut *lock(&self.0);
        state.poller = match state.poller {
            Poller::Nobody => Poller::Thread(thread),
            Poller::Thread(other) if other == thread => state.poller,
            _ => Poller::Several,
        };
        if let Some(request) = &mut state.request {
            request.unread = request.unread.saturating_sub(found);
            if request.unread == 0 {
                state.request = None;
            }
        }
    }

    /// Handles a thread that is about to wait for an event of a channel. Returns how many
    /// completions it has left in the queue since the request, and where it made that, if no
    /// other thread may poll them.
    pub(super) fn waits(
        &self,
        channel: RawFd,
        thread: i32,
        is_alone: impl FnOnce() -> bool,
    ) -> Option<(u32, Origin)> {
        let state = &mut *lock(&self.0);
        let request = state.request.take_if(|it| it.channel == channel)?;
        let is_own = match state.poller {
            Poller::Thread(poller) => poller == thread && request.origin.thread == thread,
            Poller::Nobody => is_alone(),
            Poller::Several => false,
        };
        is_own.then_some((request.unread, request.origin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_that_are_left_are_found() {
        let here = Origin::here;
        let own = here().thread;
        let left = |of: &Notification, channel| of.waits(channel, own, || true).map(|it| it.0);
        let queue = Notification::default();
        queue.requested(5, 2, here);
        assert_eq!(left(&queue, 6), None);
        assert_eq!(left(&queue, 5), Some(2));
        // Reported once.
        assert_eq!(left(&queue, 5), None);
        queue.requested(5, 0, here);
        assert_eq!(left(&queue, 5), None);
        queue.requested(5, 3, here);
        queue.polled(own, 2);
        assert_eq!(left(&queue, 5), Some(1));
        queue.requested(5, 3, here);
        queue.polled(own, 3);
        assert_eq!(left(&queue, 5), None);
        // Another thread has asked.
        queue.requested(5, 3, || Origin {
            thread: own + 1,
            ..here()
        });
        assert_eq!(left(&queue, 5), None);
        // Another thread polls, too.
        queue.requested(5, 3, here);
        queue.polled(own + 1, 0);
        assert_eq!(left(&queue, 5), None);
    }

    #[test]
    fn another_thread_may_poll_what_nobody_has_polled() {
        let queue = Notification::default();
        queue.requested(5, 1, Origin::here);
        assert!(queue.waits(5, Origin::here().thread, || false).is_none());
    }
}
