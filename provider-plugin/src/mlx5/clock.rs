//! The device's time.

use core::ffi::c_int;

use crate::abi::*;
use crate::context::CtxRef;
use crate::entry;
use crate::errno::Errno;

/// `ibv_query_rt_values_ex`: ticks of the device's clock in the nanoseconds of
/// the answer, as the stock provider does. EINVAL for undefined values,
/// EOPNOTSUPP where the driver does not announce the clock; no value is set then.
pub unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    // SAFETY: libibverbs passes an open context of ours, the application its
    // structure.
    entry::int(|| unsafe {
        let requested = (*values).comp_mask;
        if requested & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
            return Err(Errno::INVAL);
        }
        (*values).comp_mask = 0;
        if requested & IBV_VALUES_MASK_RAW_CLOCK != 0 {
            let device = CtxRef::of(context).mlx5()?;
            let ticks = device.clock().ticks().ok_or(Errno::OPNOTSUPP)?;
            (*values).raw_clock = libc::timespec {
                tv_sec: 0,
                tv_nsec: ticks as i64,
            };
            (*values).comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
        }
        Ok(())
    })
}
