//! From a completion's user index to the queue pair that it is about.

use std::ptr::NonNull;
use std::sync::Arc;

use ring::Outstanding;

use crate::{CreateError, Role, SharedWork, Work};

/// Numbers of queue pairs and user indices have 24 bits.
pub(crate) const NUMBER: u32 = 0xff_ffff;

/// The user index in a completion's field.
#[inline(always)]
pub(crate) fn user_index(field: u32) -> u32 {
    u32::from_be(field) & NUMBER
}

/// Entries of a page.
const PAGE: usize = 64;

/// The queue pairs that complete to one completion queue.
///
/// Each completion queue has its own, under its own lock. So a completion that
/// names another queue's queue pair finds nothing, and a queue pair that is
/// gone from here is used by nobody who reads completions.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    /// By the upper bits of the user index; each empty or of [`PAGE`] entries.
    pages: Vec<Box<[Option<Entry>]>>,
    /// Whose completions were read of late, for sends and for receives.
    recent: [Recent<Outstanding>; 2],
    /// The same of receives that were a shared queue's.
    recent_shared: Recent<SharedWork>,
}

/// How many queue pairs may take turns before one has to be looked up again, if
/// the lowest bits of their user indices differ, as those of neighbours do.
const WAYS: usize = 64;

/// The place among [`WAYS`] of the queue pair that a completion's field names:
/// by the lowest bits of its user index.
#[inline(always)]
fn way(field: u32) -> usize {
    usize::from(field.to_ne_bytes()[3]) % WAYS
}

/// Queues that were looked up, each in the place of the field that names it.
#[derive(Debug)]
struct Recent<Q> {
    /// The fields of completions, as they are there. Where there is none, one
    /// that has another place.
    fields: [u32; WAYS],
    /// The queues of entries.
    queues: [NonNull<Q>; WAYS],
}

impl<Q> Recent<Q> {
    /// The queue, if it is that of this field which is here.
    #[inline(always)]
    fn get(&self, field: u32) -> Option<&Q> {
        if !self.has(field) {
            return None;
        }
        // SAFETY: it was set with this field, and its entry is there: with an
        // entry what is recent is forgotten.
        Some(unsafe { self.queues[way(field)].as_ref() })
    }

    #[inline(always)]
    fn has(&self, field: u32) -> bool {
        self.fields[way(field)] == field
    }

    /// `queue` is one of an entry's, which this field names.
    fn set(&mut self, field: u32, queue: NonNull<Q>) {
        self.fields[way(field)] = field;
        self.queues[way(field)] = queue;
    }

    /// What is in a place is forgotten.
    fn forget(&mut self, way: usize) {
        self.fields[way] = Self::elsewhere(way);
    }

    /// A field that has another place than this.
    fn elsewhere(way: usize) -> u32 {
        u32::from_ne_bytes([0, 0, 0, !(way as u8)])
    }
}

impl<Q> Default for Recent<Q> {
    fn default() -> Self {
        Self {
            fields: std::array::from_fn(Self::elsewhere),
            queues: [NonNull::dangling(); WAYS],
        }
    }
}

// SAFETY: `recent` leads to what `pages` owns a share of.
unsafe impl Send for Directory {}
// SAFETY: as above; it is used under `&mut` only.
unsafe impl Sync for Directory {}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) work: Arc<Work>,
    pub(crate) role: Role,
}

impl Directory {
    /// The queue of a queue pair's own that a completion is about: that of its
    /// sends, or, if `receives`, of its receives. `field` names it, as in the
    /// completion.
    #[inline(always)]
    pub(crate) fn queue(&mut self, receives: bool, field: u32) -> Option<&Outstanding> {
        self.make_recent(receives, field);
        self.recent(receives, field)
    }

    /// So that [`Directory::recent`] gives what [`Directory::queue`] would.
    #[inline(always)]
    pub(crate) fn make_recent(&mut self, receives: bool, field: u32) {
        if !self.recent[usize::from(receives)].has(field) {
            self.look_up(receives, field);
        }
    }

    /// As [`Directory::queue`], if it is one that was asked for of late.
    #[inline(always)]
    pub(crate) fn recent(&self, receives: bool, field: u32) -> Option<&Outstanding> {
        self.recent[usize::from(receives)].get(field)
    }

    /// The shared queue that a completion of a receive is about, if it is of a
    /// queue pair without one of its own.
    #[inline(always)]
    pub(crate) fn shared(&mut self, field: u32) -> Option<&SharedWork> {
        if !self.recent_shared.has(field) {
            self.look_up(true, field);
        }
        self.recent_shared.get(field)
    }

    /// Looks up a queue. It is a recent one then, if there is one, of the kind
    /// that it is.
    #[inline(never)]
    fn look_up(&mut self, receives: bool, field: u32) {
        if receives && self.recent_shared.has(field) {
            return;
        }
        let Some(entry) = self.find(user_index(field)) else {
            return;
        };
        let role = [Role::SEND, Role::RECEIVE][usize::from(receives)];
        if !entry.role.contains(role) {
            return;
        }
        match &entry.work.shared {
            Some(shared) if receives => {
                let queue = NonNull::from(&**shared);
                self.recent_shared.set(field, queue);
            }
            _ => {
                let at = usize::from(receives);
                let queue = NonNull::from([&entry.work.sends, &entry.work.receives][at]);
                self.recent[at].set(field, queue);
            }
        }
    }

    #[inline(always)]
    pub(crate) fn find(&self, user_index: u32) -> Option<&Entry> {
        let index = user_index as usize;
        self.pages.get(index / PAGE)?.get(index % PAGE)?.as_ref()
    }

    /// Adds a queue pair, or one more role of it.
    pub(crate) fn insert(&mut self, work: &Arc<Work>, role: Role) -> Result<(), CreateError> {
        let index = work.user_index() as usize;
        let missing = (index / PAGE + 1).saturating_sub(self.pages.len());
        self.pages
            .try_reserve(missing)
            .map_err(|_| CreateError::NoMemory)?;
        for _ in 0..missing {
            self.pages.push(Box::default());
        }
        let page = &mut self.pages[index / PAGE];
        if page.is_empty() {
            let mut entries = Vec::new();
            entries
                .try_reserve_exact(PAGE)
                .map_err(|_| CreateError::NoMemory)?;
            entries.resize_with(PAGE, || None);
            *page = entries.into_boxed_slice();
        }
        let entry = page[index % PAGE].get_or_insert_with(|| Entry {
            work: Arc::clone(work),
            role: Role::empty(),
        });
        entry.role |= role;
        Ok(())
    }

    /// Forgets a queue pair.
    pub(crate) fn remove(&mut self, user_index: u32) -> Option<Entry> {
        let way = way(user_index.to_be());
        for recent in &mut self.recent {
            recent.forget(way);
        }
        self.recent_shared.forget(way);
        let index = user_index as usize;
        self.pages
            .get_mut(index / PAGE)?
            .get_mut(index % PAGE)?
            .take()
    }
}
