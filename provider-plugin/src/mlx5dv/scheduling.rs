//! Scheduling elements: nodes, and leaves that have queues.

use core::ffi::c_int;

use mlx5::commands::Scheduling;
use mlx5::ioctl::devx::DevxObject;

use super::abi::*;
use super::refused::ringverbs_refused_object;
use super::{exported, is_ours};
use crate::abi::ibv_context;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;

/// `struct mlx5dv_sched_node` and `struct mlx5dv_sched_leaf`. The context is at the same place
/// as in libmlx5's element: its second member points to an object that begins with the context
/// pointer.
#[repr(C)]
pub struct Element {
    parent: *const Element,
    holder: *mut *mut ibv_context,
    context: *mut ibv_context,
    number: u32,
    object: DevxObject<CtxRef>,
}

impl Element {
    /// The device's number of the element.
    pub fn number(&self) -> u32 {
        self.number
    }
}

/// The context of an element.
///
/// # Safety
/// Live, of this provider or of libmlx5.
unsafe fn context(element: *const Element) -> *mut ibv_context {
    // SAFETY: as the caller says.
    unsafe { *(*element).holder }
}

/// The attributes that the application has set.
///
/// # Safety
/// The attributes are the application's, with a live parent or null.
unsafe fn scheduling(attr: *const mlx5dv_sched_attr, is_leaf: bool) -> Result<Scheduling, Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let attr = attr.as_ref().ok_or(Errno::INVAL)?;
        let known = sched_flag::BW_SHARE | sched_flag::MAX_AVG_BW;
        if attr.comp_mask != 0 || attr.flags & !known != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let set = |flag, value| (attr.flags & flag != 0).then_some(value);
        Ok(Scheduling {
            parent: attr.parent.as_ref().map_or(0, Element::number),
            is_leaf,
            share: set(sched_flag::BW_SHARE, attr.bw_share),
            max_bandwidth: set(sched_flag::MAX_AVG_BW, attr.max_avg_bw),
        })
    }
}

/// # Safety
/// An open context of ours, and attributes as for [`scheduling`].
unsafe fn create(
    context: *mut ibv_context,
    attr: *const mlx5dv_sched_attr,
    is_leaf: bool,
) -> Result<*mut Element, Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let ctx = CtxRef::of(context);
        if !Scheduling::is_supported(&ctx)? {
            return Err(Errno::OPNOTSUPP);
        }
        let scheduling = scheduling(attr, is_leaf)?;
        let parent = (*attr).parent;
        // A leaf is under a node; a node without a parent is the root, which has no limits.
        if parent.is_null() && (is_leaf || (*attr).flags != 0) {
            return Err(Errno::INVAL);
        }
        let (object, number) = scheduling.create(&ctx)?;
        let mut element = try_box(Element {
            parent,
            holder: core::ptr::null_mut(),
            context,
            number,
            object,
        })
        .map_err(|(_, errno)| errno)?;
        element.holder = &raw mut element.context;
        Ok(Box::into_raw(element))
    }
}

/// # Safety
/// A live element of ours, and attributes as for [`scheduling`].
unsafe fn modify(
    element: *mut Element,
    attr: *const mlx5dv_sched_attr,
    is_leaf: bool,
) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let mut scheduling = scheduling(attr, is_leaf)?;
        scheduling.parent = (*element).parent.as_ref().map_or(0, Element::number);
        Ok(scheduling.modify(&(*element).object, (*element).number)?)
    }
}

macro_rules! elements {
    ($($create:ident $modify:ident $destroy:ident: $is_leaf:expr, $what:literal;)+) => {$(
        exported! {
            #[doc = concat!("Creates ", $what, ". EOPNOTSUPP if the device does not schedule.")]
            fn $create(context: *mut ibv_context, attr: *const mlx5dv_sched_attr)
                -> *mut Element
            where is_ours(context), else ringverbs_refused_object().cast() => {
                // SAFETY: an open context, and the application's attributes.
                entry::pointer(|| unsafe { create(context, attr, $is_leaf) })
            }

            #[doc = concat!("QpChanges attributes of ", $what, ".")]
            fn $modify(element: *mut Element, attr: *const mlx5dv_sched_attr) -> c_int
            where is_ours(context(element)), else libc::EOPNOTSUPP => {
                // SAFETY: a live element, and the application's attributes.
                entry::int(|| unsafe { modify(element, attr, $is_leaf) })
            }

            #[doc = concat!("Destroys ", $what, ". EBUSY, and it stays, while it is used.")]
            fn $destroy(element: *mut Element) -> c_int
            where is_ours(context(element)), else libc::EOPNOTSUPP => {
                // SAFETY: what was created, once.
                entry::int(|| unsafe {
                    destroyed((*element).object.destroy().map_err(Into::into))?;
                    drop(Box::from_raw(element));
                    Ok(())
                })
            }
        }
    )+};
}

elements! {
    mlx5dv_sched_node_create mlx5dv_sched_node_modify mlx5dv_sched_node_destroy:
        false, "a node";
    mlx5dv_sched_leaf_create mlx5dv_sched_leaf_modify mlx5dv_sched_leaf_destroy:
        true, "a leaf";
}
