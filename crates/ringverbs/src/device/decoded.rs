//! Completions of a ConnectX: whose they are, and what they say.
//!
//! **Whose a completion is.** A completion names its queue pair by a number, and
//! the reader of a completion queue has a directory of those numbers. It belongs
//! to the queue's owner, who polls without a lock, but queue pairs come and go on
//! any thread. So they leave word with [`Members`], and the owner reads that when
//! its count has changed: before it reads a completion that it has seen, and so
//! before the first of a queue pair that has come. One that is gone stays in the
//! directory, and keeps its number, until all that it had completed has been
//! read.
//!
//! **What a completion cannot do.** Queue pairs are made so that their data never
//! comes in completions. What is read here thus touches no memory of operations,
//! whatever it says and however late it is read.

use std::collections::HashMap;
use std::hint::cold_path;
use std::mem::{MaybeUninit, offset_of};
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::mlx5::{Arming, CompletionError, CompletionRing, DeviceContext, Role, Timed, Usual, Work};
use ring::{Epoch, Producer, Ring, Slots};
use uverbs::WorkCompletion;

use super::SENSELESS;
use super::mlx5::too_many_entries;
use crate::context::Ctx;
use crate::error::Result;

/// Completions that are decoded ahead at most: enough for a batch, and few
/// enough to stay near.
pub(super) const AHEAD: u32 = 127;
/// Binary logarithm of the distance between them.
pub(super) const LOG2_STRIDE: u32 = size_of::<Timed>().ilog2();
const _: () = {
    assert!(size_of::<Timed>().is_power_of_two());
    // The ring's first entry is behind its header, at the beginning of a page.
    assert!(size_of::<ring::Header>().is_multiple_of(align_of::<Timed>()));
    // Where `read_time` looks.
    assert!(offset_of!(Timed, time) == size_of::<WorkCompletion>());
};

/// What asks for events of completion queues, by the number of the queue: the
/// device has to be told that an event was seen.
#[derive(Debug, Default)]
pub(super) struct Armings(Mutex<HashMap<u64, Arc<Arming>>>);

impl Armings {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Arming>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queue pairs that complete to a completion queue, as far as its owner
/// does not know yet.
#[derive(Debug, Default)]
pub(crate) struct Members {
    news: Mutex<News>,
    /// Counts them. Raised after they are there.
    changes: Epoch,
}

#[derive(Debug, Default)]
struct News {
    arrived: Vec<(Arc<Work>, Role)>,
    left: Vec<Arc<Work>>,
}

impl Members {
    fn lock(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue pair was made, and has nothing posted yet.
    fn arrive(&self, work: &Arc<Work>, role: Role) {
        self.lock().arrived.push((Arc::clone(work), role));
        self.changes.advance();
    }

    /// A queue pair is destroyed, and the device writes no completions of it
    /// any more.
    fn leave(&self, work: &Arc<Work>) {
        self.lock().left.push(Arc::clone(work));
        self.changes.advance();
    }
}

/// A queue pair's place among those that complete to its completion queues.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Each once.
    queues: Vec<Arc<Members>>,
    work: Arc<Work>,
    told: AtomicBool,
}

impl Attachment {
    /// Of a queue pair that was made just now.
    pub fn new(queues: Vec<(Arc<Members>, Role)>, work: Arc<Work>) -> Self {
        for (queue, role) in &queues {
            queue.arrive(&work, *role);
        }
        Self {
            queues: queues.into_iter().map(|(queue, _)| queue).collect(),
            work,
            told: AtomicBool::new(false),
        }
    }

    /// The queue pair is gone.
    pub fn leave(&self) {
        // Relaxed: those who destroy it are one after the other.
        if !self.told.swap(true, Ordering::Relaxed) {
            for queue in &self.queues {
                queue.leave(&self.work);
            }
        }
    }

