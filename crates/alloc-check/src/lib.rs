//! Counting a thread's heap allocations.
//!
//! A test program makes [`Counting`] its allocator:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: ringverbs_alloc_check::Counting = ringverbs_alloc_check::Counting;
//!
//! # fn main() {
//! let (count, bytes) = ringverbs_alloc_check::allocations(|| vec![0u8; 100]);
//! assert_eq!((count, bytes.len()), (1, 100));
//! # }
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, with a count of each thread's allocations and
/// reallocations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counting;

// SAFETY: everything is passed on to the system's allocator. The count is a
// cell without a destructor, which does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Returns the number of allocations of this thread in `f`, and the result of `f`.
/// Always 0 in a program whose allocator is not [`Counting`], so check first that an
/// allocation counts.
pub fn allocations<R>(f: impl FnOnce() -> R) -> (usize, R) {
    let before = ALLOCATIONS.get();
    let result = f();
    (ALLOCATIONS.get() - before, result)
}
