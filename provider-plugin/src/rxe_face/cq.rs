//! Completion queues: polling in both styles, of what the kernel writes.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::hint::cold_path;

use ring::{BiasedLock, Peek, Retired, Span};
use rxe::{CompletionQueue, CompletionRing, WorkCompletion};
use uverbs::CqInit;

use super::Rxe;
use crate::abi::*;
use crate::access::{Access, Shared, Single, locked};
use crate::context::CtxRef;
use crate::cq::{Cursor, Device, Readers, cq_of, no_entry, room};
use crate::entry;
use crate::errno::Errno;

/// The kernel's entries and the cursor over them.
#[repr(C)]
pub struct Completions {
    peek: Peek,
    ring: UnsafeCell<CompletionRing>,
    /// Where the batch between start_poll and end_poll stands.
    span: UnsafeCell<Span>,
    /// The completion there.
    entry: UnsafeCell<*const WorkCompletion>,
    retired: UnsafeCell<Vec<Retired>>,
}

type Cq = crate::cq::Cq<Rxe>;

impl Device for Rxe {
    type Completions = Completions;

    fn wc_flags(_: &CtxRef) -> u64 {
        IBV_WC_STANDARD_FLAGS
    }

    unsafe fn make_cq(
        ctx: &CtxRef,
        init: &CqInit,
        _domain: *mut ibv_pd,
    ) -> Result<(uverbs::Cq<CtxRef>, Completions), Errno> {
        let made = CompletionQueue::create(ctx, init)?;
        let completions = Completions {
            peek: made.peek,
            ring: UnsafeCell::new(made.ring),
            span: UnsafeCell::new(Span { at: 0, end: 0 }),
            entry: UnsafeCell::new(core::ptr::null()),
            retired: UnsafeCell::new(made.retired),
        };
        Ok((made.object, completions))
    }

    fn arm(cq: &Cq, solicited_only: bool) -> Result<(), Errno> {
        Ok(cq.object.req_notify(solicited_only)?)
    }

    // Not inlined, or the compiler takes what these functions call for a part
    // of the crate's interface, and calls it through a table.
    #[inline(never)]
    fn cursor(single: bool) -> Cursor {
        if single {
            Cursor {
                start_poll: start_poll::<Single>,
                next_poll,
                end_poll: end_poll::<Single>,
            }
        } else {
            Cursor {
                start_poll: start_poll::<Shared>,
                next_poll,
                end_poll: end_poll::<Shared>,
            }
        }
    }

    #[inline(never)]
    fn set_readers(cq: &mut ibv_cq_ex, wc_flags: u64) {
        READERS.set(cq, wc_flags);
    }
}

/// `ibv_resize_cq`. Completions that are in the queue stay in it.
pub unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours.
    entry::int(|| unsafe {
        let own: &Cq = cq_of(cq);
        let completions = &own.completions;
        locked(own.single, &own.lock, || {
            let cqe = CompletionQueue::resize(
                &own.object,
                &mut *completions.ring.get(),
                &completions.peek,
                &mut *completions.retired.get(),
                cqe as u32,
            )?;
            (*cq).cqe = c_int::try_from(cqe).unwrap_or(c_int::MAX);
            Ok(())
        })
    })
}

/// `ibv_poll_cq`: takes up to `num_entries` completions, in order, each once.
///
/// No allocation, no system call; a lock if several threads poll the queue and
/// it is not empty.
pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the application passes a live queue of ours, and room for
    // `num_entries` completions.
    unsafe {
        let own: &Cq = cq_of(cq);
        if own.single {
            return poll::<Single>(own, num_entries, wc);
        }
        if own.completions.peek.is_empty() {
            return 0;
        }
        if !own.lock.try_quick() {
            return poll_shared(own, num_entries, wc);
        }
        poll::<Shared>(own, num_entries, wc)
    }
}

/// The poll of a queue that may have something; apart, so that the poll of an
/// empty one saves no registers.
///
/// # Safety
/// As for [`poll_cq`]; the queue's critical section has been entered.
#[inline(never)]
unsafe extern "C" fn poll<A: Access>(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: as the caller says.
    let taken = unsafe { take(own, num_entries, wc) };
    A::leave_quick(&own.lock);
    taken
}

/// [`poll_cq`] of a thread that is not the only one to poll here.
///
/// # Safety
/// As for [`poll_cq`].
#[inline(never)]
unsafe extern "C" fn poll_shared(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    if !own.lock.try_spin() {
        // SAFETY: as the caller says.
        return unsafe { poll_contended(own, num_entries, wc) };
    }
    // SAFETY: as the caller says; in the critical section.
    let taken = unsafe { take(own, num_entries, wc) };
    own.lock.unlock_spin();
    taken
}

