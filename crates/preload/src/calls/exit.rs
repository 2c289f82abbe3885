//! The end of the process without exit handlers. What it has sent, or has to answer, leaves
//! first, as it would from a card. A process that ends as its child detaches leaves to that child
//! what listens.

use std::ffi::c_int;

use super::export;
use crate::{process, real, record};

export! {
    daemon(keeps_folder: c_int, keeps_files: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        let detached = unsafe { real::daemon(keeps_folder, keeps_files) };
        if detached == 0 && process::has_inherited_channels() {
            process::take_orphaned_channels(true);
        }
        detached
    }

    _exit = _Exit(status: c_int) -> c_int {
        embedded::flush_before_exit();
        if let Some(explainer) = process::explainer() {
            explainer.summarise();
        }
        record::finish();
        process::finish_fault_record();
        // SAFETY: as the program has called it. It does not return.
        unsafe { real::_exit(status) }
    }
}
