//! Address handles: numbers assigned by the driver.

use uverbs::{AhAttr, AhHandle, PdHandle};

use super::Rxe;
use crate::ah::AhOps;
use crate::context::CtxRef;
use crate::errno::Errno;

impl AhOps for Rxe {
    /// The number by which a datagram's work request names the handle; never
    /// 0.
    type Address = u32;
    type AhData = ();

    fn make_ah(
        ctx: &CtxRef,
        pd: PdHandle,
        attr: &AhAttr,
        user_handle: u64,
    ) -> Result<(u32, Option<AhHandle>), Errno> {
        let handle = rxe::AddressHandle::create(ctx, pd, attr, user_handle)?;
        Ok((handle.ah_num, Some(handle.object.into_handle())))
    }
}
