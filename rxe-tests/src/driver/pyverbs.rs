//! Runs rdma-core's tests of its Python bindings, and reports each test.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::case::ATTEMPTS;
use super::process::{self, Library, TestProcess};
use super::run::{Runner, last_lines};
use super::stock::CachedVerdicts;
use crate::compare;
use crate::record::{self, Outcome, Provider, Record, StockExpectation};

/// The script that runs the tests and reports the result of each.
const RUNNER: &str = include_str!("pyverbs_runner.py");

/// Time limit of one test, and of loading all tests.
const TEST_LIMIT: Duration = Duration::from_secs(120);

/// Interval of progress lines; the results are reported at the end.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(15);

/// The system's Python.
const PYTHON: &str = "/usr/bin/python3";

/// The group of these cases.
pub const GROUP: &str = "pyverbs";

/// A line from the script.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum Event {
    List {
        ids: Vec<String>,
    },
    Start {
        id: String,
    },
    End {
        id: String,
        outcome: Outcome,
        detail: String,
    },
    Done,
}

/// The result of a test.
#[derive(Debug, Clone, PartialEq)]
struct TestResult {
    outcome: Outcome,
    detail: String,
}

/// The results of one run of the script.
#[derive(Debug, Default)]
struct ScriptRun {
    ids: Vec<String>,
    /// Tests that were not run, since their verdicts are cached.
    known: Vec<String>,
    /// The tests were loaded, and the selected ones are in `ids`.
    listed: bool,
    results: BTreeMap<String, TestResult>,
    /// The test that is running.
    current_test: Option<String>,
    done: bool,
}

/// Returns the record for a missing folder of tests.
pub fn missing(folder: &Path) -> Record {
    Record::Case(record::Case {
        group: GROUP.into(),
        name: "all".into(),
        provider: Provider::Stock,
        outcome: Outcome::Skip,
        stock: StockExpectation::Reference,
        attempts: 0,
        seconds: 0.0,
        detail: format!(
            "{} has no tests: they are those of the package python3-pyverbs",
            folder.display()
        ),
        earlier: String::new(),
        figures: BTreeMap::new(),
        cached: false,
    })
}

