//! The program's objects and posts, with the places in the program that made them.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use embedded::ObjectChange;
use embedded::roce::transport::Operation;
use embedded::softhca::cause::WorkRequest;
use uverbs::{AccessFlags, QpState, QpType};

use super::stack::Stack;
use crate::check::{CompletionQueue, ReceiveQueue, SendQueue, Sge};
use crate::promises::InUse;

/// Posts from one place after which the stack is captured again.
const POSTS_PER_STACK: u64 = 1024;
/// Maximum number of places whose stacks are kept.
const MAX_SITES: usize = 4096;
/// Number of deregistered regions that are remembered, and of destroyed queue pairs.
const MAX_DEREGISTERED: usize = 1024;
const MAX_DESTROYED: usize = 1024;
/// Number of other objects that are remembered after they were destroyed.
const MAX_STRANGERS: usize = 1024;
/// Entries of a queue that is smaller, or whose size is unknown.
const MIN_ENTRIES: u32 = 16;

/// Locks, also after a panic: what is guarded is valid at any time.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call of the program.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) thread: i32,
    pub(crate) stack: Arc<Stack>,
    /// The stack is that of an earlier call from the same place.
    pub(crate) is_earlier: bool,
}

impl Origin {
    /// Describes a call of this thread that is under way.
    pub(crate) fn here() -> Self {
        Self {
            thread: thread(),
            stack: Arc::new(Stack::capture()),
            is_earlier: false,
        }
    }
}

/// Returns the number of this thread.
pub(crate) fn thread() -> i32 {
    // SAFETY: a call without arguments.
    unsafe { libc::gettid() }
}

/// A posted work request.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    pub(crate) wr_id: u64,
    /// An `ibv_wr_opcode`; `None` for a receive.
    pub(crate) opcode: Option<u32>,
    /// Address of the first buffer and remote address, as far as they are known.
    pub(crate) buffer: Option<u64>,
    pub(crate) remote: Option<u64>,
    pub(crate) origin: Origin,
}

impl Post {
    /// Returns whether it may be the work request that the device has seen.
    fn matches(&self, work: &WorkRequest) -> bool {
        if work.is_malformed {
            return self.opcode.is_some();
        }
        let operation = match (self.opcode, &work.operation) {
            (Some(opcode), Some(operation)) => is_operation(opcode, operation),
            (None, None) => true,
            _ => false,
        };
        let buffer = work.buffers().first().map(|buffer| buffer.va);
        let remote = work.remote.map(|(va, _)| va);
        let same = |known: Option<u64>, seen: Option<u64>| {
            known.zip(seen).is_none_or(|(known, seen)| known == seen)
        };
        operation && same(self.buffer, buffer) && same(self.remote, remote)
    }
}

/// Returns whether an `ibv_wr_opcode` stands for an operation.
pub(crate) fn is_operation(opcode: u32, operation: &Operation) -> bool {
    match opcode {
        0 => *operation == Operation::Write,
        1 => *operation == Operation::WriteImm,
        2 => *operation == Operation::Send,
        3 => *operation == Operation::SendImm,
        4 => *operation == Operation::Read,
        5 => matches!(operation, Operation::CompareSwap { .. }),
        6 => matches!(operation, Operation::FetchAdd { .. }),
        7 | 8 => *operation == Operation::Local,
        9 => *operation == Operation::SendInvalidate,
        // Later ones, and those of drivers.
        _ => true,
    }
}

/// Posts of a queue, as the device numbers them.
#[derive(Debug, Default)]
pub(crate) struct Posts {
    /// Number of the next one.
    next: u32,
    capacity: usize,
    recent: VecDeque<Post>,
    /// Posts of two threads whose order is unknown, or work requests that were written past
    /// the hooks: numbers mean nothing until RESET.
    is_unordered: bool,
    /// Number of posts since the queue pair was created.
    pub(crate) total: u64,
}

impl Posts {
    fn new(entries: u32) -> Self {
        Self {
            capacity: entries.max(MIN_ENTRIES) as usize,
            ..Self::default()
        }
    }

    pub(crate) fn push(&mut self, post: Post) {
        if self.recent.len() == self.capacity {
            self.recent.pop_front();
        }
        self.recent.push_back(post);
        self.next = self.next.wrapping_add(1);
        self.total += 1;
    }

    /// Takes the last posts back, which were refused. Returns the first of them.
    pub(crate) fn take_back(&mut self, count: usize) -> Option<Post> {
        let kept = self.recent.len().saturating_sub(count);
        let first = self.recent.drain(kept..).next();
        self.next = self.next.wrapping_sub(count as u32);
        self.total -= count as u64;
        first
    }

