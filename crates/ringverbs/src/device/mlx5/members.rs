//! QPs and arming of a completion queue.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::mlx5::{Arming, QpQueues, Role};
use ring::Epoch;

/// The arming state of completion queues, by the queue's identifier; it is updated when an
/// event was read.
#[derive(Debug, Default)]
pub(crate) struct Armings(Mutex<HashMap<u64, Arc<Arming>>>);

impl Armings {
    pub fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Arming>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes of the QPs that complete to a completion queue, until its owner applies them.
#[derive(Debug, Default)]
pub(crate) struct Members {
    pending: Mutex<Changes>,
    /// Count of the changes; advanced after each change.
    changes: Epoch,
}

#[derive(Debug, Default)]
pub(super) struct Changes {
    pub created_qps: Vec<(Arc<QpQueues>, Role)>,
    pub destroyed_qps: Vec<Arc<QpQueues>>,
}

impl Members {
    pub(super) fn lock(&self) -> MutexGuard<'_, Changes> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn changes(&self) -> u32 {
        self.changes.now()
    }

    /// Called when a QP was created, before anything is posted.
    fn created(&self, qp_queues: &Arc<QpQueues>, role: Role) {
        self.lock().created_qps.push((Arc::clone(qp_queues), role));
        self.changes.advance();
    }

    /// Called when a QP was destroyed; the device writes no more CQEs of the QP.
    fn destroyed(&self, qp_queues: &Arc<QpQueues>) {
        self.lock().destroyed_qps.push(Arc::clone(qp_queues));
        self.changes.advance();
    }
}

/// The membership of a QP in its completion queues.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Of each completion queue once.
    members: Vec<Arc<Members>>,
    qp_queues: Arc<QpQueues>,
    ended: AtomicBool,
}

impl Membership {
    /// Creates the membership of a new QP.
    pub fn new(members: Vec<(Arc<Members>, Role)>, qp_queues: Arc<QpQueues>) -> Self {
        for (cq_members, role) in &members {
            cq_members.created(&qp_queues, *role);
        }
        Self {
            members: members.into_iter().map(|(members, _)| members).collect(),
            qp_queues,
            ended: AtomicBool::new(false),
        }
    }

    /// Called when the QP was destroyed.
    pub fn end(&self) {
        // Relaxed: the callers are ordered by the destruction of the QP.
        if !self.ended.swap(true, Ordering::Relaxed) {
            for members in &self.members {
                members.destroyed(&self.qp_queues);
            }
        }
    }

    /// Called when the QP is leaked; the device may continue to use its queues.
    pub fn leak(&self) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            std::mem::forget(Arc::clone(&self.qp_queues));
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.end();
    }
}
