//! Commands to the device: building them, and converting their status.
//!
//! Their fields are those of [`softhca::layout`].

use roce::bits::{Field, put64};
use softhca::Hca;
use softhca::command::opcode as op;
use softhca::layout::PAGE_LIST;
pub(crate) use softhca::layout::header::NUMBER;
use softhca::layout::header::OPCODE;
use softhca::rule::Rule;

use crate::driver::cause::{Result, by_device, invalid, require};
use crate::driver::memory::Process;

/// Input of a command.
#[derive(Clone, Debug)]
pub(crate) struct Input(Vec<u8>);

impl Input {
    /// Creates a command of `length` bytes.
    pub(crate) fn new(opcode: u16, length: usize) -> Self {
        let mut bytes = vec![0; length];
        OPCODE.put(&mut bytes, opcode.into());
        Self(bytes)
    }

    /// Creates a command whose only parameter is an object number.
    pub(crate) fn about(opcode: u16, number: u32) -> Self {
        Self::new(opcode, 32).set(NUMBER, number)
    }

    /// Tags the command with a user context.
    pub(crate) fn by(self, uid: u32) -> Self {
        self.set(softhca::layout::header::UID, uid)
    }

    /// Sets a field.
    pub(crate) fn set(mut self, field: Field, value: u32) -> Self {
        field.put(&mut self.0, value);
        self
    }

    /// Sets fields of a context that begins at byte `at`.
    pub(crate) fn fields<const N: usize>(mut self, at: usize, fields: [(Field, u32); N]) -> Self {
        for (field, value) in fields {
            field.at(at).put(&mut self.0, value);
        }
        self
    }

    /// Sets a 64-bit field.
    pub(crate) fn long(mut self, at: usize, value: u64) -> Self {
        put64(&mut self.0, at, value);
        self
    }

    /// Lists the pages of a queue at the end of the command. A queue that begins
    /// at a page is one page for the device, however long it is. Another one is
    /// listed as the driver does (`mlx5_umem_find_best_quantized_pgoff`): its offset
    /// in the first page is counted in 64ths of a page.
    ///
    /// # Errors
    /// EINVAL for an address that the fields cannot express.
    pub(crate) fn pages(self, fields: (Field, Field), place: (u64, u64)) -> Result<Self> {
        self.pages_at(PAGE_LIST, fields, place)
    }

    /// As [`Input::pages`], for a command whose list begins at byte `at`.
    ///
    /// # Errors
    /// As for [`Input::pages`].
    pub(crate) fn pages_at(
        mut self,
        at: usize,
        (size, offset): (Field, Field),
        (address, bytes): (u64, u64),
    ) -> Result<Self> {
        const PARTS: u64 = 64;
        require(
            address.checked_add(bytes).is_some(),
            "address of the queue",
            address,
            Rule::NoWrap,
        )?;
        if is_page(address) || bytes == 0 {
            return Ok(self.set(size, log_page_size(bytes)).long(at, address));
        }
        for shift in PAGE_SHIFT..LONGEST_PAGE {
            let page = 1 << shift;
            let (within, part) = (address % page, page / PARTS);
            let parts = u32::try_from(within / part).unwrap_or(u32::MAX);
            if within % part != 0 || parts > offset.largest() {
                continue;
            }
            let count = (within + bytes).div_ceil(page) as usize;
            self.0.resize(at + 8 * count, 0);
            for number in 0..count {
                let start = address - within + number as u64 * page;
                put64(&mut self.0, at + 8 * number, start);
            }
            return Ok(self.set(size, shift - PAGE_SHIFT).set(offset, parts));
        }
        invalid("address of the queue", address, Rule::MultipleOf(PARTS))
    }

    /// Sets bytes, which must fit.
    pub(crate) fn bytes(mut self, at: usize, bytes: &[u8]) -> Self {
        roce::bits::put_bytes(&mut self.0, at, bytes);
        self
    }
}

/// Executes a command on the device and returns its answer.
///
/// # Errors
/// The error to which mlx5_core maps the device's status.
pub(crate) fn run(hca: &mut Hca<Process>, input: &Input, length: usize) -> Result<Vec<u8>> {
    let (output, outcome) = hca.execute_command(&input.0, length);
    match outcome {
        Ok(()) => Ok(output),
        Err(error) => Err(by_device(op::name(OPCODE.get(&input.0) as u16), error)),
    }
}

/// Executes a command that creates an object, and returns the object's number.
pub(crate) fn make(hca: &mut Hca<Process>, input: &Input) -> Result<u32> {
    run(hca, input, 16).map(|output| NUMBER.get(&output))
}

/// Page sizes in commands are relative to this one.
const PAGE_SHIFT: u32 = 12;
/// Logarithm of the size above which no page is tried.
const LONGEST_PAGE: u32 = 30;

/// Returns the page size, as encoded in commands, of a page that covers a queue
/// of `bytes` bytes: the device then sees it as one page, at whatever address
/// it begins.
pub(crate) fn log_page_size(bytes: u64) -> u32 {
    let shift = bytes.max(1).next_power_of_two().ilog2();
    shift.saturating_sub(PAGE_SHIFT)
}

/// Returns whether a queue may begin at an address, that is, at a page
/// boundary.
pub(crate) fn is_page(address: u64) -> bool {
    address % (1 << PAGE_SHIFT) == 0
}

#[cfg(test)]
mod tests {
    use roce::bits::{field, get64};

    use super::*;

    const SIZE: Field = field(0x28, 28, 24);
    const OFFSET: Field = field(0x18, 11, 6);
    const SHORT: Field = field(0x14, 20, 16);

    fn listed(offset: Field, queue: (u64, u64)) -> Option<(u32, u32, Vec<u64>)> {
        let input = Input::new(op::CREATE_CQ, PAGE_LIST + 8);
        let input = input.pages((SIZE, offset), queue).ok()?;
        let pages = (PAGE_LIST..input.0.len()).step_by(8);
        let pages = pages.map(|at| get64(&input.0, at)).collect();
        Some((SIZE.get(&input.0), offset.get(&input.0), pages))
    }

    #[test]
    fn a_queue_may_begin_within_a_page() {
        // At a page it is one page, of the next power of two.
        assert_eq!(listed(OFFSET, (0x5000, 0x3000)), Some((2, 0, vec![0x5000])));
        assert_eq!(listed(OFFSET, (0, 0)), Some((0, 0, vec![0])));
        let across = Some((0, 1, vec![0x5000, 0x6000]));
        assert_eq!(listed(OFFSET, (0x5040, 0x1000)), across);
        assert_eq!(listed(OFFSET, (0x5fc0, 0x40)), Some((0, 63, vec![0x5000])));
        // Five bits of offset: with larger pages it is a smaller number.
        assert_eq!(listed(SHORT, (0x4800, 0x40)), Some((1, 16, vec![0x4000])));
        assert_eq!(listed(SHORT, (0x5fc0, 0x40)), None);
        assert_eq!(listed(OFFSET, (0x5020, 0x40)), None);
        assert_eq!(listed(OFFSET, (u64::MAX - 0x3f, 0x1000)), None);
    }
}
