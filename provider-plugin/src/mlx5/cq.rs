//! Completion queues: polling and the cursor, attaching queue pairs, arming.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use std::sync::Arc;

use mlx5::{
    Arming, CompletionError, CompletionQueue, CqOptions, CqeRing, CursorEntry, DirectRing,
    EmptyCheck, QpQueues, QueueAllocator, Role, WallClock,
};
use uverbs::CqInit;

use super::memory::Allocators;
use super::{Mlx5, entries};
use crate::abi::*;
use crate::access::locked;
use crate::context::CtxRef;
use crate::cq::{CqOps, Cursor, Readers, cq_of, no_entry, wc_slice};
use crate::entry;
use crate::errno::Errno;

/// The device's entries and the cursor over them.
#[repr(C)]
pub struct Completions {
    /// Checks for an empty queue without the lock.
    empty_check: EmptyCheck,
    ring: UnsafeCell<CqeRing>,
    /// The completion between start_poll and end_poll.
    entry: UnsafeCell<CursorEntry>,
    /// Arms the queue; any thread.
    arming: Arming,
    /// Converts completion times to wall clock time, where the device can.
    wall: Option<WallClock>,
    /// Allocators of the memory when it is resized.
    allocator: Option<Allocators>,
}

/// The format of CQEs; `None`: that of the environment.
#[derive(Default)]
pub struct Format(pub Option<CqOptions>);

/// A completion queue of a ConnectX.
pub type Cq = crate::cq::Cq<Mlx5>;

impl CqOps for Mlx5 {
    type Completions = Completions;
    type CqOptions = Format;

    fn wc_flags(ctx: &CtxRef) -> u64 {
        let wall = ctx.mlx5().ok().and_then(|device| device.clock().wall());
        let wall = wall.map_or(0, |_| IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK);
        IBV_WC_STANDARD_FLAGS
            | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
            | IBV_WC_EX_WITH_CVLAN
            | IBV_WC_EX_WITH_FLOW_TAG
            | IBV_WC_EX_WITH_TM_INFO
            | wall
    }

    unsafe fn make_cq(
        ctx: &CtxRef,
        init: &CqInit,
        options: &Format,
        domain: *mut ibv_pd,
    ) -> Result<(uverbs::Cq<CtxRef>, Completions), Errno> {
        // SAFETY: null or live, as the caller says.
        let allocator = unsafe { Allocators::of(ctx, domain) };
        let queue_allocator = allocator
            .as_ref()
            .map(|allocator| allocator as &dyn QueueAllocator);
        let options = options.0.map_or_else(entries::sized_cq_options, Ok)?;
        let device = ctx.mlx5()?;
        let mut new_cq = CompletionQueue::create_with(ctx, device, init, options, queue_allocator)?;
        new_cq.ring.set_protected_keys(device.protected_keys());
        let completions = Completions {
            // SAFETY: it is dropped with the ring.
            empty_check: unsafe { new_cq.ring.empty_check() },
            ring: UnsafeCell::new(new_cq.ring),
            entry: UnsafeCell::default(),
            arming: new_cq.arming,
            wall: device.clock().wall(),
            allocator,
        };
        Ok((new_cq.object, completions))
    }

    /// No system call and no lock.
    fn arm(cq: &Cq, solicited_only: bool) -> Result<(), Errno> {
        let register = cq.object.context().mlx5()?.cq_doorbell();
        cq.completions.arming.arm(register, solicited_only);
        Ok(())
    }

    const CURSOR: Cursor = Cursor {
        start_poll,
        next_poll,
        end_poll,
    };

    fn set_readers(cq: &mut ibv_cq_ex, wc_flags: u64) {
        READERS.set(cq, wc_flags);
        if wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP != 0 {
            cq.read_completion_ts = Some(read_completion_ts);
        }
        if wc_flags & IBV_WC_EX_WITH_CVLAN != 0 {
            cq.read_cvlan = Some(read_cvlan);
        }
        if wc_flags & IBV_WC_EX_WITH_FLOW_TAG != 0 {
            cq.read_flow_tag = Some(read_flow_tag);
        }
        if wc_flags & IBV_WC_EX_WITH_TM_INFO != 0 {
            cq.read_tm_info = Some(read_tm_info);
        }
        if wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK != 0 {
            cq.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
        }
    }
}

