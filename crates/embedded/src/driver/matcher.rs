//! Flows in the device's format: a matcher selects bits of the outer headers, and flows of it
//! have the values (`MLX5_IB_OBJECT_FLOW_MATCHER`, `MLX5_IB_METHOD_CREATE_FLOW`). Flow
//! actions change headers (`MLX5_IB_METHOD_FLOW_ACTION_CREATE_MODIFY_HEADER`).

use std::os::fd::RawFd;

use mlx5_abi::ids::*;
use softhca::command::opcode as op;
use softhca::layout::flow;
use softhca::profile::{Group, cap};
use softhca::rule::Rule;
use uverbs::abi::ids::OBJECT_FLOW_ACTION;

use crate::driver::cause::{
    Result, at_most, invalid, is, require, require_support, reserved, supported_bits, unsupported,
};
use crate::driver::command::{Input, make};
use crate::driver::data::{
    Actions, Destination, DevxObject, HeaderChange, Headers, Match, Matcher,
};
use crate::driver::flow::{LAST_PRIORITY, MAX_TAG, OUTER_HEADERS};
use crate::driver::object::{Object, ObjectData, Summary};
use crate::driver::request::{Request, word};
use crate::driver::state::State;

/// `MLX5_IB_FLOW_TYPE_NORMAL`.
const NORMAL: u8 = 0;
/// `MLX5_IB_UAPI_FLOW_TABLE_TYPE_NIC_RX`.
const RECEIVED: u64 = 0;
/// `IB_FLOW_ATTR_FLAGS_EGRESS`.
const SENT: u32 = 1 << 2;
/// `MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DEFAULT_MISS` and `..._DROP`.
const DEFAULT_MISS: u32 = 1 << 0;
const DROP: u32 = 1 << 1;
/// Known types of flow tables: for received frames, sent ones, and others.
const TABLES: std::ops::RangeInclusive<u64> = 0..=4;
/// Bytes of an action on headers.
const CHANGE: usize = 8;
const CHANGES: usize = 0x10;

/// Returns headers that are shorter than the structure, filled with zeros.
///
/// # Errors
/// EOPNOTSUPP if others than the outer headers are not zero.
fn outer_headers(bytes: &[u8]) -> Result<Headers> {
    let mut headers = Headers::default();
    let (outer, rest) = bytes.split_at(bytes.len().min(headers.0.len()));
    for byte in rest {
        reserved("mask or value beyond the outer headers", *byte)?;
    }
    headers.0[..outer.len()].copy_from_slice(outer);
    Ok(headers)
}

impl ObjectData for Matcher {
    fn kind(&self) -> u16 {
        OBJECT_FLOW_MATCHER
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "flow matcher",
            number: 0,
            length: 0,
        }
    }

    fn destroy(&mut self, _: &mut State) -> Result<()> {
        Ok(())
    }
}

impl ObjectData for HeaderChange {
    fn kind(&self) -> u16 {
        OBJECT_FLOW_ACTION
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "flow action",
            number: self.number,
            length: 0,
        }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DEALLOC_MODIFY_HEADER_CONTEXT, self.number)
    }
}

impl State {
    pub(crate) fn create_matcher(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let flags = request.flags(ATTR_FLOW_MATCHER_FLOW_FLAGS, SENT)?;
        let has_table = request.has(ATTR_FLOW_MATCHER_FT_TYPE);
        if has_table {
            is("flow_flags with ft_type", flags, 0)?;
        }
        let table = match has_table {
            true => request.constant(ATTR_FLOW_MATCHER_FT_TYPE)?,
            false => RECEIVED,
        };
        let criteria: u8 = request.value(ATTR_FLOW_MATCHER_MATCH_CRITERIA)?;
        reserved("flow_flags", flags)?;
        require_support(table == RECEIVED, "ft_type", table, Rule::Is(RECEIVED))?;
        supported_bits("match_criteria", criteria, OUTER_HEADERS.into())?;
        let kind = request
            .enumerator(ATTR_FLOW_MATCHER_FLOW_TYPE)
            .unwrap_or(u8::MAX);
        require_support(kind == NORMAL, "flow_type", kind, Rule::Is(NORMAL.into()))?;
        require_support(
            self.is_ethernet(),
            "port",
            1u32,
            Rule::OfType("Ethernet port"),
        )?;
        let priority: u16 = request.value(ATTR_FLOW_MATCHER_FLOW_TYPE)?;
        at_most("priority", priority, u64::from(LAST_PRIORITY) - 2)?;
        let mask = request
            .bytes(ATTR_FLOW_MATCHER_MATCH_MASK)
            .unwrap_or_default();
        let mask = match criteria {
            0 => Headers::default(),
            _ => outer_headers(&mask)?,
        };
        let handle = self
            .objects
            .insert(Object::new(fd, Matcher { mask, priority }));
        request.set_handle(ATTR_FLOW_MATCHER_CREATE_HANDLE, handle);
        Ok(())
    }

