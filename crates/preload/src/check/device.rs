//! Work requests that no hook sees, as the device sees them: of programs that write to the queues
//! themselves, as those of the Rust crate do, UCX's accelerated transports and mlx5dv.
//!
//! The device sees a work request when its doorbell rings, later than the program posts it, and
//! completions that were read as soon as the program says so in the queue's doorbell record. So
//! less may be seen to be in flight at a time than there was, never more.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use embedded::roce::transport::{Operation, Service, Status};
use embedded::softhca::work::{Ended, Posted, WorkEvent};

use super::content::Content;
use super::remote::{Name, Place, Remote, Request};
use super::sends::Sge;
use super::watched::{self, Use, Watched};
use super::{Checker, Rule, unordered_accesses, writes};
use crate::explain::{Explainer, Finding, QueuePair, lock};

/// RDMA writes that have not ended, by device and queue pair, in their order.
#[derive(Debug, Default)]
pub(super) struct SeenWrites(HashMap<(usize, u32), VecDeque<Write>>);

/// An RDMA write that has not ended.
#[derive(Debug)]
struct Write {
    number: u32,
    remote: Remote,
    /// Its buffers.
    _watched: Vec<Watched>,
}

/// Returns whether work requests of a queue pair pass by hooks.
fn is_hooked(queue_pair: &QueuePair) -> bool {
    lock(&queue_pair.sends).total + lock(&queue_pair.receives).total != 0
}

impl Checker {
    /// Handles what a device tells of a work request. Returns whether those of the queue pair are
    /// of interest, if it was posted.
    pub(crate) fn seen_by_device(
        &self,
        explainer: &Explainer,
        device: usize,
        event: &WorkEvent,
    ) -> bool {
        match event {
            WorkEvent::Posted(posted) => return self.posting_seen(explainer, device, posted),
            WorkEvent::Ended(ended) if ended.is_send => self.send_ended(explainer, device, ended),
            WorkEvent::Emptied { qpn } => {
                lock(&self.seen_writes).0.remove(&(device, *qpn));
            }
            _ => {}
        }
        true
    }

    fn posting_seen(&self, explainer: &Explainer, device: usize, posted: &Posted) -> bool {
        let number = posted.work.qpn;
        let queue_pair = explainer.objects.queue_pair(device, number);
        if queue_pair.as_deref().is_some_and(is_hooked) {
            return false;
        }
        let write = queue_pair
            .as_ref()
            .and_then(|it| write(explainer, device, posted, it));
        if let Some(finding) = too_small(explainer, device, posted, queue_pair) {
            explainer.report_error(finding);
        }
        if let Some(write) = write {
            let SeenWrites(queues) = &mut *lock(&self.seen_writes);
            queues.entry((device, number)).or_default().push_back(write);
        }
        true
    }

    fn send_ended(&self, explainer: &Explainer, device: usize, ended: &Ended) {
        let (number, Some(last)) = (ended.qpn, ended.number) else {
            return;
        };
        let write = {
            let SeenWrites(queues) = &mut *lock(&self.seen_writes);
            let mut writes = queues.get_mut(&(device, number));
            let is_oldest = (writes.as_ref().and_then(|it| it.front()))
                .is_some_and(|write| write.number == last);
            (writes.as_mut().filter(|_| is_oldest)).and_then(|it| it.pop_front())
        };
        let queue_pair = explainer.objects.queue_pair(device, number);
        let Some((write, queue_pair)) = write.zip(queue_pair) else {
            return;
        };
        if ended.status != Status::Success {
            return;
        }
        for unordered in write.remote.succeeded() {
            let finding = unordered_accesses(device, number, &queue_pair, unordered);
            explainer.report_error(finding);
        }
    }
}

/// Follows a work request, if it is an RDMA write from known memory over a connection. Reads are
/// not followed: threads may read what others change, and it is not known which one has posted.
fn write(
    explainer: &Explainer,
    device: usize,
    posted: &Posted,
    queue_pair: &QueuePair,
) -> Option<Write> {
    let work = &posted.work;
    let is_write = matches!(work.operation, Some(Operation::Write | Operation::WriteImm));
    let is_connected = matches!(work.service, Service::Rc | Service::Uc);
    let is_whole = !posted.is_inline && work.buffers().len() == work.buffer_count;
    let (start, key) = work.remote?;
    let number = work.number?;
    if !(is_write && is_connected && is_whole) {
        return None;
    }
    let at = watched::now();
    let mut all = Vec::new();
    for buffer in work.buffers().iter().filter(|it| it.length != 0) {
        let element = Sge {
            address: buffer.va,
            length: buffer.length,
            lkey: buffer.key,
        };
        let address = explainer.objects.program_address(device, &element)?;
        let length = buffer.length as usize;
        let watched = Watched::new((work.qpn, at), Use::Gather, address, length);
        // Another device may be writing to it.
        if writes::under_way(address..address.saturating_add(length as u64)).is_some() {
            return None;
        }
        watched.set_content(Content::of(address, length)?);
        all.push(watched);
    }
    if all.is_empty() {
        return None;
    }
    let request = Request {
        queue_pair: (device, work.qpn),
        name: Name::Seen(number),
        usage: Use::Gather,
        origin: queue_pair.created.clone(),
    };
    let peer = *lock(&queue_pair.peer);
    let buffers = all.iter().map(Watched::local).collect();
    Some(Write {
        number,
        remote: Remote::new(Place { peer, key }, start, request, buffers),
        _watched: all,
    })
}

/// Returns the error of work requests of which too many can complete before the next poll.
fn too_small(
    explainer: &Explainer,
    device: usize,
    posted: &Posted,
    queue_pair: Option<Arc<QueuePair>>,
) -> Option<Finding> {
    let load = posted.queue;
    if !load.is_excessive() {
        return None;
    }
    let number = posted.work.qpn;
    let created = explainer
        .objects
        .created_as(device, "completion queue", load.cqn);
    Some(Finding {
        rule: Rule::CompletionQueueTooSmall,
        device,
        queue_pair: queue_pair.map(|it| (number, it)),
        message: format!("queue pair {number:#x}: its {load}"),
        origins: Vec::from_iter(created.map(|it| ("completion queue: created", it))),
    })
}
