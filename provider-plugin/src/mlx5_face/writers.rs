//! The writers of `ringverbs_mlx5`, as the data path uses them.

use core::ffi::c_int;

use mlx5::{Opcode, PostError, RecvQueue, SendFlags, SendQueue, Sge, SharedQueue, Wqe};
use ring::BiasedLock;

use super::Mlx5;
use crate::abi::*;
use crate::ah::ah_of;
use crate::post::receive;
use crate::writers::{Entry, Receives, Sends};

impl Sends for SendQueue {
    type Entry<'q> = Wqe<'q>;

    #[inline(always)]
    fn begin(&mut self) {
        SendQueue::begin(self);
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
    fn settle(&mut self) {
        SendQueue::settle(self);
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
        unsafe { self.inline_raw(pieces) }.map_err(PostError::errno)
    }
    #[inline(always)]
    fn gather(&mut self, list: &[Sge]) -> Result<(), c_int> {
        self.sge_list(list).map_err(PostError::errno)
    }
}

impl Receives for RecvQueue {
    #[inline(always)]
    fn begin(&mut self) {
        RecvQueue::begin(self);
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
        unsafe { receive(single, lock, queue, wr, bad_wr) }
    }
}

impl Receives for SharedQueue {
    /// What was pushed is in the device's list already.
    #[inline(always)]
    fn begin(&mut self) {}
    #[inline(always)]
    fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), c_int> {
        SharedQueue::push(self, wr_id, list).map_err(PostError::errno)
    }
    #[inline(always)]
    unsafe fn publish(&mut self) {
        // SAFETY: as the caller says.
        unsafe { SharedQueue::publish(self) }
    }
    #[inline(always)]
    fn max_sge(&self) -> u32 {
        SharedQueue::max_sge(self)
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
        unsafe { receive(single, lock, queue, wr, bad_wr) }
    }
}
