//! Memory windows that the program has bound to regions.

use std::collections::HashMap;

use super::watched;
use crate::explain::Origin;

/// `struct ibv_mw`.
#[repr(C)]
pub(crate) struct IbvMw {
    context: usize,
    pd: usize,
    key: u32,
    handle: u32,
    kind: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
struct IbvMr {
    context: usize,
    pd: usize,
    address: usize,
    length: usize,
    handle: u32,
    lkey: u32,
    rkey: u32,
}

/// `struct ibv_mw_bind_info`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BindInfo {
    region: *const IbvMr,
    address: u64,
    length: u64,
    access: u32,
}

const _: () = assert!(size_of::<IbvMw>() == 32);
const _: () = assert!(size_of::<IbvMr>() == 48);
const _: () = assert!(size_of::<BindInfo>() == 32);

const TYPE_1: u32 = 1;

/// A work request that binds a window.
#[derive(Debug)]
pub(crate) struct Binding {
    /// The window's handle.
    handle: u32,
    /// A key of the window: the one before for type 1, the one that it gets for type 2.
    key: u32,
    is_type_1: bool,
    /// The local key of the region; `None` if the window is unbound.
    region: Option<u32>,
}

impl Binding {
    /// Reads what `ibv_bind_mw`, or with a key the work request, is given.
    ///
    /// # Safety
    /// A window, and its region if there is one.
    pub(crate) unsafe fn new(window: *const IbvMw, key: Option<u32>, info: &BindInfo) -> Self {
        // SAFETY: guaranteed by the caller.
        let window = unsafe { &*window };
        let region = Some(info.region).filter(|it| !it.is_null() && info.length != 0);
        Self {
            handle: window.handle,
            key: key.unwrap_or(window.key),
            is_type_1: window.kind == TYPE_1,
            // SAFETY: guaranteed by the caller.
            region: region.map(|region| unsafe { (*region).lkey }),
        }
    }
}

/// A window that is bound.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) key: u32,
    is_type_1: bool,
    region: u32,
    pub(super) queue_pair: u32,
    /// When it was posted.
    at: u64,
    pub(super) origin: Origin,
}

/// The windows of a process that are bound, by device and handle.
#[derive(Debug, Default)]
pub(super) struct Windows(HashMap<(usize, u32), Bound>);

impl Windows {
    /// Handles a work request that the provider has taken.
    pub(super) fn bind(&mut self, (device, qpn): (usize, u32), binding: &Binding, origin: &Origin) {
        let key = (device, binding.handle);
        let Some(region) = binding.region else {
            self.0.remove(&key);
            return;
        };
        let bound = Bound {
            key: binding.key,
            is_type_1: binding.is_type_1,
            region,
            queue_pair: qpn,
            at: watched::now(),
            origin: origin.clone(),
        };
        self.0.insert(key, bound);
    }

    /// Handles a work request that invalidates a key.
    pub(super) fn invalidate(&mut self, device: usize, key: u32) {
        self.0.retain(|(of, _), it| *of != device || it.key != key);
    }

    /// Handles an object that was destroyed.
    pub(super) fn destroyed(&mut self, device: usize, handle: u32) {
        self.0.remove(&(device, handle));
    }

    /// Handles work requests of a queue pair that may not have been carried out.
    pub(super) fn forget(&mut self, device: usize, qpn: u32) {
        self.0
            .retain(|(of, _), it| *of != device || it.queue_pair != qpn);
    }

    /// Removes and returns a window that is bound to a region. Peers may have invalidated those
    /// of type 2 by a message.
    pub(super) fn take_bound_to(&mut self, device: usize, region: u32) -> Option<Bound> {
        let is_bound = |bound: &Bound| {
            bound.region == region && (bound.is_type_1 || !watched::has_message(bound.at))
        };
        let mut windows = self.0.iter();
        let found = windows.find(|((of, _), bound)| *of == device && is_bound(bound));
        let key = *found?.0;
        self.0.remove(&key)
    }
}
