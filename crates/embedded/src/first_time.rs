//! A point in time from which others are counted.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Instant;

/// The time of the first call. No `OnceLock`: a child of fork would wait forever for a thread of
/// its parent that was about to set it.
pub(crate) struct FirstTime(AtomicPtr<Instant>);

impl FirstTime {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the time of the first call, which is `at` if this is the first. Allocates only
    /// then.
    pub(crate) fn get(&self, at: Instant) -> Instant {
        let first = self.0.load(Ordering::Acquire);
        if first.is_null() {
            return self.set(at);
        }
        // SAFETY: only `set` stores a pointer, to a value that is never freed or changed; the
        // load with acquire sees what was written before.
        unsafe { *first }
    }

    #[cold]
    fn set(&self, at: Instant) -> Instant {
        let new = Box::into_raw(Box::new(at));
        let stored =
            self.0
                .compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        match stored {
            Ok(_) => at,
            Err(first) => {
                // SAFETY: made above, and not stored.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: as in `get`.
                unsafe { *first }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn all_threads_have_the_time_of_one_of_them() {
        let (first, barrier) = (FirstTime::new(), Barrier::new(4));
        let now = Instant::now();
        let call = |n| {
            barrier.wait();
            first.get(now + Duration::from_secs(n))
        };
        let times: Vec<Instant> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|n| scope.spawn(move || call(n))).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert!(times.iter().all(|time| *time == times[0]), "{times:?}");
        assert!((0..4).any(|n| times[0] == now + Duration::from_secs(n)));
        assert_eq!(first.get(now + Duration::from_secs(9)), times[0]);
    }
}
