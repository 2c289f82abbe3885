//! QPs of a completion queue, and who arms it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::mlx5::{Arming, Role, Work};
use ring::Epoch;

/// The armings of completion queues, by the queue's identifier: the device is
/// told of each event that was read.
#[derive(Debug, Default)]
pub(crate) struct Armings(Mutex<HashMap<u64, Arc<Arming>>>);

impl Armings {
    pub fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Arming>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes of the QPs that complete to a completion queue, which its owner has
/// not applied yet.
#[derive(Debug, Default)]
pub(crate) struct Members {
    pending: Mutex<Changes>,
    /// Counts the changes; advanced after each.
    changes: Epoch,
}

#[derive(Debug, Default)]
pub(super) struct Changes {
    pub arrived: Vec<(Arc<Work>, Role)>,
    pub destroyed: Vec<Arc<Work>>,
}

impl Members {
    pub(super) fn lock(&self) -> MutexGuard<'_, Changes> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn changes(&self) -> u32 {
        self.changes.now()
    }

    /// Called when a QP was created and has nothing posted.
    fn arrive(&self, work: &Arc<Work>, role: Role) {
        self.lock().arrived.push((Arc::clone(work), role));
        self.changes.advance();
    }

    /// Called when a QP was destroyed: the device writes no more CQEs of it.
    fn destroyed(&self, work: &Arc<Work>) {
        self.lock().destroyed.push(Arc::clone(work));
        self.changes.advance();
    }
}

/// The membership of a QP in its completion queues.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Each once.
    queues: Vec<Arc<Members>>,
    work: Arc<Work>,
    ended: AtomicBool,
}

impl Membership {
    /// Of a QP that was created just now.
    pub fn new(queues: Vec<(Arc<Members>, Role)>, work: Arc<Work>) -> Self {
        for (queue, role) in &queues {
            queue.arrive(&work, *role);
        }
        Self {
            queues: queues.into_iter().map(|(queue, _)| queue).collect(),
            work,
            ended: AtomicBool::new(false),
        }
    }

    /// Called when the QP was destroyed.
    pub fn end(&self) {
        // Relaxed: callers that destroy it are ordered.
        if !self.ended.swap(true, Ordering::Relaxed) {
            for queue in &self.queues {
                queue.destroyed(&self.work);
            }
        }
    }

    /// Called when the QP is leaked: the device may go on using its queues.
    pub fn leak(&self) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            std::mem::forget(Arc::clone(&self.work));
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.end();
    }
}
