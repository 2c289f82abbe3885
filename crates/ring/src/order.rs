//! Barriers between a process and the driver on the other side of a ring, named by
//! purpose.
//!
//! The driver uses `smp_load_acquire` and `smp_store_release` on the same
//! words (drivers/infiniband/sw/rxe/rxe_queue.h). Threads of one process are
//! ordered among themselves by the queue's lock, so own indices need none.

//!
//! A hardware device accesses memory over its bus, without the driver's words and
//! locks: the functions from [`written_by_device`] on are for devices. Memory that a
//! device reads and writes is coherent with the processors' caches; its registers are
//! mapped as write-combining.

use crate::primitive::{AtomicU8, AtomicU32, Ordering, fence};

/// Reads an index that the other side publishes.
///
/// Acquire: entries (or free slots) that the other side finished before it
/// stored this value are seen by every access that follows.
#[inline]
pub fn from_device(index: &AtomicU32) -> u32 {
    index.load(Ordering::Acquire)
}

/// Publishes an own index to the other side.
///
/// Release: every entry written (or read) before is finished when the other
/// side sees the value.
#[inline]
pub fn to_device(index: &AtomicU32, value: u32) {
    index.store(value, Ordering::Release);
}

/// Reads back an index that only this side writes. The caller owns that side, by the
/// queue's lock or as its only thread, so no ordering is needed.
#[inline]
pub fn own(index: &AtomicU32) -> u32 {
    index.load(Ordering::Relaxed)
}

/// Reads, without the lock, an index that another thread of this process
/// publishes under the lock.
///
/// Acquire: the next load (the ring's identity in [`crate::IndexCheck`]) is not executed
/// earlier.
#[inline]
pub fn from_owner(index: &AtomicU32) -> u32 {
    index.load(Ordering::Acquire)
}

/// Reads the word that a driver changes before and after it changes a record of
/// several words (`sign` of `struct mlx5_ib_clock_info`: odd in between).
///
/// Acquire: the record's words are read after this.
#[cfg(not(loom))]
#[inline]
pub fn record_begins(sign: &AtomicU32) -> u32 {
    sign.load(Ordering::Acquire)
}

/// Reads the sequence count again: if it is unchanged and even, the words that were read
/// in between are consistent.
///
/// The fence: the record's words are read before this.
#[cfg(not(loom))]
#[inline]
pub fn record_ends(sign: &AtomicU32) -> u32 {
    fence(Ordering::Acquire);
    sign.load(Ordering::Relaxed)
}

/// Reads the owner byte of an entry, which the device writes after the entry's other
/// bytes.
///
/// Acquire, against the device's writes over the bus: the entry's other bytes are read
/// after this. On x86-64 that is a plain load:
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

/// Writes a doorbell record: the word in memory from which a device reads a queue's
/// producer index, or the consumer index of a completion queue.
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

/// Between a doorbell record and the write to the doorbell register: the device must
/// see the record, and the entries, when the write to the register reaches it.
/// Write-combining stores are not ordered after cached ones without a barrier:
/// `sfence`, on aarch64 `dsb st`.
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

/// After a write to a register: flushes the write-combining buffer, so that the write
/// precedes any later write to a register by this thread or by the next holder of the
/// register's lock. `sfence`, on aarch64 `dsb st`.
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

/// Clears an announcement and returns its previous value. The caller that gets a nonzero
/// value must wake the sleeper. Earlier stores of the caller are visible to the sleeper.
#[inline]
pub(crate) fn take(word: &AtomicU32) -> u32 {
    word.swap(0, Ordering::AcqRel)
}

/// After a load of a count of users that leaves room for another one: everything that the
/// users did before they released their place precedes all later accesses.
#[inline]
pub fn after_last_user() {
    fence(Ordering::Acquire);
}