impl Cq {
    /// Runs `f` on the ring in the critical section.
    fn with<R>(&self, f: impl FnOnce(&mut CqeRing) -> R) -> R {
        locked(self.single, &self.lock, || {
            // SAFETY: in the critical section. A single owner may be stepping
            // through the queue just now.
            f(unsafe {
                (*self.completions.entry.get()).keep();
                &mut *self.completions.ring.get()
            })
        })
    }

    /// Adds a queue pair to the QP table.
    pub fn attach(&self, queues: &Arc<QpQueues>, role: Role) -> Result<(), Errno> {
        Ok(self.with(|ring| ring.attach(queues, role))?)
    }

    /// Removes a destroyed queue pair from the QP table.
    pub fn detach(&self, queues: &QpQueues) {
        self.with(|ring| ring.detach(queues));
    }

    /// The CQEs and the CQ number, for a program that reads them itself.
    pub fn direct(&self) -> (DirectRing, u32) {
        let ring = self.with(CqeRing::direct);
        (ring, self.completions.arming.cqn())
    }

    /// Removes the unread completions of a queue pair that was reset.
    pub fn clean(&self, queues: &QpQueues) {
        self.with(|ring| ring.clean(queues));
    }
}

/// `ibv_resize_cq`. Completions in the queue stay.
pub unsafe extern "C" fn resize_cq(ibcq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours.
    entry::int(|| unsafe {
        let cq: &Cq = cq_of(ibcq);
        // A negative number becomes one that is too large.
        let allocator = cq.completions.allocator.as_ref();
        let allocator = allocator.map(|allocator| allocator as &dyn QueueAllocator);
        let cqe =
            cq.with(|ring| CompletionQueue::resize(&cq.object, ring, cqe as u32, allocator))?;
        (*ibcq).cqe = c_int::try_from(cqe).unwrap_or(c_int::MAX);
        Ok(())
    })
}

/// `verbs_context_ops.cq_event`: libibverbs has read an event of the queue.
pub unsafe extern "C" fn cq_event(cq: *mut ibv_cq) {
    // SAFETY: libibverbs passes a live queue of ours.
    entry::unit(|| unsafe { cq_of::<Mlx5, _>(cq) }.completions.arming.event());
}

/// `ibv_poll_cq`: takes up to `num_entries` completions, in order, each once.
/// Negative for a malformed completion, which is skipped.
///
/// No allocation, no system call; a lock if several threads poll the queue and
/// it is not empty.
pub unsafe extern "C" fn poll_cq(ibcq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the application passes a live queue of ours, and room for
    // `num_entries` completions.
    unsafe {
        let cq: &Cq = cq_of(ibcq);
        if cq.completions.empty_check.is_empty() {
            return 0;
        }
        poll(cq, num_entries, wc)
    }
}

/// [`poll_cq`] of a queue that may not be empty. Not inlined, so that polling an
/// empty queue saves no registers (20 instructions instead of 76).
///
/// # Safety
/// As for [`poll_cq`].
#[inline(never)]
unsafe extern "C" fn poll(cq: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    cq.lock();
    // SAFETY: in the critical section. The application has promised, when it
    // posted, that the memory of its work requests is valid.
    let (ring, out) = unsafe { (&mut *cq.completions.ring.get(), wc_slice(wc, num_entries)) };
    // SAFETY: as above.
    let polled = match unsafe { ring.poll(out) } {
        Ok(count) => count as c_int,
        Err(error) => -malformed(ring, error),
    };
    cq.unlock();
    polled
}

/// Skips a malformed completion; EIO.
#[cold]
#[inline(never)]
fn malformed(ring: &mut CqeRing, error: CompletionError) -> c_int {
    tracing::error!(%error, "malformed completion");
    ring.skip();
    libc::EIO
}

