//! The guest without a distribution: busybox, the kernel's modules and our
//! static programs, with no shared library that they could lean on.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rxe_tests::guest::vm::{self, Ended, Line};
use rxe_tests::guest::{Job, Suite, bare, tree};

use crate::suite::Work;
use crate::{driver, native};

/// What runs there unless told otherwise.
pub const SHORT_SUITE: &str = include_str!("../../../rxe-tests/native/static.sh");

/// The programs that it has, besides busybox.
const PROGRAMS: [&str; 7] = [
    "atomics",
    "datagram",
    "hello",
    "ringverbs",
    "rxe-driver",
    "srq_echo",
    "write_with_immediate",
];

/// Builds the programs and packs them, boots, and runs the shell script `job`.
pub fn run(
    suite: Suite,
    kernel: Option<&str>,
    job: &str,
    limit: Duration,
    sink: impl FnMut(Line<'_>),
) -> Result<Ended> {
    let image = tree::image(suite, kernel)?;
    let architecture = suite.architecture();
    let mut built = native::programs(architecture)?;
    built.insert("rxe-driver".into(), driver::build_for(architecture)?);
    let programs: Vec<(String, PathBuf)> = PROGRAMS
        .into_iter()
        .map(|name| Some((name.to_owned(), built.remove(name)?)))
        .collect::<Option<_>>()
        .with_context(|| format!("cargo has not built all of {PROGRAMS:?}"))?;
    let dir = Work::new("static")?;
    let guest = bare::make(&image, &programs, job, &dir.0)?;
    let job = Job {
        limit,
        ..Job::default()
    };
    vm::run_bare(&guest, &job, sink)
}

/// How the short suite went.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Cases that passed.
    pub passed: usize,
    /// Those that did not, by name.
    pub failed: Vec<String>,
    /// From power to the end of the last case.
    pub time: Duration,
}

/// Runs the short suite, and shows what the cases that fail have to say.
pub fn short_suite(suite: Suite, kernel: Option<&str>) -> Result<Outcome> {
    // Some 15 s by software emulation on an idle machine.
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
    outcome.time = ended.boot + ended.run;
    Ok(outcome)
}
