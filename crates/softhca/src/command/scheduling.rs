//! Scheduling elements: the tree by which hardware shares its rate among queues.
//! The tree is stored; rates are not enforced.

use roce::bits::{Field, field, put32};

use super::general::OBJECT;
use super::resource::{full, remove};
use crate::engine::core::Core;
use crate::engine::scheduling::{ARBITER, Element, QUEUE_GROUP};
use crate::platform::Platform;
use crate::status::{CommandError, Outcome, Rule, Status, in_use, invalid, no_object, refuse};

const HIERARCHY: Field = field(0x18, 31, 24);
const ELEMENT_TYPE: Field = field(0x30, 31, 24);
const PARENT: Field = field(0x38, 31, 0);
const BW_SHARE: Field = field(0x44, 31, 0);
const MAX_AVERAGE_BW: Field = field(0x48, 31, 0);
/// The attributes that a change carries.
const SELECT: Field = field(0x14, 31, 0);
const SELECT_BW_SHARE: u32 = 1;
const SELECT_MAX_AVERAGE_BW: u32 = 1 << 1;

/// The only supported hierarchy: that of the network interface.
const HIERARCHY_NIC: u32 = 3;

impl<P: Platform> Core<P> {
    pub(crate) fn create_scheduling_element(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        if HIERARCHY.get(input) != HIERARCHY_NIC {
            return Err(invalid(
                "scheduling_hierarchy",
                HIERARCHY.get(input),
                Rule::Is(HIERARCHY_NIC.into()),
            ));
        }
        let group = match ELEMENT_TYPE.get(input) {
            ARBITER => false,
            QUEUE_GROUP => true,
            _ => {
                return Err(invalid(
                    "element_type",
                    ELEMENT_TYPE.get(input),
                    Rule::Known,
                ));
            }
        };
        let parent = match PARENT.get(input) {
            0 => None,
            number => Some(number),
        };
        let parent_element = parent.map(|number| self.scheduling.get(number));
        match parent_element {
            None if !group => {}
            Some(Some(Element { group: false, .. })) => {}
            _ => {
                return Err(refuse(
                    Status::BadResource,
                    "parent_element_id",
                    PARENT.get(input),
                    Rule::OfType("arbiter"),
                ));
            }
        }
        let element = Element {
            group,
            parent,
            bw_share: BW_SHARE.get(input),
            max_average_bw: MAX_AVERAGE_BW.get(input),
        };
        let number = self.scheduling.insert(element);
        let number = number.map_err(|_| full(&self.scheduling, "scheduling element"))?;
        OBJECT.put(output, number);
        Ok(())
    }

    pub(crate) fn modify_scheduling_element(&mut self, input: &[u8]) -> Outcome {
        let Some(element) = self.scheduling.get_mut(OBJECT.get(input)) else {
            return Err(unknown(input));
        };
        let select = SELECT.get(input);
        if select & SELECT_BW_SHARE != 0 {
            element.bw_share = BW_SHARE.get(input);
        }
        if select & SELECT_MAX_AVERAGE_BW != 0 {
            element.max_average_bw = MAX_AVERAGE_BW.get(input);
        }
        Ok(())
    }

    pub(crate) fn query_scheduling_element(&self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(element) = self.scheduling.get(OBJECT.get(input)) else {
            return Err(unknown(input));
        };
        HIERARCHY.put(output, HIERARCHY_NIC);
        ELEMENT_TYPE.put(output, if element.group { QUEUE_GROUP } else { ARBITER });
        PARENT.put(output, element.parent.unwrap_or(0));
        put32(output, 0x44, element.bw_share);
        put32(output, 0x48, element.max_average_bw);
        Ok(())
    }

    pub(crate) fn destroy_scheduling_element(&mut self, number: u32) -> Outcome {
        let parent = Some(number);
        if self.scheduling.iter().any(|(_, e)| e.parent == parent) {
            return Err(in_use("scheduling element", number));
        }
        remove(&mut self.scheduling, "scheduling element", number)
    }

    /// Whether queues can be assigned to this element; 0 stands for none.
    pub(crate) fn is_queue_group(&self, number: u32) -> bool {
        number == 0 || self.scheduling.get(number).is_some_and(|e| e.group)
    }
}

fn unknown(input: &[u8]) -> CommandError {
    no_object("scheduling element", OBJECT.get(input))
}
