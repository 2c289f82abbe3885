//! What an observer of work requests has been told.

use std::collections::HashMap;

use crate::work::{Ended, Posted, WorkEvent, WorkObserver};

/// The observer of work requests, and what it has been told.
#[derive(Debug)]
pub(crate) struct Follower {
    observer: WorkObserver,
    pub(super) queue_pairs: HashMap<u32, Followed>,
    /// Work requests that will have a completion, by completion queue.
    pub(super) expected: HashMap<u32, u32>,
}

/// A queue pair, since its queues were empty.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Followed {
    pub(super) sends: FollowedQueue,
    pub(super) receives: FollowedQueue,
    /// The observer wants to know no more.
    pub(super) is_left: bool,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FollowedQueue {
    pub(super) cqn: u32,
    /// Index and number of the next work request.
    pub(super) next: u16,
    pub(super) number: u32,
    /// Those that will have a completion.
    pub(super) expected: u32,
}

impl FollowedQueue {
    /// Creates that of a queue whose next work request has this index and number.
    pub(super) fn new(cqn: u32, next: u16, number: u32) -> Self {
        Self {
            cqn,
            next,
            number,
            expected: 0,
        }
    }
}

impl Follower {
    pub(crate) fn new(observer: WorkObserver) -> Self {
        Self {
            observer,
            queue_pairs: HashMap::new(),
            expected: HashMap::new(),
        }
    }

    /// Returns whether the observer is told of data.
    pub(super) fn is_of_data(&self) -> bool {
        self.observer.is_of_data
    }

    /// Tells that the device reads the data of a send.
    pub(super) fn reads(&mut self, qpn: u32, number: u32) {
        if self.observer.is_of_data && !self.is_left(qpn) {
            self.observer.tell(&WorkEvent::Reading { qpn, number });
        }
    }

    /// Changes the number of completions that are expected.
    pub(super) fn expect(&mut self, cqn: u32, change: i32) {
        let expected = self.expected.entry(cqn).or_default();
        *expected = expected.saturating_add_signed(change);
        if *expected == 0 {
            self.expected.remove(&cqn);
        }
    }

    pub(super) fn is_left(&self, qpn: u32) -> bool {
        self.queue_pairs.get(&qpn).is_some_and(|it| it.is_left)
    }

    /// Tells of a work request. Returns whether the queue pair is followed further.
    pub(super) fn post(&mut self, posted: Posted) -> bool {
        let qpn = posted.work.qpn;
        if self.observer.tell(&WorkEvent::Posted(posted)) {
            return true;
        }
        self.forget(qpn);
        let left = Followed {
            is_left: true,
            ..Followed::default()
        };
        self.queue_pairs.insert(qpn, left);
        false
    }

    /// Forgets the work requests of a queue pair. Returns whether there was one.
    fn forget(&mut self, qpn: u32) -> bool {
        let Some(followed) = self.queue_pairs.remove(&qpn) else {
            return false;
        };
        for queue in [followed.sends, followed.receives] {
            self.expect(queue.cqn, -(queue.expected as i32));
        }
        true
    }

    /// Handles a queue pair that is reset or destroyed.
    pub(crate) fn empty(&mut self, qpn: u32) {
        if self.forget(qpn) {
            self.observer.tell(&WorkEvent::Emptied { qpn });
        }
    }

    /// Notes that a work request has ended.
    pub(super) fn end(&mut self, ended: Ended, was_expected: bool) {
        if let Some(followed) = self.queue_pairs.get_mut(&ended.qpn) {
            if followed.is_left {
                return;
            }
            let queue = match ended.is_send {
                true => &mut followed.sends,
                false => &mut followed.receives,
            };
            if was_expected && queue.expected != 0 {
                queue.expected -= 1;
                let cqn = queue.cqn;
                self.expect(cqn, -1);
            }
        }
        self.observer.tell(&WorkEvent::Ended(ended));
    }
}
