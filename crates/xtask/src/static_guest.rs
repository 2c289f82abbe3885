//! The static guest: busybox, the kernel's modules and our static programs, without a
//! distribution or shared libraries.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rxe_tests::guest::vm::{self, JobExit, Line};
use rxe_tests::guest::{Job, Suite, static_guest, tree};

use crate::suite::TempDir;
use crate::{driver, native};

/// The default job.
pub const SHORT_SUITE: &str = include_str!("../../../rxe-tests/native/static.sh");

/// The programs in the guest, besides busybox.
const PROGRAMS: [&str; 7] = [
    "atomics",
    "datagram",
    "hello",
    "ringverbs",
    "rxe-driver",
    "srq_echo",
    "write_with_immediate",
];

/// Builds the guest with its programs, boots it, and runs the shell script `job`.
pub fn run(
    suite: Suite,
    kernel: Option<&str>,
    job: &str,
    limit: Duration,
    sink: impl FnMut(Line<'_>),
) -> Result<JobExit> {
    let image = tree::image(suite, kernel)?;
    let architecture = suite.architecture();
    let mut built = native::programs(architecture)?;
    built.insert("rxe-driver".into(), driver::build_for(architecture)?);
    let programs: Vec<(String, PathBuf)> = PROGRAMS
        .into_iter()
        .map(|name| Some((name.to_owned(), built.remove(name)?)))
        .collect::<Option<_>>()
        .with_context(|| format!("cargo has not built all of {PROGRAMS:?}"))?;
    let dir = TempDir::new("static")?;
    let guest = static_guest::make(&image, &programs, job, &dir.0)?;
    let job = Job {
        limit,
        ..Job::default()
    };
    vm::run_static(&guest, &job, sink)
}

/// The result of the short suite.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Cases that passed.
    pub passed: usize,
    /// Names of the cases that failed.
    pub failed: Vec<String>,
    /// From power on to the end of the last case.
    pub time: Duration,
}

/// Runs the short suite, and prints the output of failed cases.
pub fn short_suite(suite: Suite, kernel: Option<&str>) -> Result<Outcome> {
    // About 15 s under software emulation on an idle machine.
    let limit = Duration::from_secs(300);
    let mut outcome = Outcome::default();
    let ended = run(suite, kernel, SHORT_SUITE, limit, |line| match line {
        Line::Record(record) => match record.split_once(' ') {
            Some(("pass", _)) => outcome.passed += 1,
            Some(("fail", name)) => {
                eprintln!("  static guest: {name} failed");
                outcome.failed.push(name.to_owned());
            }
            _ => eprintln!("  {record}"),
        },
        Line::Text(text) if text.trim().is_empty() => {}
        Line::Text(text) => eprintln!("  {text}"),
    })?;
    ensure!(
        (ended.status == 0) == outcome.failed.is_empty() && outcome.passed > 0,
        "the short suite ended with status {} after {} cases",
        ended.status,
        outcome.passed + outcome.failed.len()
    );
    outcome.time = ended.boot_time + ended.run_time;
    Ok(outcome)
}
