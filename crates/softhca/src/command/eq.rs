//! Event queue commands.

use roce::bits::get64;

use super::load::object_number;
use super::resource::return_number;
use crate::engine::buffer::Buffer;
use crate::engine::core::Core;
use crate::engine::eq::Eq;
use crate::layout::{PAGE_LIST, eqc, header};
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};

impl<P: Platform> Core<P> {
    pub(crate) fn create_eq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context = &input[eqc::AT.min(input.len())..];
        let log_size = eqc::LOG_EQ_SIZE.get(context);
        if log_size > 22 {
            return Err(refuse(Status::ExceedsLimit, "the event queue is too long"));
        }
        if self.uars.get(eqc::UAR_PAGE.get(context)).is_none() {
            return Err(refuse(
                Status::BadResource,
                "the event queue's UAR does not exist",
            ));
        }
        let Some(buffer) = Buffer::from_page_list(
            input,
            PAGE_LIST,
            64 << log_size,
            eqc::LOG_PAGE_SIZE.get(context),
            eqc::PAGE_OFFSET.get(context),
        ) else {
            return Err(refuse(
                Status::BadInputLength,
                "pages of the event queue are missing",
            ));
        };
        let vector = eqc::INTR.get(context) as u16;
        if usize::from(vector) >= crate::hca::VECTORS {
            return Err(refuse(Status::BadIndex, "no such interrupt vector"));
        }
        // The mask is in words of 64 bits, lowest event types first.
        let mask = std::array::from_fn(|n| get64(input, eqc::EVENT_BITMASK + 8 * n));
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
        let eqn = header::SHORT_NUMBER.get(input);
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
        eqc::LOG_EQ_SIZE.at(eqc::AT).put(output, eq.log_size);
        eqc::INTR.at(eqc::AT).put(output, u32::from(eq.vector));
        eqc::CONSUMER_COUNTER.at(eqc::AT).put(output, eq.consumer);
        eqc::PRODUCER_COUNTER.at(eqc::AT).put(output, eq.producer);
        Ok(())
    }
}
