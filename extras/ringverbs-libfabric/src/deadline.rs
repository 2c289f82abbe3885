//! Ends of timeouts.

use std::time::{Duration, Instant};

/// The end of a timeout; `None` without a limit.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Returns the end of a timeout that begins now. A timeout beyond the range of the clock
    /// is unlimited.
    pub fn after(timeout: Option<Duration>) -> Self {
        Self(timeout.and_then(|time| Instant::now().checked_add(time)))
    }

    /// Returns the remaining time; `None` without a limit.
    pub fn remaining(self) -> Option<Duration> {
        self.0
            .map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Returns whether the deadline has passed.
    pub fn has_passed(self) -> bool {
        self.remaining().is_some_and(|time| time.is_zero())
    }
}
