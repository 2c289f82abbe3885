//! Flows in the device's format: a matcher selects the bits of a packet's headers that are
//! compared; a flow has the values, and the destination of matching packets.

use uverbs::driver::{Ioctl, Owned};
use uverbs::{Context, ContextRef, Error, FlowHandle, QpHandle};
use zerocopy::IntoBytes;

use super::devx::DevxHandle;
use super::ids::*;

methods! {
    FLOW_MATCHER_CREATE: "flow matcher", OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_CREATE;
    FLOW_MATCHER_DESTROY: "flow matcher", OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_DESTROY;
    CREATE_FLOW: "flow", OBJECT_FLOW, METHOD_CREATE_FLOW;
    CREATE_MODIFY_HEADER: "flow action", OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_MODIFY_HEADER;
    CREATE_PACKET_REFORMAT: "flow action", OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_REFORMAT;
    STEERING_ANCHOR_CREATE: "steering anchor", OBJECT_STEERING_ANCHOR, METHOD_STEERING_ANCHOR_CREATE;
    STEERING_ANCHOR_DESTROY: "steering anchor", OBJECT_STEERING_ANCHOR, METHOD_STEERING_ANCHOR_DESTROY;
    FLOW_ACTION_DESTROY: "flow action", OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_DESTROY;
}

/// Maximum flow action objects of a flow.
pub const MAX_ACTIONS: usize = 3;

/// Handle number of a flow action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowActionHandle(pub u32);

/// Creates an action that changes headers: `actions` of 8 bytes each, in the device's
/// format. [`destroy_action`] destroys it. `table` is the type of the flow tables (`enum
/// mlx5_ib_uapi_flow_table_type`).
///
/// # Errors
/// EOPNOTSUPP if the device has none; EINVAL for what it does not change, or more than it
/// can.
pub fn change_header(
    context: &Context,
    actions: &[u8],
    table: u32,
) -> Result<FlowActionHandle, Error> {
    // SAFETY: no input is an address.
    let mut ioctl = unsafe { Ioctl::driver(&CREATE_MODIFY_HEADER) };
    let action = ioctl.new_object(ATTR_MODIFY_HEADER_HANDLE);
    ioctl.input(ATTR_MODIFY_HEADER_ACTIONS, actions);
    ioctl.constant(ATTR_MODIFY_HEADER_TABLE, table.into());
    Ok(FlowActionHandle(ioctl.run(context)?.handle(action)?))
}

/// Creates an action that puts packets into a tunnel or takes them out. `kind` is `enum
/// mlx5_ib_uapi_flow_action_packet_reformat_type`, `data` the headers that it adds.
///
/// # Errors
/// As [`change_header`].
pub fn reformat_packet(
    context: &Context,
    kind: u32,
    data: &[u8],
    table: u32,
) -> Result<FlowActionHandle, Error> {
    // SAFETY: as above.
    let mut ioctl = unsafe { Ioctl::driver(&CREATE_PACKET_REFORMAT) };
    let action = ioctl.new_object(ATTR_REFORMAT_HANDLE);
    if !data.is_empty() {
        ioctl.input(ATTR_REFORMAT_DATA, data);
    }
    ioctl.constant(ATTR_REFORMAT_TYPE, kind.into());
    ioctl.constant(ATTR_REFORMAT_TABLE, table.into());
    Ok(FlowActionHandle(ioctl.run(context)?.handle(action)?))
}

/// Destroys an action.
///
/// # Errors
/// EBUSY while flows use it.
pub fn destroy_action(context: &Context, action: FlowActionHandle) -> Result<(), Error> {
    // SAFETY: no input is added.
    let mut ioctl = unsafe { Ioctl::driver(&FLOW_ACTION_DESTROY) };
    ioctl.acts_on(action.0);
    ioctl.handle(ATTR_DESTROY_FLOW_ACTION_HANDLE, action.0);
    ioctl.run(context).map(drop)
}

/// Handle number of a steering anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AnchorHandle(pub u32);

/// Creates an anchor: a flow table by whose number a program's own rules pass packets on
/// to the driver's tables of that type (`enum mlx5_ib_uapi_flow_table_type`), from that
/// priority on. Returns the number; [`destroy_anchor`] destroys it.
///
/// # Errors
/// EOPNOTSUPP for tables that the device does not have; EPERM.
pub fn create_anchor(
    context: &Context,
    table: u32,
    priority: u16,
) -> Result<(AnchorHandle, u32), Error> {
    let mut number = 0u32;
    let priority = priority.to_ne_bytes();
    // SAFETY: no input is an address.
    let mut ioctl = unsafe { Ioctl::driver(&STEERING_ANCHOR_CREATE) };
    let anchor = ioctl.new_object(ATTR_STEERING_ANCHOR_CREATE_HANDLE);
    ioctl.constant(ATTR_STEERING_ANCHOR_FT_TYPE, table.into());
    ioctl.input(ATTR_STEERING_ANCHOR_PRIORITY, &priority);
    let output = ioctl.output(ATTR_STEERING_ANCHOR_FT_ID, number.as_mut_bytes());
    let answer = ioctl.run(context)?;
    let anchor = AnchorHandle(answer.handle(anchor)?);
    let written = answer.all_written(&[output]);
    if written.is_err() {
        destroy_anchor(context, anchor)?;
    }
    written?;
    Ok((anchor, number))
}

/// Destroys an anchor.
///
/// # Errors
/// EBUSY while rules lead to it.
pub fn destroy_anchor(context: &Context, anchor: AnchorHandle) -> Result<(), Error> {
    // SAFETY: no input is added.
    let mut ioctl = unsafe { Ioctl::driver(&STEERING_ANCHOR_DESTROY) };
    ioctl.acts_on(anchor.0);
    ioctl.handle(ATTR_STEERING_ANCHOR_DESTROY_HANDLE, anchor.0);
    ioctl.run(context).map(drop)
}

