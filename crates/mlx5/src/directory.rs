//! From a completion's user index to the queue pair that it is about.

use std::sync::Arc;

use crate::{CreateError, Role, Work};

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
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) work: Arc<Work>,
    pub(crate) role: Role,
}

impl Directory {
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
        let index = user_index as usize;
        self.pages
            .get_mut(index / PAGE)?
            .get_mut(index % PAGE)?
            .take()
    }
}
