//! Work requests that no hook sees, as the device sees them: of programs that write to the queues
//! themselves, as those of the Rust crate do, UCX's accelerated transports and mlx5dv.
//!
//! The device sees a work request when its doorbell rings, later than the program posts it, and
//! completions that were read as soon as the program says so in the queue's doorbell record. So
//! less may be seen to be in flight at a time than there was, never more.

use std::sync::Arc;

use embedded::softhca::work::{CompletionLoad, Posted, WorkEvent};

use super::{Checker, Rule};
use crate::explain::{Explainer, Finding, QueuePair, lock};

/// Returns whether work requests of a queue pair pass by hooks.
fn is_hooked(queue_pair: &QueuePair) -> bool {
    lock(&queue_pair.sends).total + lock(&queue_pair.receives).total != 0
}

impl Checker {
    /// Handles what a device tells of a work request.
    pub(crate) fn seen_by_device(&self, explainer: &Explainer, device: usize, event: &WorkEvent) {
        if let WorkEvent::Posted(posted) = event {
            let queue_pair = explainer.objects.queue_pair(device, posted.work.qpn);
            if !queue_pair.as_deref().is_some_and(is_hooked) {
                if let Some(finding) = too_small(explainer, device, posted, queue_pair) {
                    explainer.report_error(finding);
                }
            }
        }
    }
}

/// Returns the error of work requests of which too many can complete before the next poll.
fn too_small(
    explainer: &Explainer,
    device: usize,
    posted: &Posted,
    queue_pair: Option<Arc<QueuePair>>,
) -> Option<Finding> {
    let CompletionLoad {
        cqn,
        entries,
        outstanding,
        ignores_overrun,
    } = posted.queue;
    if outstanding <= entries || ignores_overrun {
        return None;
    }
    let number = posted.work.qpn;
    let created = explainer
        .objects
        .created_as(device, "completion queue", cqn);
    Some(Finding {
        rule: Rule::CompletionQueueTooSmall,
        device,
        queue_pair: queue_pair.map(|it| (number, it)),
        message: format!(
            "queue pair {number:#x}: its completion queue {cqn:#x} has {entries} entries in the \
             device, and {outstanding} completions are unread or will come of work requests that \
             are posted"
        ),
        origins: Vec::from_iter(created.map(|it| ("completion queue: created", it))),
    })
}
