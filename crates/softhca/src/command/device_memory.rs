//! Device memory commands.

use roce::bits::{Field, field, get64, put64};

use super::OP_MOD;
use crate::engine::core::Core;
use crate::engine::device_memory::MemicOperation;
use crate::platform::Platform;
use crate::status::{Outcome, Rule, Status, invalid, no_object, refuse};

/// Base-2 logarithm of the alignment in units of 64 bytes. Allocations begin on a
/// page, which satisfies every alignment up to the limit.
const LOG_ALIGNMENT: Field = field(0xc, 7, 0);
const MAX_LOG_ALIGNMENT: u32 = 6;
const RANGE_START: usize = 0x10;
const LENGTH: Field = field(0x1c, 31, 0);
const ALLOCATED_START: usize = 8;

const OPERATION_ALLOC: u32 = 0;
const OPERATION_DEALLOC: u32 = 1;
const OPERATION: Field = field(0xc, 7, 0);
const OPERATION_ADDRESS: usize = 0x10;

impl<P: Platform> Core<P> {
    pub(crate) fn alloc_memic(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        if LOG_ALIGNMENT.get(input) > MAX_LOG_ALIGNMENT {
            return Err(invalid(
                "log_memic_addr_alignment",
                LOG_ALIGNMENT.get(input),
                Rule::AtMost(MAX_LOG_ALIGNMENT.into()),
            ));
        }
        let from = get64(input, RANGE_START);
        if !self
            .device_memory
            .allocate(from, u64::from(LENGTH.get(input)))
        {
            return Err(refuse(
                Status::NoResources,
                "device memory at",
                from,
                Rule::Free,
            ));
        }
        put64(output, ALLOCATED_START, from);
        Ok(())
    }

    pub(crate) fn modify_memic(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let from = get64(input, RANGE_START);
        let enabled = match OP_MOD.get(input) {
            OPERATION_ALLOC => true,
            OPERATION_DEALLOC => false,
            _ => {
                return Err(invalid("op_mod", OP_MOD.get(input), Rule::OneOf(&[0, 1])));
            }
        };
        let operation = MemicOperation::from_number(OPERATION.get(input)).ok_or_else(|| {
            invalid(
                "memic_operation_type",
                OPERATION.get(input),
                Rule::Supported,
            )
        })?;
        if !self.device_memory.set_operation(from, operation, enabled) {
            return Err(no_object("device memory without this operation at", from));
        }
        if enabled {
            put64(output, OPERATION_ADDRESS, operation.address(from));
        }
        Ok(())
    }

    pub(crate) fn dealloc_memic(&mut self, input: &[u8]) -> Outcome {
        if self.device_memory.free(get64(input, RANGE_START)) {
            Ok(())
        } else {
            Err(no_object("device memory at", get64(input, RANGE_START)))
        }
    }
}