kinds! {
    MatcherKind MatcherHandle, "a matcher", FLOW_MATCHER_DESTROY;
}

/// A matcher, destroyed when it is dropped.
#[derive(Debug)]
pub struct FlowMatcher<C: ContextRef> {
    owned: Owned<C, MatcherKind>,
}

uverbs::owned_methods!(
    FlowMatcher,
    MatcherHandle,
    (),
    "Flows may still use it: EBUSY."
);

/// Parameters of a matcher.
#[derive(Clone, Copy, Debug, Default)]
pub struct MatcherInit<'a> {
    /// Bits of the headers that are compared (`fte_match_param`).
    pub mask: &'a [u8],
    /// The parts of the mask that count.
    pub criteria: u8,
    /// Lower priorities match first.
    pub priority: u16,
    /// `IB_FLOW_ATTR_FLAGS_*`.
    pub flags: u32,
    /// The table, if it is not the one for received packets (`enum
    /// mlx5_ib_uapi_flow_table_type`).
    pub table: Option<u32>,
    /// The port, of the tables that have one.
    pub port: Option<u32>,
}

impl<C: ContextRef> FlowMatcher<C> {
    /// Creates a matcher.
    ///
    /// # Errors
    /// EINVAL, EOPNOTSUPP for a table that the device does not have, EPERM.
    pub fn create(context: &C, init: &MatcherInit<'_>) -> Result<Self, Error> {
        let priority = init.priority.to_ne_bytes();
        let criteria = [init.criteria];
        // SAFETY: no input is an address.
        let mut ioctl = unsafe { Ioctl::driver(&FLOW_MATCHER_CREATE) };
        let matcher = ioctl.new_object(ATTR_FLOW_MATCHER_CREATE_HANDLE);
        ioctl.input(ATTR_FLOW_MATCHER_MATCH_MASK, init.mask);
        ioctl.input(ATTR_FLOW_MATCHER_MATCH_CRITERIA, &criteria);
        // The value 0 of an enumeration, with the priority.
        ioctl.input(ATTR_FLOW_MATCHER_FLOW_TYPE, &priority);
        if let Some(table) = init.table {
            ioctl.constant(ATTR_FLOW_MATCHER_FT_TYPE, table.into());
        }
        if let Some(port) = init.port {
            ioctl.u32(ATTR_FLOW_MATCHER_IB_PORT, port);
        }
        if init.flags != 0 {
            ioctl.constant(ATTR_FLOW_MATCHER_FLOW_FLAGS, init.flags.into());
        }
        let handle = MatcherHandle(ioctl.run(context)?.handle(matcher)?);
        Ok(Self {
            owned: Owned::new(context, handle),
        })
    }
}

/// The destination of matching packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowTarget {
    /// To a queue pair.
    Qp(QpHandle),
    /// To an object of the device: a transport interface or a flow table.
    Devx(DevxHandle),
    /// The next table.
    DefaultMiss,
    /// Dropped.
    Drop,
}

/// Actions of a flow on matching packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowActions {
    /// The destination.
    pub target: Option<FlowTarget>,
    /// The tag that their completions carry.
    pub tag: Option<u32>,
    /// The device's counter object that counts the packets, and the index in it.
    pub counter: Option<(DevxHandle, Option<u32>)>,
    /// Handles of flow action objects, and their number.
    pub flow_actions: ([u32; MAX_ACTIONS], usize),
}

/// Creates a flow by a matcher. Returns its handle; [`uverbs::flow::destroy`] destroys
/// it. `value` is what the matcher's bits are compared with.
///
/// # Errors
/// EINVAL, EOPNOTSUPP for what the device does not do, EPERM.
pub fn create(
    context: &Context,
    matcher: MatcherHandle,
    value: &[u8],
    actions: &FlowActions,
) -> Result<FlowHandle, Error> {
    // SAFETY: no input is an address.
    let mut ioctl = unsafe { Ioctl::driver(&CREATE_FLOW) };
    let flow = ioctl.new_object(ATTR_CREATE_FLOW_HANDLE);
    ioctl.input(ATTR_CREATE_FLOW_MATCH_VALUE, value);
    ioctl.handle(ATTR_CREATE_FLOW_MATCHER, matcher.0);
    match actions.target {
        None => {}
        Some(FlowTarget::Qp(qp)) => ioctl.handle(ATTR_CREATE_FLOW_DEST_QP, qp.0),
        Some(FlowTarget::Devx(object)) => ioctl.handle(ATTR_CREATE_FLOW_DEST_DEVX, object.0),
        Some(FlowTarget::DefaultMiss) => ioctl.u32(ATTR_CREATE_FLOW_FLAGS, FLOW_DEFAULT_MISS),
        Some(FlowTarget::Drop) => ioctl.u32(ATTR_CREATE_FLOW_FLAGS, FLOW_DROP),
    }
    if let Some(tag) = actions.tag {
        ioctl.u32(ATTR_CREATE_FLOW_TAG, tag);
    }
    let (handles, count) = &actions.flow_actions;
    if let Some(handles @ [_, ..]) = handles.get(..*count) {
        ioctl.input(ATTR_CREATE_FLOW_ACTIONS, handles.as_bytes());
    }
    if let Some((counter, offset)) = actions.counter {
        // Arrays of one; so short an array is not passed by address.
        ioctl.u32(ATTR_CREATE_FLOW_COUNTERS, counter.0);
        if let Some(offset) = offset {
            ioctl.u32(ATTR_CREATE_FLOW_COUNTERS_OFFSET, offset);
        }
    }
    Ok(FlowHandle(ioctl.run(context)?.handle(flow)?))
}
