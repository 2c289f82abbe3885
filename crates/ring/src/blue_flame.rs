//! A doorbell register, which may also accept whole entries (BlueFlame).

use std::ptr::NonNull;

#[cfg(any(not(target_arch = "aarch64"), miri))]
use crate::pair::Pair;
use crate::primitive::{AtomicUsize, Ordering};
use crate::{SpinLock, order};

/// A register of two halves, written to in turn. A doorbell is the first 8
/// bytes of an entry; an entry may be written whole instead (BlueFlame), so
/// that the device need not fetch it.
///
/// The register is write-combining memory: what is written to one half leaves
/// the processor before the other is written to.
#[derive(Debug)]
pub struct BlueFlame {
    at: NonNull<u64>,
    /// Bytes of a half; 0 if the register takes doorbells only.
    half: usize,
    /// Offset of the next half in bytes. Protected by the lock if there is one.
    turn: AtomicUsize,
    /// Lock of a register that several queues use.
    lock: Option<SpinLock>,
}

// SAFETY: the register is written to under the lock, or by the one queue that
// has it (`BlueFlame::new`).
unsafe impl Send for BlueFlame {}
// SAFETY: as above.
unsafe impl Sync for BlueFlame {}

impl BlueFlame {
    /// The register at `at`, of two halves of `half` bytes each.
    ///
    /// # Safety
    /// `at` is aligned to 16 bytes and valid for writes of 8 bytes and of twice
    /// `half` for as long as this value is used. If not `shared`, calls are
    /// made by one caller at a time.
    pub unsafe fn new(at: NonNull<u8>, half: usize, shared: bool) -> Self {
        // Blocks are written whole.
        let half = half / Self::BLOCK * Self::BLOCK;
        Self {
            at: at.cast(),
            half,
            turn: AtomicUsize::new(0),
            lock: shared.then(SpinLock::new),
        }
    }

    /// Entries are written in blocks of this many bytes.
    pub const BLOCK: usize = 64;

    /// The first half's first byte.
    pub fn address(&self) -> NonNull<u8> {
        self.at.cast()
    }

    /// Bytes of the longest entry that may be written whole.
    #[inline]
    pub fn room(&self) -> usize {
        self.half
    }

    /// Rings the doorbell: the device reads the entries itself. The doorbell record must
    /// have been published.
    pub fn ring(&self, first: u64) {
        self.lock();
        // SAFETY: 8 bytes of either half, by the contract of `new`.
        self.write(|register| unsafe { register.write_volatile(first) });
        self.unlock();
    }

    /// Writes a whole entry. If it has more blocks than fit, only the first 8 bytes are
    /// written, as by [`BlueFlame::ring`].
    ///
    /// # Safety
    /// Each block is readable, and aligned to 16 bytes.
    pub unsafe fn copy(&self, blocks: impl ExactSizeIterator<Item = NonNull<u64>>) {
        self.lock();
        let fits = blocks.len() * Self::BLOCK <= self.half;
        self.write(|mut register| {
            for block in blocks {
                // SAFETY: the block is readable, and, since all of them fit,
                // lies in the half; the first 8 bytes always do.
                unsafe {
                    if !fits {
                        register.write_volatile(block.read());
                        return;
                    }
                    write_block(register, block);
                    register = register.add(Self::BLOCK / 8);
                }
            }
        });
        self.unlock();
    }

    /// As [`BlueFlame::copy`], of an entry of one block, if the register takes entries and
    /// its lock is free. Otherwise returns false without effect.
    ///
    /// # Safety
    /// As there.
    #[inline]
    pub unsafe fn try_copy_one(&self, block: NonNull<u64>) -> bool {
        if self.half == 0 || self.lock.as_ref().is_some_and(|lock| !lock.try_lock()) {
            return false;
        }
        // SAFETY: a half is some blocks; as the caller says.
        self.write(|register| unsafe { write_block(register, block) });
        self.unlock();
        true
    }

    fn lock(&self) {
        if let Some(lock) = &self.lock {
            lock.lock();
        }
    }

    #[inline]
    fn unlock(&self) {
        if let Some(lock) = &self.lock {
            lock.unlock();
        }
    }

    /// Writes to the next half, with the lock held if there is one.
    #[inline]
    fn write(&self, write: impl FnOnce(*mut u64)) {
        match self.lock {
            None => order::before_doorbell_register(),
            Some(_) => order::before_locked_doorbell_register(),
        }
        let turn = self.turn.load(Ordering::Relaxed);
        write(self.at.as_ptr().wrapping_byte_add(turn));
        // Also orders the doorbell of the lock's next holder after this one.
        order::flush_write_combining();
        self.turn.store(turn ^ self.half, Ordering::Relaxed);
    }
}

