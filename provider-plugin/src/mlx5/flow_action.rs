//! Flow actions: changes of packets, which flows name.

use core::ffi::c_int;

use mlx5::ioctl::flow::{FlowActionHandle, destroy_action};

use crate::abi::ibv_context;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;

/// `struct ibv_flow_action`.
#[repr(C)]
pub struct ibv_flow_action {
    context: *mut ibv_context,
}

/// A flow action.
#[repr(C)]
pub struct FlowAction {
    /// The structure of applications.
    public: ibv_flow_action,
    handle: FlowActionHandle,
}

/// Creates the C object of an action that `make` creates.
pub fn new(
    context: *mut ibv_context,
    make: impl FnOnce() -> Result<FlowActionHandle, uverbs::Error>,
) -> Result<*mut ibv_flow_action, Errno> {
    let action = FlowAction {
        public: ibv_flow_action { context },
        handle: FlowActionHandle(0),
    };
    let mut action = try_box(action).map_err(|(_, errno)| errno)?;
    action.handle = make()?;
    Ok(Box::into_raw(action).cast())
}

/// The kernel's number of an action.
///
/// # Safety
/// A live action of a context of ours.
pub unsafe fn handle_of(action: *mut ibv_flow_action) -> u32 {
    // SAFETY: every ibv_flow_action of such a context begins a FlowAction.
    unsafe { (*action.cast::<FlowAction>()).handle.0 }
}

/// `ibv_destroy_flow_action`. EBUSY, and the action is unchanged, while flows use it.
pub unsafe extern "C" fn destroy_flow_action(action: *mut ibv_flow_action) -> c_int {
    // SAFETY: libibverbs passes a live action of ours.
    entry::int(|| unsafe {
        let action = action.cast::<FlowAction>();
        let ctx = CtxRef::of((*action).public.context);
        destroyed(destroy_action(&ctx, (*action).handle).map_err(Into::into))?;
        drop(Box::from_raw(action));
        Ok(())
    })
}
