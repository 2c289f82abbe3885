//! Flows in the device's format: a matcher selects bits of the outer headers, and flows of it
//! have the values (`MLX5_IB_OBJECT_FLOW_MATCHER`, `MLX5_IB_METHOD_CREATE_FLOW`). Flow
//! actions change headers (`MLX5_IB_METHOD_FLOW_ACTION_CREATE_MODIFY_HEADER`).

use std::os::fd::RawFd;

use mlx5_abi::ids::*;
use softhca::command::opcode as op;
use softhca::layout::flow;
use softhca::profile::{Group, cap};
use uverbs::abi::ids::OBJECT_FLOW_ACTION;

use crate::driver::command::{Input, make};
use crate::driver::data::{
    Actions, Destination, DevxObject, HeaderChange, Headers, Match, Matcher,
};
use crate::driver::flow::{LAST_PRIORITY, MAX_TAG, OUTER_HEADERS};
use crate::driver::object::{Object, ObjectData, Summary};
use crate::driver::queues::require;
use crate::driver::request::Request;
use crate::driver::state::State;
use crate::{Result, refuse};

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
    if rest.iter().any(|byte| *byte != 0) {
        return refuse(libc::EOPNOTSUPP);
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
        require(!has_table || flags == 0)?;
        let is_received =
            !has_table || request.constant::<u64>(ATTR_FLOW_MATCHER_FT_TYPE)? == RECEIVED;
        let criteria: u8 = request.value(ATTR_FLOW_MATCHER_MATCH_CRITERIA)?;
        let supported = flags == 0
            && is_received
            && u32::from(criteria) & !OUTER_HEADERS == 0
            && request.enumerator(ATTR_FLOW_MATCHER_FLOW_TYPE) == Some(NORMAL)
            && self.is_ethernet();
        if !supported {
            return refuse(libc::EOPNOTSUPP);
        }
        let priority: u16 = request.value(ATTR_FLOW_MATCHER_FLOW_TYPE)?;
        require(u32::from(priority) < LAST_PRIORITY - 1)?;
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
        require(tag.is_none_or(|tag| tag <= MAX_TAG))?;
        let mut dependencies = vec![matcher_handle];
        dependencies.extend(qp.or(devx));
        let destination = match (qp, devx, flags) {
            (Some(qp), None, 0) => Destination::Tir(self.tir_of(fd, qp)?),
            (None, Some(object), 0) => {
                let object: &DevxObject = self.objects.typed(fd, object)?;
                match object.opcode {
                    op::CREATE_TIR => Destination::Tir(object.number),
                    op::CREATE_FLOW_TABLE => return refuse(libc::EOPNOTSUPP),
                    _ => return refuse(libc::EINVAL),
                }
            }
            (None, None, DROP) => Destination::Drop,
            (None, None, DEFAULT_MISS) => Destination::Kernel,
            // No destination, or several.
            _ => return refuse(libc::EINVAL),
        };
        let mut counter = None;
        for handle in request.handles(ATTR_CREATE_FLOW_COUNTERS) {
            if request.has(ATTR_CREATE_FLOW_COUNTERS_OFFSET) {
                // The device has no series of counters that offsets could select from.
                let offsets = request.bytes(ATTR_CREATE_FLOW_COUNTERS_OFFSET);
                require(offsets.is_some_and(|offsets| offsets == [0; 4]))?;
            }
            let object: &DevxObject = self.objects.typed(fd, handle)?;
            require(object.opcode == op::ALLOC_FLOW_COUNTER)?;
            counter = Some(object.number);
            dependencies.push(handle);
        }
        let mut header_change = None;
        for handle in request.handles(ATTR_CREATE_FLOW_ACTIONS) {
            let change = self.objects.typed::<HeaderChange>(fd, handle)?.number;
            require(header_change.replace(change).is_none())?;
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
        if most == 0 {
            return refuse(libc::EOPNOTSUPP);
        }
        require(changes.len() % CHANGE == 0 && TABLES.contains(&table))?;
        let count = (changes.len() / CHANGE) as u32;
        if table != RECEIVED || count > most {
            return refuse(libc::EOPNOTSUPP);
        }
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
