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
    /// Whose completion was read last, for sends and for receives.
    recent: [Recent<Outstanding>; 2],
    /// The same of receives that were a shared queue's.
    recent_shared: Recent<SharedWork>,
}

/// A queue that was looked up.
#[derive(Debug)]
struct Recent<Q> {
    /// The field of a completion that names it, as it is there, which has 32
    /// bits; more, if there is none.
    field: u64,
    /// One of an entry's.
    queue: NonNull<Q>,
}

impl<Q> Recent<Q> {
    const NONE: Self = Self {
        field: u64::MAX,
        queue: NonNull::dangling(),
    };

    /// The queue, if it is the one of this field.
    #[inline(always)]
    fn get(&self, field: u32) -> Option<&Q> {
        if self.field != u64::from(field) {
            return None;
        }
        // SAFETY: its entry is there: with an entry what is recent is forgotten.
        Some(unsafe { self.queue.as_ref() })
    }
}

impl<Q> Default for Recent<Q> {
    fn default() -> Self {
        Self::NONE
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
        if self.recent[usize::from(receives)].field != u64::from(field) {
            self.look_up(receives, field);
        }
        self.recent(receives, field)
    }

    /// As [`Directory::queue`], if it is the one that was asked for last.
    #[inline(always)]
    pub(crate) fn recent(&self, receives: bool, field: u32) -> Option<&Outstanding> {
        self.recent[usize::from(receives)].get(field)
    }

    /// The shared queue that a completion of a receive is about, if it is of a
    /// queue pair without one of its own.
    #[inline(always)]
    pub(crate) fn shared(&mut self, field: u32) -> Option<&SharedWork> {
        if self.recent_shared.field != u64::from(field) {
            self.look_up(true, field);
        }
        self.recent_shared.get(field)
    }

    /// Looks up another queue than the last time. It is the recent one then, if
    /// there is one, of the kind that it is.
    #[inline(never)]
    fn look_up(&mut self, receives: bool, field: u32) {
        if receives && self.recent_shared.field == u64::from(field) {
            return;
        }
        let Some(entry) = self.find(user_index(field)) else {
            return;
        };
        let role = [Role::SEND, Role::RECEIVE][usize::from(receives)];
        if !entry.role.contains(role) {
            return;
        }
        let field = field.into();
        match &entry.work.shared {
            Some(shared) if receives => {
                let queue = NonNull::from(&**shared);
                self.recent_shared = Recent { field, queue };
            }
            _ => {
                let queues = [&entry.work.sends, &entry.work.receives];
                let queue = NonNull::from(queues[usize::from(receives)]);
                self.recent[usize::from(receives)] = Recent { field, queue };
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
        self.recent = Default::default();
        self.recent_shared = Recent::NONE;
        let index = user_index as usize;
        self.pages
            .get_mut(index / PAGE)?
            .get_mut(index % PAGE)?
            .take()
    }
}
