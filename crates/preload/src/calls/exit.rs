//! The end of the process without exit handlers. What it has sent, or has to answer, leaves
//! first, as it would from a card.

use std::ffi::c_int;

use super::export;
use crate::{process, real};

export! {
    _exit = _Exit(status: c_int) -> c_int {
        embedded::flush_before_exit();
        if let Some(explainer) = process::explainer() {
            explainer.summarise();
        }
        // SAFETY: as the program has called it. It does not return.
        unsafe { real::_exit(status) }
    }
}
