//! Flow steering commands: flow tables, groups and rules, and their destinations.

use std::collections::BTreeMap;

use roce::bits::{Field, field, flag, get_array, get32, put64};

use super::NUMBER;
use super::load::object_number;
use super::opcode as op;
use crate::engine::core::Core;
use crate::engine::header_change;
use crate::engine::qp::Queue;
use crate::engine::steering::{
    ACTION_CHANGE_HEADER, Destination, FlowCounter, LOG_DESTINATIONS, Object, Rule, Tir,
    TirDestination,
};
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};

const CONTEXT: usize = 0x20;
const TIR_DISP_TYPE: Field = field(0x24, 31, 28);
const TIR_INLINE_RQN: Field = field(0x3c, 23, 0);
const TIR_INDIRECT_TABLE: Field = field(0x40, 23, 0);
/// Linux calls this field `self_lb_block`, but sets the bits of the frames that pass:
/// for its loopback test, and where the interface receives its own frames.
const TIR_SELF_LB: Field = field(0x44, 25, 24);
const TIR_DOMAIN: Field = field(0x44, 23, 0);
const MODIFY_SELF_LB: Field = flag(0x14, 4);
const TIS_DOMAIN: Field = field(0x44, 23, 0);
/// The port of a bond that the queue's frames leave through; and in QUERY_TIS.
const TIS_LAG_PORT: Field = field(CONTEXT, 27, 24);
const QUERIED_LAG_PORT: Field = field(0x10, 27, 24);
const QUERIED_DOMAIN: Field = field(0x34, 23, 0);
const MODIFY_LAG_PORT: Field = flag(0x14, 2);
const RQT_LENGTH: Field = field(CONTEXT + 0x18, 15, 0);
const RQT_LIST: usize = CONTEXT + 0xf0;
const MAX_QUEUES: usize = 1 << 12;

/// Flow tables and groups are named by fields of their own.
const TABLE_TYPE: Field = field(0x10, 31, 24);
const TABLE: Field = field(0x14, 23, 0);
const GROUP: Field = field(0x18, 31, 0);
const COUNTER: Field = field(0x8, 31, 0);
/// The table type for receiving.
const RECEIVES: u32 = 0;
const MISS_ACTION: Field = field(0x18, 27, 24);
const MISS_FORWARD: u32 = 1;
const MISS_TABLE: Field = field(0x1c, 23, 0);
const MODIFY_MISS: Field = flag(0xc, 0);
const ROOT_DISCONNECT: Field = flag(0x4, 0);
const CRITERIA: usize = 0x40;

const RULE_INDEX: Field = field(0x20, 31, 0);
const RULE_GROUP: Field = field(0x44, 31, 0);
const RULE_TAG: Field = field(0x48, 23, 0);
const RULE_ACTION: Field = field(0x4c, 15, 0);
const RULE_DESTINATIONS: Field = field(0x50, 23, 0);
const RULE_HEADER_CHANGE: Field = field(0x5c, 31, 0);
const RULE_COUNTERS: Field = field(0x54, 23, 0);
const RULE_VALUE: usize = 0x80;
const RULE_LIST: usize = 0x340;
/// QUERY_FLOW_COUNTER: the counter, whether it is cleared, and its values.
pub(super) const QUERIED_COUNTER: Field = field(0x1c, 31, 0);
const CLEAR_COUNTER: Field = flag(0x18, 31);
const COUNTER_VALUES: usize = 0x10;
/// A header change: the number of its actions, which follow, and its own.
const ACTION_COUNT: Field = field(0xc, 7, 0);
const ACTIONS: usize = 0x10;
const HEADER_CHANGE: Field = field(0x8, 31, 0);
const TO_TABLE: u32 = 1;
const TO_TIR: u32 = 2;

const UNKNOWN: super::CommandError = refuse(Status::BadResource, "no such steering object");
const TOO_MANY: super::CommandError =
    refuse(Status::ExceedsLimit, "there are too many steering objects");

fn parse_tir(input: &[u8]) -> Tir {
    Tir {
        destination: match TIR_DISP_TYPE.is_set(input) {
            true => TirDestination::Table(TIR_INDIRECT_TABLE.get(input)),
            false => TirDestination::Queue(TIR_INLINE_RQN.get(input)),
        },
        domain: TIR_DOMAIN.get(input),
        self_loopback: TIR_SELF_LB.get(input),
    }
}

