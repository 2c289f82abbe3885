//! The summary of a run of the tests.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::process::ExitCode;
use std::time::Duration;

use rxe_tests::guest::host;

/// One line of the summary.
pub(super) struct Line {
    pub(super) what: String,
    pub(super) passed: usize,
    pub(super) failed: usize,
    pub(super) skipped: usize,
    /// The skipped tests: the reason, and the name of the test.
    pub(super) skips: Vec<(String, String)>,
    /// Number of tests that passed after the first attempt.
    pub(super) retried: usize,
    pub(super) seconds: u64,
    /// Known parts of the time, in seconds.
    pub(super) parts: Vec<(String, u64)>,
    pub(super) note: String,
}

impl Line {
    /// Creates a line without results.
    pub(super) fn new(what: &str) -> Self {
        Self {
            what: what.to_owned(),
            passed: 0,
            failed: 0,
            skipped: 0,
            skips: Vec::new(),
            retried: 0,
            seconds: 0,
            parts: Vec::new(),
            note: String::new(),
        }
    }
}

/// Returns the line of a skipped step.
pub(super) fn skipped(what: &str, reason: &str) -> Line {
    Line {
        skipped: 1,
        note: reason.to_owned(),
        ..Line::new(what)
    }
}

/// Returns the line of a step that lacks a tool: skipped, but failed in CI, which installs
/// all tools.
pub(super) fn unavailable(what: &str, error: &anyhow::Error) -> Line {
    let mut line = skipped(what, &error.to_string());
    if is_ci() {
        (line.failed, line.skipped) = (1, 0);
    }
    line
}

/// Returns whether this is a CI job.
pub(super) fn is_ci() -> bool {
    env::var("CI").is_ok_and(|value| value == "true")
}

/// Returns the line of a step whose thread panicked.
pub(super) fn panicked(what: &str) -> Line {
    Line {
        failed: 1,
        note: "panicked: its message is above".to_owned(),
        ..Line::new(what)
    }
}

/// Prints the summary: a table of the steps, their times, and the totals. The exit
/// status is a failure if anything failed.
pub(super) fn report(lines: &[Line], time: Duration) -> ExitCode {
    println!();
    let width = lines.iter().map(|l| l.what.len()).max().unwrap_or(0);
    println!(
        "{:width$}  {:>6} {:>6} {:>6} {:>7} {:>6}",
        "", "passed", "(late)", "failed", "skipped", "s"
    );
    for l in lines {
        println!(
            "{:width$}  {:>6} {:>6} {:>6} {:>7} {:>6}  {}",
            l.what, l.passed, l.retried, l.failed, l.skipped, l.seconds, l.note
        );
    }
    slowest(lines, time);
    print!("{}", reasons(lines));
    let sum = |field: fn(&Line) -> usize| lines.iter().map(field).sum::<usize>();
    let failed = sum(|l| l.failed);
    println!(
        "{} passed, {failed} failed, {} skipped",
        sum(|l| l.passed),
        sum(|l| l.skipped)
    );
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Returns the reasons for skipped tests, each with the number of tests and some of them.
fn reasons(lines: &[Line]) -> String {
    const NAMED: usize = 3;
    let mut reasons: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for line in lines {
        for (reason, test) in &line.skips {
            let tests = reasons.entry(reason).or_default();
            tests.insert(format!("{}: {test}", line.what));
        }
    }
    let mut text = String::new();
    for (reason, tests) in reasons {
        text += &format!("skipped {:>3}: {reason}\n", tests.len());
        for test in tests.iter().take(NAMED) {
            text += &format!("             {test}\n");
        }
        if tests.len() > NAMED {
            text += &format!("             and {} others\n", tests.len() - NAMED);
        }
    }
    if !text.is_empty() {
        text.push('\n');
    }
    text
}

/// Prints the times of the steps, slowest first. Steps overlap: the sum of their times
/// exceeds that of the run.
fn slowest(lines: &[Line], time: Duration) {
    let total = time.as_secs();
    let busy_processors = host::processor_time().as_secs_f64() / time.as_secs_f64().max(1.0);
    println!("\nTime, slowest first: {total} s in all, {busy_processors:.1} processors busy");
    for (seconds, what) in times(lines) {
        let share = seconds * 100 / total.max(1);
        println!("{seconds:>6} s {share:>3}%  {what}");
    }
    println!();
}

/// Returns the times of the steps, or of their parts and the remainder, slowest first.
fn times(lines: &[Line]) -> Vec<(u64, String)> {
    let mut times = Vec::new();
    for line in lines {
        let known: u64 = line.parts.iter().map(|(_, seconds)| seconds).sum();
        let part = |(part, seconds): &(String, u64)| (*seconds, format!("{}: {part}", line.what));
        times.extend(line.parts.iter().map(part));
        let rest = if line.parts.is_empty() { "" } else { ": other" };
        times.push((
            line.seconds.saturating_sub(known),
            format!("{}{rest}", line.what),
        ));
    }
    times.retain(|(seconds, _)| *seconds > 0);
    times.sort_by(|a, b| b.cmp(a));
    times
}

/// Rounds the parts of a guest's time to seconds.
pub(super) fn parts(times: &BTreeMap<String, Duration>) -> Vec<(String, u64)> {
    times
        .iter()
        .map(|(part, time)| (part.clone(), time.as_secs_f64().round() as u64))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Line, reasons, times};

    #[test]
    fn skipped_tests_are_listed_by_reason() {
        let mut line = Line::new("unit");
        let skip = |reason: &str, test: &str| (reason.to_owned(), test.to_owned());
        line.skips = vec![skip("no tshark", "a"), skip("no root", "b")];
        line.skips
            .extend(["c", "d", "e", "e"].map(|test| skip("no root", test)));
        assert_eq!(
            reasons(&[line]),
            "skipped   4: no root\n             unit: b\n             unit: c\n             \
             unit: d\n             and 1 others\nskipped   1: no tshark\n             unit: a\n\n"
        );
        assert_eq!(reasons(&[Line::new("unit")]), "");
    }

    #[test]
    fn times_are_sorted_and_split_into_parts() {
        let mut guest = Line::new("guest");
        guest.seconds = 100;
        guest.parts = vec![("boot".to_owned(), 8), ("pyverbs [stock]".to_owned(), 60)];
        let mut doc = Line::new("doc");
        doc.seconds = 40;
        let none = Line::new("none");
        let times = times(&[guest, none, doc]);
        let times: Vec<_> = times.iter().map(|(s, what)| (*s, what.as_str())).collect();
        assert_eq!(
            times,
            [
                (60, "guest: pyverbs [stock]"),
                (40, "doc"),
                (32, "guest: other"),
                (8, "guest: boot"),
            ]
        );
    }
}
