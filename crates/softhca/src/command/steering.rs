//! Flow steering commands: flow tables, groups and rules, and their destinations.

use std::collections::BTreeMap;

use roce::bits::{Field, field, flag, get_array, get32, put64};

use super::load::object_number;
use super::opcode as op;
use crate::engine::core::Core;
use crate::engine::header_change;
use crate::engine::qp::Queue;
use crate::engine::steering::{
    Destination, FlowCounter, FlowRule, LOG_DESTINATIONS, MAX_OBJECTS, Object, Tir, TirDestination,
};
use crate::layout::{flow, header, rqtc, tirc, tisc};
use crate::platform::Platform;
use crate::status::{
    CommandError, Outcome, Rule, Status, in_use, invalid, no_object, refuse, too_many,
};

const MAX_QUEUES: usize = 1 << 12;

/// The table type for receiving.
const RECEIVES: u32 = 0;
const MISS_ACTION: Field = field(0x18, 27, 24);
const MISS_FORWARD: u32 = 1;
const MISS_TABLE: Field = field(0x1c, 23, 0);
const MODIFY_MISS: Field = flag(0xc, 0);
const ROOT_DISCONNECT: Field = flag(0x4, 0);

fn unknown(number: u32) -> CommandError {
    no_object("steering object", number)
}

fn parse_tir(input: &[u8]) -> Tir {
    Tir {
        destination: match tirc::DISP_TYPE.at(tirc::AT).is_set(input) {
            true => TirDestination::Table(tirc::INDIRECT_TABLE.at(tirc::AT).get(input)),
            false => TirDestination::Queue(tirc::INLINE_RQN.at(tirc::AT).get(input)),
        },
        domain: tirc::TRANSPORT_DOMAIN.at(tirc::AT).get(input),
        self_loopback: tirc::SELF_LB_BLOCK.at(tirc::AT).get(input),
    }
}

