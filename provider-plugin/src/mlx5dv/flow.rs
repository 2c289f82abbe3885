//! Flows in the device's format.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::slice;

use mlx5::ioctl::devx::DevxHandle;
use mlx5::ioctl::flow::{
    AnchorHandle, FlowActions, FlowMatcher, FlowTarget, MatcherInit, change_header, create,
    create_anchor, destroy_anchor, reformat_packet,
};
use uverbs::QpHandle;

use super::abi::*;
use super::devx;
use super::refused::ringverbs_refused_object;
use super::{exported, is_ours};
use crate::abi::ibv_context;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::flow::ibv_flow;
use crate::mlx5::flow_action::{self, ibv_flow_action};

/// A matcher. Its context comes first, as in libmlx5's.
#[repr(C)]
pub struct Matcher {
    context: *mut ibv_context,
    matcher: FlowMatcher<CtxRef>,
}

/// An anchor, of which applications have `public`. Its context comes first, as in
/// libmlx5's.
#[repr(C)]
struct Anchor {
    context: *mut ibv_context,
    handle: u32,
    public: mlx5dv_steering_anchor,
}

const _: () = assert!(offset_of!(Anchor, public) == 12);

/// Converts an application's anchor pointer.
///
/// # Safety
/// A live anchor, of libmlx5 or of ours.
unsafe fn anchor_of(public: *mut mlx5dv_steering_anchor) -> *mut Anchor {
    // SAFETY: as the caller says; both are laid out so.
    unsafe { public.byte_sub(offset_of!(Anchor, public)).cast() }
}

/// The bytes of a match's parameters.
///
/// # Safety
/// Live for as long as the result is used.
unsafe fn bytes<'a>(parameters: *const mlx5dv_flow_match_parameters) -> &'a [u8] {
    // SAFETY: as the caller says; so many bytes follow.
    unsafe { slice::from_raw_parts(parameters.add(1).cast(), (*parameters).match_sz) }
}

/// # Safety
/// A live matcher of ours, live parameters, and so many actions, each of `length` bytes.
unsafe fn create_flow(
    matcher: *mut Matcher,
    value: *const mlx5dv_flow_match_parameters,
    count: usize,
    actions: *const mlx5dv_flow_action_attr,
    length: usize,
) -> *mut ibv_flow {
    // SAFETY: as the caller says.
    entry::pointer(|| unsafe {
        let mut all = FlowActions::default();
        for i in 0..count {
            let at = actions.byte_add(i * length);
            let action = &*at;
            let to = match action.kind {
                action::DEST_QP => FlowTarget::Qp(QpHandle((*action.value.qp).handle)),
                action::DEST_DEVX => {
                    FlowTarget::Devx(DevxHandle(devx::handle(action.value.object)))
                }
                action::DEFAULT_MISS => FlowTarget::DefaultMiss,
                action::DROP => FlowTarget::Drop,
                action::TAG if all.tag.is_none() => {
                    all.tag = Some(action.value.tag);
                    continue;
                }
                action::TAG => return Err(Errno::INVAL),
                action::COUNTERS_DEVX | action::COUNTERS_DEVX_WITH_OFFSET => {
                    let counter = DevxHandle(devx::handle(action.value.object));
                    let has_offset = action.kind == action::COUNTERS_DEVX_WITH_OFFSET;
                    // Only actions of later headers have an offset.
                    let offset = match (has_offset, length >= 24) {
                        (false, _) => None,
                        (true, true) => Some(at.byte_add(16).cast::<u32>().read()),
                        (true, false) => return Err(Errno::INVAL),
                    };
                    if all.counter.replace((counter, offset)).is_some() {
                        return Err(Errno::OPNOTSUPP);
                    }
                    continue;
                }
                action::FLOW_ACTION => {
                    let (list, count) = &mut all.flow_actions;
                    let place = list.get_mut(*count).ok_or(Errno::OPNOTSUPP)?;
                    *place = flow_action::handle_of(action.value.action);
                    *count += 1;
                    continue;
                }
                _ => return Err(Errno::OPNOTSUPP),
            };
            if all.target.replace(to).is_some() {
                return Err(Errno::OPNOTSUPP);
            }
        }
        let context = (*matcher).context;
        let mut flow = try_box(ibv_flow::new(context)).map_err(|(_, errno)| errno)?;
        let ctx = CtxRef::of(context);
        flow.set_handle(create(
            &ctx,
            (*matcher).matcher.handle(),
            bytes(value),
            &all,
        )?);
        Ok(Box::into_raw(flow))
    })
}

