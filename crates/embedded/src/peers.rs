//! Processes of this host that are stopped: by SIGSTOP, or in a debugger. Their devices answer
//! nothing meanwhile, where a card would.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use roce::packet::Path;

/// How long the state of a process is remembered: many queue pairs may ask at once.
const MAX_AGE: Duration = Duration::from_millis(5);
/// Number of processes above which the older states are forgotten.
const MAX_STATES: usize = 256;

/// The processes that have the devices which a wire reaches.
pub(crate) trait PeerProcesses: fmt::Debug + Send + Sync {
    /// Returns whether a queue pair, by its path and number, belongs to a process of this host
    /// that is stopped.
    fn is_stopped(&self, path: &Path, qpn: u32) -> bool;

    /// Returns whether a path leads to this host.
    fn is_of_this_host(&self, path: &Path) -> bool;
}

/// States of processes that were read recently.
#[derive(Debug, Default)]
pub(crate) struct StoppedProcesses(Mutex<HashMap<u32, (Instant, bool)>>);

impl StoppedProcesses {
    /// Returns whether a process is stopped. One that has ended, or is not visible, is not.
    pub(crate) fn contains(&self, process: u32) -> bool {
        let mut states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, stopped)) = states.get(&process).filter(|it| it.0.elapsed() < MAX_AGE) {
            return *stopped;
        }
        let stopped = is_stopped(process);
        if states.len() >= MAX_STATES {
            states.clear();
        }
        states.insert(process, (Instant::now(), stopped));
        stopped
    }
}

/// Returns whether a process is stopped.
fn is_stopped(process: u32) -> bool {
    let stat = fs::read(format!("/proc/{process}/stat")).unwrap_or_default();
    state(&stat).is_some_and(|state| matches!(state, b'T' | b't'))
}

/// Returns the state in a line of `/proc/PID/stat`: it follows the name, which may contain
/// anything.
fn state(stat: &[u8]) -> Option<u8> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).copied()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn the_state_follows_the_name() {
        assert_eq!(state(b"7 (a) S) T 1 2"), Some(b'T'));
        assert_eq!(state(b"7 (a) "), None);
        assert_eq!(state(b"7 (a)"), None);
        assert_eq!(state(b""), None);
    }

    #[test]
    fn stopped_processes_are_told_apart() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let id = child.id();
        let pid = Pid::from_raw(id as i32);
        let all = StoppedProcesses::default();
        let wait_for = |stopped| {
            while all.contains(id) != stopped {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        assert!(!all.contains(id) && !all.contains(std::process::id()));
        kill(pid, Signal::SIGSTOP).unwrap();
        wait_for(true);
        kill(pid, Signal::SIGCONT).unwrap();
        wait_for(false);
        kill(pid, Signal::SIGSTOP).unwrap();
        wait_for(true);
        child.kill().unwrap();
        wait_for(false);
        child.wait().unwrap();
    }
}
