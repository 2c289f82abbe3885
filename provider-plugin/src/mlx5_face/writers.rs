//! The writers of `ringverbs_mlx5`, as the data path uses them.

use core::ffi::c_int;

use mlx5::{Bind, RecvQueue, RecvWriter, SendQueue, SharedQueue, SharedWriter, WindowKind, Wqe};

use super::Mlx5;
use crate::abi::*;
use crate::ah::ah_of;
use crate::mr::may_be_bound;
use crate::writers::{entry, receives, sends};

sends!(SendQueue, Wqe, {
    #[inline(always)]
    fn begin(&mut self) {
        SendQueue::begin(self);
    }

    #[inline(always)]
    fn settle(&mut self) {
        SendQueue::settle(self);
    }

    fn abandon(&mut self) {
        SendQueue::abort(self);
    }
});

entry!(Wqe, {
    #[inline(always)]
    unsafe fn ud(&mut self, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
        // SAFETY: as the caller says.
        let address = unsafe { &ah_of::<Mlx5>(ah).address };
        Wqe::ud(self, address, remote_qpn, remote_qkey);
    }

    #[inline(always)]
    fn xrc(&mut self, remote_srqn: u32) {
        Wqe::xrc(self, remote_srqn);
    }

    /// Without a region, binds it to nothing. The card does not know which regions
    /// may be bound.
    unsafe fn bind_window(
        &mut self,
        mw: *mut ibv_mw,
        rkey: u32,
        info: &ibv_mw_bind_info,
    ) -> Result<(), c_int> {
        // SAFETY: as the caller says.
        let (mw, mr) = unsafe { (mw.as_ref(), info.mr.as_ref()) };
        let (Some(mw), true) = (mw, mr.is_some() || info.length == 0) else {
            return Err(libc::EINVAL);
        };
        // SAFETY: regions are ours, as this part of them.
        let region = unsafe { info.mr.cast::<verbs_mr>().as_ref() };
        let refused = |region| info.length != 0 && !may_be_bound(region, info.mw_access_flags);
        if region.is_some_and(refused) {
            return Err(libc::EINVAL);
        }
        let kind = match mw.type_ {
            IBV_MW_TYPE_1 => WindowKind::Type1,
            IBV_MW_TYPE_2 => WindowKind::Type2,
            _ => return Err(libc::EINVAL),
        };
        self.bind_mw(&Bind {
            window: mw.rkey,
            rkey,
            kind,
            addr: info.addr,
            length: info.length,
            lkey: mr.map_or(0, |mr| mr.lkey),
            access: info.mw_access_flags,
        })
        .map_err(|error| error.errno())
    }
});

receives!(RecvQueue, RecvWriter);
receives!(SharedQueue, SharedWriter, locked);
