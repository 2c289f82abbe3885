//! The receives of a queue pair whose completions the program has not polled.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::completion_queue::{CompletionQueue, Entry};
use super::guard::Guard;
use super::receiving;
use super::sends::Sge;
use super::shared;
use crate::explain::{Objects, Origin};

/// A receive whose completion was not polled.
#[derive(Debug)]
pub(crate) struct Received {
    pub(super) wr_id: u64,
    pub(super) origin: Origin,
    elements: Vec<Sge>,
    /// Addresses of its buffers in known regions, and the keys of those.
    pub(super) buffers: Vec<(Range<u64>, u32)>,
    /// Those of its buffers that are guarded against reads.
    guards: Vec<Guard>,
    /// In the completion queue.
    pub(super) entry: Option<Entry>,
}

/// A receive whose completion is polled.
#[derive(Debug)]
pub(super) struct Completed {
    pub(super) received: Received,
    /// It is known to have got any bytes.
    pub(super) is_filled: bool,
    /// The first of its bytes that a later message has changed, and where the receive of that was
    /// posted.
    pub(super) overwritten: Option<(u64, Origin)>,
    /// Where the program has freed a buffer before it has got any bytes.
    pub(super) freed: Option<Origin>,
}

impl Received {
    pub(crate) fn new(wr_id: u64, elements: Vec<Sge>, origin: Origin) -> Self {
        Self {
            wr_id,
            origin,
            elements,
            buffers: Vec::new(),
            guards: Vec::new(),
            entry: None,
        }
    }

    /// Guards its buffers against reads, until it has completed.
    pub(super) fn guard(&mut self, device: usize, objects: &Objects) {
        let guards = self.elements.iter().filter_map(|element| {
            let start = objects.program_address(device, element)?;
            let start = usize::try_from(start).ok()?;
            let end = start.checked_add(element.length as usize)?;
            let region = objects.mapped_memory(device, element.lkey)?;
            Guard::arm_against_reads(&(start..end), &region)
        });
        self.guards = guards.collect();
    }

    /// Returns who has read it too early.
    pub(super) fn reader(&self) -> Option<Origin> {
        self.guards.iter().find_map(Guard::accessor)
    }

    /// Ends that its buffers are guarded.
    pub(super) fn unguard(&mut self) {
        self.guards.clear();
    }

    /// Looks for its buffers, and returns their addresses.
    pub(super) fn locate(&mut self, device: usize, objects: &Objects) -> Vec<Range<u64>> {
        let buffers = self.elements.iter().filter_map(|element| {
            let start = objects.program_address(device, element)?;
            let end = start.checked_add(element.length.into())?;
            Some((start..end, element.lkey))
        });
        self.buffers = buffers.collect();
        self.buffers
            .iter()
            .map(|(range, _)| range.clone())
            .collect()
    }

    /// Returns the address in its first element.
    pub(super) fn first_address(&self) -> Option<u64> {
        self.elements.first().map(|element| element.address)
    }
}

/// The receives of a queue pair, in their order; of one with a shared receive queue they are in
/// [`shared`].
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
    /// Device and handle of its shared receive queue, and the completion queue of what it gets.
    shared: Option<shared::Key>,
    completions: Option<Arc<CompletionQueue>>,
}

impl ReceiveQueue {
    /// Creates that of a queue pair, given by device and number, with the handle of its shared
    /// receive queue and the completion queue of receives of that. Messages are followed if it is a reliable one.
    pub(crate) fn new(
        entries: u32,
        (device, number): (usize, u32),
        shared: Option<(u32, Option<Arc<CompletionQueue>>)>,
        is_reliable: bool,
    ) -> Self {
        let (shared, completions) = shared.unzip();
        let queue = Self {
            capacity: entries as usize,
            queue_pair: is_reliable.then_some((device, number)),
            shared: shared.map(|handle| (device, handle)),
            completions: completions.flatten(),
            ..Self::default()
        };
        if let Some(shared) = queue.shared {
            shared::used(shared, queue.completions.as_ref());
            match is_reliable {
                true => shared::attach(number, shared, queue.completions.clone()),
                false => shared::ignore(shared),
            }
        }
        queue
    }

    pub(crate) fn reset(&mut self) {
        self.receives.clear();
        self.is_lost = false;
        self.ignore_messages();
        self.ignores_messages = false;
        if let Some(((_, qpn), shared)) = self.queue_pair.zip(self.shared) {
            shared::attach(qpn, shared, self.completions.clone());
        }
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
        if let Some(shared) = self.shared {
            shared::uncount(shared);
        }
        if let Some((_, qpn)) = self.queue_pair {
            match self.shared {
                Some(shared) => shared::detach(qpn, shared),
                None => receiving::forget(qpn),
            }
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
            receiving::push((device, number), received.locate(device, objects));
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
        if let Some(shared) = self.shared {
            let qpn = self.queue_pair.map(|(_, qpn)| qpn);
            return shared::complete(shared, qpn, wr_id);
        }
        let oldest = self.receives.pop_front()?;
        if oldest.wr_id != wr_id {
            self.lose();
            return None;
        }
        let found = self.followed().and_then(|(_, qpn)| receiving::pop(qpn));
        let overwritten = found.as_ref().and_then(|it| it.changed()).and_then(|it| {
            let later = self.receives.get(it.by.checked_sub(1)?)?.origin.clone();
            Some((it.address, later))
        });
        Some(Completed {
            received: oldest,
            is_filled: found.as_ref().is_some_and(|it| it.is_filled()),
            overwritten,
            freed: found.and_then(|it| it.freed().cloned()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_complete_in_order() {
        let (mut queue, objects) = (
            ReceiveQueue::new(3, (0, 1), None, false),
            Objects::default(),
        );
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
