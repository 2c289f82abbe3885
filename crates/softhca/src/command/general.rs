//! Commands for programs that issue their own (DevX): user contexts and general
//! objects.

use roce::bits::{Field, field};

use super::NUMBER;
use super::protection::{ENCRYPTION_KEY, LOGIN};
use super::resource::{full, insert, remove};
use crate::engine::core::Core;
use crate::platform::Platform;
use crate::status::{CommandError, Outcome, Rule, Status, invalid, no_object, refuse};

const TYPE: Field = field(4, 15, 0);
pub(crate) const OBJECT: Field = field(8, 31, 0);
const LOG_RANGE: Field = field(0xc, 28, 24);

/// Object type of scheduling elements.
pub(crate) const SCHEDULING_ELEMENT: u32 = 0x26;
/// Object type of ranges of reserved queue pair numbers.
pub(crate) const RESERVED_QPN: u32 = 0x2c;
/// Object type of mappings from an address to a queue pair.
pub(crate) const ADDRESS_TO_QP: u32 = 0x3a;
/// Base-2 logarithm of the numbers in a range.
pub(crate) const LOG_RESERVED_QPNS: u32 = 6;
/// The first reserved number, above all numbers of queues.
const FIRST_RESERVED: u32 = 1 << 20;
const RESERVED_QPNS: &str = "range of queue pair numbers";

impl<P: Platform> Core<P> {
    pub(crate) fn create_uctx(&mut self, output: &mut [u8]) -> Outcome {
        insert(output, &mut self.user_contexts, "user context", ())
    }

    pub(crate) fn create_general_object(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        match TYPE.get(input) {
            ENCRYPTION_KEY => self.create_encryption_key(input, output),
            LOGIN => self.create_login(input, output),
            RESERVED_QPN => self.create_reserved_qpns(input, output),
            SCHEDULING_ELEMENT => self.create_scheduling_element(input, output),
            ADDRESS_TO_QP => self.create_address_mapping(input, output),
            _ => Err(unknown_type(input)),
        }
    }

    pub(crate) fn modify_general_object(&mut self, input: &[u8]) -> Outcome {
        match TYPE.get(input) {
            SCHEDULING_ELEMENT => self.modify_scheduling_element(input),
            _ => Err(unknown_type(input)),
        }
    }

    pub(crate) fn query_general_object(&self, input: &[u8], output: &mut [u8]) -> Outcome {
        match TYPE.get(input) {
            ENCRYPTION_KEY => self.query_encryption_key(input, output),
            // A login stays valid, since the credential does not change.
            LOGIN if self.logins.get(OBJECT.get(input)).is_some() => Ok(()),
            SCHEDULING_ELEMENT => self.query_scheduling_element(input, output),
            _ => Err(unknown_type(input)),
        }
    }

    pub(crate) fn destroy_general_object(&mut self, input: &[u8]) -> Outcome {
        let object = OBJECT.get(input);
        match TYPE.get(input) {
            ENCRYPTION_KEY => remove(&mut self.encryption_keys, "encryption key", object),
            LOGIN => remove(&mut self.logins, "login", object),
            RESERVED_QPN => self.destroy_reserved_qpns(object),
            SCHEDULING_ELEMENT => self.destroy_scheduling_element(object),
            ADDRESS_TO_QP => remove(&mut self.address_mappings, "address mapping", object),
            _ => Err(no_object("general object", object)),
        }
    }

    fn create_reserved_qpns(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        if LOG_RANGE.get(input) > LOG_RESERVED_QPNS {
            return Err(invalid(
                "log_obj_range",
                LOG_RANGE.get(input),
                Rule::AtMost(LOG_RESERVED_QPNS.into()),
            ));
        }
        let range = self.reserved_qpns.insert(());
        let range = range.map_err(|()| full(&self.reserved_qpns, RESERVED_QPNS))?;
        NUMBER.put(output, FIRST_RESERVED + (range << LOG_RESERVED_QPNS));
        Ok(())
    }

    fn destroy_reserved_qpns(&mut self, object: u32) -> Outcome {
        let aligned = object & ((1 << LOG_RESERVED_QPNS) - 1) == 0;
        match object.checked_sub(FIRST_RESERVED) {
            Some(range) if aligned => remove(
                &mut self.reserved_qpns,
                RESERVED_QPNS,
                range >> LOG_RESERVED_QPNS,
            ),
            _ => Err(no_object("general object", object)),
        }
    }

    /// Creates a mapping, which hardware uses as a hint to find the queue pair for
    /// packets from an address. Here it has no effect.
    fn create_address_mapping(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        if self.queues.get(MAPPED_QPN.get(input)).is_none() {
            return Err(no_object("queue pair", MAPPED_QPN.get(input)));
        }
        insert(output, &mut self.address_mappings, "address mapping", ())
    }
}

const MAPPED_QPN: Field = field(0x1c, 23, 0);

/// Creates the error of a command on a general object of a type that the device does not have.
fn unknown_type(input: &[u8]) -> CommandError {
    refuse(
        Status::BadOpcode,
        "obj_type",
        TYPE.get(input),
        Rule::Supported,
    )
}
