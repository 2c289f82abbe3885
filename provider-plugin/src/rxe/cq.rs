//! Completion queues: polling and the cursor, over entries that the kernel writes.

use core::cell::UnsafeCell;
use core::ffi::c_int;

use ring::{IndexCheck, Retired, Span};
use rxe::{CompletionQueue, WcRing, WorkCompletion};
use uverbs::CqInit;

use super::Rxe;
use crate::abi::*;
use crate::access::locked;
use crate::context::CtxRef;
use crate::cq::{CqOps, Cursor, Readers, cq_of, no_entry, wc_slice};
use crate::entry;
use crate::errno::Errno;

/// The kernel's entries and the cursor over them.
#[repr(C)]
pub struct Completions {
    index_check: IndexCheck,
    ring: UnsafeCell<WcRing>,
    /// Position of the batch between start_poll and end_poll.
    span: UnsafeCell<Span>,
    /// The completion at that position.
    entry: UnsafeCell<*const WorkCompletion>,
    retired: UnsafeCell<Vec<Retired>>,
}

type Cq = crate::cq::Cq<Rxe>;

impl CqOps for Rxe {
    type Completions = Completions;
    type CqOptions = ();

    fn wc_flags(_: &CtxRef) -> u64 {
        IBV_WC_STANDARD_FLAGS
    }

    unsafe fn make_cq(
        ctx: &CtxRef,
        init: &CqInit,
        _options: &(),
        _domain: *mut ibv_pd,
    ) -> Result<(uverbs::Cq<CtxRef>, Completions), Errno> {
        let new_cq = CompletionQueue::create(ctx, init)?;
        let completions = Completions {
            index_check: new_cq.index_check,
            ring: UnsafeCell::new(new_cq.ring),
            span: UnsafeCell::new(Span { at: 0, end: 0 }),
            entry: UnsafeCell::new(core::ptr::null()),
            retired: UnsafeCell::new(new_cq.retired),
        };
        Ok((new_cq.object, completions))
    }

    fn arm(cq: &Cq, solicited_only: bool) -> Result<(), Errno> {
        Ok(cq.object.req_notify(solicited_only)?)
    }

    const CURSOR: Cursor = Cursor {
        start_poll,
        next_poll,
        end_poll,
    };

    fn set_readers(cq: &mut ibv_cq_ex, wc_flags: u64) {
        READERS.set(cq, wc_flags);
    }
}

impl Cq {
    /// Removes the unread completions of a queue pair that was reset or destroyed.
    pub fn clean(&self, qp_num: u32) {
        locked(self.single, &self.lock, || {
            // SAFETY: in the critical section.
            unsafe { &*self.completions.ring.get() }.clean(qp_num);
        });
    }
}

/// `ibv_resize_cq`. Completions in the queue stay.
pub unsafe extern "C" fn resize_cq(ibcq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours.
    entry::int(|| unsafe {
        let cq: &Cq = cq_of(ibcq);
        let completions = &cq.completions;
        locked(cq.single, &cq.lock, || {
            let cqe = CompletionQueue::resize(
                &cq.object,
                &mut *completions.ring.get(),
                &completions.index_check,
                &mut *completions.retired.get(),
                cqe as u32,
            )?;
            (*ibcq).cqe = c_int::try_from(cqe).unwrap_or(c_int::MAX);
            Ok(())
        })
    })
}

/// `ibv_poll_cq`: takes up to `num_entries` completions, in order, each once.
///
/// No allocation, no system call; a lock if several threads poll the queue and
/// it is not empty.
pub unsafe extern "C" fn poll_cq(ibcq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the application passes a live queue of ours, and room for
    // `num_entries` completions.
    unsafe {
        let cq: &Cq = cq_of(ibcq);
        if cq.completions.index_check.is_empty() {
            return 0;
        }
        poll(cq, num_entries, wc)
    }
}

/// [`poll_cq`] of a queue that may not be empty. Not inlined, so that polling an
/// empty queue saves no registers (19 instructions instead of 33).
///
/// # Safety
/// As for [`poll_cq`].
#[inline(never)]
unsafe extern "C" fn poll(cq: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    cq.lock();
    // SAFETY: in the critical section; as the caller says.
    let count = unsafe { (*cq.completions.ring.get()).take(wc_slice(wc, num_entries)) };
    cq.unlock();
    count as c_int
}

/// Sets the public members to the cursor's completion.
///
/// # Safety
/// The queue's critical section has been entered. Since then the span was set by
/// [`WcRing::available`] or a step; it is not empty.
#[inline]
unsafe fn set_current(ibcq: *mut ibv_cq_ex, cq: &Cq) {
    // SAFETY: in the critical section, so the cells are this caller's, and the
    // public members are as the interface has it.
    unsafe {
        let entry = (*cq.completions.ring.get()).entry_inside(&*cq.completions.span.get());
        (*ibcq).status = entry.status();
        (*ibcq).wr_id = entry.wr_id();
        *cq.completions.entry.get() = entry.as_ptr();
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
        let span = (*cq.completions.ring.get()).available();
        if span.at == span.end {
            cq.unlock();
            return no_entry();
        }
        *cq.completions.span.get() = span;
        set_current(ibcq, cq);
        0
    }
}

/// `ibv_next_poll`.
unsafe extern "C" fn next_poll(ibcq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe {
        let cq: &Cq = cq_of(ibcq);
        let ring = &*cq.completions.ring.get();
        let span = &mut *cq.completions.span.get();
        // On ENOENT the cursor stays: end_poll releases that completion, too.
        if !ring.step_within(span) && !ring.step(span) {
            return no_entry();
        }
        set_current(ibcq, cq);
        0
    }
}

/// `ibv_end_poll`.
unsafe extern "C" fn end_poll(ibcq: *mut ibv_cq_ex) {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe {
        let cq: &Cq = cq_of(ibcq);
        (*cq.completions.ring.get()).release(&*cq.completions.span.get());
        cq.unlock();
    }
}

/// Pointer to a field of a work completion.
macro_rules! field {
    ($wc:ident, imm_data) => {
        (&raw const (*$wc).ex)
    };
    ($wc:ident, $field:ident) => {
        (&raw const (*$wc).$field)
    };
}

/// Functions that read a field of the completion under the cursor.
macro_rules! readers {
    ($($name:ident: $field:ident -> $type:ty;)+) => {
        const READERS: Readers = Readers { $($field: $name,)+ };
        $(
            unsafe extern "C" fn $name(ibcq: *mut ibv_cq_ex) -> $type {
                // SAFETY: the application is between start_poll and end_poll, so
                // the completion is there, and the cell is its own; any bytes
                // are one.
                unsafe {
                    let cq: &Cq = cq_of(ibcq);
                    let current = *cq.completions.entry.get();
                    field!(current, $field).read().into()
                }
            }
        )+
    };
}

readers! {
    read_opcode: opcode -> u32;
    read_vendor_err: vendor_err -> u32;
    read_byte_len: byte_len -> u32;
    read_imm_data: imm_data -> u32;
    read_qp_num: qp_num -> u32;
    read_src_qp: src_qp -> u32;
    read_wc_flags: wc_flags -> u32;
    read_slid: slid -> u32;
    read_sl: sl -> u8;
    read_dlid_path_bits: dlid_path_bits -> u8;
}
