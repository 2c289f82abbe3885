//! The writers of `ringverbs_rxe`, as the data path uses them.

use core::ffi::c_int;

use ring::BiasedLock;
use rxe::{BindMwWr, Opcode, PostError, RecvQueue, SendFlags, SendQueue, Sge, Wqe};

use super::Rxe;
use super::post::post_receives;
use crate::abi::*;
use crate::ah::ah_of;
use crate::writers::{Entry, Receives, Sends};

impl Sends for SendQueue {
    type Entry<'q> = Wqe<'q>;

    #[inline(always)]
    fn begin(&mut self) {
        let _ = SendQueue::begin(self).keep();
    }
    #[inline(always)]
    fn open(&mut self, wr_id: u64, opcode: Opcode, flags: SendFlags) -> Result<Wqe<'_>, c_int> {
        SendQueue::open(self, wr_id, opcode, flags).map_err(PostError::errno)
    }
    #[inline(always)]
    fn accept(&mut self) {
        SendQueue::accept(self);
    }
    #[inline(always)]
    fn last(&mut self) -> Option<Wqe<'_>> {
        SendQueue::last(self)
    }
    #[inline(always)]
    unsafe fn publish(&mut self) -> bool {
        // SAFETY: as the caller says.
        unsafe { SendQueue::publish(self) }
    }
    #[inline(always)]
    fn max_sge(&self) -> u32 {
        SendQueue::max_sge(self)
    }
}

impl Entry for Wqe<'_> {
    #[inline(always)]
    fn takes_atomic(remote_addr: u64, list: &[Sge]) -> bool {
        let length: u64 = list.iter().map(|sge| u64::from(sge.length)).sum();
        remote_addr.is_multiple_of(8) && length >= 8
    }
    #[inline(always)]
    fn max_sge(&mut self) -> u32 {
        Wqe::max_sge(self)
    }
    #[inline(always)]
    fn immediate_or_key(&mut self, value: u32) {
        Wqe::immediate_or_key(self, value);
    }
    #[inline(always)]
    fn rdma(&mut self, remote_addr: u64, rkey: u32) {
        Wqe::rdma(self, remote_addr, rkey);
    }
    #[inline(always)]
    fn atomic(&mut self, remote_addr: u64, rkey: u32, compare_add: u64, swap: u64) {
        Wqe::atomic(self, remote_addr, rkey, compare_add, swap);
    }
    #[inline(always)]
    unsafe fn ud(&mut self, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
        // SAFETY: as the caller says.
        Wqe::ud(
            self,
            unsafe { ah_of::<Rxe>(ah) }.address,
            remote_qpn,
            remote_qkey,
        );
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
    fn no_data(&mut self) {
        Wqe::no_data(self);
    }
    #[inline(always)]
    unsafe fn inline(
        &mut self,
        pieces: impl Iterator<Item = (*const u8, usize)>,
    ) -> Result<(), c_int> {
        // SAFETY: as the caller says.
        unsafe { self.inline_raw(pieces) }
            .map(drop)
            .map_err(PostError::errno)
    }
    #[inline(always)]
    fn gather(&mut self, list: &[Sge]) -> Result<(), c_int> {
        self.sge_list(list).map(drop).map_err(PostError::errno)
    }
    #[inline(always)]
    fn gather_one(&mut self, sge: Sge) -> Result<(), c_int> {
        self.sge(sge).map(drop).map_err(PostError::errno)
    }
    #[inline(always)]
    fn set_inline_flag(&mut self, inline: bool) {
        Wqe::set_inline_flag(self, inline);
    }
}

impl Receives for RecvQueue {
    #[inline(always)]
    fn begin(&mut self) {
        let _ = RecvQueue::begin(self).keep();
    }
    #[inline(always)]
    fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), c_int> {
        RecvQueue::push(self, wr_id, list).map_err(PostError::errno)
    }
    #[inline(always)]
    unsafe fn publish(&mut self) {
        // SAFETY: as the caller says.
        unsafe { RecvQueue::publish(self) }
    }
    #[inline(always)]
    fn max_sge(&self) -> u32 {
        RecvQueue::max_sge(self)
    }
    #[inline(always)]
    unsafe fn post(
        single: bool,
        lock: &BiasedLock,
        queue: *mut Self,
        wr: *mut ibv_recv_wr,
        bad_wr: *mut *mut ibv_recv_wr,
    ) -> c_int {
        // SAFETY: as the caller says.
        unsafe { post_receives(single, lock, queue, wr, bad_wr) }
    }
}
