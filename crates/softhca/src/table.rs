//! Tables of numbered objects.

use std::collections::VecDeque;

/// Objects of one kind, numbered from `first` on. Freed numbers are reused as late
/// as possible, so that a stale number does not name another object soon.
#[derive(Debug)]
pub struct Table<T> {
    first: u32,
    limit: usize,
    slots: Vec<Option<T>>,
    free: VecDeque<u32>,
    used: usize,
    reuse_after: usize,
}

/// The most freed numbers that wait before one is reused, while the table has
/// unused slots.
const REUSE_AFTER: usize = 64;

impl<T> Table<T> {
    /// Creates a table of at most `limit` objects, whose numbers begin at `first`.
    pub fn new(first: u32, limit: usize) -> Self {
        Table {
            first,
            limit,
            slots: Vec::new(),
            free: VecDeque::new(),
            used: 0,
            reuse_after: REUSE_AFTER,
        }
    }

    /// Sets how many freed numbers wait before one is used again, while there are unused ones.
    /// With 0, the number that was freed last is used next.
    pub fn set_reuse_after(&mut self, count: usize) {
        self.reuse_after = count;
    }

    fn slot(&self, number: u32) -> Option<usize> {
        number.checked_sub(self.first).map(|n| n as usize)
    }

    /// Inserts an object. Returns its number, or the object if the table is full.
    pub fn insert(&mut self, object: T) -> Result<u32, T> {
        self.insert_with(|_| object)
    }

    /// Like `insert`, for objects that contain their number.
    pub fn insert_with(&mut self, make: impl FnOnce(u32) -> T) -> Result<u32, T> {
        let full = self.slots.len() >= self.limit;
        let slot = match self.reuse_after {
            0 => self.free.pop_back(),
            count if self.free.len() > count || full => self.free.pop_front(),
            _ => None,
        };
        let slot = match slot {
            Some(slot) => slot as usize,
            None if full => return Err(make(u32::MAX)),
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        // Does not overflow: the limits of all tables are below 2^24.
        let number = self.first + slot as u32;
        self.slots[slot] = Some(make(number));
        self.used += 1;
        Ok(number)
    }

    /// Returns the object with this number.
    pub fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(self.slot(number)?)?.as_ref()
    }

    /// Returns the object with this number, mutable.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let slot = self.slot(number)?;
        self.slots.get_mut(slot)?.as_mut()
    }

    /// Removes and returns an object.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let slot = self.slot(number)?;
        let object = self.slots.get_mut(slot)?.take()?;
        self.free.push_back(slot as u32);
        self.used -= 1;
        Some(object)
    }

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Iterates over all objects and their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let first = self.first;
        self.slots
            .iter()
            .enumerate()
            .filter_map(move |(slot, object)| Some((first + slot as u32, object.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_begin_at_the_first_and_end_at_the_limit() {
        let mut table = Table::new(8, 2);
        assert_eq!(table.insert('a'), Ok(8));
        assert_eq!(table.insert('b'), Ok(9));
        assert_eq!(table.insert('c'), Err('c'));
        assert_eq!(table.remove(8), Some('a'));
        assert_eq!(table.remove(8), None);
        assert_eq!(table.get(8), None);
        assert_eq!(table.get(7), None);
        assert_eq!(table.insert('c'), Ok(8));
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn a_number_is_not_used_again_at_once() {
        let mut table = Table::new(1, 1000);
        let number = table.insert(0).unwrap();
        table.remove(number);
        assert_ne!(table.insert(0), Ok(number));
    }
}
