//! The QP table of a completion queue: from the user index of a CQE to the queue
//! pair.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::{CreateError, QpQueues, Role};

/// Numbers of queue pairs and user indices have 24 bits.
pub(crate) const NUMBER: u32 = 0xff_ffff;

/// The user index in a CQE's field.
#[inline]
pub(crate) fn user_index(field: u32) -> u32 {
    u32::from_be(field) & NUMBER
}

/// Entries of a page.
const PAGE: usize = 64;

/// The queue pair of a user index, for sends and for receives.
type Entry = [Option<Arc<QpQueues>>; 2];
type Page = Box<[Entry; PAGE]>;

const SENDS: usize = 0;
const RECEIVES: usize = 1;

/// The queue pairs that complete to one completion queue, by user index.
///
/// Each completion queue has its own table under its own lock. So a CQE cannot
/// name a queue pair of another completion queue, and a removed queue pair is not
/// used by pollers.
#[derive(Debug)]
pub(crate) struct QpTable {
    /// By the upper bits of the user index.
    pages: Vec<Option<Page>>,
    /// The last queue pairs found, for sends and for receives.
    last: [CachedQp; 2],
}

/// The result of a lookup.
#[derive(Clone, Copy, Debug)]
struct CachedQp {
    /// The CQE's raw field; more than 32 bits if none is cached.
    field: u64,
    queues: NonNull<QpQueues>,
}

impl CachedQp {
    const NONE: Self = Self {
        field: u64::MAX,
        queues: NonNull::dangling(),
    };
}

impl Default for QpTable {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            last: [CachedQp::NONE; 2],
        }
    }
}

impl QpTable {
    /// The queue pair whose sends complete here, by a CQE's field.
    #[inline]
    pub(crate) fn sender(&mut self, field: u32) -> Option<&QpQueues> {
        self.find(field, SENDS)
    }

    /// The queue pair whose receives complete here, by a CQE's field.
    #[inline]
    pub(crate) fn receiver(&mut self, field: u32) -> Option<&QpQueues> {
        self.find(field, RECEIVES)
    }

    #[inline(always)]
    fn find(&mut self, field: u32, role: usize) -> Option<&QpQueues> {
        if self.last[role].field != field.into() {
            let index = user_index(field) as usize;
            let page = self.pages.get(index / PAGE)?.as_ref()?;
            let queues = page[index % PAGE][role].as_ref()?;
            self.last[role] = CachedQp {
                field: field.into(),
                queues: NonNull::from(&**queues),
            };
        }
        // SAFETY: it is in the table: `last` is reset when a queue pair is removed.
        Some(unsafe { self.last[role].queues.as_ref() })
    }

    /// Adds a queue pair, or a role to it.
    pub(crate) fn insert(&mut self, queues: &Arc<QpQueues>, role: Role) -> Result<(), CreateError> {
        let index = queues.user_index() as usize;
        let missing = (index / PAGE + 1).saturating_sub(self.pages.len());
        self.pages
            .try_reserve(missing)
            .map_err(|_| CreateError::NoMemory)?;
        self.pages.extend((0..missing).map(|_| None));
        let page = &mut self.pages[index / PAGE];
        let page = match page {
            Some(page) => page,
            None => page.insert(new_page().ok_or(CreateError::NoMemory)?),
        };
        for (of, slot) in [Role::SEND, Role::RECEIVE]
            .into_iter()
            .zip(&mut page[index % PAGE])
        {
            if role.contains(of) {
                *slot = Some(Arc::clone(queues));
            }
        }
        Ok(())
    }

    /// Removes a queue pair. Returns whether it existed.
    pub(crate) fn remove(&mut self, user_index: u32) -> bool {
        self.last = [CachedQp::NONE; 2];
        let index = user_index as usize;
        let page = self.pages.get_mut(index / PAGE).and_then(Option::as_mut);
        page.is_some_and(|page| {
            std::mem::take(&mut page[index % PAGE])
                .iter()
                .any(Option::is_some)
        })
    }
}

/// An empty page; `None` if out of memory.
fn new_page() -> Option<Page> {
    let mut entries = Vec::new();
    entries.try_reserve_exact(PAGE).ok()?;
    entries.resize_with(PAGE, Entry::default);
    entries.into_boxed_slice().try_into().ok()
}
