//! The receives of a queue pair whose completions the program has not polled.

use std::collections::VecDeque;
use std::sync::Arc;

use super::completion_queue::{CompletionQueue, Entry};
use crate::explain::Origin;

/// A receive whose completion was not polled.
#[derive(Debug)]
pub(crate) struct Received {
    wr_id: u64,
    pub(super) origin: Origin,
    /// In the completion queue.
    pub(super) entry: Option<Entry>,
}

impl Received {
    pub(crate) fn new(wr_id: u64, origin: Origin) -> Self {
        Self {
            wr_id,
            origin,
            entry: None,
        }
    }
}

/// The receives of a queue pair that has its own queue of them, in their order.
#[derive(Debug, Default)]
pub(crate) struct ReceiveQueue {
    receives: VecDeque<Received>,
    /// Maximum number.
    capacity: usize,
    /// As that of sends.
    is_lost: bool,
}

impl ReceiveQueue {
    pub(crate) fn new(entries: u32) -> Self {
        Self {
            capacity: entries as usize,
            ..Self::default()
        }
    }

    pub(crate) fn reset(&mut self) {
        self.receives.clear();
        self.is_lost = false;
    }

    /// Stops until RESET.
    pub(super) fn lose(&mut self) {
        self.receives.clear();
        self.is_lost = true;
    }

    /// Adds a receive. Returns false if receives are not followed, or if there are more than the
    /// queue has room for.
    #[must_use]
    pub(super) fn push(
        &mut self,
        mut received: Received,
        queue: Option<&Arc<CompletionQueue>>,
    ) -> bool {
        if self.is_lost || self.receives.len() == self.capacity {
            self.lose();
            return false;
        }
        received.entry = queue.map(Entry::new);
        self.receives.push_back(received);
        true
    }

    /// Takes the last receives back, which were refused.
    pub(crate) fn take_back(&mut self, count: usize) {
        let kept = self.receives.len().saturating_sub(count);
        self.receives.truncate(kept);
    }

    /// Removes the oldest receive, which has completed, if it is this one.
    pub(super) fn complete(&mut self, wr_id: u64) -> Option<Received> {
        let oldest = self.receives.pop_front()?;
        if oldest.wr_id != wr_id {
            self.lose();
            return None;
        }
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_complete_in_order() {
        let mut queue = ReceiveQueue::new(3);
        let received = |wr_id| Received::new(wr_id, Origin::here());
        assert!((1..=3).all(|wr_id| queue.push(received(wr_id), None)));
        queue.take_back(1);
        assert_eq!(queue.complete(1).map(|it| it.wr_id), Some(1));
        assert!(queue.complete(3).is_none());
        // Another one has completed: nothing is known.
        assert!(!queue.push(received(4), None));
        queue.reset();
        assert!((1..=3).all(|wr_id| queue.push(received(wr_id), None)));
        assert!(!queue.push(received(4), None));
    }
}
