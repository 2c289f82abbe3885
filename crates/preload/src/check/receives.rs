//! The receives of a queue pair whose completions the program has not polled.

use std::collections::VecDeque;
use std::sync::Arc;

use super::completion_queue::{CompletionQueue, Entry};
use super::receiving::{self, Overwritten};
use super::sends::Sge;
use crate::explain::{Objects, Origin};

/// A receive whose completion was not polled.
#[derive(Debug)]
pub(crate) struct Received {
    pub(super) wr_id: u64,
    pub(super) origin: Origin,
    elements: Vec<Sge>,
    /// In the completion queue.
    pub(super) entry: Option<Entry>,
}

/// A receive whose completion is polled.
#[derive(Debug)]
pub(super) struct Completed {
    pub(super) received: Received,
    /// Its bytes that a later message has changed, and where the receive of that was posted.
    pub(super) overwritten: Option<(Overwritten, Origin)>,
}

impl Received {
    pub(crate) fn new(wr_id: u64, elements: Vec<Sge>, origin: Origin) -> Self {
        Self {
            wr_id,
            origin,
            elements,
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
    /// Device and number of a reliable queue pair, whose messages are followed until RESET.
    queue_pair: Option<(usize, u32)>,
    /// They are not followed.
    ignores_messages: bool,
}

impl ReceiveQueue {
    /// Creates that of a queue pair. Messages are followed if it is a reliable one, given by
    /// device and number.
    pub(crate) fn new(entries: u32, queue_pair: Option<(usize, u32)>) -> Self {
        Self {
            capacity: entries as usize,
            queue_pair,
            ..Self::default()
        }
    }

    pub(crate) fn reset(&mut self) {
        self.receives.clear();
        self.is_lost = false;
        self.ignore_messages();
        self.ignores_messages = false;
    }

    /// Stops until RESET.
    pub(crate) fn lose(&mut self) {
        self.receives.clear();
        self.is_lost = true;
        self.ignore_messages();
    }

    /// Ignores messages until RESET.
    pub(super) fn ignore_messages(&mut self) {
        self.ignores_messages = true;
        if let Some((_, qpn)) = self.queue_pair {
            receiving::forget(qpn);
        }
    }

    /// Returns the queue pair whose messages are followed.
    fn followed(&self) -> Option<(usize, u32)> {
        self.queue_pair.filter(|_| !self.ignores_messages)
    }

    /// Adds a receive. Returns false if receives are not followed, or if there are more than the
    /// queue has room for.
    #[must_use]
    pub(super) fn push(
        &mut self,
        mut received: Received,
        queue: Option<&Arc<CompletionQueue>>,
        objects: &Objects,
    ) -> bool {
        if self.is_lost || self.receives.len() == self.capacity {
            self.lose();
            return false;
        }
        if let Some((device, number)) = self.followed() {
            let elements = std::mem::take(&mut received.elements);
            let buffers = elements.iter().filter_map(|element| {
                let start = objects.program_address(device, element)?;
                Some(start..start.checked_add(element.length.into())?)
            });
            receiving::push((device, number), buffers.collect());
        }
        received.entry = queue.map(Entry::new);
        self.receives.push_back(received);
        true
    }

    /// Takes the last receives back, which were refused.
    pub(crate) fn take_back(&mut self, count: usize) {
        let kept = self.receives.len().saturating_sub(count);
        self.receives.truncate(kept);
        if let Some((_, qpn)) = self.followed() {
            receiving::take_back(qpn, count);
        }
    }

    /// Removes the oldest receive, which has completed, if it is this one.
    pub(super) fn complete(&mut self, wr_id: u64) -> Option<Completed> {
        let oldest = self.receives.pop_front()?;
        if oldest.wr_id != wr_id {
            self.lose();
            return None;
        }
        let overwritten = self.followed().and_then(|(_, qpn)| receiving::pop(qpn));
        let overwritten = overwritten.and_then(|it| {
            let later = self.receives.get(it.by.checked_sub(1)?)?.origin.clone();
            Some((it, later))
        });
        Some(Completed {
            received: oldest,
            overwritten,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_complete_in_order() {
        let (mut queue, objects) = (ReceiveQueue::new(3, None), Objects::default());
        let received = |wr_id| Received::new(wr_id, Vec::new(), Origin::here());
        assert!((1..=3).all(|wr_id| queue.push(received(wr_id), None, &objects)));
        queue.take_back(1);
        let completed = queue.complete(1).map(|it| it.received.wr_id);
        assert_eq!(completed, Some(1));
        assert!(queue.complete(3).is_none());
        // Another one has completed: nothing is known.
        assert!(!queue.push(received(4), None, &objects));
        queue.reset();
        assert!((1..=3).all(|wr_id| queue.push(received(wr_id), None, &objects)));
        assert!(!queue.push(received(4), None, &objects));
    }
}
