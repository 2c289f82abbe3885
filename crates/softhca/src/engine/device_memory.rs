//! Memory of the device itself, in its register space: the guest's processors
//! reach it there, and memory keys name parts of it.

use std::cell::RefCell;

use crate::transport::Fault;

/// Where it begins in the register space: between the UARs and the table of
/// the interrupt vectors.
pub const START: u64 = 0x1f8_0000;
/// Bytes of it.
pub const SIZE: u64 = 0x2_0000;
/// It is given out in pages, since it is mapped in pages.
pub(crate) const PAGE: u64 = 4096;

/// A range that was given out: where, and how many bytes.
type Range = (u64, u64);

/// The memory, and what of it is given out.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    // Keys are translated through a shared reference, as for the guest's memory.
    bytes: RefCell<Vec<u8>>,
    taken: Vec<Range>,
}

impl DeviceMemory {
    pub(crate) fn new() -> DeviceMemory {
        DeviceMemory {
            bytes: RefCell::new(vec![0; SIZE as usize]),
            taken: Vec::new(),
        }
    }

    /// Gives a range out, which begins at `from` in the register space. False
    /// if it cannot be had.
    pub(crate) fn take(&mut self, from: u64, length: u64) -> bool {
        let end = from.saturating_add(length);
        let free = self
            .taken
            .iter()
            .all(|(at, size)| end <= *at || from >= at + size);
        let good = length != 0
            && from.is_multiple_of(PAGE)
            && from >= START
            && end <= START + SIZE
            && free;
        if good {
            self.taken.push((from, length));
        }
        good
    }

    /// Takes a range back; false if none begins there.
    pub(crate) fn give_back(&mut self, from: u64) -> bool {
        let before = self.taken.len();
        self.taken.retain(|(at, _)| *at != from);
        self.taken.len() < before
    }

    /// Whether a range was given out, all of it at once.
    pub(crate) fn is_taken(&self, from: u64, length: u64) -> bool {
        self.taken
            .iter()
            .any(|(at, size)| from >= *at && from.saturating_add(length) <= at + size)
    }

    /// Forgets who has what.
    pub(crate) fn clear(&mut self) {
        self.taken.clear();
    }

    fn range(at: u64, length: usize) -> Result<std::ops::Range<usize>, Fault> {
        let from = at.checked_sub(START).ok_or(Fault::Memory)?;
        let from = usize::try_from(from).map_err(|_| Fault::Memory)?;
        let to = from.checked_add(length).ok_or(Fault::Memory)?;
        (to <= SIZE as usize)
            .then_some(from..to)
            .ok_or(Fault::Memory)
    }

    /// Copies out of it, from an offset in the register space on.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Fault> {
        let range = Self::range(at, out.len())?;
        out.copy_from_slice(&self.bytes.borrow()[range]);
        Ok(())
    }

    /// Copies into it.
    pub(crate) fn write(&self, at: u64, data: &[u8]) -> Result<(), Fault> {
        let range = Self::range(at, data.len())?;
        self.bytes.borrow_mut()[range].copy_from_slice(data);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_out_is_not_given_out_again() {
        let mut memory = DeviceMemory::new();
        assert!(memory.take(START, 2 * PAGE));
        assert!(!memory.take(START + PAGE, PAGE));
        assert!(memory.take(START + 2 * PAGE, 64));
        assert!(!memory.take(START + 4 * PAGE + 64, 64), "not on a page");
        assert!(!memory.take(START + SIZE - PAGE, PAGE + 1), "past its end");
        assert!(!memory.take(START - PAGE, PAGE) && !memory.take(START, 0));
        assert!(memory.is_taken(START + 64, PAGE));
        assert!(!memory.is_taken(START + PAGE, 2 * PAGE), "two ranges");
        assert!(memory.give_back(START) && !memory.give_back(START));
        assert!(memory.take(START + PAGE, PAGE));
    }

    #[test]
    fn nothing_is_outside_of_it() {
        let memory = DeviceMemory::new();
        let mut eight = [0; 8];
        assert!(memory.write(START + SIZE - 8, &[7; 8]).is_ok());
        assert!(memory.read(START + SIZE - 8, &mut eight).is_ok());
        assert_eq!(eight, [7; 8]);
        for at in [START - 1, START + SIZE - 7, u64::MAX] {
            assert_eq!(memory.read(at, &mut eight), Err(Fault::Memory));
        }
    }
}
