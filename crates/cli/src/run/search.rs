//! `ringverbs check --chaos --runs`: searches the seeds with which a program fails, and the
//! fewest decisions of the devices that make it fail.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, IsTerminal};
use std::num::NonZeroU32;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use embedded::softhca::chaos::{Decision, Kind, parse_list};
use embedded::usage;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use uverbs::environment::variable;

use super::chaos::join;
use super::supervise::End;
use super::{RunError, Settings};
use crate::error::Error;
use crate::escape::escaped;
use crate::out;

/// How often the end of a program is looked for.
const TICK: Duration = Duration::from_millis(2);
/// The most runs in which decisions are left out.
const MAX_TRIALS: u32 = 150;
/// Runs that show how often a failure occurs.
const REPETITIONS: u32 = 10;
/// Runs without a failure after which decisions are held to cause none, if not every run fails.
const MAX_ATTEMPTS: u32 = 5;
/// Decisions that are printed and put on the command line; more are written to a file.
const MAX_LISTED: usize = 20;
/// Lines of the output of a failure that are printed.
const MAX_LINES: usize = 20;

/// The options of a search.
pub struct Search<'a> {
    /// The program and its arguments.
    pub command: &'a [OsString],
    /// The first seed.
    pub first: u64,
    /// The number of seeds.
    pub runs: NonZeroU32,
    /// When a program hangs.
    pub timeout: Duration,
    /// Exit status after a failure.
    pub error_status: u8,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Ended(End),
    /// It ended well, and `check` has reported errors.
    Reported(u64),
    Hung,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("no failure"),
            Self::Ended(End::Exited(status)) => write!(f, "exit status {status}"),
            Self::Ended(End::Killed(signal)) => write!(f, "killed by signal {signal}"),
            Self::Reported(count) => write!(f, "errors: {count}"),
            Self::Hung => f.write_str("no end within the time-out"),
        }
    }
}

/// A directory of its own for the network of the programs, which is removed at the end.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a program again and again.
struct Runner<'a> {
    search: &'a Search<'a>,
    settings: &'a Settings,
    place: Place,
    /// Signals that end this process.
    signals: SignalFd,
    mask: SigSet,
}

/// The program and its descendants that stay in its process group.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.0.id()) {
            // Fails if none is left.
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.0.wait();
    }
}

impl Runner<'_> {
    fn file(&self, name: &str) -> PathBuf {
        self.place.0.join(name)
    }

    /// Runs the program, with devices of a seed if there is one, limited to these decisions.
    fn run(&self, seed: Option<u64>, only: Option<&[Decision]>) -> Result<Outcome, Error> {
        let output = File::create(self.file("output"))?;
        let (errors, decisions) = (self.file("errors"), self.file("decisions"));
        File::create(&errors)?;
        File::create(&decisions)?;
        let mut settings = self.settings.clone();
        settings.set("RINGVERBS_DIRECTORY", self.file("network").into());
        settings.set("RINGVERBS_CHECK", "1".into());
        settings.set("RINGVERBS_CHECK_ERRORS", errors.clone().into());
        if let Some(seed) = seed {
            settings.set("RINGVERBS_CHAOS", seed.to_string().into());
            settings.set("RINGVERBS_CHAOS_DECISIONS", decisions.into());
        }
        if let Some(only) = only {
            let file = self.file("only");
            fs::write(&file, join(only))?;
            let mut value = OsString::from("@");
            value.push(file);
            settings.set("RINGVERBS_CHAOS_ONLY", value);
        }
        let [program, arguments @ ..] = self.search.command else {
            return Ok(Outcome::Passed);
        };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(settings.variables(variable))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0);
        let child = usage::spawn_bound(&mut command, self.mask);
        let child = child.map_err(|error| RunError::Exec(program.clone(), error))?;
        let end = self.wait(Group(child))?;
        let count = fs::metadata(errors).map_or(0, |it| it.len());
        Ok(match (end, count) {
            (None, _) => Outcome::Hung,
            (Some(End::Exited(0)), 0) => Outcome::Passed,
            (Some(End::Exited(0)), count) => Outcome::Reported(count),
            (Some(end), _) => Outcome::Ended(end),
        })
    }

    /// Waits for the end of a program; `None` if it hangs. What it leaves behind is killed.
    fn wait(&self, mut group: Group) -> Result<Option<End>, Error> {
        let end = Instant::now() + self.search.timeout;
        loop {
            if let Some(status) = group.0.try_wait()? {
                return Ok(Some(End::from(status)));
            }
            if let Ok(Some(signal)) = self.signals.read_signal() {
                return Err(RunError::Stopped(signal.ssi_signo).into());
            }
            if Instant::now() > end {
                return Ok(None);
            }
            thread::sleep(TICK);
        }
    }

    /// Returns the decisions of the last run.
    fn decisions(&self) -> Result<Vec<Decision>, Error> {
        let text = fs::read_to_string(self.file("decisions"))?;
        // A process that was killed may have written a part of a line.
        let lines = text.lines().filter_map(|line| parse_list(line).ok());
        let all: BTreeSet<Decision> = lines.flatten().collect();
        Ok(all.into_iter().collect())
    }

    /// Prints the end of what the program has written.
    fn print_output(&self) {
        let text = fs::read(self.file("output")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(MAX_LINES)..] {
            eprintln!("    {}", escaped(line));
        }
    }

    /// Returns how many of some runs fail.
    fn failures(&self, seed: u64, only: &[Decision], runs: u32) -> Result<u32, Error> {
        let mut count = 0;
        for _ in 0..runs {
            count += u32::from(self.run(Some(seed), Some(only))? != Outcome::Passed);
        }
        Ok(count)
    }
}

