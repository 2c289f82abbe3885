//! Commands that programs give themselves (DevX): their contexts, and objects
//! that have a type and little else.

use super::load::number;
use super::resource::{created, gone};
use super::status::{Outcome, Status, refuse};
use crate::bits::{Field, field};
use crate::engine::core::Core;
use crate::platform::Platform;

const TYPE: Field = field(4, 15, 0);
const OBJECT: Field = field(8, 31, 0);
const LOG_RANGE: Field = field(0xc, 28, 24);

/// The type of object that is a range of queue pair numbers.
pub(crate) const RESERVED_QPN: u32 = 0x2c;
/// The logarithm of how many there are in one.
pub(crate) const LOG_RESERVED_QPNS: u32 = 6;
/// The first number: past all that queues get.
const FIRST_RESERVED: u32 = 1 << 20;
/// How many ranges there are, so that the numbers keep to 24 bits.
pub(crate) const RANGES: usize = 1 << 14;

impl<P: Platform> Core<P> {
    pub(crate) fn create_uctx(&mut self, output: &mut [u8]) -> Outcome {
        created(output, self.user_contexts.insert(()))
    }

    pub(crate) fn destroy_uctx(&mut self, input: &[u8]) -> Outcome {
        gone(self.user_contexts.remove(number(input)))
    }

    pub(crate) fn create_general_object(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        if TYPE.get(input) != RESERVED_QPN {
            return Err(refuse(
                Status::BadOpcode,
                "this type of object is not modelled",
            ));
        }
        if LOG_RANGE.get(input) > LOG_RESERVED_QPNS {
            return Err(refuse(
                Status::BadParameter,
                "more numbers than a range has",
            ));
        }
        let range = self.reserved_qpns.insert(());
        created(
            output,
            range.map(|n| FIRST_RESERVED + (n << LOG_RESERVED_QPNS)),
        )
    }

    pub(crate) fn destroy_general_object(&mut self, input: &[u8]) -> Outcome {
        let object = OBJECT.get(input);
        let range = object.checked_sub(FIRST_RESERVED);
        let aligned = object & ((1 << LOG_RESERVED_QPNS) - 1) == 0;
        match range {
            Some(range) if aligned && TYPE.get(input) == RESERVED_QPN => {
                gone(self.reserved_qpns.remove(range >> LOG_RESERVED_QPNS))
            }
            _ => Err(refuse(Status::BadResource, "no such object")),
        }
    }
}