/// # Safety
/// As for [`poll_cq`].
#[cold]
#[inline(never)]
unsafe extern "C" fn poll_contended(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    own.lock.lock_shared();
    // SAFETY: as the caller says; in the critical section.
    let taken = unsafe { take(own, num_entries, wc) };
    own.lock.unlock();
    taken
}

/// # Safety
/// As for [`poll_cq`]; the queue's critical section has been entered.
#[inline(always)]
unsafe fn take(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: as the caller says; any bytes are a completion.
    unsafe {
        let ring = &*own.completions.ring.get();
        match room(wc, num_entries) {
            [one] => ring.take_one(one).into(),
            out => ring.take(out) as c_int,
        }
    }
}

/// Shows the completion that the cursor is on.
///
/// # Safety
/// The queue's critical section has been entered; the span is not empty, and
/// from [`CompletionRing::available`] or a step since it was entered.
#[inline(always)]
unsafe fn show(cq: *mut ibv_cq_ex, own: &Cq) -> c_int {
    // SAFETY: in the critical section, so the cells are this caller's, and the
    // public members are as the interface has it.
    unsafe {
        let entry = (*own.completions.ring.get()).entry_inside(&*own.completions.span.get());
        (*cq).status = entry.status();
        (*cq).wr_id = entry.wr_id();
        *own.completions.entry.get() = entry.as_ptr();
    }
    0
}

unsafe extern "C" fn start_poll<A: Access>(
    cq: *mut ibv_cq_ex,
    attr: *mut ibv_poll_cq_attr,
) -> c_int {
    // SAFETY: the application passes a live queue of ours and its attributes.
    unsafe {
        if (*attr).comp_mask != 0 {
            cold_path();
            return libc::EINVAL;
        }
        let own: &Cq = cq_of(cq);
        if !A::try_quick(&own.lock) {
            return start_shared(cq);
        }
        start(cq, own, A::leave_quick)
    }
}

/// [`start_poll`] of a thread that is not the only one to poll here.
///
/// # Safety
/// `cq` is a live queue of ours.
#[inline(never)]
unsafe extern "C" fn start_shared(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let own: &Cq = cq_of(cq);
        if !own.lock.try_spin() {
            return start_contended(cq);
        }
        start(cq, own, BiasedLock::unlock_spin)
    }
}

/// # Safety
/// `cq` is a live queue of ours.
#[cold]
#[inline(never)]
unsafe extern "C" fn start_contended(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let own: &Cq = cq_of(cq);
        own.lock.lock_shared();
        start(cq, own, BiasedLock::unlock)
    }
}

/// # Safety
/// The queue's critical section has been entered.
#[inline(always)]
unsafe fn start(cq: *mut ibv_cq_ex, own: &Cq, leave: fn(&BiasedLock)) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let span = (*own.completions.ring.get()).available();
        if span.at == span.end {
            leave(&own.lock);
            return no_entry();
        }
        *own.completions.span.get() = span;
        show(cq, own)
    }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe {
        let own: &Cq = cq_of(cq);
        if !(*own.completions.ring.get()).step_within(&mut *own.completions.span.get()) {
            return next_beyond(cq);
        }
        show(cq, own)
    }
}

/// [`next_poll`] at the end of what was there when it was last looked.
///
/// # Safety
/// The application is between start_poll and end_poll.
#[cold]
#[inline(never)]
unsafe extern "C" fn next_beyond(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let own: &Cq = cq_of(cq);
        // On ENOENT the cursor stays where it is: that completion, too, is
        // given back at end_poll.
        if !(*own.completions.ring.get()).step(&mut *own.completions.span.get()) {
            return no_entry();
        }
        show(cq, own)
    }
}

unsafe extern "C" fn end_poll<A: Access>(cq: *mut ibv_cq_ex) {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe {
        let own: &Cq = cq_of(cq);
        (*own.completions.ring.get()).release(&*own.completions.span.get());
        A::leave(&own.lock);
    }
}

/// Where a field of a work completion is.
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
            unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
                // SAFETY: the application is between start_poll and end_poll, so
                // the completion is there, and the cell is its own; any bytes
                // are one.
                unsafe {
                    let own: &Cq = cq_of(cq);
                    let current = *own.completions.entry.get();
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
