//! The writers of `ringverbs_mlx5`, as the data path uses them.

use core::ffi::c_int;

use mlx5::{RecvQueue, SendQueue, SharedQueue, Wqe};

use super::Mlx5;
use crate::abi::*;
use crate::ah::ah_of;
use crate::post;
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
});

entry!(Wqe, {
    #[inline(always)]
    unsafe fn ud(&mut self, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
        // SAFETY: as the caller says.
        let address = unsafe { &ah_of::<Mlx5>(ah).address };
        Wqe::ud(self, address, remote_qpn, remote_qkey);
    }

    /// Not done: opening such an entry says so already.
    unsafe fn bind_window(
        &mut self,
        _mw: *mut ibv_mw,
        _rkey: u32,
        _info: &ibv_mw_bind_info,
    ) -> Result<(), c_int> {
        Err(libc::EOPNOTSUPP)
    }
});

receives!(RecvQueue, post::receive, {
    #[inline(always)]
    fn begin(&mut self) {
        RecvQueue::begin(self);
    }
});

receives!(SharedQueue, post::receive, {
    /// It has no batches to forget: what is pushed is linked to the rest.
    #[inline(always)]
    fn begin(&mut self) {}
});
