//! Counts a thread's heap allocations.
//!
//! A test program uses [`CountingAllocator`] as its global allocator:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: ringverbs_testing::allocations::CountingAllocator =
//!     ringverbs_testing::allocations::CountingAllocator;
//!
//! # fn main() {
//! let (count, bytes) = ringverbs_testing::allocations::allocations(|| vec![0u8; 100]);
//! assert_eq!((count, bytes.len()), (1, 100));
//! # }
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator with a counter of each thread's allocations and
/// reallocations.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

// SAFETY: every call is forwarded to the system's allocator. The counter is a
// `Cell` without a destructor, so accessing it does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
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

/// Runs `f`, and returns the number of this thread's allocations in it and its result.
/// The number is always 0 if the global allocator is not [`CountingAllocator`], so a test
/// should first check that an allocation is counted.
pub fn allocations<R>(f: impl FnOnce() -> R) -> (usize, R) {
    let before = ALLOCATIONS.get();
    let result = f();
    (ALLOCATIONS.get() - before, result)
}