fn parse_rqt(input: &[u8]) -> Vec<u32> {
    let count = (RQT_LENGTH.get(input) as usize).min(MAX_QUEUES);
    (0..count)
        .map(|n| get32(input, RQT_LIST + 4 * n) & 0xff_ffff)
        .collect()
}

fn miss_table(input: &[u8]) -> Option<u32> {
    (MISS_ACTION.get(input) == MISS_FORWARD).then(|| MISS_TABLE.get(input))
}

impl<P: Platform> Core<P> {
    pub(crate) fn create_steering(
        &mut self,
        opcode: u16,
        input: &[u8],
        output: &mut [u8],
    ) -> Outcome {
        let object = match opcode {
            op::CREATE_TIR => Object::Tir(parse_tir(input)),
            op::CREATE_TIS => Object::Tis {
                domain: TIS_DOMAIN.get(input),
                lag_port: TIS_LAG_PORT.get(input),
            },
            op::CREATE_RQT => Object::Rqt(parse_rqt(input)),
            op::CREATE_FLOW_TABLE => Object::Table {
                receives: TABLE_TYPE.get(input) == RECEIVES,
                next: miss_table(input),
                rules: BTreeMap::new(),
            },
            op::CREATE_FLOW_GROUP => {
                if !matches!(
                    self.steering.get(TABLE.get(input)),
                    Some(Object::Table { .. })
                ) {
                    return Err(UNKNOWN);
                }
                Object::Group {
                    criteria: Box::new(get_array(input, CRITERIA)),
                }
            }
            op::ALLOC_MODIFY_HEADER_CONTEXT => {
                let actions = input.get(ACTIONS..).unwrap_or(&[]);
                let decoded = header_change::decode(actions, ACTION_COUNT.get(input));
                let message = "unsupported action on a header";
                Object::HeaderChange(decoded.ok_or(refuse(Status::BadParameter, message))?)
            }
            _ => Object::Counter(FlowCounter::default()),
        };
        let number = self.steering.insert(object).ok_or(TOO_MANY)?;
        NUMBER.put(output, number);
        Ok(())
    }

    pub(crate) fn destroy_steering(&mut self, opcode: u16, input: &[u8]) -> Outcome {
        let number = match opcode {
            op::DESTROY_FLOW_TABLE => TABLE.get(input),
            op::DESTROY_FLOW_GROUP => GROUP.get(input),
            op::DEALLOC_FLOW_COUNTER => COUNTER.get(input),
            op::DEALLOC_MODIFY_HEADER_CONTEXT => HEADER_CHANGE.get(input),
            _ => object_number(input),
        };
        let destroy_opcode = match self.steering.get(number) {
            Some(Object::Tir(_)) => op::DESTROY_TIR,
            Some(Object::Tis { .. }) => op::DESTROY_TIS,
            Some(Object::Rqt(_)) => op::DESTROY_RQT,
            Some(Object::Table { .. }) => op::DESTROY_FLOW_TABLE,
            Some(Object::Group { .. }) => op::DESTROY_FLOW_GROUP,
            Some(Object::Counter(_)) => op::DEALLOC_FLOW_COUNTER,
            Some(Object::HeaderChange(_)) => op::DEALLOC_MODIFY_HEADER_CONTEXT,
            None => return Err(UNKNOWN),
        };
        if destroy_opcode != opcode {
            return Err(UNKNOWN);
        }
        let sends = |queue: &Queue| matches!(queue, Queue::Sq(sq) if sq.tis == number);
        if self.steering.is_referenced(number) || self.queues.iter().any(|(_, it)| sends(it)) {
            return Err(refuse(
                Status::ResourceBusy,
                "rules, TIRs or send queues still refer to it",
            ));
        }
        self.steering.remove(number);
        Ok(())
    }

