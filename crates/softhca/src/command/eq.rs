//! Event queue commands.

use roce::bits::get64;

use super::load::object_number;
use super::resource::insert;
use crate::engine::buffer::Buffer;
use crate::engine::core::Core;
use crate::engine::eq::Eq;
use crate::layout::{PAGE_LIST, eqc, header};
use crate::platform::Platform;
use crate::status::{Outcome, Rule, Status, in_use, no_object, refuse, too_many};

impl<P: Platform> Core<P> {
    pub(crate) fn create_eq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context = &input[eqc::AT.min(input.len())..];
        let log_size = eqc::LOG_EQ_SIZE.get(context);
        if log_size > 22 {
            return Err(too_many("log_eq_size", log_size, 22));
        }
        if self.uars.get(eqc::UAR_PAGE.get(context)).is_none() {
            return Err(no_object("UAR", eqc::UAR_PAGE.get(context)));
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
                "input",
                input.len(),
                Rule::AtLeast((PAGE_LIST + 8) as u64),
            ));
        };
        let vector = eqc::INTR.get(context) as u16;
        if usize::from(vector) >= crate::hca::VECTORS {
            return Err(refuse(
                Status::BadIndex,
                "intr",
                vector,
                Rule::AtMost(crate::hca::VECTORS as u64 - 1),
            ));
        }
        // The mask is in words of 64 bits, lowest event types first.
        let mask = std::array::from_fn(|n| get64(input, eqc::EVENT_BITMASK + 8 * n));
        let eq = Eq {
            buffer,
            log_size,
            vector,
            mask,
            producer: 0,
            consumer: 0,
            armed: false,
        };
        insert(output, &mut self.eqs, "event queue", eq)
    }

    pub(crate) fn destroy_eq(&mut self, input: &[u8]) -> Outcome {
        let eqn = header::SHORT_NUMBER.get(input);
        if self.cqs.iter().any(|(_, cq)| cq.eqn == eqn) {
            return Err(in_use("event queue", eqn));
        }
        match self.eqs.remove(eqn) {
            Some(_) => Ok(()),
            None => Err(no_object("event queue", eqn)),
        }
    }

    pub(crate) fn query_eq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(eq) = self.eqs.get(object_number(input) & 0xff) else {
            return Err(no_object("event queue", object_number(input) & 0xff));
        };
        eqc::LOG_EQ_SIZE.at(eqc::AT).put(output, eq.log_size);
        eqc::INTR.at(eqc::AT).put(output, u32::from(eq.vector));
        eqc::CONSUMER_COUNTER.at(eqc::AT).put(output, eq.consumer);
        eqc::PRODUCER_COUNTER.at(eqc::AT).put(output, eq.producer);
        Ok(())
    }
}
