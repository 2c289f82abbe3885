//! Identity of the current thread, at the cost of one load.

/// A number that no other living thread of the process has: not zero, even.
///
/// It is the address of the thread's thread-local memory. A new thread may get the
/// number of an ended one, whose accesses are complete and visible by then.
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