    pub(crate) fn modify_steering(&mut self, opcode: u16, input: &[u8]) -> Outcome {
        let table = TABLE.get(input);
        match opcode {
            op::MODIFY_TIR => match self.steering.get_mut(object_number(input)) {
                // Its destination does not change.
                Some(Object::Tir(tir)) => {
                    if MODIFY_SELF_LB.is_set(input) {
                        tir.self_loopback = TIR_SELF_LB.get(input);
                    }
                    Ok(())
                }
                _ => Err(UNKNOWN),
            },
            op::MODIFY_TIS => match self.steering.get_mut(object_number(input)) {
                Some(Object::Tis { lag_port, .. }) => {
                    if MODIFY_LAG_PORT.is_set(input) {
                        *lag_port = TIS_LAG_PORT.get(input);
                    }
                    Ok(())
                }
                _ => Err(UNKNOWN),
            },
            op::MODIFY_RQT => match self.steering.get_mut(object_number(input)) {
                Some(Object::Rqt(queues)) => {
                    *queues = parse_rqt(input);
                    Ok(())
                }
                _ => Err(UNKNOWN),
            },
            op::MODIFY_FLOW_TABLE => match self.steering.get_mut(table) {
                Some(Object::Table { next, .. }) => {
                    if MODIFY_MISS.is_set(input) {
                        *next = miss_table(input);
                    }
                    Ok(())
                }
                _ => Err(UNKNOWN),
            },
            op::SET_FLOW_TABLE_ROOT => match self.steering.get(table) {
                Some(Object::Table { receives, .. }) => {
                    if *receives {
                        let off = ROOT_DISCONNECT.is_set(input);
                        self.steering.root = (!off).then_some(table);
                    }
                    Ok(())
                }
                _ => Err(UNKNOWN),
            },
            op::SET_FLOW_TABLE_ENTRY => self.set_rule(table, input),
            _ => {
                if self.steering.remove_rule(table, RULE_INDEX.get(input)) {
                    Ok(())
                } else {
                    Err(refuse(Status::BadResource, "no such rule"))
                }
            }
        }
    }

    pub(crate) fn query_tis(&self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(Object::Tis { domain, lag_port }) = self.steering.get(object_number(input)) else {
            return Err(UNKNOWN);
        };
        QUERIED_LAG_PORT.put(output, *lag_port);
        QUERIED_DOMAIN.put(output, *domain);
        Ok(())
    }

    pub(crate) fn query_flow_counter(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(Object::Counter(counter)) = self.steering.get_mut(QUERIED_COUNTER.get(input))
        else {
            return Err(UNKNOWN);
        };
        if output.len() < COUNTER_VALUES + 16 {
            return Err(refuse(
                Status::BadOutputLength,
                "the output is too short for the counter",
            ));
        }
        put64(output, COUNTER_VALUES, counter.packets);
        put64(output, COUNTER_VALUES + 8, counter.bytes);
        if CLEAR_COUNTER.is_set(input) {
            *counter = FlowCounter::default();
        }
        Ok(())
    }

    fn set_rule(&mut self, table: u32, input: &[u8]) -> Outcome {
        let count = RULE_DESTINATIONS.get(input) as usize;
        let counters = RULE_COUNTERS.get(input) as usize;
        if count.max(counters) > 1 << LOG_DESTINATIONS {
            return Err(refuse(
                Status::ExceedsLimit,
                "the rule has too many destinations or counters",
            ));
        }
        let list = input.get(RULE_LIST..).unwrap_or(&[]);
        if list.len() / 8 < count + counters {
            return Err(refuse(
                Status::BadInputLength,
                "destinations or counters of the rule are missing",
            ));
        }
        let (destination_list, counter_list) = list.split_at(8 * count);
        let counters: Vec<u32> = counter_list
            .chunks_exact(8)
            .take(counters)
            .map(|entry| get32(entry, 0))
            .collect();
        let is_counter = |number| matches!(self.steering.get(number), Some(Object::Counter(_)));
        if !counters.iter().all(|number| is_counter(*number)) {
            return Err(UNKNOWN);
        }
        let destinations = destination_list
            .chunks_exact(8)
            .map(|entry| {
                let (kind, number) = (get32(entry, 0) >> 24, get32(entry, 0) & 0xff_ffff);
                match kind {
                    TO_TABLE => Destination::Table(number),
                    TO_TIR => Destination::Tir(number),
                    _ => Destination::Other,
                }
            })
            .collect();
        let (action, header_change) = (RULE_ACTION.get(input), RULE_HEADER_CHANGE.get(input));
        let header_change_object = self.steering.get(header_change);
        let is_header_change = matches!(header_change_object, Some(Object::HeaderChange(_)));
        if action & ACTION_CHANGE_HEADER != 0 && !is_header_change {
            return Err(UNKNOWN);
        }
        let rule = Rule {
            group: RULE_GROUP.get(input),
            tag: RULE_TAG.get(input),
            action,
            header_change,
            value: Box::new(get_array(input, RULE_VALUE)),
            destinations,
            counters,
        };
        if self.steering.set_rule(table, RULE_INDEX.get(input), rule) {
            Ok(())
        } else {
            Err(refuse(
                Status::BadResource,
                "no such flow table, or too many rules",
            ))
        }
    }
}