/// Runs the tests in `folder` whose names contain one of `parts`, or all, with
/// `provider`, and reports each of them. Stock's cached verdicts are reported without
/// running the tests; those `without` are not run. Returns the names of the tests that passed.
pub fn run(
    runner: &mut Runner,
    folder: &Path,
    provider: Provider,
    parts: &[String],
    cached: &CachedVerdicts,
    without: &[String],
) -> Result<Vec<String>> {
    let mut known = without.to_vec();
    if provider == Provider::Stock {
        known.extend(cached.names(GROUP).map(str::to_owned));
    }
    let library = match provider {
        Provider::Stock => Library::Stock,
        _ => Library::Ours,
    };
    let mut results: BTreeMap<String, (TestResult, u32)> = BTreeMap::new();
    let mut all: Vec<String> = Vec::new();

    // All in one process, as run_tests.py does; after a crash or a hang, the remaining
    // tests.
    let mut wanted: Vec<String> = Vec::new();
    loop {
        let script_run = run_script(runner, folder, library, parts, &wanted, &known)?;
        if !script_run.listed {
            bail!(
                "the pyverbs tests do not load under {provider}: {:?}",
                script_run.results
            );
        }
        if all.is_empty() {
            all = script_run.ids;
            all.retain(|id| !known.contains(id));
            let known_cases = script_run
                .known
                .iter()
                .filter(|id| !without.contains(id))
                .filter_map(|id| cached.get(GROUP, id));
            for case in known_cases {
                runner.report.write(&Record::Case(case.clone()))?;
            }
        }
        let before = results.len();
        for (id, result) in script_run.results {
            results.insert(id, (result, 1));
        }
        runner.restore()?;
        wanted = all
            .iter()
            .filter(|id| !results.contains_key(*id))
            .cloned()
            .collect();
        if wanted.is_empty() || script_run.done || results.len() == before {
            break;
        }
    }
    for id in &wanted {
        let result = TestResult {
            outcome: Outcome::Fail,
            detail: "not reported by the test run".into(),
        };
        results.insert(id.clone(), (result, 1));
    }

    // Printed now: the retries take minutes on a slow machine.
    for (id, (result, _)) in &results {
        if result.outcome == Outcome::Fail {
            println!(
                "pyverbs {library:?}: failed at the first attempt: {id}: {}",
                last_lines(&result.detail, 2)
            );
        }
    }

    // Failed tests are retried together in one process: they may have shared a queue or a
    // device with earlier tests, or waited for a lost datagram. Refusals by design are
    // not retried.
    let mut earlier: BTreeMap<String, String> = BTreeMap::new();
    for attempt in 2..=ATTEMPTS {
        let mut again: Vec<String> = all
            .iter()
            .filter(|id| {
                results.get(*id).is_some_and(|(result, _)| {
                    result.outcome == Outcome::Fail
                        && (provider == Provider::Stock || !is_refused(id, &result.detail))
                })
            })
            .cloned()
            .collect();
        for id in &again {
            if let Some((result, 1)) = results.get(id) {
                earlier.insert(id.clone(), last_lines(&result.detail, 6));
            }
        }
        while !again.is_empty() {
            let script_run = run_script(runner, folder, library, parts, &again, &known)?;
            runner.restore()?;
            let before = again.len();
            for (id, result) in script_run.results {
                again.retain(|other| *other != id);
                if all.contains(&id) {
                    results.insert(id, (result, attempt));
                }
            }
            if script_run.done || again.len() == before {
                break;
            }
        }
    }

    let mut passed = Vec::new();
    for id in &all {
        let Some((result, attempts)) = results.remove(id) else {
            continue;
        };
        if result.outcome == Outcome::Pass {
            passed.push(id.clone());
        }
        runner.report.write(&Record::Case(record::Case {
            group: GROUP.into(),
            name: id.clone(),
            provider,
            outcome: result.outcome,
            stock: StockExpectation::Reference,
            attempts,
            seconds: 0.0,
            detail: last_lines(&result.detail, 6),
            earlier: earlier.remove(id).unwrap_or_default(),
            figures: BTreeMap::new(),
            cached: false,
        }))?;
    }
    Ok(passed)
}

/// Returns whether a failure of ours is a refusal by design.
fn is_refused(id: &str, detail: &str) -> bool {
    compare::known_refusal(GROUP, id, detail).is_some()
}

