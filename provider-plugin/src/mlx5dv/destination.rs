//! The direct rule action that DPDK's driver creates for each receiving queue pair, even
//! without direct rules (`dv_flow_en=0`). No rule can use it.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::refused::{ringverbs_refused_object, ringverbs_refused_status};
use super::{exported, is_ours};
use crate::abi::ibv_qp;
use crate::alloc::try_box;
use crate::errno::Errno;

/// An action. The program identifies it by its address.
#[expect(
    dead_code,
    reason = "not zero-sized, so that each action has a unique address"
)]
struct Action(u8);

type Actions = Vec<Box<Action>>;

static ACTIONS: Mutex<Actions> = Mutex::new(Vec::new());

fn actions() -> MutexGuard<'static, Actions> {
    ACTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn create() -> Result<*mut c_void, Errno> {
    let mut actions = actions();
    actions.try_reserve(1).map_err(|_| Errno::NOMEM)?;
    let mut action = try_box(Action(0)).map_err(|(_, errno)| errno)?;
    let address = (&raw mut *action).cast();
    actions.push(action);
    Ok(address)
}

/// Removes an action. Returns whether there was one.
fn remove(action: *mut c_void) -> bool {
    let mut actions = actions();
    let index = actions
        .iter()
        .position(|it| core::ptr::addr_eq(&raw const **it, action));
    index.map(|index| actions.swap_remove(index)).is_some()
}

exported! {
    /// `mlx5dv_dr_action_create_dest_ibv_qp`.
    fn mlx5dv_dr_action_create_dest_ibv_qp(qp: *mut ibv_qp) -> *mut c_void
    where is_ours((*qp).context), else ringverbs_refused_object() => {
        create().unwrap_or_else(|errno| {
            errno.set();
            null_mut()
        })
    }

    /// `mlx5dv_dr_action_destroy`.
    fn mlx5dv_dr_action_destroy(action: *mut c_void) -> c_int
    where remove(action), else ringverbs_refused_status() => { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_is_destroyed_once() {
        let (one, other) = (create().unwrap(), create().unwrap());
        assert_ne!(one, other);
        assert!(remove(one) && !remove(one));
        assert!(!remove(null_mut()));
        assert!(remove(other));
    }
}
