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
use crate::status::{CommandError, Outcome, in_use, no_object, too_many};
use crate::table::Table;

/// Adds an object to a table, and returns its number to the driver.
pub(crate) fn insert<T>(
    output: &mut [u8],
    table: &mut Table<T>,
    what: &'static str,
    object: T,
) -> Outcome {
    insert_with(output, table, what, |_| object)
}

/// As [`insert`], for objects that contain their number.
pub(crate) fn insert_with<T>(
    output: &mut [u8],
    table: &mut Table<T>,
    what: &'static str,
    make: impl FnOnce(u32) -> T,
) -> Outcome {
    let number = table.insert_with(make).map_err(|_| full(table, what))?;
    NUMBER.put(output, number);
    Ok(())
}

/// Creates the error of a command that adds an object to a full table.
pub(crate) fn full<T>(table: &Table<T>, what: &'static str) -> CommandError {
    too_many(what, table.len() + 1, table.len() as u64)
}

/// Removes an object, which must exist.
pub(crate) fn remove<T>(table: &mut Table<T>, what: &'static str, number: u32) -> Outcome {
    let removed = table.remove(number).map(drop);
    removed.ok_or_else(|| no_object(what, number))
}

/// Removes an object unless others refer to it by number.
fn remove_unused(table: &mut Table<()>, what: &'static str, number: u32, used: bool) -> Outcome {
    match used {
        true => Err(in_use(what, number)),
        false => remove(table, what, number),
    }
}

impl<P: Platform> Core<P> {
    pub(crate) fn alloc_uar(&mut self, output: &mut [u8]) -> Outcome {
        insert(output, &mut self.uars, "UAR", ())
    }

    pub(crate) fn dealloc_uar(&mut self, input: &[u8]) -> Outcome {
        remove(&mut self.uars, "UAR", object_number(input))
    }

    pub(crate) fn alloc_pd(&mut self, output: &mut [u8]) -> Outcome {
        insert(output, &mut self.pds, "protection domain", ())
    }

    pub(crate) fn dealloc_pd(&mut self, input: &[u8]) -> Outcome {
        let pd = object_number(input);
        let used = self.queues.iter().any(|(_, queue)| queue.pd() == Some(pd))
            || self.srqs.iter().any(|(_, srq)| srq.pd == pd);
        remove_unused(&mut self.pds, "protection domain", pd, used)
    }

    pub(crate) fn alloc_xrcd(&mut self, output: &mut [u8]) -> Outcome {
        insert(output, &mut self.xrcds, "XRC domain", ())
    }

    pub(crate) fn dealloc_xrcd(&mut self, input: &[u8]) -> Outcome {
        let xrcd = object_number(input);
        let used = self.srqs.iter().any(|(_, srq)| srq.xrcd == Some(xrcd));
        remove_unused(&mut self.xrcds, "XRC domain", xrcd, used)
    }

    pub(crate) fn alloc_transport_domain(&mut self, output: &mut [u8]) -> Outcome {
        insert(output, &mut self.transport_domains, "transport domain", ())
    }

    pub(crate) fn dealloc_transport_domain(&mut self, input: &[u8]) -> Outcome {
        remove(
            &mut self.transport_domains,
            "transport domain",
            object_number(input),
        )
    }

    pub(crate) fn alloc_q_counter(&mut self, output: &mut [u8]) -> Outcome {
        let set = self.q_counters.insert(QCounters::default());
        let set = set.map_err(|_| full(&self.q_counters, "counter set"))?;
        SHORT_NUMBER.put(output, set);
        Ok(())
    }

    pub(crate) fn dealloc_q_counter(&mut self, input: &[u8]) -> Outcome {
        remove(&mut self.q_counters, "counter set", SHORT_NUMBER.get(input))
    }

    pub(crate) fn query_q_counter(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(set) = self
            .q_counters
            .get_mut(q_counter::COUNTER_SET_ID.get(input))
        else {
            return Err(no_object(
                "counter set",
                q_counter::COUNTER_SET_ID.get(input),
            ));
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
