//! Errors of a program that no device reports, as far as devices see them: of programs that use
//! no libibverbs, as those of the crate `ringverbs`.
//!
//! A device sees a work request when its doorbell rings, later than the program posts it, and
//! completions that were read by the consumer index of their queue. So fewer may be seen to be in
//! flight at a time than there were, never more.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use roce::packet::{Link, Path};
use roce::transport::{Operation, Service, Status};
use softhca::work::{Ended, Posted, WorkEvent, WorkObserver};

use crate::runtime::network::Network;

/// Bytes of RDMA writes that are kept, each until the device reads them; others are not followed.
const MAX_KEPT: usize = 32 << 20;
/// Errors that are reported. Each queue, or pair of queue pairs, has one of a rule.
const MAX_REPORTED: usize = 1024;
/// Writes of others that one write is compared with.
const MAX_RACES: usize = 4;

/// A rule that a program can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CheckRule {
    /// More can complete into a completion queue than it has entries, before the program reads.
    CompletionQueueTooSmall,
    /// RDMA writes of two queue pairs to the same bytes, which nothing orders.
    OverlappingAccess,
}

impl CheckRule {
    /// Returns its name, by which `docs/check.md` in the repository explains it.
    pub fn name(self) -> &'static str {
        match self {
            Self::CompletionQueueTooSmall => "completion-queue-too-small",
            Self::OverlappingAccess => "overlapping-access",
        }
    }
}

/// An error of a program that no device reports ([`Network::check`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProgramError {
    /// The rule that it breaks.
    pub rule: CheckRule,
    /// The device, by its number in the network.
    pub device: usize,
    /// The queue pair; of two, that whose work request has ended later.
    pub qp_num: u32,
    /// Description of the error, with the addresses and sizes involved.
    pub message: String,
}

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule.name(), self.message)
    }
}

/// A queue pair: its device, and its number.
type QueuePair = (usize, u32);

/// Where remote memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    peer: Peer,
    key: u32,
}

/// The port of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    Gid([u8; 16]),
    Lid(u16),
}

impl Peer {
    fn of(path: &Path) -> Option<Self> {
        match (path.grh, path.link) {
            (Some(grh), _) => Some(Self::Gid(grh.dgid)),
            (None, Link::Ib { dlid, .. }) => Some(Self::Lid(dlid)),
            _ => None,
        }
    }
}

/// An RDMA write that has not ended.
#[derive(Debug)]
struct Write {
    number: u32,
    place: Place,
    range: Range<u64>,
    /// Its data; `None` once the device has begun to read them.
    data: Option<Arc<[u8]>>,
    /// The races that it is part of.
    races: Vec<u64>,
}

impl Write {
    /// Returns a part of what it writes.
    fn part(&self, range: &Range<u64>) -> Option<&[u8]> {
        let offset = |address: u64| address.checked_sub(self.range.start).map(|it| it as usize);
        self.data
            .as_deref()?
            .get(offset(range.start)?..offset(range.end)?)
    }

    /// Returns the bytes that another write and this one set to different values.
    fn conflict(&self, other: &Self) -> Option<Range<u64>> {
        let start = self.range.start.max(other.range.start);
        let end = self.range.end.min(other.range.end);
        if self.place != other.place || start >= end {
            return None;
        }
        let range = start..end;
        (self.part(&range)? != other.part(&range)?).then_some(range)
    }
}

/// Two writes that are not ordered, neither of which has failed.
#[derive(Debug)]
struct Race {
    /// The other write was posted later.
    first: (QueuePair, u32),
    second: (QueuePair, u32),
    range: Range<u64>,
    /// One of them has ended.
    has_ended: bool,
}

impl Race {
    fn message(&self) -> String {
        let name = |((_, qpn), number)| {
            format!("RDMA write (work request {number}) of queue pair {qpn:#x}")
        };
        format!(
            "{} was posted before the {} had begun, and nothing orders them: both access {} bytes \
             at remote address {:#x}",
            name(self.second),
            name(self.first),
            self.range.end - self.range.start,
            self.range.start,
        )
    }
}

