//! Counters of flows.

use core::ffi::c_int;
use core::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mlx5::CounterPoint;
use uverbs::CountersHandle;

use crate::abi::ibv_context;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::flow::ibv_flow;

/// `struct ibv_counters`.
#[repr(C)]
pub struct ibv_counters {
    context: *mut ibv_context,
}

/// `struct ibv_counters_init_attr`.
#[repr(C)]
pub struct ibv_counters_init_attr {
    comp_mask: u32,
}

/// `struct ibv_counter_attach_attr`.
#[repr(C)]
pub struct ibv_counter_attach_attr {
    counter_desc: u32,
    index: u32,
    comp_mask: u32,
}

/// The supported counters: `IBV_COUNTER_PACKETS` and `IBV_COUNTER_BYTES`.
const LAST_DESCRIPTION: u32 = 1;

/// Counters.
#[repr(C)]
pub struct Counters {
    /// The structure of applications.
    public: ibv_counters,
    object: uverbs::Counters<CtxRef>,
    points: SharedCounterPoints,
}

/// The points that counters count, shared with the flows that use them.
#[derive(Clone, Default)]
pub struct SharedCounterPoints(Arc<Mutex<CounterPoints>>);

#[derive(Default)]
struct CounterPoints {
    list: Vec<CounterPoint>,
    /// Number of flows that use the counters; the first one passes the points to the driver.
    flows: u32,
}

impl SharedCounterPoints {
    fn lock(&self) -> MutexGuard<'_, CounterPoints> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A flow with these counters was destroyed.
    pub fn flow_destroyed(&self) {
        self.lock().flows -= 1;
    }
}

/// The provider's view of counters.
///
/// # Safety
/// They are live, and of a context of ours.
pub unsafe fn counters_of<'a>(counters: *mut ibv_counters) -> &'a Counters {
    // SAFETY: every ibv_counters that this provider hands out begins a Counters.
    unsafe { &*counters.cast::<Counters>() }
}

impl Counters {
    /// The kernel's number.
    pub fn handle(&self) -> CountersHandle {
        self.object.handle()
    }

    /// Creates a flow by `make`, which gets the points if it is the first flow with these
    /// counters. The flow calls [`SharedCounterPoints::flow_destroyed`] when it is destroyed.
    ///
    /// # Errors
    /// EINVAL if nothing is to be counted; those of `make`.
    pub fn create_flow_with<T>(
        &self,
        make: impl FnOnce(Option<&[CounterPoint]>) -> Result<T, Errno>,
    ) -> Result<(T, SharedCounterPoints), Errno> {
        let mut points = self.points.lock();
        let list = match points.flows {
            0 if points.list.is_empty() => return Err(Errno::INVAL),
            0 => Some(&*points.list),
            _ => None,
        };
        let flow = make(list)?;
        points.flows += 1;
        Ok((flow, self.points.clone()))
    }
}

/// `ibv_create_counters`. EOPNOTSUPP for attributes that are not known.
pub unsafe extern "C" fn create_counters(
    context: *mut ibv_context,
    attr: *mut ibv_counters_init_attr,
) -> *mut ibv_counters {
    // SAFETY: libibverbs passes an open context of ours, the application its attributes.
    entry::pointer(|| unsafe {
        if (*attr).comp_mask != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let counters = Counters {
            public: ibv_counters { context },
            object: uverbs::Counters::create(&CtxRef::of(context))?,
            points: SharedCounterPoints::default(),
        };
        Ok(Box::into_raw(try_box(counters).map_err(|(_, errno)| errno)?).cast())
    })
}

/// `ibv_destroy_counters`. EBUSY, and the counters are unchanged, while flows use them.
pub unsafe extern "C" fn destroy_counters(counters: *mut ibv_counters) -> c_int {
    // SAFETY: libibverbs passes live counters of ours.
    entry::int(|| unsafe {
        let object = &counters_of(counters).object;
        destroyed(object.destroy().map_err(Into::into))?;
        drop(Box::from_raw(counters.cast::<Counters>()));
        Ok(())
    })
}

/// `ibv_attach_counters_point_flow`, before flows are created with the counters. EBUSY
/// once a flow uses them, ENOTSUP for another description or an existing flow.
pub unsafe extern "C" fn attach_counters_point_flow(
    counters: *mut ibv_counters,
    attr: *mut ibv_counter_attach_attr,
    flow: *mut ibv_flow,
) -> c_int {
    // SAFETY: libibverbs passes live counters of ours, the application its attributes.
    entry::int(|| unsafe {
        let attr = &*attr;
        if !flow.is_null() || attr.comp_mask != 0 || attr.counter_desc > LAST_DESCRIPTION {
            return Err(Errno::OPNOTSUPP);
        }
        let mut points = counters_of(counters).points.lock();
        if points.flows != 0 {
            return Err(Errno::BUSY);
        }
        points.list.try_reserve(1).map_err(|_| Errno::NOMEM)?;
        points.list.push(CounterPoint {
            description: attr.counter_desc,
            index: attr.index,
        });
        Ok(())
    })
}

/// `ibv_read_counters`. EINVAL before a flow uses them.
pub unsafe extern "C" fn read_counters(
    counters: *mut ibv_counters,
    values: *mut u64,
    count: u32,
    flags: u32,
) -> c_int {
    // SAFETY: libibverbs passes live counters of ours, the application room for so many
    // values.
    entry::int(|| unsafe {
        let values = match count {
            0 => &mut [],
            _ => slice::from_raw_parts_mut(values, count as usize),
        };
        Ok(counters_of(counters).object.read(values, flags)?)
    })
}