/// Moves the cursor to the next completion: 0, ENOENT, or EIO for a malformed one.
///
/// # Safety
/// Both are the same live queue, and its critical section has been entered.
#[inline(always)]
unsafe fn next(ibcq: *mut ibv_cq_ex, cq: &Cq) -> c_int {
    // SAFETY: in the critical section, so the cells are this caller's, and the
    // public members are as the interface has it. As for `poll_cq`.
    unsafe {
        let ring = &mut *cq.completions.ring.get();
        let entry = &mut *cq.completions.entry.get();
        match ring.next(entry) {
            Ok(true) => {
                (*ibcq).wr_id = entry.wr_id();
                (*ibcq).status = entry.status();
                0
            }
            Ok(false) => no_entry(),
            Err(error) => malformed(ring, error),
        }
    }
}

/// `ibv_start_poll`.
unsafe extern "C" fn start_poll(ibcq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the application passes a live queue of ours and its attributes.
    unsafe {
        if (*attr).comp_mask != 0 {
            return libc::EINVAL;
        }
        let cq: &Cq = cq_of(ibcq);
        cq.lock();
        let result = next(ibcq, cq);
        if result != 0 {
            cq.unlock();
        }
        result
    }
}

/// `ibv_next_poll`.
unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe { next(cq, cq_of(cq)) }
}

/// `ibv_end_poll`.
unsafe extern "C" fn end_poll(ibcq: *mut ibv_cq_ex) {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe {
        let cq: &Cq = cq_of(ibcq);
        (*cq.completions.ring.get()).publish();
        cq.unlock();
    }
}

/// Functions that read a field of the completion under the cursor.
macro_rules! readers {
    ($($name:ident: $field:ident -> $type:ty;)+) => {$(
        unsafe extern "C" fn $name(ibcq: *mut ibv_cq_ex) -> $type {
            // SAFETY: the application is between start_poll and end_poll, so
            // there is a completion, and the cell is its own.
            unsafe {
                let cq: &Cq = cq_of(ibcq);
                let entry = &*cq.completions.entry.get();
                CursorEntry::$field(entry).into()
            }
        }
    )+};
}

readers! {
    read_opcode: opcode -> u32;
    read_vendor_err: vendor_err -> u32;
    read_wc_flags: wc_flags -> u32;
    read_byte_len: byte_len -> u32;
    read_imm_data: imm_data -> u32;
    read_qp_num: qp_num -> u32;
    read_src_qp: src_qp -> u32;
    read_slid: slid -> u32;
    read_sl: sl -> u8;
    read_dlid_path_bits: dlid_path_bits -> u8;
    read_completion_ts: time -> u64;
    read_cvlan: cvlan -> u16;
    read_flow_tag: flow_tag -> u32;
}

const READERS: Readers = Readers {
    opcode: read_opcode,
    vendor_err: read_vendor_err,
    wc_flags: read_wc_flags,
    byte_len: read_byte_len,
    imm_data: read_imm_data,
    qp_num: read_qp_num,
    src_qp: read_src_qp,
    slid: read_slid,
    sl: read_sl,
    dlid_path_bits: read_dlid_path_bits,
};

unsafe extern "C" fn read_tm_info(ibcq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    // SAFETY: the application is between start_poll and end_poll, and passes room for the
    // answer.
    unsafe {
        let cq: &Cq = cq_of(ibcq);
        let (tag, private) = (*cq.completions.entry.get()).tag();
        (*info).tag = tag;
        (*info).priv_ = private;
    }
}

/// Nanoseconds since 1970; 0 without the driver's clock record.
unsafe extern "C" fn read_completion_wallclock_ns(ibcq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: the application is between start_poll and end_poll, so it alone
    // uses the ring and the clock.
    unsafe {
        let cq: &Cq = cq_of(ibcq);
        let time = (*cq.completions.entry.get()).time();
        match (&cq.completions.wall, cq.object.context().mlx5()) {
            (Some(wall), Ok(device)) => wall.nanoseconds(device.clock(), time),
            _ => 0,
        }
    }
}
