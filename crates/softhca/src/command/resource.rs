//! Objects with little state: UARs, protection domains, XRC domains, transport
//! domains, counter sets.

use roce::bits::put32;

use super::NUMBER;
use super::load::object_number;
use crate::engine::core::Core;
use crate::engine::counters::QCounters;
use crate::layout::header::SHORT_NUMBER;
use crate::layout::q_counter;
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};
use crate::table::Table;

/// Returns the number of a new object to the driver.
pub(crate) fn return_number<T>(output: &mut [u8], inserted: Result<u32, T>) -> Outcome {
    match inserted {
        Ok(number) => {
            NUMBER.put(output, number);
            Ok(())
        }
        Err(_) => Err(refuse(
            Status::ExceedsLimit,
            "there are too many of these objects",
        )),
    }
}

/// Fails if there was no object to remove.
pub(crate) fn check_removed<T>(removed: Option<T>) -> Outcome {
    match removed {
        Some(_) => Ok(()),
        None => Err(refuse(
            Status::BadResource,
            "there is no object of this number",
        )),
    }
}

/// Removes an object unless others refer to it by number.
fn drop_unused(table: &mut Table<()>, number: u32, used: bool) -> Outcome {
    if used {
        return Err(refuse(Status::ResourceBusy, "other objects still use it"));
    }
    check_removed(table.remove(number))
}

impl<P: Platform> Core<P> {
    pub(crate) fn alloc_uar(&mut self, output: &mut [u8]) -> Outcome {
        return_number(output, self.uars.insert(()))
    }

    pub(crate) fn dealloc_uar(&mut self, input: &[u8]) -> Outcome {
        check_removed(self.uars.remove(object_number(input)))
    }

    pub(crate) fn alloc_pd(&mut self, output: &mut [u8]) -> Outcome {
        return_number(output, self.pds.insert(()))
    }

    pub(crate) fn dealloc_pd(&mut self, input: &[u8]) -> Outcome {
        let pd = object_number(input);
        let used = self.queues.iter().any(|(_, queue)| queue.pd() == Some(pd))
            || self.srqs.iter().any(|(_, srq)| srq.pd == pd);
        drop_unused(&mut self.pds, pd, used)
    }

    pub(crate) fn alloc_xrcd(&mut self, output: &mut [u8]) -> Outcome {
        return_number(output, self.xrcds.insert(()))
    }

    pub(crate) fn dealloc_xrcd(&mut self, input: &[u8]) -> Outcome {
        let xrcd = object_number(input);
        let used = self.srqs.iter().any(|(_, srq)| srq.xrcd == Some(xrcd));
        drop_unused(&mut self.xrcds, xrcd, used)
    }

    pub(crate) fn alloc_transport_domain(&mut self, output: &mut [u8]) -> Outcome {
        return_number(output, self.transport_domains.insert(()))
    }

    pub(crate) fn dealloc_transport_domain(&mut self, input: &[u8]) -> Outcome {
        check_removed(self.transport_domains.remove(object_number(input)))
    }

    pub(crate) fn alloc_q_counter(&mut self, output: &mut [u8]) -> Outcome {
        match self.q_counters.insert(QCounters::default()) {
            Ok(set) => {
                SHORT_NUMBER.put(output, set);
                Ok(())
            }
            Err(_) => Err(refuse(Status::ExceedsLimit, "all counter sets are in use")),
        }
    }

    pub(crate) fn dealloc_q_counter(&mut self, input: &[u8]) -> Outcome {
        check_removed(self.q_counters.remove(SHORT_NUMBER.get(input)))
    }

    pub(crate) fn query_q_counter(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(set) = self
            .q_counters
            .get_mut(q_counter::COUNTER_SET_ID.get(input))
        else {
            return Err(refuse(Status::BadResource, "no such counter set"));
        };
        for (offset, value) in set.fields() {
            put32(output, offset, value);
        }
        if q_counter::CLEAR.is_set(input) {
            *set = QCounters::default();
        }
        Ok(())
    }
}
