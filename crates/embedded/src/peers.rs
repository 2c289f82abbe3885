//! Processes of this host that do not answer, where a card would: they are stopped, by SIGSTOP
//! or in a debugger, or wait for a processor.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use roce::packet::Path;

/// How long what is known of a process is used: many queue pairs may ask at once.
const MAX_AGE: Duration = Duration::from_millis(5);
/// How long the times of a process's threads are compared with later ones.
const MAX_SPAN: Duration = Duration::from_secs(2);
/// Number of processes above which the older states are forgotten.
const MAX_STATES: usize = 256;
/// Number of threads of a process that are looked at.
const MAX_THREADS: usize = 64;
/// A process is starved if a thread has waited for a processor for this part of the time.
const STARVED_PART: u32 = 4;

/// The processes that have the devices which a wire reaches.
pub(crate) trait PeerProcesses: fmt::Debug + Send + Sync {
    /// Returns the process of this host that has a queue pair, by its path and number, if it is
    /// known.
    fn process(&self, path: &Path, qpn: u32) -> Option<u32>;

    /// Returns what is known of processes.
    fn states(&self) -> &ProcessStates;

    /// Returns whether a path leads to this host.
    fn is_of_this_host(&self, path: &Path) -> bool;

    /// Returns whether a queue pair belongs to a process that is stopped.
    fn is_stopped(&self, path: &Path, qpn: u32) -> bool {
        let process = self.process(path, qpn);
        process.is_some_and(|it| self.states().is_stopped(it))
    }

    /// Returns whether a queue pair belongs to a process that waits for a processor. The first
    /// question begins to watch it.
    fn is_starved(&self, path: &Path, qpn: u32) -> bool {
        let process = self.process(path, qpn);
        process.is_some_and(|it| self.states().is_starved(it))
    }
}

/// States of processes that were read recently.
#[derive(Debug, Default)]
pub(crate) struct ProcessStates {
    stopped: Mutex<HashMap<u32, (Instant, bool)>>,
    times: Mutex<HashMap<u32, ProcessTimes>>,
}

impl ProcessStates {
    /// Returns whether a process is stopped. One that has ended, or is not visible, is not.
    pub(crate) fn is_stopped(&self, process: u32) -> bool {
        let mut states = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Returns whether a thread of a process has waited for a processor for much of the time
    /// since the last question. One that has ended, or is not visible, has not.
    pub(crate) fn is_starved(&self, process: u32) -> bool {
        let mut all = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let last = all.get(&process);
        if let Some(last) = last.filter(|it| it.at.elapsed() < MAX_AGE) {
            return last.is_starved;
        }
        let mut times = ProcessTimes::read(process);
        times.is_starved = last.is_some_and(|last| times.waited_since(last));
        let is_starved = times.is_starved;
        if all.len() >= MAX_STATES {
            all.clear();
        }
        all.insert(process, times);
        is_starved
    }
}

/// Times of a process's threads.
#[derive(Debug)]
struct ProcessTimes {
    at: Instant,
    threads: HashMap<u32, ThreadTimes>,
    is_starved: bool,
}

/// Times of a thread (`/proc/PID/task/TID/schedstat`), and whether it runs or could run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ThreadTimes {
    ran: Duration,
    /// Without the wait that has not ended.
    waited: Duration,
    is_runnable: bool,
}

impl ProcessTimes {
    fn read(process: u32) -> Self {
        let at = Instant::now();
        let tasks = fs::read_dir(format!("/proc/{process}/task"));
        let tasks = tasks.into_iter().flatten().flatten();
        let ids = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
        let times = |id: u32| {
            let read = |name| fs::read(format!("/proc/{process}/task/{id}/{name}"));
            let times = ThreadTimes::parse(&read("schedstat").ok()?, &read("stat").ok()?);
            Some((id, times?))
        };
        Self {
            at,
            threads: ids.take(MAX_THREADS).filter_map(times).collect(),
            is_starved: false,
        }
    }

    /// Returns whether a thread has waited for much of the time since `before`.
    fn waited_since(&self, before: &Self) -> bool {
        let span = self.at.saturating_duration_since(before.at);
        let waited = |(id, times): (&u32, &ThreadTimes)| {
            let before = before.threads.get(id)?;
            // It has neither run nor begun to run.
            let waits = times.is_runnable && before.is_runnable && times.ran == before.ran;
            let waited = times.waited.saturating_sub(before.waited);
            Some(if waits { span } else { waited })
        };
        let longest = self.threads.iter().filter_map(waited).max();
        span <= MAX_SPAN && longest.is_some_and(|it| it * STARVED_PART > span)
    }
}

impl ThreadTimes {
    /// Parses the files `schedstat` and `stat` of a thread.
    fn parse(schedstat: &[u8], stat: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(schedstat).ok()?;
        let mut numbers = text.split_whitespace().map(str::parse);
        let mut time = || Some(Duration::from_nanos(numbers.next()?.ok()?));
        Some(Self {
            ran: time()?,
            waited: time()?,
            is_runnable: state(stat)? == b'R',
        })
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
    fn a_thread_that_waits_starves_its_process() {
        let thread = |ran, waited, state: &str| {
            let schedstat = format!("{ran} {waited} 7\n");
            ThreadTimes::parse(schedstat.as_bytes(), format!("1 (a) {state} 1").as_bytes()).unwrap()
        };
        let at = Instant::now();
        let times = |milliseconds, threads: &[ThreadTimes]| ProcessTimes {
            at: at + Duration::from_millis(milliseconds),
            threads: (1..).zip(threads.iter().copied()).collect(),
            is_starved: false,
        };
        const MS: u64 = 1_000_000;
        let idle = thread(5, 5, "S");
        let before = times(0, &[idle, thread(0, 0, "R")]);
        for (now, expected) in [
            // Still waits, runs, and sleeps.
            (thread(0, 0, "R"), true),
            (thread(90 * MS, 0, "R"), false),
            (thread(0, 0, "S"), false),
            // Has waited for a third and for a fifth of the time.
            (thread(10 * MS, 33 * MS, "S"), true),
            (thread(80 * MS, 20 * MS, "R"), false),
        ] {
            let now = times(100, &[idle, now]);
            assert_eq!(now.waited_since(&before), expected, "{now:?}");
        }
        let late = times(3000, &[idle, thread(0, 0, "R")]);
        assert!(!late.waited_since(&before));
        assert!(!times(100, &[]).waited_since(&before));
        for (schedstat, stat) in [
            ("", "1 (a) R"),
            ("1", "1 (a) R"),
            ("1 x", "1 (a) R"),
            ("1 2", ""),
        ] {
            assert_eq!(
                ThreadTimes::parse(schedstat.as_bytes(), stat.as_bytes()),
                None
            );
        }
    }

    #[test]
    fn stopped_processes_are_told_apart() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let id = child.id();
        let pid = Pid::from_raw(id as i32);
        let all = ProcessStates::default();
        let wait_for = |stopped| {
            while all.is_stopped(id) != stopped {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        assert!(!all.is_stopped(id) && !all.is_stopped(std::process::id()));
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
