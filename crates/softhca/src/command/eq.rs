//! Event queue commands.

use roce::bits::{Field, field, get64};

use super::load::object_number;
use super::resource::return_number;
use crate::engine::buffer::{Buffer, PAGE_LIST_OFFSET};
use crate::engine::core::Core;
use crate::engine::eq::Eq;
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};

const CONTEXT: usize = 0x10;
const PAGE_OFFSET: Field = field(0x8, 11, 6);
const LOG_SIZE: Field = field(0xc, 28, 24);
const UAR: Field = field(0xc, 23, 0);
const INTR: Field = field(0x14, 11, 0);
const LOG_PAGE_SIZE: Field = field(0x18, 28, 24);
const CONSUMER: Field = field(0x28, 23, 0);
const PRODUCER: Field = field(0x2c, 23, 0);
const EVENT_BITMASK: usize = 0x58;
/// The event queue number in commands that name one.
const EQN: Field = field(8, 7, 0);

impl<P: Platform> Core<P> {
    pub(crate) fn create_eq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context = &input[CONTEXT.min(input.len())..];
        let log_size = LOG_SIZE.get(context);
        if log_size > 22 {
            return Err(refuse(Status::ExceedsLimit, "the event queue is too long"));
        }
        if self.uars.get(UAR.get(context)).is_none() {
            return Err(refuse(
                Status::BadResource,
                "the event queue's UAR does not exist",
            ));
        }
        let Some(buffer) = Buffer::from_page_list(
            input,
            PAGE_LIST_OFFSET,
            64 << log_size,
            LOG_PAGE_SIZE.get(context),
            PAGE_OFFSET.get(context),
        ) else {
            return Err(refuse(
                Status::BadInputLength,
                "pages of the event queue are missing",
            ));
        };
        let vector = INTR.get(context) as u16;
        if usize::from(vector) >= crate::hca::VECTORS {
            return Err(refuse(Status::BadIndex, "no such interrupt vector"));
        }
        // The mask is in words of 64 bits, lowest event types first.
        let mask = std::array::from_fn(|n| get64(input, EVENT_BITMASK + 8 * n));
        return_number(
            output,
            self.eqs.insert(Eq {
                buffer,
                log_size,
                vector,
                mask,
                producer: 0,
                consumer: 0,
                armed: false,
            }),
        )
    }

    pub(crate) fn destroy_eq(&mut self, input: &[u8]) -> Outcome {
        let eqn = EQN.get(input);
        if self.cqs.iter().any(|(_, cq)| cq.eqn == eqn) {
            return Err(refuse(
                Status::ResourceBusy,
                "completion queues still use the event queue",
            ));
        }
        match self.eqs.remove(eqn) {
            Some(_) => Ok(()),
            None => Err(refuse(Status::BadResource, "no such event queue")),
        }
    }

    pub(crate) fn query_eq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(eq) = self.eqs.get(object_number(input) & 0xff) else {
            return Err(refuse(Status::BadResource, "no such event queue"));
        };
        LOG_SIZE.at(CONTEXT).put(output, eq.log_size);
        INTR.at(CONTEXT).put(output, u32::from(eq.vector));
        CONSUMER.at(CONTEXT).put(output, eq.consumer);
        PRODUCER.at(CONTEXT).put(output, eq.producer);
        Ok(())
    }
}
