//! Accesses of the process to remote memory, of which two may be under way at a time.
//!
//! Nothing orders the work requests of two queue pairs but what the program knows of their ends,
//! which it may have learnt in any way: from its peer by another network, for example. Two
//! accesses are an error only if neither can have been before the other: the device had not begun
//! the first one when the second was posted. The requester knows that, wherever the memory is.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::memory;
use super::ranges::{Key, Ranges};
use super::watched::{Local, Use};
use crate::explain::{Origin, lock};

static ACCESSES: Mutex<Ranges<Arc<Access>>> = Mutex::new(Ranges::new());

/// Bytes of two accesses that are compared.
const MAX_COMPARED: u64 = 64 << 10;
/// Races of one access that are followed.
const MAX_RACES: usize = 4;

/// Where remote memory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// GID or LID of the port.
    pub(super) peer: [u8; 16],
    pub(super) key: u32,
}

/// The work request of an access.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// Device and number.
    pub(super) queue_pair: (usize, u32),
    pub(super) name: Name,
    pub(super) usage: Use,
    /// Where it was posted; of one that no hook sees, where its queue pair was created.
    pub(super) origin: Origin,
}

/// The name of a work request in a report.
#[derive(Clone, Copy, Debug)]
pub(super) enum Name {
    /// Its `wr_id`, from a hook.
    Posted(u64),
    /// Its number in the queue, from the device.
    Seen(u32),
}

impl Request {
    /// Returns the thread that has posted it, if it is known.
    fn thread(&self) -> Option<i32> {
        matches!(self.name, Name::Posted(_)).then_some(self.origin.thread)
    }
}

/// An access in flight.
#[derive(Debug)]
struct Access {
    place: Place,
    range: Range<u64>,
    request: Request,
    /// The buffers that it reads from or writes to, one after the other.
    buffers: Vec<Local>,
    races: Mutex<Vec<Arc<Race>>>,
}

/// An access in flight, while it exists.
#[derive(Debug)]
pub(crate) struct Remote {
    key: Key,
    access: Arc<Access>,
}

/// Two accesses to the same bytes that are not ordered, of which one writes.
#[derive(Debug)]
struct Race {
    /// The first one was posted before the other.
    requests: [Request; 2],
    range: Range<u64>,
    /// What the write writes, if the other one reads.
    written: Option<Vec<u8>>,
    /// Number of accesses that have succeeded.
    ended: AtomicU32,
    /// What was read tells nothing.
    is_void: AtomicBool,
}

/// An error: two accesses that are not ordered.
#[derive(Debug)]
pub(super) struct Unordered {
    pub(super) requests: [Request; 2],
    pub(super) range: Range<u64>,
}

impl Access {
    /// Returns the parts of the buffers that a remote range stands for.
    fn parts(&self, range: &Range<u64>) -> impl Iterator<Item = (&Local, Range<usize>)> {
        let mut start = self.range.start;
        self.buffers.iter().filter_map(move |buffer| {
            let at = start;
            start += buffer.length() as u64;
            let offset = |address: u64| address.clamp(at, start) - at;
            let part = offset(range.start) as usize..offset(range.end) as usize;
            (!part.is_empty()).then_some((buffer, part))
        })
    }

    /// Returns whether the device has not yet accessed the buffers of a remote range.
    fn is_ahead(&self, range: &Range<u64>) -> bool {
        self.parts(range)
            .all(|(buffer, part)| buffer.accessed() <= part.start)
    }

    /// Returns what it writes to a remote range, if that is known.
    fn written(&self, range: &Range<u64>) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for (buffer, part) in self.parts(range) {
            bytes.extend_from_slice(buffer.posted(part)?);
        }
        Some(bytes)
    }

    /// Returns what it has read of a remote range.
    fn read(&self, range: &Range<u64>) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for (buffer, part) in self.parts(range) {
            bytes.reserve(part.len());
            let out = &mut bytes.spare_capacity_mut()[..part.len()];
            memory::read(buffer.start() + part.start as u64, out)?;
            let length = bytes.len() + part.len();
            // SAFETY: `read` has written so many bytes after those that there were.
            unsafe { bytes.set_len(length) };
        }
        Some(bytes)
    }

    /// Returns the race of an access with one that is posted later; `None` if there is none, or if
    /// it changes nothing.
    fn race(&self, later: &Self) -> Option<Race> {
        let (a, b) = (&self.request, &later.request);
        if self.place != later.place || a.queue_pair == b.queue_pair {
            return None;
        }
        let start = self.range.start.max(later.range.start);
        let end = self.range.end.min(later.range.end);
        let range = start..end.min(start.saturating_add(MAX_COMPARED));
        if !self.is_ahead(&range) {
            return None;
        }
        let written = match (a.usage, b.usage) {
            (Use::Answer, Use::Answer) => return None,
            (Use::Gather, Use::Gather) => {
                if self.written(&range)? == later.written(&range)? {
                    return None;
                }
                None
            }
            // Threads may read what others change, and find that out by a version or a checksum.
            _ if a.thread().is_none() || a.thread() != b.thread() => return None,
            (Use::Gather, Use::Answer) => Some(self.written(&range)?),
            (Use::Answer, Use::Gather) => Some(later.written(&range)?),
        };
        Some(Race {
            requests: [a.clone(), b.clone()],
            range,
            written,
            ended: AtomicU32::new(0),
            is_void: AtomicBool::new(false),
        })
    }
}

impl Remote {
    /// Notes an access before it is posted.
    pub(super) fn new(place: Place, start: u64, request: Request, buffers: Vec<Local>) -> Self {
        let length: u64 = buffers.iter().map(|buffer| buffer.length() as u64).sum();
        let range = start..start.saturating_add(length);
        let access = Arc::new(Access {
            place,
            range: range.clone(),
            request,
            buffers,
            races: Mutex::default(),
        });
        let mut accesses = lock(&ACCESSES);
        for earlier in accesses.overlapping(range.clone()) {
            let mut earlier_races = lock(&earlier.races);
            let mut races = lock(&access.races);
            if earlier_races.len().max(races.len()) == MAX_RACES {
                continue;
            }
            if let Some(race) = earlier.race(&access).map(Arc::new) {
                earlier_races.push(Arc::clone(&race));
                races.push(race);
            }
        }
        let key = accesses.insert(range, Arc::clone(&access));
        drop(accesses);
        Self { key, access }
    }

    /// Handles its end, by success. Returns the errors in which it is the second one to end.
    pub(super) fn succeeded(&self) -> Vec<Unordered> {
        let races = std::mem::take(&mut *lock(&self.access.races));
        let mut errors = Vec::new();
        for race in races {
            let is_seen = match (&race.written, self.access.request.usage) {
                (Some(written), Use::Answer) => {
                    // What the write has written, or was there before: both may be in order.
                    let read = self.access.read(&race.range);
                    read.is_some_and(|read| read != *written)
                }
                // Otherwise the device's accesses are not known.
                _ => !self.access.is_ahead(&race.range),
            };
            if !is_seen {
                race.is_void.store(true, Ordering::SeqCst);
            }
            let is_second = race.ended.fetch_add(1, Ordering::SeqCst) == 1;
            if is_second && !race.is_void.load(Ordering::SeqCst) {
                errors.push(Unordered {
                    requests: race.requests.clone(),
                    range: race.range.clone(),
                });
            }
        }
        errors
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        lock(&ACCESSES).remove(self.key);
    }
}
