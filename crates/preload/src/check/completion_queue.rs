//! Completion queues: how many completions they may get before the program polls.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::memory;
use super::notification::Notification;
use crate::explain::{Finding, Origin, lock};
use crate::hooks;
use crate::promises::InUse;

/// A completion queue of the program.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) created: Origin,
    /// Its number in the device.
    pub(crate) number: u32,
    /// In libibverbs the address of the `ibv_cq`.
    user_handle: u64,
    is_destroyed: AtomicBool,
    pub(crate) notification: Notification,
    /// The program has promised to use it by one thread at a time.
    is_promised: AtomicBool,
    pub(crate) in_use: InUse,
    ignores_overrun: bool,
    /// Work requests that will have a completion, which was not polled.
    outstanding: AtomicU32,
    /// Sends that will have a completion only if they fail or are flushed.
    unsignaled: AtomicU32,
    /// Receives of shared receive queues that have got no data, and complete into this queue only.
    waiting: AtomicU32,
    /// A completion was polled in a way that is seen.
    is_polled: AtomicBool,
    /// An error that is reported when the first completion is polled: until then the program
    /// may read the queue's memory itself.
    pending: Mutex<Option<Finding>>,
    /// The thread between `ibv_start_poll` and `ibv_end_poll`; 0 if none.
    reader: AtomicI32,
}

impl CompletionQueue {
    /// Creates one with a number in the device and a user handle.
    pub(crate) fn new(
        created: Origin,
        (number, user_handle): (u32, u64),
        ignores_overrun: bool,
    ) -> Self {
        Self {
            created,
            number,
            user_handle,
            is_destroyed: AtomicBool::new(false),
            notification: Notification::default(),
            is_promised: AtomicBool::new(false),
            in_use: InUse::default(),
            ignores_overrun,
            outstanding: AtomicU32::new(0),
            unsignaled: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            is_polled: AtomicBool::new(false),
            pending: Mutex::new(None),
            reader: AtomicI32::new(0),
        }
    }

    /// Notes a promise of the program to use it by one thread at a time.
    pub(crate) fn promise(&self) {
        self.is_promised.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_promised(&self) -> bool {
        self.is_promised.load(Ordering::Relaxed)
    }

    /// Notes that a thread has begun to read completions, and has the queue's lock if there is
    /// one. Returns the thread that has not ended to do so.
    pub(crate) fn begin_reading(&self, thread: i32) -> Option<i32> {
        let other = self.reader.swap(thread, Ordering::SeqCst);
        (other != 0 && other != thread).then_some(other)
    }

    /// Notes that a thread is about to give the lock up.
    pub(crate) fn end_reading(&self) {
        self.reader.store(0, Ordering::SeqCst);
    }

    /// Handles that it is destroyed. Its memory still exists.
    pub(crate) fn destroyed(&self) {
        self.is_destroyed.store(true, Ordering::SeqCst);
    }

    /// Returns the number of its entries, as libibverbs has it; `None` if it was destroyed.
    pub(super) fn entries(&self) -> Option<u32> {
        let address = self.user_handle.checked_add(hooks::ENTRIES as u64)?;
        let mut bytes = [MaybeUninit::uninit(); size_of::<u32>()];
        let entries = memory::read(address, &mut bytes)?;
        let entries = u32::from_ne_bytes(entries.try_into().ok()?);
        // Memory that was freed before the read may have another owner's data.
        let is_destroyed = self.is_destroyed.load(Ordering::SeqCst);
        (!is_destroyed && entries != 0).then_some(entries)
    }

    /// As [`Self::excess`], with all receives of shared receive queues that complete into it only.
    pub(super) fn excess_with_waiting(&self, entries: u32) -> Option<u32> {
        let waiting = self.waiting.load(Ordering::Relaxed);
        let all = (self.outstanding.load(Ordering::Relaxed)).saturating_add(waiting);
        (waiting != 0 && all > entries && !self.ignores_overrun).then_some(all)
    }

    /// Keeps a finding until a completion is polled.
    pub(super) fn report_at_poll(&self, finding: Finding) {
        lock(&self.pending).get_or_insert(finding);
    }

    /// Notes that a completion was polled in a way that is seen.
    pub(super) fn note_polled(&self) {
        self.is_polled.store(true, Ordering::Relaxed);
    }

    /// A completion was polled in a way that is seen.
    pub(super) fn is_polled(&self) -> bool {
        self.is_polled.load(Ordering::Relaxed)
    }

    /// Returns how many work requests it may get completions of, if these are more than its
    /// entries.
    pub(super) fn excess(&self, entries: u32) -> Option<u32> {
        let outstanding = self.outstanding.load(Ordering::Relaxed);
        (outstanding > entries && !self.ignores_overrun).then_some(outstanding)
    }

    /// Returns how many completions it gets, more than its entries, if all that is posted fails or
    /// is flushed: that is the work of several queues, of which one has `own`.
    pub(super) fn excess_of_failures(&self, entries: u32, own: usize) -> Option<u32> {
        let unsignaled = self.unsignaled.load(Ordering::Relaxed);
        let all = (self.outstanding.load(Ordering::Relaxed)).saturating_add(unsignaled);
        let is_shared = own < all as usize;
        (is_shared && all > entries && !self.ignores_overrun).then_some(all)
    }

    /// Returns the finding if it can be reported, and keeps it otherwise.
    pub(super) fn report_when_polled(&self, finding: Finding) -> Option<Finding> {
        if self.is_polled() {
            return Some(finding);
        }
        self.report_at_poll(finding);
        None
    }
}

/// The entry of a work request in its completion queue, until the completion is polled or will
/// not come.
#[derive(Debug)]
pub(crate) struct Entry(Arc<CompletionQueue>);

impl Entry {
    pub(crate) fn new(queue: &Arc<CompletionQueue>) -> Self {
        queue.outstanding.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(queue))
    }