    fn reset(&mut self) {
        self.recent.clear();
        (self.next, self.is_unordered) = (0, false);
    }

    /// Returns the post that the device has seen as this work request.
    fn find(&self, work: &WorkRequest) -> Option<Post> {
        let number = work.number.filter(|_| !self.is_unordered)?;
        let after = match work.operation {
            Some(_) => self.next.wrapping_sub(number),
            // Numbers of receives have 16 bits.
            None => u32::from((self.next as u16).wrapping_sub(number as u16)),
        };
        let at = self.recent.len().checked_sub(after as usize)?;
        let post = self.recent.get(at)?;
        post.matches(work).then(|| post.clone())
    }
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) kind: QpType,
    pub(crate) state: Mutex<QpState>,
    pub(crate) created: Origin,
    pub(crate) user_handle: u64,
    /// GID or LID of the peer's port, since RTR; zeros before.
    pub(crate) peer: Mutex<[u8; 16]>,
    /// Posts that were not noted ([`Objects::note_unseen`]) since RESET: of this queue pair, and
    /// of unknown ones at the time of the last RESET.
    unseen: AtomicBool,
    unseen_before: AtomicU64,
    /// Posts, and locks that are held while the provider posts, so that the order is its.
    pub(crate) sends: Mutex<Posts>,
    pub(crate) receives: Mutex<Posts>,
    pub(crate) send_order: Mutex<()>,
    pub(crate) receive_order: Mutex<()>,
    /// The thread that has called `ibv_wr_start` and uses builders, 0 if none, and its work
    /// requests since.
    pub(crate) builder: AtomicI32,
    pub(crate) built: Mutex<usize>,
    /// Threads that post sends and receives, if they have no lock.
    pub(crate) in_use: [InUse; 2],
    /// Sends and receives whose completions were not polled, if the program is checked.
    pub(crate) in_flight: Mutex<SendQueue>,
    pub(crate) receives_in_flight: Mutex<ReceiveQueue>,
}

impl QueuePair {
    /// Returns the name of its type.
    pub(crate) fn kind_name(&self) -> &'static str {
        match self.kind {
            QpType::RC => "RC",
            QpType::UC => "UC",
            QpType::UD => "UD",
            QpType::RAW_PACKET => "raw packets",
            QpType::XRC_INI => "XRC initiator",
            QpType::XRC_TGT => "XRC target",
            QpType::DRIVER => "DC",
            _ => "another type",
        }
    }

    /// Returns whether it is for raw packets, whose queues are no queue pair in the device.
    pub(crate) fn is_raw(&self) -> bool {
        self.kind == QpType::RAW_PACKET
    }

    /// Returns the name of the state that the program has set last.
    pub(crate) fn state_name(&self) -> &'static str {
        uverbs::state_name(*lock(&self.state)).unwrap_or("ERR")
    }

    /// Returns the post that the device has seen as this work request.
    pub(crate) fn post_of(&self, work: &WorkRequest) -> Option<Post> {
        match work.operation {
            Some(_) => lock(&self.sends).find(work),
            None => lock(&self.receives).find(work),
        }
    }

    /// Returns where the last send was posted.
    pub(crate) fn last_send(&self) -> Option<Origin> {
        lock(&self.sends)
            .recent
            .back()
            .map(|post| post.origin.clone())
    }

    /// Notes that the order of sends is unknown.
    pub(crate) fn lose_order(&self) {
        lock(&self.sends).is_unordered = true;
    }
}

/// A memory region.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) start: u64,
    /// Where it is in the program's memory.
    address: u64,
    pub(crate) length: u64,
    pub(crate) access: AccessFlags,
    pub(crate) registered: Origin,
    pub(crate) deregistered: Option<Origin>,
}

/// An object of a context.
#[derive(Clone, Debug)]
pub(crate) struct Created {
    /// The device's descriptor of the context.
    context: RawFd,
    /// Its type.
    pub(crate) name: &'static str,
    /// Its number in the device; 0 if it has none.
    pub(crate) number: u32,
    pub(crate) created: Origin,
}

impl fmt::Display for Created {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            0 => f.write_str(self.name),
            number => write!(f, "{} {number:#x}", self.name),
        }
    }
}

/// An object that was destroyed.
#[derive(Debug)]
struct Gone {
    /// The device and its handle.
    key: (usize, u32),
    created: Created,
    destroyed: Origin,
}

