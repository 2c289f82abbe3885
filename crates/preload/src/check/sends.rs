//! The sends of a queue pair whose completions the program has not polled.

use std::collections::VecDeque;
use std::sync::Arc;

use super::completion_queue::{CompletionQueue, Entry, Unsignaled};
use super::content::{Content, Fate};
use super::guard::Guard;
use super::remote::{Name, Place, Remote, Request, Unordered};
use super::watched::{self, Use, Watched};
use crate::explain::{Objects, Origin};

/// `IBV_SEND_SIGNALED` and `IBV_SEND_INLINE`.
const SIGNALED: u32 = 1 << 1;
const INLINE: u32 = 1 << 3;

/// A scatter/gather element.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Sge {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

const _: () = assert!(size_of::<Sge>() == 16);

/// A buffer in flight.
#[derive(Debug)]
pub(super) struct Buffer {
    /// Where it is in the program's memory.
    pub(super) address: u64,
    pub(super) length: usize,
    pub(super) lkey: u32,
    watched: Watched,
    guard: Option<Guard>,
}

/// A send whose completion was not polled.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(super) wr_id: u64,
    pub(super) origin: Origin,
    is_signaled: bool,
    /// When it was posted.
    pub(super) at: u64,
    pub(super) buffers: Vec<Buffer>,
    /// Elements of a builder, until the work request is posted.
    elements: Vec<Sge>,
    usage: Option<Use>,
    /// Address and key of the remote memory of an RDMA write or read.
    target: Option<(u64, u32)>,
    remote: Option<Remote>,
    /// In the completion queue, if it has a completion.
    pub(super) entry: Option<Entry>,
    /// Otherwise.
    unsignaled: Option<Unsignaled>,
}

/// Returns what the device does with the buffers of an `ibv_wr_opcode`.
fn usage(opcode: u32, flags: u32) -> Option<Use> {
    match opcode {
        0..=3 | 9 => (flags & INLINE == 0).then_some(Use::Gather),
        4..=6 => Some(Use::Answer),
        _ => None,
    }
}

impl Sent {
    /// A work request without buffers yet.
    pub(crate) fn new(wr_id: u64, (opcode, flags): (u32, u32), origin: Origin) -> Self {
        Self {
            wr_id,
            origin,
            is_signaled: flags & SIGNALED != 0,
            at: watched::now(),
            buffers: Vec::new(),
            elements: Vec::new(),
            usage: usage(opcode, flags),
            target: None,
            remote: None,
            entry: None,
            unsignaled: None,
        }
    }

    /// Sets the address and the key of remote memory.
    pub(crate) fn with_target(mut self, target: Option<(u64, u32)>) -> Self {
        self.target = target;
        self
    }

    /// Adds elements, which are read by [`Self::read`].
    pub(crate) fn add(&mut self, elements: impl IntoIterator<Item = Sge>) {
        if self.usage.is_some() {
            self.elements.extend(elements);
        }
    }

    /// Reads the buffers of the elements, as far as they are in known regions, of a work request
    /// to a peer at this GID or LID. Guards them if `guards`.
    pub(crate) fn read(
        &mut self,
        (device, qpn): (usize, u32),
        peer: [u8; 16],
        objects: &Objects,
        guards: bool,
    ) {
        let Some(usage) = self.usage else { return };
        let elements = std::mem::take(&mut self.elements);
        let count = elements.iter().filter(|it| it.length != 0).count();
        for element in elements {
            let Sge { lkey, length, .. } = element;
            let length = length as usize;
            let Some(address) = objects.program_address(device, &element) else {
                continue;
            };
            let memory = (guards)
                .then(|| objects.mapped_memory(device, lkey))
                .flatten();
            let guard = memory.and_then(|memory| {
                let start = usize::try_from(address).ok()?;
                Guard::arm(&(start..start.checked_add(length)?), &memory)
            });
            let watched = Watched::new((qpn, self.at), usage, address, length);
            watched.settle();
            let Some(content) = Content::of(address, length) else {
                continue;
            };
            watched.set_content(content);
            self.buffers.push(Buffer {
                address,
                length,
                lkey,
                watched,
                guard,
            });
        }
        let is_whole = count == self.buffers.len() && count != 0;
        if let Some((start, key)) = self.target.filter(|_| is_whole) {
            let request = Request {
                queue_pair: (device, qpn),
                name: Name::Posted(self.wr_id),
                usage,
                origin: self.origin.clone(),
            };
            let buffers = self.buffers.iter().map(|it| it.watched.local());
            let place = Place { peer, key };
            self.remote = Some(Remote::new(place, start, request, buffers.collect()));
        }
    }

    /// Handles its end, by success. Returns accesses to remote memory that were not ordered.
    pub(super) fn succeeded(&self) -> Vec<Unordered> {
        (self.remote.as_ref()).map_or_else(Vec::new, Remote::succeeded)
    }
}

/// An error in the use of a buffer, found when the send's completion is polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Its bytes have changed, from an offset on.
    Changed(usize),
    /// Its bytes had changed when the device read them or, for an answer, wrote them.
    ChangedBefore(Use, usize),
    /// The answer to a read or an atomic of another queue pair has changed them.
    Overlaps(u32),
    /// What this queue pair has received has changed them before the device has read them.
    Overtaken(u32),
    Unmapped,
}

impl Buffer {
    /// Returns who has written to it, if it is guarded.
    pub(super) fn writer(&self) -> Option<Origin> {
        self.guard.as_ref().and_then(Guard::accessor)
    }

