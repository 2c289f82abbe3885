//! The barriers between a process and the driver on the other side of a ring,
//! named by what they are for.
//!
//! The driver uses `smp_load_acquire` and `smp_store_release` on the same
//! words (drivers/infiniband/sw/rxe/rxe_queue.h). Threads of one process are
//! ordered among themselves by the queue's lock, so own indices need none.

//!
//! A device that takes part by itself, over its bus, uses neither word nor
//! lock of the kernel's: the functions from [`written_by_device`] on are for
//! it. Memory that it reads and writes is coherent with the processors'
//! caches; its registers are mapped as write-combining.

use crate::primitive::{AtomicU8, AtomicU32, Ordering, fence};

/// Reads an index that the other side publishes.
///
/// Acquire: entries (or free slots) that the other side finished before it
/// stored this value are seen by every access that follows.
#[inline]
pub fn from_device(index: &AtomicU32) -> u32 {
    index.load(Ordering::Acquire)
}

/// Publishes an index of ours to the other side.
///
/// Release: every entry written (or read) before is finished when the other
/// side sees the value.
#[inline]
pub fn to_device(index: &AtomicU32, value: u32) {
    index.store(value, Ordering::Release);
}

/// Reads back an index that only this side writes; the caller owns that side
/// (by the queue's lock, or as its only thread), so nothing is to be ordered.
#[inline]
pub fn own(index: &AtomicU32) -> u32 {
    index.load(Ordering::Relaxed)
}

/// Reads, without the lock, an index that another thread of this process
/// publishes under the lock.
///
/// Acquire: what is looked at next (the ring's identity in [`crate::IndexCheck`]) is
/// not read earlier.
#[inline]
pub fn from_owner(index: &AtomicU32) -> u32 {
    index.load(Ordering::Acquire)
}

/// Reads the word that a driver changes before and after it changes a record of
/// several words (`sign` of `struct mlx5_ib_clock_info`: odd in between).
///
/// Acquire: no word of the record that is read after this was read before.
#[cfg(not(loom))]
#[inline]
pub fn record_begins(sign: &AtomicU32) -> u32 {
    sign.load(Ordering::Acquire)
}

/// Reads it again: if it is the same, and even, the words that were read in
/// between are of one piece.
///
/// The fence: no word of the record that was read before this is read after it.
#[cfg(not(loom))]
#[inline]
pub fn record_ends(sign: &AtomicU32) -> u32 {
    fence(Ordering::Acquire);
    sign.load(Ordering::Relaxed)
}

/// Reads the byte by which a device says, in the entry itself, that it has
/// written the entry: a device writes an entry's other bytes before that one.
///
/// Acquire: no byte of the entry that is read after this was read before.
/// Against the device's writes over the bus. On x86-64 that is a plain load:
/// loads of cached memory are not reordered with each other, and a device's
/// writes are seen in order; no fence is needed. On aarch64 an acquire orders
/// against observers of the inner shareable domain only, and a device may be
/// outside of it: a load barrier for the outer one follows.
#[inline]
pub fn written_by_device(owner: &AtomicU8) -> u8 {
    let value = owner.load(Ordering::Acquire);
    #[cfg(all(target_arch = "aarch64", not(loom), not(miri)))]
    // SAFETY: a barrier touches neither memory nor registers.
    unsafe {
        core::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    value
}

/// Writes a doorbell record: the word in memory where a device reads how far
/// a queue has been filled, or its completions consumed.
///
/// Release: every entry written (or read) before is finished when the device
/// sees the value. Against the device's reads over the bus: on x86-64 a plain
/// store, since stores of cached memory are seen in order, and not before the
/// loads that precede them; on aarch64 a barrier of the outer shareable domain
/// comes first.
#[inline]
pub fn doorbell_record(record: &AtomicU32, value: u32) {
    #[cfg(all(target_arch = "aarch64", not(loom), not(miri)))]
    // SAFETY: a barrier touches neither memory nor registers.
    unsafe {
        core::arch::asm!("dmb osh", options(nostack, preserves_flags));
    }
    record.store(value, Ordering::Release);
}

/// Between a doorbell record and the register that announces it: the device
/// shall find the record, and the entries, when the register's write reaches
/// it. Write-combining stores are not ordered behind cached ones by
/// themselves: `sfence`, on aarch64 `dsb st`.
#[cfg(not(loom))]
#[inline]
pub fn before_doorbell_register() {
    flush_write_combining();
}

/// [`before_doorbell_register`] of a register whose lock was just taken: on x86-64
/// the instruction that takes a lock waits for all stores before it.
#[cfg(not(loom))]
#[inline]
pub fn before_locked_doorbell_register() {
    if cfg!(target_arch = "x86_64") {
        core::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        flush_write_combining();
    }
}

/// After a write to a register: it leaves the write-combining buffer now, and
/// before any write to a register that follows, from this thread or from one
/// that takes the register's lock next. `sfence`, on aarch64 `dsb st`.
#[cfg(not(loom))]
#[inline]
pub fn flush_write_combining() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is part of x86-64, and a fence touches no memory.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a barrier touches neither memory nor registers.
    unsafe {
        core::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    fence(Ordering::SeqCst);
}

/// Between a store and a load where the other side, another process, stores and loads
/// the same two words the other way round: at least one of the two sees the other's
/// store. A full barrier on both sides, since membarrier(2) reaches one process only.
#[inline]
pub(crate) fn between_stores_and_sleep() {
    fence(Ordering::SeqCst);
}

/// Announces a sleep to another process. Ordered by [`between_stores_and_sleep`].
#[inline]
pub(crate) fn announce(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Relaxed);
}

/// Takes an announcement back; returns what it was. Who gets it has to wake. What it
/// has published stays before this.
#[inline]
pub(crate) fn take(word: &AtomicU32) -> u32 {
    word.swap(0, Ordering::AcqRel)
}

/// After a count of users was read that has become low enough for another one: what those
/// that have gone did before they let go is before all that follows.
#[inline]
pub fn after_last_user() {
    fence(Ordering::Acquire);
}
