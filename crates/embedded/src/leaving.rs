//! The end of a process that others are joined with.
//!
//! A datagram is sent when its completion is there, and a program may end then.
//! A device's frame would be on the wire; one of these may still be on its way to
//! a socket, by a thread that does not outlive the program.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError, Weak};

use crate::runner::Shared;

/// The networks of other processes too that this one is in.
static NETWORKS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
static REGISTERED: Once = Once::new();
/// The process that they are in: a child of fork has copies, of which it must
/// leave the sockets alone.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// What this network has sent is let go before the process ends by itself.
pub(crate) fn note(network: Weak<Shared>) {
    // Without room for it frames may be lost, as on networks.
    // SAFETY: a function for any time; it is there until the process ends.
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
    // Whoever has the lock may be gone.
    let Ok(networks) = NETWORKS.try_lock() else {
        return;
    };
    for network in networks.iter().filter_map(Weak::upgrade) {
        network.let_go();
    }
}