/// An object that a context does not have.
pub(crate) enum Stranger {
    /// With where it was destroyed.
    Destroyed(Created, Origin),
    /// One of another context, with where it was created.
    OfAnother(String, Origin),
}

/// Places in the program from which work requests are posted.
#[derive(Debug, Default)]
struct Sites(HashMap<usize, (u64, Arc<Stack>)>);

/// The objects of a process, by device.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    queue_pairs: Mutex<HashMap<(usize, u32), Arc<QueuePair>>>,
    regions: Mutex<HashMap<(usize, u32), Region>>,
    /// Keys of deregistered regions, oldest first.
    deregistered: Mutex<VecDeque<(usize, u32)>>,
    /// Destroyed queue pairs, oldest first.
    destroyed: Mutex<VecDeque<(usize, u32)>>,
    /// The objects of contexts by handle, if the program is checked.
    created: Mutex<HashMap<(usize, u32), Created>>,
    /// Those that were destroyed, oldest first, and where.
    strangers: Mutex<VecDeque<Gone>>,
    /// By user handle, if the program is checked.
    completion_queues: Mutex<HashMap<(usize, u64), Arc<CompletionQueue>>>,
    /// Those that were destroyed, with where they were destroyed and created.
    destroyed_queues: Mutex<HashMap<(usize, u64), [Origin; 2]>>,
    has_destroyed_queues: AtomicBool,
    sites: Mutex<Sites>,
    queue_pairs_created: AtomicU64,
    /// Number of calls in signal handlers that were not noted, and of those among them whose queue
    /// pair is not known.
    unseen: AtomicU64,
    unseen_of_unknown: AtomicU64,
}

impl Objects {
    /// Handles a change that a command of this thread, which is under way, has made.
    pub(crate) fn changed(&self, device: usize, change: &ObjectChange) {
        match *change {
            ObjectChange::QueuePairCreated {
                number,
                kind,
                user_handle,
                entries: [sends, receives],
                send_blocks,
                signals_all,
                shared_queue,
                receive_queue,
                ..
            } => {
                let completions = receive_queue.and_then(|it| self.completion_queue(device, it));
                let queue_pair = QueuePair {
                    kind,
                    state: Mutex::new(QpState::RESET),
                    created: Origin::here(),
                    user_handle,
                    peer: Mutex::default(),
                    unseen: AtomicBool::new(false),
                    unseen_before: AtomicU64::new(self.unseen_of_unknown.load(Ordering::Relaxed)),
                    sends: Mutex::new(Posts::new(sends)),
                    receives: Mutex::new(Posts::new(receives)),
                    send_order: Mutex::default(),
                    receive_order: Mutex::default(),
                    builder: AtomicI32::new(0),
                    built: Mutex::default(),
                    in_use: Default::default(),
                    in_flight: Mutex::new(SendQueue::new(send_blocks, signals_all)),
                    receives_in_flight: Mutex::new(ReceiveQueue::new(
                        receives,
                        (device, number),
                        shared_queue.map(|handle| (handle, completions)),
                        kind == QpType::RC,
                    )),
                };
                self.queue_pairs_created.fetch_add(1, Ordering::Relaxed);
                lock(&self.queue_pairs).insert((device, number), Arc::new(queue_pair));
            }
            ObjectChange::QueuePairModified {
                number,
                state,
                ref attributes,
            } => {
                let Some(queue_pair) = self.queue_pair(device, number) else {
                    return;
                };
                *lock(&queue_pair.state) = state;
                *lock(&queue_pair.peer) = attributes.destination;
                if state == QpState::RESET {
                    queue_pair.unseen.store(false, Ordering::Relaxed);
                    let unseen = self.unseen_of_unknown.load(Ordering::Relaxed);
                    queue_pair.unseen_before.store(unseen, Ordering::Relaxed);
                    lock(&queue_pair.sends).reset();
                    lock(&queue_pair.receives).reset();
                    lock(&queue_pair.in_flight).reset();
                    lock(&queue_pair.receives_in_flight).reset();
                }
            }
            ObjectChange::QueuePairDestroyed { number } => {
                let queue_pair = lock(&self.queue_pairs).remove(&(device, number));
                if let Some(queue_pair) = queue_pair {
                    lock(&queue_pair.receives_in_flight).lose();
                }
                let mut destroyed = lock(&self.destroyed);
                destroyed.push_back((device, number));
                if destroyed.len() > MAX_DESTROYED {
                    destroyed.pop_front();
                }
            }
            ObjectChange::RegionRegistered {
                key,
                iova,
                address,
                length,
                access,
            } => {
                let region = Region {
                    start: iova,
                    address,
                    length,
                    access,
                    registered: Origin::here(),
                    deregistered: None,
                };
                lock(&self.regions).insert((device, key), region);
            }
            ObjectChange::RegionDeregistered { key } => {
                let mut regions = lock(&self.regions);
                if let Some(region) = regions.get_mut(&(device, key)) {
                    region.deregistered = Some(Origin::here());
                }
                let mut deregistered = lock(&self.deregistered);
                deregistered.push_back((device, key));
                if deregistered.len() > MAX_DEREGISTERED {
                    let oldest = deregistered.pop_front();
                    let oldest = oldest
                        .filter(|key| regions.get(key).is_some_and(|it| it.deregistered.is_some()));
                    oldest.and_then(|key| regions.remove(&key));
                }
            }
            ObjectChange::Destroyed { handle, .. } => {
                let key = (device, handle);
                if let Some(created) = lock(&self.created).remove(&key) {
                    let mut strangers = lock(&self.strangers);
                    strangers.push_back(Gone {
                        key,
                        created,
                        destroyed: Origin::here(),
                    });
                    if strangers.len() > MAX_STRANGERS {
                        strangers.pop_front();
                    }
                }
            }
            _ => {}
        }
    }

