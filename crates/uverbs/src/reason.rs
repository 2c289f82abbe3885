//! Reasons of refused commands: beside the errors, which stay small and `Copy`.

use core::fmt;
use core::num::NonZeroU32;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The reason of a refused command, kept by the process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Reason(NonZeroU32);

/// The last reasons, oldest first, and the number of the last one.
struct Kept {
    texts: VecDeque<(Reason, String)>,
    last: u32,
}

static KEPT: Mutex<Kept> = Mutex::new(Kept {
    texts: VecDeque::new(),
    last: 0,
});

fn kept() -> MutexGuard<'static, Kept> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reason {
    /// Number of reasons that a process keeps.
    pub const KEPT: usize = 256;

    pub(crate) fn keep(text: String) -> Self {
        let mut kept = kept();
        kept.last = kept.last.checked_add(1).unwrap_or(1);
        let reason = Self(NonZeroU32::new(kept.last).unwrap_or(NonZeroU32::MIN));
        if kept.texts.len() == Self::KEPT {
            kept.texts.pop_front();
        }
        kept.texts.push_back((reason, text));
        reason
    }

    /// Returns the reason in words: the parameter, its value and the rule that it breaks;
    /// `None` after [`KEPT`](Self::KEPT) later ones.
    pub fn text(self) -> Option<String> {
        let kept = kept();
        let mut newest_first = kept.texts.iter().rev();
        let found = newest_first.find(|(reason, _)| *reason == self);
        found.map(|(_, text)| text.clone())
    }
}

impl fmt::Debug for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_reasons_are_kept() {
        let first = Reason::keep("first".to_owned());
        assert_eq!(first.text().as_deref(), Some("first"));
        for number in 0..Reason::KEPT {
            let later = Reason::keep(number.to_string());
            assert_eq!(later.text(), Some(number.to_string()));
        }
        assert_eq!(first.text(), None);
    }
}
