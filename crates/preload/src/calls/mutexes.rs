//! Mutexes, of which one is in each context of libibverbs.

use std::ffi::{c_int, c_void};

use super::export;
use crate::promises;
use crate::real;

export! {
    pthread_mutex_init(mutex: *mut c_void, attributes: *const c_void) -> c_int {
        promises::mutex_initialized(mutex.expose_provenance());
        // SAFETY: guaranteed by the caller.
        unsafe { real::pthread_mutex_init(mutex, attributes) }
    }
}
