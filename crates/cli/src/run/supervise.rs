//! Runs a program as a child, in a way that others do not notice: signals for this process
//! reach the program, it does not outlive this process, and its end becomes this process's.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};

use embedded::usage;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpid};

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its exit status.
    Exited(u8),
    /// The signal that killed it.
    Killed(i32),
}

/// Returns the signals to pass on: not those of this process's own faults, and not those of job
/// control, which the terminal sends to all processes of a job.
fn forwarded() -> SigSet {
    let own = [
        Signal::SIGABRT,
        Signal::SIGBUS,
        Signal::SIGFPE,
        Signal::SIGILL,
        Signal::SIGKILL,
        Signal::SIGSEGV,
        Signal::SIGSTOP,
        Signal::SIGSYS,
        Signal::SIGTRAP,
        Signal::SIGTSTP,
        Signal::SIGTTIN,
        Signal::SIGTTOU,
    ];
    let signals = Signal::iterator().filter(|signal| !own.contains(signal));
    signals.collect()
}

/// Runs the program until it ends.
pub fn run(command: &mut Command) -> io::Result<End> {
    // Blocked from before the program exists, so that none is lost.
    let signals = forwarded();
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let end = supervise(command, &signals, before);
    before.thread_set_mask()?;
    end
}

fn supervise(command: &mut Command, signals: &SigSet, before: SigSet) -> io::Result<End> {
    let queue = SignalFd::with_flags(signals, SfdFlags::SFD_CLOEXEC)?;
    let mut child = usage::spawn_bound(command, before)?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(End::from(status));
        }
        let signal = match queue.read_signal() {
            Ok(Some(signal)) => signal,
            Ok(None) | Err(nix::Error::EINTR) => continue,
            Err(error) => return Err(error.into()),
        };
        // The terminal has sent its signals to the program as well.
        if signal.ssi_code != libc::SI_KERNEL {
            forward(&child, signal.ssi_signo);
        }
    }
}

/// Passes a signal on, unless it reports the end of a child.
fn forward(child: &Child, number: u32) {
    let signal = i32::try_from(number).map(Signal::try_from);
    let (Ok(Ok(signal)), Ok(child)) = (signal, i32::try_from(child.id())) else {
        return;
    };
    if signal != Signal::SIGCHLD {
        // Fails if the program has ended, or has another user's rights by now.
        let _ = kill(Pid::from_raw(child), signal);
    }
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        match status.code() {
            Some(code) => Self::Exited(code as u8),
            None => Self::Killed(status.signal().unwrap_or(libc::SIGKILL)),
        }
    }
}

impl End {
    /// Returns the exit status of a program that ended this way. If a signal killed it, ends
    /// this process by the same signal, so that its parent sees that too.
    pub fn mirror(self) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Killed(number) => {
                // The program's core is the one of interest.
                let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
                if let Ok(signal) = Signal::try_from(number) {
                    let _ = kill(getpid(), signal);
                }
                // The shell's convention, for signals that do not kill this process.
                128 | number as u8
            }
        }
    }
}