    /// Notes an object of a context, which a command of this thread has created.
    pub(crate) fn created(&self, device: usize, context: RawFd, change: &ObjectChange) {
        if let ObjectChange::CompletionQueueCreated {
            number,
            user_handle,
            ignores_overrun,
        } = *change
        {
            let queue =
                CompletionQueue::new(Origin::here(), (number, user_handle), ignores_overrun);
            lock(&self.destroyed_queues).remove(&(device, user_handle));
            lock(&self.completion_queues).insert((device, user_handle), Arc::new(queue));
        }
        if let ObjectChange::Created {
            handle,
            name,
            number,
        } = *change
        {
            let created = Created {
                context,
                name,
                number,
                created: Origin::here(),
            };
            lock(&self.created).insert((device, handle), created);
        }
    }

    /// Returns the object with a handle that a context does not have.
    pub(crate) fn stranger(&self, device: usize, context: RawFd, handle: u32) -> Option<Stranger> {
        let key = (device, handle);
        if let Some(other) = lock(&self.created).get(&key) {
            let is_other = other.context != context;
            return is_other.then(|| Stranger::OfAnother(other.to_string(), other.created.clone()));
        }
        let strangers = lock(&self.strangers);
        let gone = strangers.iter().rev().find(|gone| gone.key == key)?;
        Some(Stranger::Destroyed(
            gone.created.clone(),
            gone.destroyed.clone(),
        ))
    }

