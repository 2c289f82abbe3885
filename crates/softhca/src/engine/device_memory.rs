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

/// What the processors do to a byte of it in one access, at an address of its
/// own for each byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtOnce {
    /// What is written is added.
    Increment = 0,
    /// What is read is 1 afterwards.
    TestAndSet = 1,
}

impl AtOnce {
    /// All of them, as bits by their numbers.
    pub(crate) const ALL: u32 = 0b11;
    /// The lengths that they are done with, as bits by the logarithm: a byte.
    pub(crate) const LENGTHS: u32 = 1;

    /// The one of a number.
    pub(crate) fn numbered(number: u32) -> Option<AtOnce> {
        match number {
            0 => Some(AtOnce::Increment),
            1 => Some(AtOnce::TestAndSet),
            _ => None,
        }
    }

    /// Where its addresses begin in the register space, behind the memory.
    const fn start(self) -> u64 {
        START + SIZE * (1 + self as u64)
    }

    /// Its address for a byte of the memory.
    pub(crate) fn address(self, at: u64) -> u64 {
        at - START + self.start()
    }
}

/// What an offset in the register space is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// The memory.
    Plain,
    /// A byte of the memory, whose offset this is.
    AtOnce(AtOnce, u64),
}

/// What is at an offset; none if it is none of this.
pub(crate) fn access(offset: u64) -> Option<Access> {
    let from = offset.checked_sub(START)?;
    let at = START + from % SIZE;
    match from / SIZE {
        0 => Some(Access::Plain),
        n => AtOnce::numbered(u32::try_from(n - 1).ok()?).map(|op| Access::AtOnce(op, at)),
    }
}

/// A range that was given out: where, and how many bytes.
type Range = (u64, u64);

/// The memory, and what of it is given out.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    // Keys are translated through a shared reference, as for the guest's memory.
    bytes: RefCell<Vec<u8>>,
    taken: Vec<Range>,
    /// What can be done at once with the range that begins here.
    at_once: Vec<(u64, AtOnce)>,
}

impl DeviceMemory {
    pub(crate) fn new() -> DeviceMemory {
        DeviceMemory {
            bytes: RefCell::new(vec![0; SIZE as usize]),
            taken: Vec::new(),
            at_once: Vec::new(),
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
        self.at_once.retain(|(at, _)| *at != from);
        self.taken.len() < before
    }

    /// Whether a range was given out, all of it at once.
    pub(crate) fn is_taken(&self, from: u64, length: u64) -> bool {
        self.taken
            .iter()
            .any(|(at, size)| from >= *at && from.saturating_add(length) <= at + size)
    }

    /// Lets an operation be done with the range that begins at `from`, or no
    /// longer. False if that cannot be, or was not.
    pub(crate) fn allow(&mut self, from: u64, operation: AtOnce, yes: bool) -> bool {
        let before = self.at_once.len();
        self.at_once.retain(|entry| *entry != (from, operation));
        let had = self.at_once.len() < before;
        if yes && self.taken.iter().any(|(at, _)| *at == from) {
            self.at_once.push((from, operation));
            return !had;
        }
        !yes && had
    }

    fn is_allowed(&self, at: u64, operation: AtOnce) -> bool {
        let range = self
            .taken
            .iter()
            .find(|(from, size)| at >= *from && at - from < *size);
        range.is_some_and(|(from, _)| self.at_once.contains(&(*from, operation)))
    }

    /// A processor reads where operations are done: 0 unless that is one.
    pub(crate) fn read_at_once(&self, operation: AtOnce, at: u64, out: &mut [u8]) {
        out.fill(0);
        if let [byte] = out
            && operation == AtOnce::TestAndSet
            && self.is_allowed(at, operation)
            && let Ok(range) = Self::range(at, 1)
        {
            let mut bytes = self.bytes.borrow_mut();
            *byte = std::mem::replace(&mut bytes[range.start], 1);
        }
    }

    /// A processor writes where operations are done.
    pub(crate) fn write_at_once(&self, operation: AtOnce, at: u64, data: &[u8]) {
        if let [byte] = data
            && operation == AtOnce::Increment
            && self.is_allowed(at, operation)
            && let Ok(range) = Self::range(at, 1)
        {
            let mut bytes = self.bytes.borrow_mut();
            bytes[range.start] = bytes[range.start].wrapping_add(*byte);
        }
    }

    /// Forgets who has what.
    pub(crate) fn clear(&mut self) {
        self.taken.clear();
        self.at_once.clear();
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
