//! Threads in processes of other programs.

use std::io;
use std::thread::{Builder, JoinHandle};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

/// Signals that an instruction of the thread itself causes. If they were blocked, the kernel
/// would end the process without calling the program's handler.
const FAULTS: [Signal; 6] = [
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGFPE,
    Signal::SIGILL,
    Signal::SIGTRAP,
    Signal::SIGSYS,
];

/// Starts a thread that receives no signals of the process: a program may block a signal at
/// any time, to wait for it, and another thread would then take it. Only faults of the thread
/// itself are not blocked.
///
/// # Errors
/// As [`Builder::spawn`].
pub fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let mut blocked = SigSet::all();
    for fault in FAULTS {
        blocked.remove(fault);
    }
    // A new thread inherits the mask.
    let before = blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let thread = Builder::new().name(name.to_owned()).spawn(run);
    // Succeeds: the set is valid.
    let _ = before.thread_set_mask();
    thread
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_blocks_all_signals_but_faults() {
        let before = SigSet::thread_get_mask().unwrap();
        let thread = spawn("signals", || SigSet::thread_get_mask().unwrap()).unwrap();
        let mask = thread.join().unwrap();
        assert_eq!(SigSet::thread_get_mask().unwrap(), before);
        for signal in Signal::iterator() {
            let blockable = !matches!(signal, Signal::SIGKILL | Signal::SIGSTOP);
            let expected = blockable && !FAULTS.contains(&signal);
            assert_eq!(mask.contains(signal), expected, "{signal}");
        }
    }
}