    /// Returns what the device has found when it accessed it.
    pub(super) fn fault_before(&self) -> Option<Fault> {
        if let Some(qpn) = self.watched.overtaken_by() {
            return Some(Fault::Overtaken(qpn));
        }
        let usage = self.watched.usage();
        (self.watched.changed()).map(|offset| Fault::ChangedBefore(usage, offset))
    }

    /// Returns where the program has freed it.
    pub(super) fn freed(&self) -> Option<&Origin> {
        self.watched.freed()
    }

    /// Compares it with what was posted.
    pub(super) fn fault(&self) -> Option<Fault> {
        if self.watched.usage() == Use::Answer {
            return None;
        }
        let fate = self.watched.content()?.compare(self.address, self.length);
        match fate {
            // After the comparison: the device marks a buffer before it writes to it.
            Fate::Changed(_) if self.watched.is_written() => {
                self.watched.overlaps().map(Fault::Overlaps)
            }
            Fate::Changed(offset) => Some(Fault::Changed(offset)),
            Fate::Unreadable => Some(Fault::Unmapped),
            Fate::Same => None,
        }
    }
}

/// The sends of a queue pair that were not completed, in their order.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    sends: VecDeque<Sent>,
    /// Those since `ibv_wr_start`.
    building: Vec<Sent>,
    /// Maximum number.
    capacity: usize,
    signals_all: bool,
    /// Work requests were posted, or completions polled, in ways that are not seen, or one has
    /// failed: nothing is known until RESET.
    is_lost: bool,
}

impl SendQueue {
    pub(crate) fn new(entries: u32, signals_all: bool) -> Self {
        Self {
            capacity: entries as usize,
            signals_all,
            ..Self::default()
        }
    }

    pub(crate) fn reset(&mut self) {
        self.sends.clear();
        self.building.clear();
        self.is_lost = false;
    }

    /// Stops until RESET. Returns whether there was anything to follow.
    pub(super) fn lose(&mut self) -> bool {
        self.sends.clear();
        self.building.clear();
        !std::mem::replace(&mut self.is_lost, true)
    }

    /// Returns the number of sends.
    pub(super) fn len(&self) -> usize {
        self.sends.len()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Adds a send. Returns false if there are more than the queue has room for: completions
    /// are polled in a way that is not seen.
    #[must_use]
    pub(super) fn push(&mut self, mut sent: Sent, queue: Option<&Arc<CompletionQueue>>) -> bool {
        if self.capacity != 0 && self.sends.len() == self.capacity {
            return false;
        }
        if self.signals_all || sent.is_signaled {
            sent.entry = queue.map(Entry::new);
        } else {
            sent.unsignaled = queue.map(Unsignaled::new);
        }
        self.sends.push_back(sent);
        true
    }

    /// Takes the last sends back, which were refused.
    pub(super) fn take_back(&mut self, count: usize) {
        let kept = self.sends.len().saturating_sub(count);
        self.sends.truncate(kept);
    }

    pub(crate) fn start(&mut self) {
        self.building.clear();
    }

    pub(crate) fn build(&mut self, sent: Sent) {
        if !self.is_lost {
            self.building.push(sent);
        }
    }

    /// Adds elements to the last send that is being built.
    pub(crate) fn add(&mut self, elements: impl IntoIterator<Item = Sge>) {
        if let Some(last) = self.building.last_mut() {
            last.add(elements);
        }
    }

    pub(crate) fn take_built(&mut self) -> Vec<Sent> {
        std::mem::take(&mut self.building)
    }

    /// Returns the oldest send with this number.
    pub(super) fn find(&self, wr_id: u64) -> Option<&Sent> {
        self.sends.iter().find(|sent| sent.wr_id == wr_id)
    }

    /// Returns the first of the sends if none of them has a completion.
    pub(super) fn first_of_unsignaled(&self) -> Option<&Sent> {
        let none = !self.signals_all && !self.sends.iter().any(|sent| sent.is_signaled);
        self.sends.front().filter(|_| none && !self.is_lost)
    }

    /// Removes the sends that a completion stands for: one that has completions, and those
    /// before that have none. `None` if it cannot be that of the oldest.
    pub(super) fn complete(&mut self, wr_id: u64) -> Option<Vec<Sent>> {
        let mut sends = self.sends.iter();
        let at = sends.position(|sent| self.signals_all || sent.is_signaled)?;
        let is_same = self.sends.get(at).is_some_and(|sent| sent.wr_id == wr_id);
        is_same.then(|| self.sends.drain(..=at).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(wr_id: u64, flags: u32) -> Sent {
        Sent::new(wr_id, (2, flags), Origin::here())
    }

    #[test]
    fn a_completion_stands_for_those_before_it() {
        let mut queue = SendQueue::new(8, false);
        for (wr_id, flags) in [(1, 0), (2, 0), (3, SIGNALED), (4, SIGNALED), (5, 0)] {
            assert!(queue.push(sent(wr_id, flags), None));
        }
        let ids = |sends: Vec<Sent>| sends.iter().map(|it| it.wr_id).collect::<Vec<_>>();
        assert_eq!(queue.complete(3).map(ids), Some(vec![1, 2, 3]));
        assert!(queue.complete(5).is_none());
        assert_eq!(queue.complete(4).map(ids), Some(vec![4]));
        assert_eq!(queue.first_of_unsignaled().map(|it| it.wr_id), Some(5));
        assert!(queue.complete(5).is_none());
        let mut queue = SendQueue::new(1, true);
        assert!(queue.push(sent(1, 0), None) && !queue.push(sent(2, 0), None));
        assert!(queue.first_of_unsignaled().is_none());
        assert_eq!(queue.complete(1).map(ids), Some(vec![1]));
        assert!(queue.lose() && !queue.lose());
        queue.reset();
        assert!(queue.push(sent(1, 0), None));
    }
}