    pub(crate) fn create_matched_flow(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let flags = request.flags(ATTR_CREATE_FLOW_FLAGS, DEFAULT_MISS | DROP)?;
        let matcher_handle = request.handle(ATTR_CREATE_FLOW_MATCHER)?;
        let Matcher { mask, priority } = *self.objects.typed(fd, matcher_handle)?;
        let qp = request.optional_handle(ATTR_CREATE_FLOW_DEST_QP);
        let devx = request.optional_handle(ATTR_CREATE_FLOW_DEST_DEVX);
        let tag = match request.has(ATTR_CREATE_FLOW_TAG) {
            true => Some(request.value(ATTR_CREATE_FLOW_TAG)?),
            false => None,
        };
        if let Some(tag) = tag {
            at_most("tag", tag, MAX_TAG.into())?;
        }
        let mut dependencies = vec![matcher_handle];
        dependencies.extend(qp.or(devx));
        let destination = match (qp, devx, flags) {
            (Some(qp), None, 0) => Destination::Tir(self.tir_of(fd, qp)?),
            (None, Some(object), 0) => {
                let handle = object;
                let object: &DevxObject = self.objects.typed(fd, handle)?;
                match object.opcode {
                    op::CREATE_TIR => Destination::Tir(object.number),
                    op::CREATE_FLOW_TABLE => {
                        return unsupported("dest_devx", handle, Rule::OfType("TIR"));
                    }
                    _ => return invalid("dest_devx", handle, Rule::OfType("TIR")),
                }
            }
            (None, None, DROP) => Destination::Drop,
            (None, None, DEFAULT_MISS) => Destination::Kernel,
            // No destination, or several.
            _ => {
                let count = u32::from(qp.is_some()) + u32::from(devx.is_some());
                let count = count + (flags & (DROP | DEFAULT_MISS)).count_ones();
                return invalid("number of destinations", count, Rule::Is(1));
            }
        };
        let mut counter = None;
        for handle in request.handles(ATTR_CREATE_FLOW_COUNTERS) {
            if request.has(ATTR_CREATE_FLOW_COUNTERS_OFFSET) {
                // The device has no series of counters that offsets could select from.
                let offsets = request.bytes(ATTR_CREATE_FLOW_COUNTERS_OFFSET);
                let offset = offsets.map_or(0, |offsets| match offsets.len() {
                    4 => word(&offsets, 0),
                    _ => u32::MAX,
                });
                is("offset of the counter", offset, 0)?;
            }
            let object: &DevxObject = self.objects.typed(fd, handle)?;
            let is_counter = object.opcode == op::ALLOC_FLOW_COUNTER;
            require(is_counter, "handle", handle, Rule::OfType("flow counter"))?;
            counter = Some(object.number);
            dependencies.push(handle);
        }
        let mut header_change = None;
        for handle in request.handles(ATTR_CREATE_FLOW_ACTIONS) {
            let change = self.objects.typed::<HeaderChange>(fd, handle)?.number;
            let is_first = header_change.replace(change).is_none();
            require(is_first, "flow action", handle, Rule::Once)?;
            dependencies.push(handle);
        }
        let value = request
            .bytes(ATTR_CREATE_FLOW_MATCH_VALUE)
            .unwrap_or_default();
        let mut value = outer_headers(&value)?;
        for (byte, mask) in value.0.iter_mut().zip(mask.0) {
            *byte &= mask;
        }
        let actions = Actions {
            destination,
            tag,
            counter,
            header_change,
        };
        let flow = self.add_flow(priority.into(), Match { mask, value }, actions)?;
        let handle = self
            .objects
            .insert(Object::new(fd, flow).using(dependencies));
        request.set_handle(ATTR_CREATE_FLOW_HANDLE, handle);
        Ok(())
    }

    pub(crate) fn create_header_change(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let changes = request
            .bytes(ATTR_MODIFY_HEADER_ACTIONS)
            .unwrap_or_default();
        let table: u64 = request.constant(ATTR_MODIFY_HEADER_TABLE)?;
        let flow_tables = self.hca.settings().profile.group(Group::FlowTable);
        let most = cap::FT_HEADER_CHANGE_ACTIONS.get(&flow_tables);
        let length = changes.len();
        require_support(most != 0, "length of the actions", length, Rule::AtMost(0))?;
        let unit = Rule::MultipleOf(CHANGE as u64);
        require(length % CHANGE == 0, "length of the actions", length, unit)?;
        require(TABLES.contains(&table), "ft_type", table, Rule::Known)?;
        let count = (changes.len() / CHANGE) as u32;
        require_support(table == RECEIVED, "ft_type", table, Rule::Is(RECEIVED))?;
        require_support(count <= most, "actions", count, Rule::AtMost(most.into()))?;
        let input = Input::new(op::ALLOC_MODIFY_HEADER_CONTEXT, CHANGES + changes.len())
            .set(flow::NUM_OF_ACTIONS, count)
            .bytes(CHANGES, &changes);
        let number = make(&mut self.hca, &input)?;
        let handle = self
            .objects
            .insert(Object::new(fd, HeaderChange { number }));
        request.set_handle(ATTR_MODIFY_HEADER_HANDLE, handle);
        Ok(())
    }
}
