//! Features that are enabled by environment variables.

use std::sync::atomic::{AtomicU8, Ordering};

use uverbs::environment;

const UNDECIDED: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// Whether the environment asks for something. It is read once, so that a later question costs a
/// load.
pub(crate) struct Switch(AtomicU8);

impl Switch {
    pub(crate) const fn new() -> Self {
        Self(AtomicU8::new(UNDECIDED))
    }

    /// Returns whether it is on; `is_asked` reads the environment.
    #[inline]
    pub(crate) fn is_on(&self, is_asked: fn() -> bool) -> bool {
        match self.0.load(Ordering::Relaxed) {
            UNDECIDED => self.decide(is_asked),
            state => state == ON,
        }
    }

    #[cold]
    fn decide(&self, is_asked: fn() -> bool) -> bool {
        // A sanitizer's runtime calls functions of this library before.
        if !environment::exists() {
            return false;
        }
        let is_on = is_asked();
        self.0
            .store(if is_on { ON } else { OFF }, Ordering::Relaxed);
        is_on
    }

    pub(crate) fn turn_off(&self) {
        self.0.store(OFF, Ordering::Relaxed);
    }
}
