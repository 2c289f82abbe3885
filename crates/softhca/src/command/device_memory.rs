//! Device memory commands.

use roce::bits::{Field, field, get64, put64};

use super::OP_MOD;
use crate::engine::core::Core;
use crate::engine::device_memory::MemicOperation;
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};

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
            return Err(refuse(
                Status::BadParameter,
                "unsupported alignment of device memory",
            ));
        }
        let from = get64(input, RANGE_START);
        if !self
            .device_memory
            .allocate(from, u64::from(LENGTH.get(input)))
        {
            return Err(refuse(
                Status::NoResources,
                "the range of device memory is not free",
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
                return Err(refuse(
                    Status::BadParameter,
                    "unknown modification of device memory",
                ));
            }
        };
        let operation = MemicOperation::from_number(OPERATION.get(input)).ok_or(refuse(
            Status::BadParameter,
            "no such operation of device memory",
        ))?;
        if !self.device_memory.set_operation(from, operation, enabled) {
            return Err(refuse(
                Status::BadResource,
                "no such device memory, or the operation is set already",
            ));
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
            Err(refuse(
                Status::BadResource,
                "no device memory is allocated at this address",
            ))
        }
    }
}