    /// The queue pair is there for ever.
    pub fn stay(&self) {
        if !self.told.swap(true, Ordering::Relaxed) {
            // The device may go on using its queues.
            std::mem::forget(Arc::clone(&self.work));
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Reads a ConnectX's completions, and decodes them into a ring.
#[derive(Debug)]
pub(crate) struct Source {
    ring: CompletionRing,
    /// The side of the ring that a driver has otherwise.
    filled: Producer,
    slots: Slots,
    /// What follows in the ring makes no sense.
    senseless: bool,
    /// Completions that the device's queue holds.
    entries: u32,
    /// How many were read, ever.
    read: u64,
    /// Of those, what the device was told of.
    given_back: u64,
    members: Arc<Members>,
    /// The news that were read.
    seen: u32,
    leaving: Vec<Leaving>,
    arming: Arc<Arming>,
    device: Arc<DeviceContext>,
    armings: Arc<Armings>,
    number: u64,
}

/// A queue pair that is gone, of which completions may still be there.
#[derive(Debug)]
struct Leaving {
    work: Arc<Work>,
    /// When so many have been read, none is.
    until: u64,
}

impl Source {
    /// What reads `queue` into `ring`, which outlives it, for the completion
    /// queue of that number.
    pub fn new(
        queue: (CompletionRing, Arming),
        entries: u32,
        ring: &Ring,
        number: u64,
        device: Arc<DeviceContext>,
        armings: &Arc<Armings>,
    ) -> Self {
        let arming = Arc::new(queue.1);
        armings.lock().insert(number, Arc::clone(&arming));
        let members = Arc::<Members>::default();
        Self {
            ring: queue.0,
            filled: Producer::new(ring.indices()),
            slots: ring.slots(),
            senseless: false,
            entries,
            read: 0,
            given_back: 0,
            seen: members.changes.now(),
            members,
            leaving: Vec::new(),
            arming,
            device,
            armings: Arc::clone(armings),
            number,
        }
    }

    /// Where queue pairs that complete here leave word.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// Decodes what is there, as far as there is room. What makes no sense goes
    /// to those who can be told, and only when they are next.
    #[inline(never)]
    pub fn fill(&mut self, tell: bool) {
        if self.members.changes.now() != self.seen && !self.read_news() {
            return;
        }
        let begin = self.filled.tail();
        let mut at = begin;
        if self.senseless && self.filled.indices().consumed_by_device() == at {
            self.senseless = false;
            if tell {
                at = self.put(at, senseless()).unwrap_or(at);
            }
        }
        while !self.senseless {
            let room = self.room(at);
            if room.is_empty() {
                break;
            }
            // SAFETY: as below.
            let (count, why) = unsafe { self.ring.take_usual(room) };
            self.read += count as u64;
            at = self.filled.indices().advance(at, count);
            match why {
                Usual::Taken => continue,
                Usual::Nothing => break,
                Usual::Other => {}
            }
            cold_path();
            // After the look at the completion, which may be the first of a
            // queue pair that has come since.
            if self.members.changes.now() != self.seen {
                if !self.read_news() {
                    break;
                }
                continue;
            }
            // SAFETY: what was published to the queues that complete here was
            // published under their contracts. (And no completion of theirs
            // touches memory of it: `QpOptions::short_data`.)
            let next = unsafe { self.ring.read() };
            self.read += u64::from(next.is_some());
            let wc = match next {
                Some(Ok(wc)) => wc,
                Some(Err(error)) => {
                    report(error);
                    if self.filled.indices().consumed_by_device() == at {
                        if !tell {
                            continue;
                        }
                        senseless()
                    } else {
                        self.senseless = true;
                        break;
                    }
                }
                None => break,
            };
            at = self.put(at, wc).unwrap_or(at);
        }
        if at != begin || self.read != self.given_back {
            self.ring.publish();
            self.given_back = self.read;
            self.filled.publish(at);
        }
        if !self.leaving.is_empty() {
            self.let_go();
        }
    }

    /// Whether there is nothing to do: no completion, no news, nothing to tell.
    #[inline(always)]
    pub fn is_idle(&self) -> bool {
        let idle =
            self.ring.is_empty() && self.members.changes.now() == self.seen && !self.senseless;
        // Who leaves is let go as soon as the queue is found empty.
        debug_assert!(!idle || self.leaving.is_empty());
        idle
    }

    /// The places from `at` on that may be filled, up to the end of the ring.
    #[inline(always)]
    fn room<'r>(&mut self, at: usize) -> &'r mut [MaybeUninit<Timed>] {
        let count = self.filled.room_ahead(at);
        // SAFETY: slots of the ring, which outlives this, from its indices:
        // aligned, as long as they are apart, and nobody reads them before they
        // are published. One such slice is there at a time.
        unsafe { slice::from_raw_parts_mut(self.slots.slot_inside(at).cast().as_ptr(), count) }
    }

    /// Writes a completion to the ring, if there is room; what is after it.
    fn put(&mut self, at: usize, completion: WorkCompletion) -> Option<usize> {
        let after = self.filled.after(at)?;
        let time = self.ring.time();
        // SAFETY: as in `room`; there is room.
        unsafe {
            let slot = self.slots.slot_inside(at).cast::<Timed>();
            slot.write(Timed { completion, time });
        }
        Some(after)
    }

    /// Takes note of the queue pairs that have come and gone. False if that
    /// could not be done, for lack of memory: then nothing is to be read.
    #[cold]
    #[inline(never)]
    fn read_news(&mut self) -> bool {
        let mut news = self.members.lock();
        // Under the lock, with which they are counted up to there at least.
        let now = self.members.changes.now();
        while let Some((work, role)) = news.arrived.last() {
            if let Err(error) = self.ring.attach(work, *role) {
                tracing::error!(%error, "completions are not read");
                return false;
            }
            news.arrived.pop();
        }
        let until = self.read + u64::from(self.ring.capacity());
        let left = news.left.drain(..);
        self.leaving
            .extend(left.map(|work| Leaving { work, until }));
        self.seen = now;
        true
    }

    /// Forgets queue pairs of which no completion can be there any more.
    #[cold]
    #[inline(never)]
    fn let_go(&mut self) {
        let all = self.ring.is_empty();
        let (read, ring) = (self.read, &mut self.ring);
        self.leaving.retain(|leaving| {
            let stays = !all && read < leaving.until;
            if !stays {
                ring.detach(&leaving.work);
            }
            stays
        });
    }

    /// Asks for an event of what comes after what was read.
    pub fn arm(&self, solicited_only: bool) {
        self.arming.arm(self.device.arm_register(), solicited_only);
    }

    /// Resizes the device's queue, keeping what is in it.
    pub fn resize(&mut self, object: &uverbs::Cq<Ctx>, cqe: u32) -> Result<u32> {
        let resized = ::mlx5::CompletionQueue::resize(object, &mut self.ring, cqe, None);
        self.entries = resized.map_err(|error| too_many_entries(error, cqe))?;
        Ok(self.entries)
    }

    pub fn capacity(&self) -> u32 {
        self.entries
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.armings.lock().remove(&self.number);
    }
}

/// What stands for a completion that makes no sense: one that names nothing.
#[cold]
#[inline(never)]
fn senseless() -> WorkCompletion {
    WorkCompletion {
        status: SENSELESS,
        ..WorkCompletion::default()
    }
}

#[cold]
#[inline(never)]
fn report(error: CompletionError) {
    tracing::error!(%error, "a completion");
}
