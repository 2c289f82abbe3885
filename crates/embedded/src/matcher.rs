//! Flows in the device's format: a matcher selects bits of the outer headers, and flows of it
//! have the values (`MLX5_IB_OBJECT_FLOW_MATCHER`, `MLX5_IB_METHOD_CREATE_FLOW`).

use std::os::fd::RawFd;

use softhca::command::opcode as op;

use crate::driver_ids::*;
use crate::flow::{Action, Headers, LAST_PRIORITY, Match, OUTER_HEADERS};
use crate::object::{Object, ObjectData};
use crate::queues::require;
use crate::request::Request;
use crate::state::State;
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
/// Tags have 24 bits.
const MAX_TAG: u32 = (1 << 24) - 1;

/// A matcher.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matcher {
    mask: Headers,
    priority: u16,
}

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

impl State {
    pub(crate) fn create_matcher(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let flags = request.flags(ATTR_MATCHER_FLAGS, SENT)?;
        let has_table = request.has(ATTR_MATCHER_TABLE);
        require(!has_table || flags == 0)?;
        let is_received = !has_table || request.constant::<u64>(ATTR_MATCHER_TABLE)? == RECEIVED;
        let criteria: u8 = request.value(ATTR_MATCHER_CRITERIA)?;
        let supported = flags == 0
            && is_received
            && u32::from(criteria) & !OUTER_HEADERS == 0
            && request.enumerator(ATTR_MATCHER_TYPE) == Some(NORMAL)
            && self.is_ethernet();
        if !supported {
            return refuse(libc::EOPNOTSUPP);
        }
        let priority: u16 = request.value(ATTR_MATCHER_TYPE)?;
        require(u32::from(priority) < LAST_PRIORITY - 1)?;
        let mask = request.bytes(ATTR_MATCHER_MASK).unwrap_or_default();
        let mask = match criteria {
            0 => Headers::default(),
            _ => outer_headers(&mask)?,
        };
        let handle = self.objects.insert(Object {
            file: fd,
            dependencies: Vec::new(),
            uses: 0,
            ranges: Vec::new(),
            data: ObjectData::Matcher(Matcher { mask, priority }),
        });
        request.set_handle(ATTR_MATCHER_HANDLE, handle);
        Ok(())
    }

    pub(crate) fn create_matched_flow(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let flags = request.flags(ATTR_FLOW_FLAGS, DEFAULT_MISS | DROP)?;
        let matcher_handle = request.handle(ATTR_FLOW_MATCHER)?;
        let Matcher { mask, priority } = *self.objects.matcher(fd, matcher_handle)?;
        let qp = request.optional_handle(ATTR_FLOW_QP);
        let devx = request.optional_handle(ATTR_FLOW_DEVX);
        let tag = match request.has(ATTR_FLOW_TAG) {
            true => request.value(ATTR_FLOW_TAG)?,
            false => 0,
        };
        require(tag <= MAX_TAG)?;
        let forward = |tir| Action::Forward { tir, tag };
        let mut dependencies = vec![matcher_handle];
        dependencies.extend(qp.or(devx));
        let action = match (qp, devx, flags) {
            (Some(qp), None, 0) => forward(self.tir_of(fd, qp)?),
            (None, Some(object), 0) => match &self.objects.get(fd, object)?.data {
                ObjectData::Devx(object) if object.opcode == op::CREATE_TIR => {
                    forward(object.number)
                }
                ObjectData::Devx(object) if object.opcode == op::CREATE_FLOW_TABLE => {
                    return refuse(libc::EOPNOTSUPP);
                }
                _ => return refuse(libc::EINVAL),
            },
            (None, None, DROP) => Action::Drop,
            (None, None, DEFAULT_MISS) => return refuse(libc::EOPNOTSUPP),
            // No destination, or several.
            _ => return refuse(libc::EINVAL),
        };
        let unsupported = [ATTR_FLOW_ACTIONS, ATTR_FLOW_COUNTERS];
        if unsupported.into_iter().any(|id| request.has(id)) {
            return refuse(libc::EOPNOTSUPP);
        }
        let value = request.bytes(ATTR_FLOW_VALUE).unwrap_or_default();
        let mut value = outer_headers(&value)?;
        for (byte, mask) in value.0.iter_mut().zip(mask.0) {
            *byte &= mask;
        }
        let flow = self.add_flow(priority.into(), Match { mask, value }, action)?;
        let handle = self.objects.insert(Object {
            file: fd,
            dependencies,
            uses: 0,
            ranges: Vec::new(),
            data: ObjectData::Flow(flow),
        });
        request.set_handle(ATTR_FLOW_HANDLE, handle);
        Ok(())
    }
}
