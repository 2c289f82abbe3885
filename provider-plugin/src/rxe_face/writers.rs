//! The writers of `ringverbs_rxe`, as the data path uses them.

use core::ffi::c_int;

use rxe::{BindMwWr, RecvQueue, RecvWriter, SendQueue, Sge, Wqe};

use super::Rxe;
use crate::abi::*;
use crate::ah::ah_of;
use crate::writers::{entry, receives, sends};

sends!(SendQueue, Wqe, {
    #[inline(always)]
    fn begin(&mut self) {
        let _ = SendQueue::begin(self).keep();
    }
});

entry!(Wqe, {
    #[inline(always)]
    fn takes_atomic(remote_addr: u64, list: &[Sge]) -> bool {
        let length: u64 = list.iter().map(|sge| u64::from(sge.length)).sum();
        remote_addr.is_multiple_of(8) && length >= 8
    }

    #[inline(always)]
    unsafe fn ud(&mut self, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
        // SAFETY: as the caller says.
        let ah_num = unsafe { ah_of::<Rxe>(ah) }.address;
        Wqe::ud(self, ah_num, remote_qpn, remote_qkey);
    }

    /// Without a region, binds it to nothing.
    #[inline(always)]
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
        self.bind_mw(BindMwWr {
            addr: info.addr,
            length: info.length,
            mr_lkey: mr.map_or(0, |mr| mr.lkey),
            mw_rkey: mw.rkey,
            rkey,
            access: info.mw_access_flags,
        });
        Ok(())
    }

    #[inline(always)]
    fn gather_one(&mut self, sge: Sge) -> Result<(), c_int> {
        self.sge(sge).map(drop).map_err(|error| error.errno())
    }

    #[inline(always)]
    fn set_inline_flag(&mut self, inline: bool) {
        Wqe::set_inline_flag(self, inline);
    }
});

receives!(RecvQueue, RecvWriter);
