//! The file that asks processes for their state.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use embedded::RunningProcesses;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::unistd::getpid;

use crate::error::Error;

/// Removes the question when the command ends, also by a signal.
pub(super) struct Question(Arc<Mutex<RunningProcesses>>);

fn lock(processes: &Mutex<RunningProcesses>) -> MutexGuard<'_, RunningProcesses> {
    processes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Question {
    /// Blocks the signals that end a command in this thread, and starts one that waits for them:
    /// this one may wait for whoever reads its output.
    pub(super) fn new(processes: RunningProcesses) -> Result<Self, Error> {
        let processes = Arc::new(Mutex::new(processes));
        let shared = Arc::clone(&processes);
        let ends = SigSet::from_iter([
            Signal::SIGHUP,
            Signal::SIGINT,
            Signal::SIGQUIT,
            Signal::SIGTERM,
        ]);
        let before = ends.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        let before = before.map_err(io::Error::from)?;
        let wait = move || {
            while let Ok(signal) = ends.wait() {
                // Held, so that there is no other question until the command ends.
                let processes = lock(&shared);
                processes.end_status();
                end_by(signal, before, &ends);
            }
        };
        thread::Builder::new().spawn(wait)?;
        Ok(Self(processes))
    }

    /// Returns the processes to ask.
    pub(super) fn processes(&self) -> MutexGuard<'_, RunningProcesses> {
        lock(&self.0)
    }
}

/// Ends the command by a signal, as it would without this thread. Returns if it is ignored, as in
/// a background job of a script or under nohup.
fn end_by(signal: Signal, before: SigSet, ends: &SigSet) {
    // They fail for signals that do not exist only.
    let _ = kill(getpid(), signal);
    let _ = before.thread_set_mask();
    let _ = ends.thread_block();
}

impl Drop for Question {
    fn drop(&mut self) {
        self.processes().end_status();
    }
}
