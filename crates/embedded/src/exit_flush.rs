//! Flushing at exit of a process whose network reaches other processes or hosts.
//!
//! A datagram completes when it is sent, and the program may exit then. A card's frame
//! would be on the wire; here the frame may still wait for a socket, and the thread that
//! sends it does not outlive the program.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError, Weak};

use crate::runner::in_scope;

/// A network that may have frames to send.
pub(crate) trait Flush: Send + Sync {
    /// Waits until the receivers have accepted all frames, at most as long as a
    /// frame may wait.
    fn flush(&self);
}

/// The networks of this process that are shared with other processes.
static NETWORKS: Mutex<Vec<Weak<dyn Flush>>> = Mutex::new(Vec::new());
static REGISTERED: Once = Once::new();
/// The process that created the networks. A child of fork has copies, whose sockets it must
/// not use.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Delays the normal exit of the process until this network has sent its
/// frames.
pub(crate) fn flush_at_exit(network: Weak<dyn Flush>) {
    // If registration fails, unsent frames are lost, as on any network.
    // SAFETY: `at_exit` may be called at any time, and exists until the process
    // ends.
    REGISTERED.call_once(|| _ = unsafe { libc::atexit(at_exit) });
    PROCESS.store(process::id(), Ordering::Relaxed);
    let mut networks = NETWORKS.lock().unwrap_or_else(PoisonError::into_inner);
    networks.retain(|network| network.strong_count() != 0);
    networks.push(network);
}

extern "C" fn at_exit() {
    if PROCESS.load(Ordering::Relaxed) != process::id() {
        return;
    }
    // Not blocking: the thread that holds the lock may no longer exist.
    let Ok(networks) = NETWORKS.try_lock() else {
        return;
    };
    in_scope(|| {
        for network in networks.iter().filter_map(Weak::upgrade) {
            network.flush();
        }
    });
}