/// Copies a block, from its beginning to its end, in the pieces in which
/// [`crate::write_pair`] has written it: a processor forwards what was just written
/// to a read of the same piece; one of several pieces waits for them.
///
/// # Safety
/// The one is writable, the other readable; both are aligned to 16 bytes.
#[cfg(any(not(target_arch = "aarch64"), miri))]
#[inline]
unsafe fn write_block(register: *mut u64, block: NonNull<u64>) {
    let (to, from) = (register.cast::<Pair>(), block.cast::<Pair>());
    for pair in 0..BlueFlame::BLOCK / size_of::<Pair>() {
        // SAFETY: as the caller says.
        unsafe { to.add(pair).write_volatile(from.add(pair).read()) };
    }
}

/// Copies a block by one store of 64 bytes. Of several stores the write-combining
/// buffer of some processors makes several writes on the bus (`mmio_memcpy_x64` of
/// rdma-core's util/mmio.h has the same instruction).
///
/// # Safety
/// The one is writable, the other readable; both are aligned to 16 bytes.
#[cfg(all(target_arch = "aarch64", not(miri)))]
#[inline]
unsafe fn write_block(register: *mut u64, block: NonNull<u64>) {
    const _: () = assert!(BlueFlame::BLOCK == 64);
    // SAFETY: as the caller says; ld4 and st4 take words apart and put them together
    // in the same way, so that what is stored is what was read.
    unsafe {
        core::arch::asm!(
            "ld4 {{v0.2d, v1.2d, v2.2d, v3.2d}}, [{from}]",
            "st4 {{v0.2d, v1.2d, v2.2d, v3.2d}}, [{to}]",
            from = in(reg) block.as_ptr(),
            to = in(reg) register,
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Memory([u64; 64]);

    fn register(memory: &mut Memory, half: usize, shared: bool) -> BlueFlame {
        // SAFETY: aligned; the memory outlives the register in each test.
        unsafe { BlueFlame::new(NonNull::from(&mut memory.0).cast(), half, shared) }
    }

    #[test]
    fn buffers_alternate() {
        for shared in [false, true] {
            let mut memory = Memory([0; 64]);
            let flame = register(&mut memory, 256, shared);
            flame.ring(1);
            flame.ring(2);
            flame.ring(3);
            assert_eq!((memory.0[0], memory.0[32]), (3, 2));
        }
    }

    #[test]
    fn entries_are_written_whole_and_only_if_they_fit() {
        let mut memory = Memory([0; 64]);
        #[repr(align(64))]
        struct Entry([u64; 40]);
        let Entry(entry) = &Entry(std::array::from_fn(|word| word as u64 + 1));
        let blocks =
            |count: usize| (0..count).map(move |block| NonNull::from(&entry[block * 8..]).cast());
        let flame = register(&mut memory, 256, false);
        // SAFETY: the blocks are parts of `entry`.
        unsafe {
            flame.copy(blocks(4));
            flame.copy(blocks(5));
        }
        assert_eq!(memory.0[..32], entry[..32]);
        assert_eq!(memory.0[32], 1);
        assert_eq!(memory.0[33..], [0; 31]);
    }

    #[test]
    fn one_block_is_copied_unless_the_lock_is_held() {
        #[repr(align(64))]
        struct Entry([u64; 8]);
        let Entry(entry) = &Entry([1, 2, 3, 4, 5, 6, 7, 8]);
        let cases = [(256, false, true), (256, true, true), (0, false, false)];
        for (half, shared, copied) in cases {
            let mut memory = Memory([0; 64]);
            let flame = register(&mut memory, half, shared);
            if let Some(lock) = &flame.lock {
                lock.lock();
                // SAFETY: one block.
                assert!(!unsafe { flame.try_copy_one(NonNull::from(entry).cast()) });
                assert_eq!(memory.0, [0; 64]);
                lock.unlock();
            }
            // SAFETY: one block.
            let done = unsafe { flame.try_copy_one(NonNull::from(entry).cast()) };
            assert_eq!(done, copied);
            assert_eq!(memory.0[..8], if copied { *entry } else { [0; 8] });
            // The turn is taken only then.
            flame.ring(9);
            assert_eq!(memory.0[if copied { 32 } else { 0 }], 9);
        }
    }

    #[test]
    fn doorbell_register_takes_no_entry() {
        let mut memory = Memory([0; 64]);
        let flame = register(&mut memory, 0, false);
        let entry = Memory([7; 64]);
        // SAFETY: one block.
        unsafe { flame.copy([NonNull::from(&entry.0).cast()].into_iter()) };
        assert_eq!(flame.room(), 0);
        assert_eq!((memory.0[0], memory.0[1]), (7, 0));
    }
}