/// Runs the script once for the tests `wanted`, or for all whose names contain one of
/// `parts`, without those in `known`.
fn run_script(
    runner: &Runner,
    folder: &Path,
    library: Library,
    parts: &[String],
    wanted: &[String],
    known: &[String],
) -> Result<ScriptRun> {
    let dir = runner.scratch.join("pyverbs");
    fs::create_dir_all(&dir)?;
    let file = |name: &str| dir.join(name);
    fs::write(file("runner.py"), RUNNER)?;
    fs::write(file("parts"), parts.join("\n"))?;
    fs::write(file("wanted"), wanted.join("\n"))?;
    fs::write(file("known"), known.join("\n"))?;
    let _ = fs::remove_file(file("results"));
    // Of several Pythons, the system's has pyverbs.
    let python = match runner.embedded {
        Some(_) if Path::new(PYTHON).exists() => PYTHON,
        _ => "python3",
    };
    let mut argv: Vec<String> = vec![python.into()];
    for path in [
        file("runner.py"),
        folder.to_owned(),
        file("parts"),
        file("wanted"),
        file("known"),
        file("results"),
    ] {
        argv.push(path.to_string_lossy().into_owned());
    }
    let gid = runner.device.gid.to_string();
    argv.extend(["--dev", &runner.device.name, "--port", "1", "--gid", &gid].map(str::to_owned));

    let mut command = process::command(library, runner.plugin.as_ref(), &argv)?;
    runner.set_environment(&mut command);
    command.current_dir(&dir);
    let mut running = TestProcess::start(command, &file("output"))?;

    let mut script_run = ScriptRun::default();
    let mut read = 0;
    let mut last_event = Instant::now();
    let mut last_printed = Instant::now();
    let mut reason = String::new();
    loop {
        let ended = running.poll()?;
        let text = fs::read_to_string(file("results")).unwrap_or_default();
        let whole = text.rfind('\n').map_or(0, |at| at + 1);
        if whole > read {
            parse_events(&mut script_run, &text[read..whole])?;
            read = whole;
            last_event = Instant::now();
        }
        if last_printed.elapsed() > PROGRESS_INTERVAL {
            let total = if wanted.is_empty() {
                script_run.ids.len()
            } else {
                wanted.len()
            };
            let current = script_run.current_test.as_deref().unwrap_or_default();
            println!(
                "pyverbs {library:?}: {} of {total} tests, at {current}",
                script_run.results.len()
            );
            last_printed = Instant::now();
        }
        if let Some(status) = ended {
            // Results written between the last read and the exit.
            let text = fs::read_to_string(file("results")).unwrap_or_default();
            parse_events(&mut script_run, text.get(read..).unwrap_or_default())?;
            if !script_run.done {
                reason = format!("the process exited: {status}");
            }
            break;
        }
        if last_event.elapsed() > TEST_LIMIT {
            running.kill_unfinished();
            reason = format!("timed out after {} s", TEST_LIMIT.as_secs());
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    if let Some(id) = script_run.current_test.take() {
        let detail = format!("{reason}: {}", last_lines(&running.output(), 6));
        script_run.results.insert(id, failure(detail));
    } else if !script_run.listed {
        let detail = format!("{reason}: {}", last_lines(&running.output(), 6));
        script_run.results.insert("load".into(), failure(detail));
    }
    let is_known = |id: &&String| known.contains(id);
    script_run.known = script_run.ids.iter().filter(is_known).cloned().collect();
    require_provider(&mut script_run, library, runner, &running);
    Ok(script_run)
}

/// Turns passed tests into failures unless the right provider served them.
fn require_provider(
    script_run: &mut ScriptRun,
    library: Library,
    runner: &Runner,
    running: &TestProcess,
) {
    if let Err(reason) = runner.check_provider(library, running) {
        for result in script_run.results.values_mut() {
            if result.outcome == Outcome::Pass {
                *result = failure(reason.clone());
            }
        }
    }
}

fn failure(detail: String) -> TestResult {
    TestResult {
        outcome: Outcome::Fail,
        detail,
    }
}

/// Adds the events in lines of the script to the results.
fn parse_events(script_run: &mut ScriptRun, lines: &str) -> Result<()> {
    for line in lines.lines() {
        let event = serde_json::from_str(line).with_context(|| format!("from pyverbs: {line}"))?;
        match event {
            Event::List { ids } => {
                script_run.ids = ids;
                script_run.listed = true;
            }
            Event::Start { id } => script_run.current_test = Some(id),
            Event::End {
                id,
                outcome,
                detail,
            } => {
                script_run.current_test = None;
                script_run
                    .results
                    .insert(id, TestResult { outcome, detail });
            }
            Event::Done => script_run.done = true,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the script on a package of tests laid out as rdma-core's, with one test of
    /// each outcome.
    #[test]
    fn script_reports_every_outcome() {
        let python = std::process::Command::new("python3")
            .arg("--version")
            .output();
        if !python.is_ok_and(|out| out.status.success()) {
            testing::skip!(missing: "python3", "no python3 on this machine");
            return;
        }
        let dir = std::env::temp_dir().join(format!("rv-pyverbs-{}", std::process::id()));
        let put = |name: &str, text: &str| fs::write(dir.join(name), text).unwrap();
        fs::create_dir_all(&dir).unwrap();
        put(
            "args_parser.py",
            "class P:\n    def parse_args(self): pass\nparser = P()\n",
        );
        put(
            "__init__.py",
            "import importlib\n\
             test_fates = importlib.import_module('.test_fates', __name__)\n\
             def load_tests(loader, tests, pattern):\n    \
                 return loader.loadTestsFromModule(test_fates)\n",
        );
        put(
            "test_fates.py",
            "import multiprocessing, os, unittest\n\
             class Fates(unittest.TestCase):\n    \
                 def test_a_pass(self):\n        \
                     self.assertEqual(multiprocessing.get_start_method(True), 'fork')\n    \
                 def test_b_skip(self): self.skipTest('not here')\n    \
                 def test_c_fail(self): self.assertEqual(1, 2)\n    \
                 def test_d_late(self): self.addCleanup(lambda: 1 / 0)\n    \
                 def test_e_crash(self): os.abort()\n    \
                 def test_f_after(self): pass\n",
        );
        put("runner.py", RUNNER);
        let run_script = |parts: &str, wanted: &str, known: &str| {
            put("parts", parts);
            put("wanted", wanted);
            put("known", known);
            let out = std::process::Command::new("python3")
                .arg(dir.join("runner.py"))
                .arg(&dir)
                .args(["parts", "wanted", "known", "results"].map(|name| dir.join(name)))
                .args(["--dev", "rxe0"])
                .output()
                .unwrap();
            let mut script_run = ScriptRun::default();
            parse_events(
                &mut script_run,
                &fs::read_to_string(dir.join("results")).unwrap(),
            )
            .unwrap();
            (out.status.success(), script_run)
        };
        let name = |test: &str| format!("tests.test_fates.Fates.{test}");

        let (good, script_run) = run_script("", "", "");
        assert!(!good);
        assert_eq!(script_run.ids.len(), 6);
        let outcome = |test: &str| script_run.results[&name(test)].outcome;
        assert_eq!(outcome("test_a_pass"), Outcome::Pass);
        assert_eq!(outcome("test_b_skip"), Outcome::Skip);
        assert_eq!(outcome("test_c_fail"), Outcome::Fail);
        assert_eq!(outcome("test_d_late"), Outcome::Fail);
        assert_eq!(script_run.current_test, Some(name("test_e_crash")));
        assert!(!script_run.done && !script_run.results.contains_key(&name("test_f_after")));

        let (good, script_run) = run_script("", &name("test_f_after"), "");
        assert!(good && script_run.done);
        assert_eq!(script_run.results.len(), 1);

        // Tests that were not selected are neither listed nor run.
        let (good, script_run) = run_script("fates.Fates.test_a\n_skip", "", "");
        assert!(good && script_run.done);
        assert_eq!(script_run.ids, [name("test_a_pass"), name("test_b_skip")]);
        assert!(script_run.results.keys().eq(&script_run.ids));
        // Known tests are listed and not run.
        let (good, script_run) = run_script("Fates.test_a\nFates.test_f", "", &name("test_a_pass"));
        assert!(good && script_run.done);
        assert_eq!(script_run.ids, [name("test_a_pass"), name("test_f_after")]);
        assert!(script_run.results.keys().eq([&name("test_f_after")]));
        let (good, script_run) = run_script("no such test", "", "");
        assert!(good && script_run.done && script_run.listed);
        assert!(script_run.ids.is_empty() && script_run.results.is_empty());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_crash_is_attributed_to_the_running_test() {
        let mut script_run = ScriptRun::default();
        let lines = r#"{"event":"list","ids":["a","b","c"]}
{"event":"start","id":"a"}
{"event":"end","id":"a","outcome":"pass","detail":""}
{"event":"start","id":"b"}
"#;
        parse_events(&mut script_run, lines).unwrap();
        assert_eq!(script_run.current_test.as_deref(), Some("b"));
        assert_eq!(script_run.results["a"].outcome, Outcome::Pass);
        assert!(!script_run.done);
        assert!(parse_events(&mut script_run, "nonsense").is_err());
    }
}
