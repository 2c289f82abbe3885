//! Asymmetric barriers: free for the side that runs often, while the side that
//! runs rarely pays for both (membarrier(2)).
//!
//! Store, [`light`], load on one side and store, [`heavy`], load on the other:
//! at least one of the two loads sees the other side's store, as with a full
//! barrier on both sides.

#[cfg(not(loom))]
pub(crate) use real::{available, heavy, light};

#[cfg(loom)]
pub(crate) use modelled::{available, heavy, light};

#[cfg(not(loom))]
mod real {
    use std::sync::atomic::{AtomicU8, Ordering, compiler_fence};
    use std::time::Duration;

    // linux/membarrier.h
    const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

    fn membarrier(command: libc::c_int) -> bool {
        if cfg!(miri) {
            return false; // The kernel does not support the command.
        }
        // SAFETY: the call takes two integers and touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0) == 0 }
    }

    /// Returns whether this process can use the pair (Linux 4.14, not blocked by a seccomp
    /// filter). The kernel is queried once, or by several threads at first: a child of fork must
    /// not wait for one of its parent.
    pub(crate) fn available() -> bool {
        const UNKNOWN: u8 = 0;
        const NO: u8 = 1;
        const YES: u8 = 2;
        static REGISTERED: AtomicU8 = AtomicU8::new(UNKNOWN);
        let registered = REGISTERED.load(Ordering::Acquire);
        if registered != UNKNOWN {
            return registered == YES;
        }
        let registered = membarrier(REGISTER_PRIVATE_EXPEDITED);
        REGISTERED.store(if registered { YES } else { NO }, Ordering::Release);
        registered
    }

    /// The cheap half: keeps the compiler from moving accesses across it.
    #[inline]
    pub(crate) fn light() {
        compiler_fence(Ordering::SeqCst);
    }

    /// The expensive half: every thread of the process executes a full barrier before
    /// this returns. It takes some microseconds, and interrupts the processors on which
    /// the process runs.
    #[cold]
    pub(crate) fn heavy() {
        let done = membarrier(PRIVATE_EXPEDITED)
            // A forked child may have to register again.
            || membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED);
        if !done {
            // The call was forbidden after registration. No processor delays a
            // store or a load for this long, and a thread that is not running
            // executed a barrier when it was descheduled.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

#[cfg(loom)]
mod modelled {
    use loom::sync::atomic::{AtomicU32, Ordering};

    loom::lazy_static! {
        /// All calls in one order, each seeing what was done before the ones
        /// before it. Not a fence: that would order the owner's accesses with
        /// those of threads which pass no barrier.
        static ref TURN: AtomicU32 = AtomicU32::new(0);
    }

    pub(crate) fn available() -> bool {
        true
    }

    pub(crate) fn light() {
        TURN.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn heavy() {
        TURN.fetch_add(1, Ordering::AcqRel);
    }
}