/// Leaves decisions out while the program fails without them.
struct Shrinker<'a> {
    runner: &'a Runner<'a>,
    seed: u64,
    /// Runs for each attempt.
    attempts: u32,
    trials: u32,
}

impl Shrinker<'_> {
    fn fails(&mut self, only: &[Decision]) -> Result<bool, Error> {
        for _ in 0..self.attempts {
            self.trials += 1;
            if self.runner.run(Some(self.seed), Some(only))? != Outcome::Passed {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn has_trials(&self) -> bool {
        self.trials < MAX_TRIALS
    }

    /// Returns the fewest decisions that were found: leaves out all of a kind, then halves,
    /// quarters and so on.
    fn shrink(&mut self, mut list: Vec<Decision>) -> Result<Vec<Decision>, Error> {
        let kinds: BTreeSet<Kind> = list.iter().map(|it| it.kind).collect();
        for kind in kinds {
            let rest: Vec<_> = list.iter().copied().filter(|it| it.kind != kind).collect();
            if self.has_trials() && self.fails(&rest)? {
                list = rest;
            }
        }
        let mut size = list.len().div_ceil(2);
        while size > 0 && self.has_trials() {
            let mut start = 0;
            let before = list.len();
            while start < list.len() && self.has_trials() {
                let end = (start + size).min(list.len());
                let rest = [&list[..start], &list[end..]].concat();
                match self.fails(&rest)? {
                    true => list = rest,
                    false => start = end,
                }
            }
            // Once more where one has become unnecessary by another.
            size = match size {
                1 if list.len() < before => 1,
                size => size / 2,
            };
        }
        Ok(list)
    }
}

/// Searches; `directory` is where the network's directory is made.
pub fn run(search: &Search<'_>, settings: &Settings, directory: &Path) -> Result<ExitCode, Error> {
    let place = Place(directory.join(format!("chaos-{}", std::process::id())));
    fs::create_dir(&place.0)?;
    let network = place.0.join("network");
    fs::DirBuilder::new().mode(0o700).create(&network)?;
    let ends = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    let mask = ends
        .thread_swap_mask(SigmaskHow::SIG_BLOCK)
        .map_err(io::Error::from)?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let runner = Runner {
        search,
        settings,
        place,
        signals: SignalFd::with_flags(&ends, flags).map_err(io::Error::from)?,
        mask,
    };
    let outcome = runner.run(None, None)?;
    if outcome != Outcome::Passed {
        out::print_warning(&format!("without chaos: {outcome}"));
        runner.print_output();
        return Ok(search.error_status.into());
    }
    for number in 0..search.runs.get() {
        let seed = search.first.wrapping_add(number.into());
        if io::stderr().is_terminal() {
            eprint!("\rseed {seed} ");
        }
        let outcome = runner.run(Some(seed), None)?;
        if outcome != Outcome::Passed {
            out::print_warning(&format!("seed {seed}: {outcome}"));
            runner.print_output();
            return explain_failure(&runner, seed);
        }
    }
    eprintln!("ringverbs: chaos: no failure with {} seeds", search.runs);
    Ok(ExitCode::SUCCESS)
}

/// Reports the fewest decisions with which the program fails, and how to repeat that.
fn explain_failure(runner: &Runner<'_>, seed: u64) -> Result<ExitCode, Error> {
    let search = runner.search;
    let all = runner.decisions()?;
    let failed = runner.failures(seed, &all, MAX_ATTEMPTS)?;
    let attempts = match failed {
        MAX_ATTEMPTS => 1,
        _ => MAX_ATTEMPTS,
    };
    let mut shrinker = Shrinker {
        runner,
        seed,
        attempts,
        trials: 0,
    };
    let fewest = match failed {
        0 => all.clone(),
        _ => shrinker.shrink(all.clone())?,
    };
    let count = runner.failures(seed, &fewest, REPETITIONS)?;
    eprintln!(
        "ringverbs: chaos: {} of {} decisions; with them alone {count} of {REPETITIONS} runs fail",
        fewest.len(),
        all.len()
    );
    for decision in fewest.iter().take(MAX_LISTED) {
        eprintln!("    {decision}: {}", decision.sentence());
    }
    let list = match fewest.len() {
        ..=MAX_LISTED => join(&fewest),
        more => {
            let file = std::env::current_dir()?.join(format!("chaos-{seed}.txt"));
            fs::write(&file, join(&fewest))?;
            eprintln!("    {} more, all in {}", more - MAX_LISTED, file.display());
            format!("@{}", file.display())
        }
    };
    eprintln!("ringverbs: chaos: to repeat it:");
    eprintln!("    {}", replay(search.command, seed, &list));
    Ok(search.error_status.into())
}

/// Returns the command that repeats a failure.
fn replay(command: &[OsString], seed: u64, list: &str) -> String {
    let given: Vec<OsString> = std::env::args_os().collect();
    let options = given.len().saturating_sub(command.len());
    let mut words = Vec::new();
    let mut given = given[..options].iter().map(|it| it.to_string_lossy());
    while let Some(word) = given.next() {
        let is_of_search = |name: &str| word.split('=').next() == Some(name);
        if ["--runs", "--timeout", "--chaos-only"]
            .iter()
            .any(|it| is_of_search(it))
        {
            if !word.contains('=') {
                given.next();
            }
        } else if !is_of_search("--chaos") && word != "--" {
            words.push(quoted(&word));
        }
    }
    words.push(format!("--chaos={seed}"));
    words.push(format!("--chaos-only={}", quoted(list)));
    words.push("--".to_owned());
    words.extend(command.iter().map(|it| quoted(&OsStr::to_string_lossy(it))));
    words.join(" ")
}

/// Returns a word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |it: char| it.is_ascii_alphanumeric() || "-_./=:,@+%".contains(it);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("--chaos=3"), "--chaos=3");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
    }
}