    /// Returns the type of an object that was destroyed.
    pub(crate) fn name_of_destroyed(&self, device: usize, handle: u32) -> Option<&'static str> {
        let strangers = lock(&self.strangers);
        let mut newest = strangers.iter().rev();
        let gone = newest.find(|gone| gone.key == (device, handle))?;
        Some(gone.created.name)
    }

    /// Returns where a queue pair, or another object with a number, was destroyed and created.
    pub(crate) fn destroyed(&self, device: usize, name: &str, number: u32) -> Option<[Origin; 2]> {
        let strangers = lock(&self.strangers);
        let mut newest = strangers.iter().rev();
        let gone = newest.find(|gone| {
            let Created {
                name: of,
                number: its,
                ..
            } = gone.created;
            gone.key.0 == device && of == name && its == number
        })?;
        Some([gone.destroyed.clone(), gone.created.created.clone()])
    }

    /// Returns where an object of a type with a number was created.
    pub(crate) fn created_as(&self, device: usize, name: &str, number: u32) -> Option<Origin> {
        let created = lock(&self.created);
        let mut of_device = created.iter().filter(|((of, _), _)| *of == device);
        let found = of_device.find(|(_, it)| it.name == name && it.number == number)?;
        Some(found.1.created.clone())
    }

    /// Removes and returns the objects of a context, oldest first.
    pub(crate) fn take_context(&self, device: usize, context: RawFd) -> Vec<Created> {
        let mut created = lock(&self.created);
        let is_of =
            |(of, _): &(usize, u32), object: &Created| *of == device && object.context == context;
        let mut handles: Vec<_> = created
            .iter()
            .filter(|(key, it)| is_of(key, it))
            .map(|it| *it.0)
            .collect();
        handles.sort_unstable();
        handles
            .iter()
            .filter_map(|key| created.remove(key))
            .collect()
    }

    /// Returns the queue pairs of a device.
    pub(crate) fn queue_pairs_of(&self, device: usize) -> Vec<Arc<QueuePair>> {
        let queue_pairs = lock(&self.queue_pairs);
        let of_device = queue_pairs.iter().filter(|((of, _), _)| *of == device);
        of_device
            .map(|(_, queue_pair)| Arc::clone(queue_pair))
            .collect()
    }

    /// Returns where an element is in the program's memory; `None` if it is empty, or not in a
    /// region.
    pub(crate) fn program_address(&self, device: usize, element: &Sge) -> Option<u64> {
        let regions = lock(&self.regions);
        let region = regions.get(&(device, element.lkey))?;
        let offset = element.address.checked_sub(region.start)?;
        let end = offset.checked_add(element.length.into())?;
        let is_inside = end <= region.length && element.length != 0;
        (is_inside && region.deregistered.is_none())
            .then(|| region.address.checked_add(offset))
            .flatten()
    }

    pub(crate) fn queue_pair(&self, device: usize, number: u32) -> Option<Arc<QueuePair>> {
        lock(&self.queue_pairs).get(&(device, number)).cloned()
    }

    /// Counts a call in a signal handler about the queue pair with this user handle.
    /// Waits for no lock and allocates nothing.
    pub(crate) fn note_unseen(&self, user_handle: u64) {
        self.unseen.fetch_add(1, Ordering::Relaxed);
        let found = self.queue_pairs.try_lock().ok().is_some_and(|queue_pairs| {
            let mut queue_pairs = queue_pairs.values();
            let found = queue_pairs.find(|it| it.user_handle == user_handle);
            found.is_some_and(|it| {
                it.unseen.store(true, Ordering::Relaxed);
                true
            })
        });
        if !found {
            self.unseen_of_unknown.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of calls in signal handlers that were not noted.
    pub(crate) fn unseen(&self) -> u64 {
        self.unseen.load(Ordering::Relaxed)
    }

    /// Returns whether posts to a queue pair may not have been noted since RESET: the device's
    /// numbers of work requests mean nothing then.
    pub(crate) fn has_unseen(&self, queue_pair: &QueuePair) -> bool {
        queue_pair.unseen.load(Ordering::Relaxed)
            || queue_pair.unseen_before.load(Ordering::Relaxed)
                != self.unseen_of_unknown.load(Ordering::Relaxed)
    }

    /// Returns whether the program has destroyed a queue pair with this number.
    pub(crate) fn was_destroyed(&self, device: usize, number: u32) -> bool {
        lock(&self.destroyed).contains(&(device, number))
    }

    /// Returns the memory of a region that stays mapped; `None` for one with on-demand paging.
    pub(crate) fn mapped_memory(&self, device: usize, key: u32) -> Option<Range<usize>> {
        let regions = lock(&self.regions);
        let region = regions.get(&(device, key))?;
        let start = usize::try_from(region.address).ok()?;
        let end = start.checked_add(usize::try_from(region.length).ok()?)?;
        let is_mapped = !region.access.contains(AccessFlags::ON_DEMAND);
        (is_mapped && region.deregistered.is_none()).then_some(start..end)
    }

    pub(crate) fn region(&self, device: usize, key: u32) -> Option<Region> {
        lock(&self.regions).get(&(device, key)).cloned()
    }

    pub(crate) fn completion_queue(
        &self,
        device: usize,
        user_handle: u64,
    ) -> Option<Arc<CompletionQueue>> {
        lock(&self.completion_queues)
            .get(&(device, user_handle))
            .cloned()
    }

    /// Returns all completion queues, with their devices.
    pub(crate) fn completion_queues(&self) -> Vec<(usize, Arc<CompletionQueue>)> {
        let queues = lock(&self.completion_queues);
        let all = queues.iter();
        all.map(|((device, _), queue)| (*device, Arc::clone(queue)))
            .collect()
    }

    /// Removes a completion queue that a command of this thread has destroyed.
    pub(crate) fn remove_completion_queue(
        &self,
        device: usize,
        user_handle: u64,
    ) -> Option<Arc<CompletionQueue>> {
        let key = (device, user_handle);
        let queue = lock(&self.completion_queues).remove(&key)?;
        queue.destroyed();
        let origins = [Origin::here(), queue.created.clone()];
        let mut destroyed = lock(&self.destroyed_queues);
        destroyed.insert(key, origins);
        self.has_destroyed_queues.store(true, Ordering::Relaxed);
        Some(queue)
    }

    /// Returns whether a completion queue was destroyed, for the fast path.
    pub(crate) fn has_destroyed_queues(&self) -> bool {
        self.has_destroyed_queues.load(Ordering::Relaxed)
    }

    /// Returns where the completion queue was destroyed and created that had this user handle,
    /// unless another one has it.
    pub(crate) fn destroyed_queue(&self, device: usize, user_handle: u64) -> Option<[Origin; 2]> {
        lock(&self.destroyed_queues)
            .get(&(device, user_handle))
            .cloned()
    }

    /// Returns the number of queue pairs that were created.
    pub(crate) fn queue_pairs_created(&self) -> u64 {
        self.queue_pairs_created.load(Ordering::Relaxed)
    }

    /// Describes a call of this thread from `site`, whose stack is captured once in
    /// [`POSTS_PER_STACK`] calls.
    pub(crate) fn call_from(&self, site: usize) -> Origin {
        let known = {
            let Sites(sites) = &mut *lock(&self.sites);
            sites.get_mut(&site).and_then(|(count, stack)| {
                *count += 1;
                (*count % POSTS_PER_STACK != 0).then(|| Arc::clone(stack))
            })
        };
        if let Some(stack) = known {
            return Origin {
                thread: thread(),
                stack,
                is_earlier: true,
            };
        }
        let here = Origin::here();
        let Sites(sites) = &mut *lock(&self.sites);
        if sites.len() < MAX_SITES || sites.contains_key(&site) {
            let stack = Arc::clone(&here.stack);
            let (_, known) = sites.entry(site).or_insert((1, Arc::default()));
            *known = stack;
        }
        here
    }
}

#[cfg(test)]
mod tests {
    use embedded::roce::transport::Service;

    use super::*;

    fn post(wr_id: u64, opcode: Option<u32>) -> Post {
        Post {
            wr_id,
            opcode,
            buffer: None,
            remote: None,
            origin: Origin::here(),
        }
    }

    fn work(number: u32, operation: Option<Operation>) -> WorkRequest {
        WorkRequest {
            qpn: 2,
            service: Service::Rc,
            number: Some(number),
            operation,
            length: 8,
            buffers: Default::default(),
            buffer_count: 0,
            remote: Some((64, 3)),
            peer: None,
            path: None,
            is_loopback: false,
            is_malformed: false,
        }
    }

    #[test]
    fn posts_are_found_by_number() {
        let mut posts = Posts::new(4);
        for number in 0..100 {
            posts.push(post(number, Some(0)));
        }
        let write = Some(Operation::Write);
        let found = |posts: &Posts, number| posts.find(&work(number, write)).map(|it| it.wr_id);
        assert_eq!(found(&posts, 99), Some(99));
        assert_eq!(found(&posts, 84), Some(84));
        // No longer kept, not posted yet.
        assert_eq!(found(&posts, 83), None);
        assert_eq!(found(&posts, 100), None);
        posts.take_back(1);
        assert_eq!(found(&posts, 99), None);
        assert_eq!(found(&posts, 98), Some(98));
        posts.reset();
        posts.push(post(7, Some(0)));
        assert_eq!(found(&posts, 0), Some(7));
    }

    #[test]
    fn numbers_of_receives_wrap() {
        let mut posts = Posts::new(64);
        for number in 0..=0x1_0003 {
            posts.push(post(number, None));
        }
        let found = |number| posts.find(&work(number, None)).map(|it| it.wr_id);
        assert_eq!(found(3), Some(0x1_0003));
        assert_eq!(found(0xffff), Some(0xffff));
    }

    #[test]
    fn another_operation_or_address_is_another_work_request() {
        let mut posts = Posts::new(4);
        posts.push(post(7, Some(0)));
        assert!(posts.find(&work(0, Some(Operation::Read))).is_none());
        posts.push(Post {
            remote: Some(65),
            ..post(8, Some(0))
        });
        assert!(posts.find(&work(1, Some(Operation::Write))).is_none());
    }

    #[test]
    fn stacks_are_captured_once_in_many_calls() {
        let objects = Objects::default();
        let calls = (0..2 * POSTS_PER_STACK).map(|_| objects.call_from(5));
        let captured = calls.filter(|it| !it.is_earlier).count();
        assert_eq!(captured, 3);
    }
}
