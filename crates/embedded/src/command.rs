//! Commands to the device: how they are put together, and how they end.
//!
//! The fields are those of Linux's `mlx5_ifc.h`, and none is shared with a
//! driver of this project.

use softhca::Hca;
use softhca::bits::{Field, field, put64};
use softhca::command::opcode as op;

use crate::memory::Process;
use crate::{Result, refuse};

const OPCODE: Field = field(0, 31, 16);
const STATUS: Field = field(0, 31, 24);
/// The number that most commands name an object by, and most answers a new one.
pub(crate) const NUMBER: Field = field(8, 23, 0);
/// Where commands that carry a list of pages have it.
pub(crate) const PAGES_AT: usize = 0x110;

/// A command's input.
#[derive(Debug)]
pub(crate) struct Input(Vec<u8>);

impl Input {
    /// A command of `length` bytes.
    pub(crate) fn new(opcode: u16, length: usize) -> Self {
        let mut bytes = vec![0; length];
        OPCODE.put(&mut bytes, opcode.into());
        Self(bytes)
    }

    /// A command that names an object and nothing else.
    pub(crate) fn about(opcode: u16, number: u32) -> Self {
        Self::new(opcode, 32).set(NUMBER, number)
    }

    /// Sets a field.
    pub(crate) fn set(mut self, field: Field, value: u32) -> Self {
        field.put(&mut self.0, value);
        self
    }

    /// Sets a double word.
    pub(crate) fn long(mut self, at: usize, value: u64) -> Self {
        put64(&mut self.0, at, value);
        self
    }

    /// Sets bytes, which fit.
    pub(crate) fn bytes(mut self, at: usize, bytes: &[u8]) -> Self {
        softhca::bits::put_bytes(&mut self.0, at, bytes);
        self
    }
}

/// Has the device carry out a command; its answer.
///
/// # Errors
/// What mlx5_core makes of the device's status.
pub(crate) fn run(hca: &mut Hca<Process>, input: &Input, length: usize) -> Result<Vec<u8>> {
    let output = hca.execute(&input.0, length);
    let errno = match STATUS.get(&output) {
        0 => return Ok(output),
        // A resource in use.
        0x6 => libc::EBUSY,
        // More than the device has.
        0x8 => libc::ENOMEM,
        0xf => libc::EAGAIN,
        // Bad: opcode, parameter, resource, its state, index, QP's state, CQ's.
        0x2 | 0x3 | 0x5 | 0x9 | 0xa | 0x10 | 0x40 => libc::EINVAL,
        _ => libc::EIO,
    };
    let opcode = OPCODE.get(&input.0) as u16;
    tracing::info!(command = op::name(opcode), errno, "the device refuses");
    refuse(errno)
}

/// Has the device make something; its number.
pub(crate) fn make(hca: &mut Hca<Process>, input: &Input) -> Result<u32> {
    run(hca, input, 16).map(|output| NUMBER.get(&output))
}

/// Pages are counted from this size on.
const PAGE_SHIFT: u32 = 12;

/// The size of a page, as commands have it, that all of a queue of `bytes`
/// bytes lies in: the device sees it as one, wherever it begins.
pub(crate) fn log_page_size(bytes: u64) -> u32 {
    let shift = bytes.max(1).next_power_of_two().ilog2();
    shift.saturating_sub(PAGE_SHIFT)
}

/// Whether a queue can be at an address: where a page begins.
pub(crate) fn is_page(address: u64) -> bool {
    address.is_multiple_of(1 << PAGE_SHIFT)
}