fn parse_rqt(input: &[u8]) -> Vec<u32> {
    let count = (rqtc::RQT_ACTUAL_SIZE.at(rqtc::AT).get(input) as usize).min(MAX_QUEUES);
    (0..count)
        .map(|n| get32(input, rqtc::AT + rqtc::RQ_NUM + 4 * n) & 0xff_ffff)
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
                domain: tisc::TRANSPORT_DOMAIN.at(tisc::AT).get(input),
                lag_port: tisc::LAG_TX_PORT_AFFINITY.at(tisc::AT).get(input),
            },
            op::CREATE_RQT => Object::Rqt(parse_rqt(input)),
            op::CREATE_FLOW_TABLE => Object::Table {
                receives: flow::TABLE_TYPE.get(input) == RECEIVES,
                next: miss_table(input),
                rules: BTreeMap::new(),
            },
            op::CREATE_FLOW_GROUP => {
                if !matches!(
                    self.steering.get(flow::TABLE_ID.get(input)),
                    Some(Object::Table { .. })
                ) {
                    return Err(unknown(flow::TABLE_ID.get(input)));
                }
                Object::Group {
                    criteria: Box::new(get_array(input, flow::MATCH_CRITERIA)),
                }
            }
            op::ALLOC_MODIFY_HEADER_CONTEXT => {
                let actions = input.get(flow::ACTIONS..).unwrap_or(&[]);
                let decoded = header_change::decode(actions, flow::NUM_OF_ACTIONS.get(input));
                let count = flow::NUM_OF_ACTIONS.get(input);
                let error = || invalid("num_of_actions", count, Rule::Supported);
                Object::HeaderChange(decoded.ok_or_else(error)?)
            }
            _ => Object::Counter(FlowCounter::default()),
        };
        let number = self.steering.insert(object);
        let number = number
            .ok_or_else(|| too_many("steering objects", MAX_OBJECTS + 1, MAX_OBJECTS as u64))?;
        header::NUMBER.put(output, number);
        Ok(())
    }

    pub(crate) fn destroy_steering(&mut self, opcode: u16, input: &[u8]) -> Outcome {
        let number = match opcode {
            op::DESTROY_FLOW_TABLE => flow::TABLE_ID.get(input),
            op::DESTROY_FLOW_GROUP => flow::GROUP_ID.get(input),
            op::DEALLOC_FLOW_COUNTER => header::OBJ_ID.get(input),
            op::DEALLOC_MODIFY_HEADER_CONTEXT => header::OBJ_ID.get(input),
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
            None => return Err(unknown(number)),
        };
        if destroy_opcode != opcode {
            return Err(unknown(number));
        }
        let sends = |queue: &Queue| matches!(queue, Queue::Sq(sq) if sq.tis == number);
        if self.steering.is_referenced(number) || self.queues.iter().any(|(_, it)| sends(it)) {
            return Err(in_use("steering object", number));
        }
        self.steering.remove(number);
        Ok(())
    }

    pub(crate) fn modify_steering(&mut self, opcode: u16, input: &[u8]) -> Outcome {
        let table = flow::TABLE_ID.get(input);
        match opcode {
            op::MODIFY_TIR => match self.steering.get_mut(object_number(input)) {
                // Its destination does not change.
                Some(Object::Tir(tir)) => {
                    if tirc::MODIFY_SELF_LB_EN.is_set(input) {
                        tir.self_loopback = tirc::SELF_LB_BLOCK.at(tirc::AT).get(input);
                    }
                    Ok(())
                }
                _ => Err(unknown(object_number(input))),
            },
            op::MODIFY_TIS => match self.steering.get_mut(object_number(input)) {
                Some(Object::Tis { lag_port, .. }) => {
                    if tisc::MODIFY_LAG_TX_PORT_AFFINITY.is_set(input) {
                        *lag_port = tisc::LAG_TX_PORT_AFFINITY.at(tisc::AT).get(input);
                    }
                    Ok(())
                }
                _ => Err(unknown(object_number(input))),
            },
            op::MODIFY_RQT => match self.steering.get_mut(object_number(input)) {
                Some(Object::Rqt(queues)) => {
                    *queues = parse_rqt(input);
                    Ok(())
                }
                _ => Err(unknown(object_number(input))),
            },
            op::MODIFY_FLOW_TABLE => match self.steering.get_mut(table) {
                Some(Object::Table { next, .. }) => {
                    if MODIFY_MISS.is_set(input) {
                        *next = miss_table(input);
                    }
                    Ok(())
                }
                _ => Err(unknown(table)),
            },
            op::SET_FLOW_TABLE_ROOT => match self.steering.get(table) {
                Some(Object::Table { receives, .. }) => {
                    if *receives {
                        let off = ROOT_DISCONNECT.is_set(input);
                        self.steering.root = (!off).then_some(table);
                    }
                    Ok(())
                }
                _ => Err(unknown(table)),
            },
            op::SET_FLOW_TABLE_ENTRY => self.set_rule(table, input),
            _ => {
                if self
                    .steering
                    .remove_rule(table, flow::FLOW_INDEX.get(input))
                {
                    Ok(())
                } else {
                    Err(no_object("rule", flow::FLOW_INDEX.get(input)))
                }
            }
        }
    }

    pub(crate) fn query_tis(&self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(Object::Tis { domain, lag_port }) = self.steering.get(object_number(input)) else {
            return Err(unknown(object_number(input)));
        };
        tisc::LAG_TX_PORT_AFFINITY
            .at(tisc::QUERIED_AT)
            .put(output, *lag_port);
        tisc::TRANSPORT_DOMAIN
            .at(tisc::QUERIED_AT)
            .put(output, *domain);
        Ok(())
    }

    pub(crate) fn query_flow_counter(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(Object::Counter(counter)) =
            self.steering.get_mut(flow::FLOW_COUNTER_ID.get(input))
        else {
            return Err(unknown(flow::FLOW_COUNTER_ID.get(input)));
        };
        if output.len() < flow::FLOW_STATISTICS + 16 {
            return Err(refuse(
                Status::BadOutputLength,
                "output",
                output.len(),
                Rule::AtLeast(flow::FLOW_STATISTICS as u64 + 16),
            ));
        }
        put64(output, flow::FLOW_STATISTICS, counter.packets);
        put64(output, flow::FLOW_STATISTICS + 8, counter.bytes);
        if flow::CLEAR.is_set(input) {
            *counter = FlowCounter::default();
        }
        Ok(())
    }

    fn set_rule(&mut self, table: u32, input: &[u8]) -> Outcome {
        let count = flow::DESTINATION_LIST_SIZE.get(input) as usize;
        let counters = flow::FLOW_COUNTER_LIST_SIZE.get(input) as usize;
        if count.max(counters) > 1 << LOG_DESTINATIONS {
            return Err(too_many(
                "destination_list_size",
                count.max(counters),
                1 << LOG_DESTINATIONS,
            ));
        }
        let list = input.get(flow::DESTINATION..).unwrap_or(&[]);
        if list.len() / 8 < count + counters {
            return Err(refuse(
                Status::BadInputLength,
                "destination_list_size",
                count + counters,
                Rule::AtMost(list.len() as u64 / 8),
            ));
        }
        let (destination_list, counter_list) = list.split_at(8 * count);
        let counters: Vec<u32> = counter_list
            .chunks_exact(8)
            .take(counters)
            .map(|entry| get32(entry, 0))
            .collect();
        let is_counter = |number| matches!(self.steering.get(number), Some(Object::Counter(_)));
        if let Some(number) = counters.iter().find(|number| !is_counter(**number)) {
            return Err(unknown(*number));
        }
        let destinations = destination_list
            .chunks_exact(8)
            .map(|entry| {
                let (kind, number) = (get32(entry, 0) >> 24, get32(entry, 0) & 0xff_ffff);
                match kind {
                    flow::destination::FLOW_TABLE => Destination::Table(number),
                    flow::destination::TIR => Destination::Tir(number),
                    _ => Destination::Other,
                }
            })
            .collect();
        let (action, header_change) = (flow::ACTION.get(input), flow::MODIFY_HEADER_ID.get(input));
        let header_change_object = self.steering.get(header_change);
        let is_header_change = matches!(header_change_object, Some(Object::HeaderChange(_)));
        if action & flow::action::MOD_HDR != 0 && !is_header_change {
            return Err(unknown(header_change));
        }
        let rule = FlowRule {
            group: flow::FTE_GROUP_ID.get(input),
            tag: flow::FLOW_TAG.get(input),
            action,
            header_change,
            value: Box::new(get_array(input, flow::MATCH_VALUE)),
            destinations,
            counters,
        };
        if self
            .steering
            .set_rule(table, flow::FLOW_INDEX.get(input), rule)
        {
            Ok(())
        } else {
            Err(no_object("flow table with room for a rule", table))
        }
    }
}
