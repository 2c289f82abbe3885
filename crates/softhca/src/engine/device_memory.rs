//! Device memory in the register space: the guest's processors access it there, and
//! memory keys refer to parts of it.

use std::cell::RefCell;

use roce::transport::Fault;

/// Offset of device memory in the register space: between the UARs and the interrupt
/// vector table.
pub const START: u64 = 0x1f8_0000;
/// Size of device memory in bytes.
pub const SIZE: u64 = 0x2_0000;
/// Alignment of allocations, since they are mapped in pages.
pub(crate) const PAGE_SIZE: u64 = 4096;

/// An atomic operation of a processor on one byte of device memory. Each operation has
/// an address range of its own, with an address for each byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemicOperation {
    /// A write adds its value.
    Increment = 0,
    /// A read sets the byte to 1 and returns the previous value.
    TestAndSet = 1,
}

impl MemicOperation {
    /// All operations, as a bit mask by number.
    pub(crate) const ALL: u32 = 0b11;
    /// Supported operand sizes, as a bit mask by log2 of the size: one byte.
    pub(crate) const OPERAND_SIZES: u32 = 1;

    /// Returns the operation with this number.
    pub(crate) fn from_number(number: u32) -> Option<MemicOperation> {
        match number {
            0 => Some(MemicOperation::Increment),
            1 => Some(MemicOperation::TestAndSet),
            _ => None,
        }
    }

    /// Returns the offset of its address range in the register space, behind the
    /// memory.
    const fn start(self) -> u64 {
        START + SIZE * (1 + self as u64)
    }

    /// Returns its address for a byte of device memory.
    pub(crate) fn address(self, at: u64) -> u64 {
        at - START + self.start()
    }
}

/// Meaning of an offset in the register space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Device memory.
    Plain,
    /// An atomic operation on the byte of device memory at this offset.
    MemicOperation(MemicOperation, u64),
}

/// Returns the kind of access at an offset, or `None` outside of device memory.
pub(crate) fn decode_offset(offset: u64) -> Option<Access> {
    let from = offset.checked_sub(START)?;
    let at = START + from % SIZE;
    match from / SIZE {
        0 => Some(Access::Plain),
        n => MemicOperation::from_number(u32::try_from(n - 1).ok()?)
            .map(|op| Access::MemicOperation(op, at)),
    }
}

/// An allocation: offset and length in bytes.
type Range = (u64, u64);

/// Device memory and its allocations.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    // In a cell, since keys are translated through a shared reference, as for guest
    // memory.
    bytes: RefCell<Vec<u8>>,
    allocations: Vec<Range>,
    /// Operations permitted on the allocation that begins at this offset.
    operations: Vec<(u64, MemicOperation)>,
}

impl DeviceMemory {
    pub(crate) fn new() -> DeviceMemory {
        DeviceMemory {
            bytes: RefCell::new(vec![0; SIZE as usize]),
            allocations: Vec::new(),
            operations: Vec::new(),
        }
    }

    /// Allocates a range that begins at `from` in the register space. Returns false if
    /// the range is invalid or not free.
    pub(crate) fn allocate(&mut self, from: u64, length: u64) -> bool {
        let end = from.saturating_add(length);
        let free = self
            .allocations
            .iter()
            .all(|(at, size)| end <= *at || from >= at + size);
        let is_valid =
            length != 0 && from % PAGE_SIZE == 0 && from >= START && end <= START + SIZE && free;
        if is_valid {
            self.allocations.push((from, length));
        }
        is_valid
    }

    /// Frees the allocation that begins at `from`. Returns false if there is none.
    pub(crate) fn free(&mut self, from: u64) -> bool {
        let before = self.allocations.len();
        self.allocations.retain(|(at, _)| *at != from);
        self.operations.retain(|(at, _)| *at != from);
        self.allocations.len() < before
    }

    /// Returns whether a range lies within one allocation.
    pub(crate) fn is_allocated(&self, from: u64, length: u64) -> bool {
        self.allocations
            .iter()
            .any(|(at, size)| from >= *at && from.saturating_add(length) <= at + size)
    }