    /// Frees it, since its completion was polled. Returns an error that is due.
    pub(super) fn polled(self) -> Option<Finding> {
        self.0.note_polled();
        lock(&self.0.pending).take()
    }
}

/// Receives of a shared receive queue that have got no data. All complete into one completion
/// queue.
#[derive(Debug)]
pub(super) struct Waiting {
    queue: Arc<CompletionQueue>,
    count: u32,
}

impl Waiting {
    pub(super) fn new(queue: &Arc<CompletionQueue>) -> Self {
        Self {
            queue: Arc::clone(queue),
            count: 0,
        }
    }

    pub(super) fn queue(&self) -> &Arc<CompletionQueue> {
        &self.queue
    }

    pub(super) fn set(&mut self, count: u32) {
        let waiting = &self.queue.waiting;
        match count.checked_sub(self.count) {
            Some(more) => _ = waiting.fetch_add(more, Ordering::Relaxed),
            None => _ = waiting.fetch_sub(self.count - count, Ordering::Relaxed),
        }
        self.count = count;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// A send that has an entry in its completion queue only if it fails or is flushed.
#[derive(Debug)]
pub(crate) struct Unsignaled(Arc<CompletionQueue>);

impl Unsignaled {
    pub(crate) fn new(queue: &Arc<CompletionQueue>) -> Self {
        queue.unsignaled.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(queue))
    }
}

impl Drop for Unsignaled {
    fn drop(&mut self) {
        self.0.unsignaled.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.outstanding.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_reads_at_a_time() {
        let queue = CompletionQueue::new(Origin::here(), (1, 0), false);
        assert_eq!(queue.begin_reading(1), None);
        assert_eq!(queue.begin_reading(1), None);
        assert_eq!(queue.begin_reading(2), Some(1));
        queue.end_reading();
        assert_eq!(queue.begin_reading(1), None);
    }

    #[test]
    fn entries_are_free_when_their_completions_are_polled() {
        let queue = Arc::new(CompletionQueue::new(Origin::here(), (1, 0), false));
        let first = Entry::new(&queue);
        let _second = Entry::new(&queue);
        assert_eq!((queue.excess(1), queue.excess(2)), (Some(2), None));
        assert!(first.polled().is_none());
        assert_eq!(queue.excess(1), None);
        let unsignaled = Unsignaled::new(&queue);
        assert_eq!(queue.excess_of_failures(1, 1), Some(2));
        assert_eq!(queue.excess_of_failures(1, 2), None, "of one queue");
        assert_eq!(queue.excess_of_failures(2, 1), None);
        drop(unsignaled);
        assert_eq!(queue.excess_of_failures(0, 0), Some(1));
        let mut waiting = Waiting::new(&queue);
        waiting.set(3);
        assert_eq!(queue.excess_with_waiting(3), Some(4));
        assert_eq!(
            (queue.excess(0), queue.excess_with_waiting(4)),
            (Some(1), None)
        );
        waiting.set(1);
        assert_eq!(queue.excess_with_waiting(1), Some(2));
        drop(waiting);
        assert_eq!(queue.excess_with_waiting(0), None);
        let queue = Arc::new(CompletionQueue::new(Origin::here(), (1, 0), true));
        let _entry = Entry::new(&queue);
        assert_eq!(queue.excess(0), None);
        let _unsignaled = Unsignaled::new(&queue);
        assert_eq!(queue.excess_of_failures(0, 0), None);
    }
}
