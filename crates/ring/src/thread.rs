//! Which thread this is, for the price of one load.

/// A number that no other living thread of the process has: not zero, even.
///
/// It is the address by which a thread finds its thread-local memory. When a
/// thread has ended a new one may get its number; what the old one did is
/// finished and seen by then.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(crate) fn id() -> usize {
    let id;
    // SAFETY: the System V ABI (ELF thread-local storage) has the thread
    // pointer's own value at fs:0.
    unsafe {
        std::arch::asm!(
            "mov {}, qword ptr fs:0",
            out(reg) id,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    id
}

/// A number that no other living thread of the process has: not zero, even.
#[cfg(all(target_arch = "aarch64", not(miri)))]
#[inline]
pub(crate) fn id() -> usize {
    let id;
    // SAFETY: reads a register that user space may read.
    unsafe {
        std::arch::asm!(
            "mrs {}, tpidr_el0",
            out(reg) id,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    id
}

/// A number that no other living thread of the process has: not zero, even.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[inline]
pub(crate) fn id() -> usize {
    thread_local!(static ADDRESS: u64 = const { 0 });
    ADDRESS.with(|address| std::ptr::from_ref(address).addr())
}