/// Looks for errors.
#[derive(Debug, Default)]
struct Checker {
    /// In the order of each queue pair.
    writes: HashMap<QueuePair, VecDeque<Write>>,
    /// Bytes of writes that are kept.
    kept: usize,
    races: HashMap<u64, Race>,
    next_race: u64,
    /// Completion queues, by device and number, and pairs of queue pairs with an error.
    reported: HashSet<Reported>,
}

/// Objects for which an error was reported, to report each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reported {
    /// A completion queue, by its device and number.
    Queue(usize, u32),
    /// In the order of their numbers.
    QueuePairs(QueuePair, QueuePair),
}

impl Checker {
    /// Handles what a device tells of a work request. Returns the errors of the program.
    fn handle(&mut self, device: usize, event: &WorkEvent) -> Vec<ProgramError> {
        match event {
            WorkEvent::Posted(posted) => {
                self.follow_write(device, posted);
                Vec::from_iter(self.too_small(device, posted))
            }
            WorkEvent::Reading { qpn, number } => {
                self.begin((device, *qpn), *number);
                Vec::new()
            }
            WorkEvent::Ended(ended) if ended.is_send => self.end(device, ended),
            WorkEvent::Emptied { qpn } => {
                let writes = self.writes.remove(&(device, *qpn));
                writes.into_iter().flatten().for_each(|it| self.forget(it));
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// Returns whether an error is reported for the first time.
    fn is_first(&mut self, reported: Reported) -> bool {
        self.reported.len() < MAX_REPORTED && self.reported.insert(reported)
    }

    fn too_small(&mut self, device: usize, posted: &Posted) -> Option<ProgramError> {
        let (load, qp_num) = (posted.queue, posted.work.qpn);
        let is_new = load.is_excessive() && self.is_first(Reported::Queue(device, load.cqn));
        is_new.then(|| ProgramError {
            rule: CheckRule::CompletionQueueTooSmall,
            device,
            qp_num,
            message: format!("queue pair {qp_num:#x}: its {load}"),
        })
    }

    /// Follows an RDMA write over a connection, and compares it with those of other queue pairs
    /// that the devices do not read yet.
    fn follow_write(&mut self, device: usize, posted: &Posted) {
        let work = &posted.work;
        let is_connected = matches!(work.service, Service::Rc | Service::Uc);
        let is_write = matches!(work.operation, Some(Operation::Write | Operation::WriteImm));
        let peer = work.path.as_ref().and_then(Peer::of);
        let (Some(number), Some((start, key)), Some(peer)) = (work.number, work.remote, peer)
        else {
            return;
        };
        let Some(data) = posted.data.clone().filter(|_| is_connected && is_write) else {
            return;
        };
        if data.is_empty() || self.kept + data.len() > MAX_KEPT {
            return;
        }
        self.kept += data.len();
        let own = (device, work.qpn);
        let mut write = Write {
            number,
            place: Place { peer, key },
            range: start..start.saturating_add(data.len() as u64),
            data: Some(data),
            races: Vec::new(),
        };
        let others = self.writes.iter_mut().filter(|(other, _)| **other != own);
        let others = others.flat_map(|(other, writes)| writes.iter_mut().map(|it| (*other, it)));
        for (other, earlier) in others {
            if write.races.len().max(earlier.races.len()) == MAX_RACES {
                continue;
            }
            let Some(range) = earlier.conflict(&write) else {
                continue;
            };
            let race = Race {
                first: (other, earlier.number),
                second: (own, number),
                range,
                has_ended: false,
            };
            self.races.insert(self.next_race, race);
            earlier.races.push(self.next_race);
            write.races.push(self.next_race);
            self.next_race += 1;
        }
        self.writes.entry(own).or_default().push_back(write);
    }

    /// Notes that the device reads the data of a work request.
    fn begin(&mut self, queue_pair: QueuePair, number: u32) {
        let writes = self.writes.get_mut(&queue_pair);
        let write = writes.and_then(|it| it.iter_mut().find(|write| write.number == number));
        let data = write.and_then(|write| write.data.take());
        self.kept -= data.map_or(0, |data| data.len());
    }

    /// Forgets a write that has not succeeded, or of which it is not known when it began: it may
    /// not have been carried out at the time of another.
    fn forget(&mut self, write: Write) {
        self.kept -= write.data.map_or(0, |data| data.len());
        for race in write.races {
            self.races.remove(&race);
        }
    }

    fn end(&mut self, device: usize, ended: &Ended) -> Vec<ProgramError> {
        let own = (device, ended.qpn);
        let mut errors = Vec::new();
        let Some(mut writes) = self.writes.remove(&own) else {
            return errors;
        };
        // Work requests end in their order.
        let is_first = |write: &Write| Some(write.number) == ended.number;
        if writes.front().is_some_and(is_first) {
            let has_succeeded = ended.status == Status::Success;
            match writes.pop_front() {
                Some(write) if has_succeeded && write.data.is_none() => {
                    let errors_of = |race| self.succeed(own, race);
                    errors.extend(write.races.into_iter().filter_map(errors_of));
                }
                Some(write) => self.forget(write),
                None => {}
            }
        }
        if !writes.is_empty() {
            self.writes.insert(own, writes);
        }
        errors
    }

    /// Notes that a write of a race has succeeded. Returns the error if both have.
    fn succeed(&mut self, own: QueuePair, number: u64) -> Option<ProgramError> {
        let race = self.races.get_mut(&number)?;
        if !std::mem::replace(&mut race.has_ended, true) {
            return None;
        }
        let race = self.races.remove(&number)?;
        let ((a, _), (b, _)) = (race.first, race.second);
        let is_new = self.is_first(Reported::QueuePairs(a.min(b), a.max(b)));
        is_new.then(|| ProgramError {
            rule: CheckRule::OverlappingAccess,
            device: own.0,
            qp_num: own.1,
            message: race.message(),
        })
    }
}

impl Network {
    /// From now on looks for errors of the program that its devices do not report, and tells
    /// `report` each, with the device locked: it must not use the network, and must not wait.
    /// `docs/check.md` in the repository explains them. Each completion queue, and each pair of
    /// queue pairs, has an error of a rule at most once.
    ///
    /// RDMA writes are copied when their doorbell rings, if they have at most 64 KiB. Devices that
    /// are added later are not checked.
    pub fn check(&self, report: impl Fn(&ProgramError) + Send + Sync + 'static) {
        let checker = Arc::new((Mutex::new(Checker::default()), report));
        for device in self.devices() {
            let (number, checker) = (device.number(), Arc::clone(&checker));
            let observer = WorkObserver::of_data(move |event| {
                let (state, report) = &*checker;
                let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                let errors = state.handle(number, event);
                drop(state);
                errors.iter().for_each(report);
                true
            });
            device.lock().hca.observe_work(Some(observer));
        }
    }
}

#[cfg(test)]
mod tests {
    use roce::packet::Path;
    use softhca::cause::WorkRequest;
    use softhca::work::CompletionLoad;

    use super::*;

    const KEY: u32 = 0x1a03;

    fn write(qpn: u32, number: u32, start: u64, data: &[u8]) -> WorkEvent {
        let work = WorkRequest {
            qpn,
            service: Service::Rc,
            number: Some(number),
            operation: Some(Operation::Write),
            length: data.len() as u32,
            buffers: Default::default(),
            buffer_count: 1,
            remote: Some((start, KEY)),
            peer: Some(qpn + 1),
            path: Some(Path::ib(1, 2)),
            is_loopback: false,
            is_malformed: false,
        };
        WorkEvent::Posted(Posted {
            work,
            is_signaled: true,
            is_inline: false,
            queue: CompletionLoad::default(),
            data: Some(data.into()),
        })
    }

    fn ended(qpn: u32, number: u32, status: Status) -> WorkEvent {
        WorkEvent::Ended(Ended {
            qpn,
            cqn: 0,
            is_send: true,
            number: Some(number),
            status,
            length: 0,
            has_completion: true,
        })
    }

    const OK: Status = Status::Success;

    fn reading(qpn: u32, number: u32) -> WorkEvent {
        WorkEvent::Reading { qpn, number }
    }

    /// Returns the errors of these events of one device.
    fn errors(events: &[WorkEvent]) -> Vec<String> {
        let mut checker = Checker::default();
        let errors = events.iter().flat_map(|it| checker.handle(0, it));
        let errors = Vec::from_iter(errors.map(|it| it.to_string()));
        assert_eq!((checker.kept, checker.races.len()), (0, 0), "{events:?}");
        assert!(checker.writes.is_empty());
        errors
    }

    /// Two writes that both begin once both are posted.
    fn both(second: WorkEvent, ends: [WorkEvent; 2]) -> Vec<String> {
        let begin = [write(5, 0, 100, &[1; 8]), second];
        let middle = [reading(5, 0), reading(7, 3)];
        errors(&[&begin[..], &middle[..], &ends[..]].concat())
    }

    #[test]
    fn writes_that_nothing_orders_are_found() {
        let overlaps = || write(7, 3, 104, &[2; 8]);
        for ends in [[(5, 0), (7, 3)], [(7, 3), (5, 0)]] {
            let found = both(overlaps(), ends.map(|(qpn, number)| ended(qpn, number, OK)));
            assert_eq!(
                found,
                [
                    "overlapping-access: RDMA write (work request 3) of queue pair 0x7 was posted \
                     before the RDMA write (work request 0) of queue pair 0x5 had begun, and \
                     nothing orders them: both access 4 bytes at remote address 0x68"
                ]
            );
        }
        // Beside, and the same bytes.
        for second in [write(7, 3, 108, &[2; 8]), write(7, 3, 104, &[1; 8])] {
            assert!(both(second, [ended(5, 0, OK), ended(7, 3, OK)]).is_empty());
        }
        // One has failed, or was taken away.
        let failed = ended(5, 0, Status::Flushed);
        assert!(both(overlaps(), [failed, ended(7, 3, OK)]).is_empty());
        let emptied = WorkEvent::Emptied { qpn: 7 };
        assert!(both(overlaps(), [ended(5, 0, OK), emptied]).is_empty());
    }

    #[test]
    fn writes_that_may_be_ordered_are_not_reported() {
        // The first has begun: the program may know that it has ended.
        let found = errors(&[
            write(5, 0, 100, &[1; 8]),
            reading(5, 0),
            write(7, 3, 100, &[2; 8]),
            reading(7, 3),
            ended(5, 0, OK),
            ended(7, 3, OK),
        ]);
        assert!(found.is_empty(), "{found:?}");
        // Of one queue pair.
        let found = errors(&[
            write(5, 0, 100, &[1; 8]),
            write(5, 1, 100, &[2; 8]),
            reading(5, 0),
            ended(5, 0, OK),
            reading(5, 1),
            ended(5, 1, OK),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn a_pair_of_queue_pairs_has_one_error() {
        let mut events = Vec::new();
        for number in 0..3 {
            events.extend([
                write(5, number, 100, &[1; 8]),
                write(7, number, 100, &[2; 8]),
                reading(5, number),
                reading(7, number),
                ended(7, number, OK),
                ended(5, number, OK),
            ]);
        }
        assert_eq!(errors(&events).len(), 1);
    }
}