    /// Permits or forbids an operation on the allocation that begins at `from`. Returns
    /// false if there is no such allocation or nothing changes.
    pub(crate) fn set_operation(
        &mut self,
        from: u64,
        operation: MemicOperation,
        enabled: bool,
    ) -> bool {
        let before = self.operations.len();
        self.operations.retain(|entry| *entry != (from, operation));
        let was_enabled = self.operations.len() < before;
        if enabled && self.allocations.iter().any(|(at, _)| *at == from) {
            self.operations.push((from, operation));
            return !was_enabled;
        }
        !enabled && was_enabled
    }

    fn is_allowed(&self, at: u64, operation: MemicOperation) -> bool {
        let range = self
            .allocations
            .iter()
            .find(|(from, size)| at >= *from && at - from < *size);
        range.is_some_and(|(from, _)| self.operations.contains(&(*from, operation)))
    }

    /// Handles a processor's read in the range of an operation; it reads 0 unless the
    /// operation is permitted.
    pub(crate) fn read_atomic(&self, operation: MemicOperation, at: u64, out: &mut [u8]) {
        out.fill(0);
        if let [byte] = out {
            if operation == MemicOperation::TestAndSet && self.is_allowed(at, operation) {
                if let Ok(range) = Self::range(at, 1) {
                    let mut bytes = self.bytes.borrow_mut();
                    *byte = std::mem::replace(&mut bytes[range.start], 1);
                }
            }
        }
    }

    /// Handles a processor's write in the range of an operation.
    pub(crate) fn write_atomic(&self, operation: MemicOperation, at: u64, data: &[u8]) {
        if let [byte] = data {
            if operation == MemicOperation::Increment && self.is_allowed(at, operation) {
                if let Ok(range) = Self::range(at, 1) {
                    let mut bytes = self.bytes.borrow_mut();
                    bytes[range.start] = bytes[range.start].wrapping_add(*byte);
                }
            }
        }
    }

    /// Frees all allocations.
    pub(crate) fn clear(&mut self) {
        self.allocations.clear();
        self.operations.clear();
    }

    fn range(at: u64, length: usize) -> Result<std::ops::Range<usize>, Fault> {
        let from = at.checked_sub(START).ok_or(Fault::Memory)?;
        let from = usize::try_from(from).map_err(|_| Fault::Memory)?;
        let to = from.checked_add(length).ok_or(Fault::Memory)?;
        (to <= SIZE as usize)
            .then_some(from..to)
            .ok_or(Fault::Memory)
    }

    /// Reads device memory from an offset in the register space.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Fault> {
        let range = Self::range(at, out.len())?;
        out.copy_from_slice(&self.bytes.borrow()[range]);
        Ok(())
    }

    /// Writes device memory at an offset in the register space.
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
    fn allocations_do_not_overlap() {
        let mut memory = DeviceMemory::new();
        assert!(memory.allocate(START, 2 * PAGE_SIZE));
        assert!(!memory.allocate(START + PAGE_SIZE, PAGE_SIZE));
        assert!(memory.allocate(START + 2 * PAGE_SIZE, 64));
        assert!(
            !memory.allocate(START + 4 * PAGE_SIZE + 64, 64),
            "not on a page"
        );
        assert!(
            !memory.allocate(START + SIZE - PAGE_SIZE, PAGE_SIZE + 1),
            "past its end"
        );
        assert!(!memory.allocate(START - PAGE_SIZE, PAGE_SIZE) && !memory.allocate(START, 0));
        assert!(memory.is_allocated(START + 64, PAGE_SIZE));
        assert!(
            !memory.is_allocated(START + PAGE_SIZE, 2 * PAGE_SIZE),
            "two ranges"
        );
        assert!(memory.free(START) && !memory.free(START));
        assert!(memory.allocate(START + PAGE_SIZE, PAGE_SIZE));
    }

    #[test]
    fn an_access_outside_of_the_bar_is_refused() {
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
