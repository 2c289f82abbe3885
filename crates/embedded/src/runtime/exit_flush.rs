//! Flushing at exit of a process whose network reaches other processes or hosts.
//!
//! A datagram completes when it is sent, and the program may exit then. A card's frame
//! would be on the wire; here the frame may still wait for a socket, and the thread that
//! sends it does not outlive the program.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{mem, process, thread};

use crate::scope::in_scope;

/// A network that may have frames to send.
pub(crate) trait Flush: Send + Sync {
    /// Waits until the receivers have accepted all frames, at most as long as a
    /// frame may wait.
    fn flush(&self);

    /// Asks the network's thread to do so, if there is one. Async-signal-safe.
    fn request_flush(&self);

    /// Returns whether the thread has not done so yet, but will.
    fn awaits_flush(&self) -> bool;
}

/// How long a process that ends without exit handlers waits for the networks' threads.
const MAX_THREAD_WAIT: Duration = Duration::from_secs(1);

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
    let mut networks = NETWORKS.lock().unwrap_or_else(PoisonError::into_inner);
    let process = process::id();
    if PROCESS.swap(process, Ordering::Relaxed) != process {
        // Networks of the parent process, which have no threads here.
        mem::forget(mem::take(&mut *networks));
    }
    networks.retain(|network| network.strong_count() != 0);
    networks.push(network);
}

/// Sends the frames of this process before it ends without exit handlers. Waits at most a
/// second.
///
/// Async-signal-safe: the networks' threads send, since this thread may have been interrupted
/// with any lock held.
pub fn flush_before_exit() {
    if PROCESS.load(Ordering::Relaxed) != process::id() {
        return;
    }
    let Ok(networks) = NETWORKS.try_lock() else {
        return;
    };
    in_scope(|| {
        let end = Instant::now() + MAX_THREAD_WAIT;
        let upgraded = || networks.iter().filter_map(Weak::upgrade);
        // Forgotten, since dropping the last reference is not async-signal-safe.
        for network in upgraded() {
            network.request_flush();
            mem::forget(network);
        }
        for network in upgraded() {
            while network.awaits_flush() && Instant::now() < end {
                thread::yield_now();
            }
            mem::forget(network);
        }
    });
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
