//! Cleanup of a wait that the program leaves before it has ended.
//!
//! The program may leave a call that waits: by the cancellation of the thread, which unwinds
//! it, or by siglongjmp(3) from a signal handler, which does not.

use std::cell::Cell;
use std::ptr;

thread_local! {
    /// The innermost scope of this thread.
    static INNERMOST: Cell<*const Scope> = const { Cell::new(ptr::null()) };
}

/// A scope, in the frame of [`with_cleanup`].
struct Scope {
    cleanup: *const dyn Fn(),
    outer: *const Scope,
}

impl Drop for Scope {
    fn drop(&mut self) {
        // Not this one after `abandon_waits`, if the jump stayed within the wait.
        let is_innermost = INNERMOST.get() == ptr::from_ref(self);
        if is_innermost {
            INNERMOST.set(self.outer);
            // SAFETY: the closure outlives this value, which is in the frame of
            // `with_cleanup`.
            unsafe { (*self.cleanup)() };
        }
    }
}

/// Calls `run`, then `cleanup`; the latter also if the thread leaves `run` by unwinding, or
/// after [`abandon_waits`].
pub(crate) fn with_cleanup<T>(cleanup: impl Fn(), run: impl FnOnce() -> T) -> T {
    let cleanup: &dyn Fn() = &cleanup;
    let scope = Scope {
        // SAFETY: extends the lifetime only; the scope ends before the closure does.
        cleanup: unsafe { std::mem::transmute::<&dyn Fn(), *const (dyn Fn() + 'static)>(cleanup) },
        outer: INNERMOST.get(),
    };
    INNERMOST.set(&raw const scope);
    run()
}

/// Called before this thread leaves its calls that wait without unwinding them, while the
/// program's part of such a call runs: undoes what they have begun.
pub fn abandon_waits() {
    loop {
        let scope = INNERMOST.get();
        // SAFETY: a scope is in a frame of this thread, which exists until the thread has left
        // it: it is not left yet.
        let Some(scope) = (unsafe { scope.as_ref() }) else {
            return;
        };
        INNERMOST.set(scope.outer);
        // SAFETY: as for the scope.
        unsafe { (*scope.cleanup)() };
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn each_scope_is_undone_once() {
        let undone = Cell::new(0);
        let count = |by| undone.set(undone.get() * 10 + by);
        assert_eq!(with_cleanup(|| count(1), || 5), 5);
        assert_eq!(undone.take(), 1);
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            with_cleanup(|| count(1), || with_cleanup(|| count(2), || panic!("left")))
        }));
        assert!(unwound.is_err());
        assert_eq!(undone.take(), 21);
        // A jump that stays within the inner scope.
        with_cleanup(|| count(1), || with_cleanup(|| count(2), abandon_waits));
        assert_eq!(undone.take(), 21);
        abandon_waits();
        assert_eq!(undone.take(), 0);
    }
}