exported! {
    /// `mlx5dv_create_flow_action_modify_header`: actions of 8 bytes each, in the device's
    /// format.
    fn mlx5dv_create_flow_action_modify_header(
        context: *mut ibv_context,
        length: usize,
        actions: *mut u64,
        table: u32
    ) -> *mut ibv_flow_action
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context of ours, and the application's actions.
        entry::pointer(|| unsafe {
            let actions = match length {
                0 => &[],
                _ => slice::from_raw_parts(actions.cast(), length),
            };
            flow_action::new(context, || change_header(&CtxRef::of(context), actions, table))
        })
    }

    /// `mlx5dv_create_flow_action_packet_reformat`. EINVAL for data without a length, and
    /// a length without data.
    fn mlx5dv_create_flow_action_packet_reformat(
        context: *mut ibv_context,
        length: usize,
        data: *mut c_void,
        kind: u32,
        table: u32
    ) -> *mut ibv_flow_action
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context of ours, and the application's data.
        entry::pointer(|| unsafe {
            let data = match (data.is_null(), length) {
                (true, 0) => &[],
                (true, _) | (false, 0) => return Err(Errno::INVAL),
                (false, _) => slice::from_raw_parts(data.cast(), length),
            };
            let ctx = CtxRef::of(context);
            flow_action::new(context, || reformat_packet(&ctx, kind, data, table))
        })
    }

    /// `mlx5dv_create_flow_matcher`. EOPNOTSUPP for a type other than the normal one.
    fn mlx5dv_create_flow_matcher(
        context: *mut ibv_context,
        attr: *mut mlx5dv_flow_matcher_attr
    ) -> *mut Matcher
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context and the application's attributes.
        entry::pointer(|| unsafe {
            let comp_mask = (*attr).comp_mask;
            if comp_mask & !(MATCHER_MASK_TABLE | MATCHER_MASK_PORT) != 0 || (*attr).kind != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            let init = MatcherInit {
                mask: bytes((*attr).match_mask),
                criteria: (*attr).match_criteria_enable,
                priority: (*attr).priority,
                flags: (*attr).flags,
                // Members that not every header has.
                table: match comp_mask & MATCHER_MASK_TABLE {
                    0 => None,
                    _ => Some((*attr).ft_type),
                },
                port: match comp_mask & MATCHER_MASK_PORT {
                    0 => None,
                    _ => Some((*attr).ib_port),
                },
            };
            let matcher = FlowMatcher::create(&CtxRef::of(context), &init)?;
            devx::boxed(Matcher { context, matcher })
        })
    }

    /// `mlx5dv_destroy_flow_matcher`. EBUSY, and the matcher is unchanged, while flows use it.
    fn mlx5dv_destroy_flow_matcher(matcher: *mut Matcher) -> c_int
    where is_ours((*matcher).context), else libc::EOPNOTSUPP => {
        // SAFETY: what `mlx5dv_create_flow_matcher` made, once.
        entry::int(|| unsafe {
            destroyed((*matcher).matcher.destroy().map_err(Into::into))?;
            drop(Box::from_raw(matcher));
            Ok(())
        })
    }

    /// `mlx5dv_create_steering_anchor`: a flow table that leads to those of the driver.
    fn mlx5dv_create_steering_anchor(
        context: *mut ibv_context,
        attr: *mut mlx5dv_steering_anchor_attr
    ) -> *mut mlx5dv_steering_anchor
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context and the application's attributes.
        entry::pointer(|| unsafe {
            if (*attr).comp_mask != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            let ctx = CtxRef::of(context);
            let (handle, id) = create_anchor(&ctx, (*attr).ft_type, (*attr).priority)?;
            let result: Result<*mut Anchor, _> = devx::boxed(Anchor {
                context,
                handle: handle.0,
                public: mlx5dv_steering_anchor { id },
            });
            if result.is_err() {
                destroy_anchor(&ctx, handle)?;
            }
            Ok(&raw mut (*result?).public)
        })
    }

    /// `mlx5dv_destroy_steering_anchor`. EBUSY, and the anchor is unchanged, while flows lead
    /// to it.
    fn mlx5dv_destroy_steering_anchor(anchor: *mut mlx5dv_steering_anchor) -> c_int
    where is_ours((*anchor_of(anchor)).context), else libc::EOPNOTSUPP => {
        // SAFETY: what `mlx5dv_create_steering_anchor` made, once.
        entry::int(|| unsafe {
            let anchor = anchor_of(anchor);
            let done = destroy_anchor(&CtxRef::of((*anchor).context), AnchorHandle((*anchor).handle));
            destroyed(done.map_err(Into::into))?;
            drop(Box::from_raw(anchor));
            Ok(())
        })
    }

    /// `mlx5dv_create_flow` of headers without `__mlx5dv_create_flow`: actions of 16
    /// bytes.
    fn mlx5dv_create_flow(
        matcher: *mut Matcher,
        value: *mut mlx5dv_flow_match_parameters,
        count: usize,
        actions: *mut mlx5dv_flow_action_attr
    ) -> *mut ibv_flow
    where is_ours((*matcher).context), else ringverbs_refused_object().cast() => {
        // SAFETY: the arguments of that function.
        unsafe { create_flow(matcher, value, count, actions, 16) }
    }

    /// `mlx5dv_create_flow` of later headers. EOPNOTSUPP for two targets or counters, and for
    /// more than three flow action objects.
    fn __mlx5dv_create_flow(
        matcher: *mut Matcher,
        value: *mut mlx5dv_flow_match_parameters,
        count: usize,
        actions: *mut mlx5dv_flow_action_attr,
        length: usize
    ) -> *mut ibv_flow
    where is_ours((*matcher).context), else ringverbs_refused_object().cast() => {
        // SAFETY: the arguments of that function.
        unsafe { create_flow(matcher, value, count, actions, length) }
    }
}
