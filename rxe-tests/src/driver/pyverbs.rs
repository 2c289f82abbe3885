//! rdma-core's own tests of its Python bindings, test by test.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::case::ATTEMPTS;
use super::process::{self, Library, Running};
use super::run::{Runner, last_lines};
use super::stock::Verdicts;
use crate::compare;
use crate::record::{self, Outcome, Provider, Record, Stock};

/// The script that runs them and says how each one ended.
const RUNNER: &str = include_str!("pyverbs_runner.py");

/// How long one test may take, and the loading of all of them.
const TEST_LIMIT: Duration = Duration::from_secs(120);

/// How often a line says how far they are; their results come at the end.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// The system's Python.
const PYTHON: &str = "/usr/bin/python3";

/// The group that they are reported in.
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

/// How a test ended.
#[derive(Debug, Clone, PartialEq)]
struct Ended {
    outcome: Outcome,
    detail: String,
}

/// What one run of the script has shown.
#[derive(Debug, Default)]
struct Pass {
    ids: Vec<String>,
    /// Those of them that were not run, since their verdicts are known.
    known: Vec<String>,
    /// The tests were loaded, and those asked for are listed.
    listed: bool,
    ended: BTreeMap<String, Ended>,
    /// The test that was under way when the script ended.
    open: Option<String>,
    done: bool,
}

/// What is reported where the tests are not there.
pub fn missing(folder: &Path) -> Record {
    Record::Case(record::Case {
        group: GROUP.into(),
        name: "all".into(),
        provider: Provider::Stock,
        outcome: Outcome::Skip,
        stock: Stock::Reference,
        attempts: 0,
        seconds: 0.0,
        detail: format!(
            "{} has no tests: rdma-core's source package could not be fetched",
            folder.display()
        ),
        earlier: String::new(),
        figures: BTreeMap::new(),
        cached: false,
    })
}

/// Runs the tests in `folder` whose names contain one of `parts`, or all, under
/// `provider` and reports each of them. With stock, those that `cached` has a
/// verdict of are reported and not run.
pub fn run(
    runner: &mut Runner,
    folder: &Path,
    provider: Provider,
    parts: &[String],
    cached: &Verdicts,
) -> Result<()> {
    let known: Vec<String> = match provider {
        Provider::Stock => cached.names(GROUP).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let library = match provider {
        Provider::Stock => Library::Stock,
        _ => Library::Ours,
    };
    let mut results: BTreeMap<String, (Ended, u32)> = BTreeMap::new();
    let mut all: Vec<String> = Vec::new();

    // All in one process, as run_tests.py has them; after a crash or a hang,
    // those that are left.
    let mut wanted: Vec<String> = Vec::new();
    loop {
        let pass = once(runner, folder, library, parts, &wanted, &known)?;
        if !pass.listed {
            bail!(
                "the pyverbs tests do not load under {provider}: {:?}",
                pass.ended
            );
        }
        if all.is_empty() {
            all = pass.ids;
            all.retain(|id| !known.contains(id));
            let shown = pass.known.iter().filter_map(|id| cached.of(GROUP, id));
            for case in shown {
                runner.report.put(&Record::Case(case.clone()))?;
            }
        }
        let before = results.len();
        for (id, ended) in pass.ended {
            results.insert(id, (ended, 1));
        }
        runner.restore()?;
        wanted = all
            .iter()
            .filter(|id| !results.contains_key(*id))
            .cloned()
            .collect();
        if wanted.is_empty() || pass.done || results.len() == before {
            break;
        }
    }
    for id in &wanted {
        let ended = Ended {
            outcome: Outcome::Fail,
            detail: "not reported by the test run".into(),
        };
        results.insert(id.clone(), (ended, 1));
    }

    // Said at once: trying again takes minutes on a slow machine.
    for (id, (ended, _)) in &results {
        if ended.outcome == Outcome::Fail {
            println!(
                "pyverbs {library:?}: failed at first: {id}: {}",
                last_lines(&ended.detail, 2)
            );
        }
    }

    // Those that failed again, together in a process: they share a queue or a
    // device with those before them, and wait for datagrams. What is refused by
    // design is refused again.
    let mut earlier: BTreeMap<String, String> = BTreeMap::new();
    for attempt in 2..=ATTEMPTS {
        let mut again: Vec<String> = all
            .iter()
            .filter(|id| {
                results.get(*id).is_some_and(|(ended, _)| {
                    ended.outcome == Outcome::Fail
                        && (provider == Provider::Stock || !refused(id, &ended.detail))
                })
            })
            .cloned()
            .collect();
        for id in &again {
            if let Some((ended, 1)) = results.get(id) {
                earlier.insert(id.clone(), last_lines(&ended.detail, 6));
            }
        }
        while !again.is_empty() {
            let pass = once(runner, folder, library, parts, &again, &known)?;
            runner.restore()?;
            let before = again.len();
            for (id, ended) in pass.ended {
                again.retain(|other| *other != id);
                if all.contains(&id) {
                    results.insert(id, (ended, attempt));
                }
            }
            if pass.done || again.len() == before {
                break;
            }
        }
    }

    for id in &all {
        let Some((ended, attempts)) = results.remove(id) else {
            continue;
        };
        runner.report.put(&Record::Case(record::Case {
            group: GROUP.into(),
            name: id.clone(),
            provider,
            outcome: ended.outcome,
            stock: Stock::Reference,
            attempts,
            seconds: 0.0,
            detail: last_lines(&ended.detail, 6),
            earlier: earlier.remove(id).unwrap_or_default(),
            figures: BTreeMap::new(),
            cached: false,
        }))?;
    }
    Ok(())
}

/// Whether a test that ended so is refused by ours, whatever is tried.
fn refused(id: &str, detail: &str) -> bool {
    compare::refusal(GROUP, id, detail).is_some()
}

/// Runs the script once for the tests `wanted`, or for all whose names contain
/// one of `parts`, but not for those in `known`.
fn once(
    runner: &Runner,
    folder: &Path,
    library: Library,
    parts: &[String],
    wanted: &[String],
    known: &[String],
) -> Result<Pass> {
    let dir = runner.scratch.join("pyverbs");
    fs::create_dir_all(&dir)?;
    let file = |name: &str| dir.join(name);
    fs::write(file("runner.py"), RUNNER)?;
    fs::write(file("parts"), parts.join("\n"))?;
    fs::write(file("wanted"), wanted.join("\n"))?;
    fs::write(file("known"), known.join("\n"))?;
    let _ = fs::remove_file(file("results"));
    // Where there are several, the system's has pyverbs.
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
    runner.surround(&mut command);
    command.current_dir(&dir);
    let mut running = Running::start(command, &file("output"))?;

    let mut pass = Pass::default();
    let listed = |pass: &mut Pass| {
        let is_known = |id: &&String| known.contains(id);
        pass.known = pass.ids.iter().filter(is_known).cloned().collect();
    };
    let mut read = 0;
    let mut moved = Instant::now();
    let mut said = Instant::now();
    let mut why = String::new();
    loop {
        let ended = running.poll()?;
        let text = fs::read_to_string(file("results")).unwrap_or_default();
        let whole = text.rfind('\n').map_or(0, |at| at + 1);
        if whole > read {
            take(&mut pass, &text[read..whole])?;
            read = whole;
            moved = Instant::now();
        }
        if said.elapsed() > SIGN_OF_LIFE {
            let total = if wanted.is_empty() {
                pass.ids.len()
            } else {
                wanted.len()
            };
            let open = pass.open.as_deref().unwrap_or_default();
            println!(
                "pyverbs {library:?}: {} of {total} tests, at {open}",
                pass.ended.len()
            );
            said = Instant::now();
        }
        if let Some(status) = ended {
            // What was written between the look and the end.
            let text = fs::read_to_string(file("results")).unwrap_or_default();
            take(&mut pass, text.get(read..).unwrap_or_default())?;
            if !pass.done {
                why = format!("the process ended: {status}");
            }
            break;
        }
        if moved.elapsed() > TEST_LIMIT {
            running.kill_unfinished();
            why = format!("no end after {} s", TEST_LIMIT.as_secs());
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    if let Some(id) = pass.open.take() {
        let detail = format!("{why}: {}", last_lines(&running.output(), 6));
        pass.ended.insert(id, fail(detail));
    } else if !pass.listed {
        let detail = format!("{why}: {}", last_lines(&running.output(), 6));
        pass.ended.insert("load".into(), fail(detail));
    }
    listed(&mut pass);
    trust(&mut pass, library, runner, &running);
    Ok(pass)
}

/// A pass counts only if the right provider was seen.
fn trust(pass: &mut Pass, library: Library, runner: &Runner, running: &Running) {
    if let Err(why) = runner.verdict(library, running) {
        for ended in pass.ended.values_mut() {
            if ended.outcome == Outcome::Pass {
                *ended = fail(why.clone());
            }
        }
    }
}

fn fail(detail: String) -> Ended {
    Ended {
        outcome: Outcome::Fail,
        detail,
    }
}

/// Takes in lines from the script.
fn take(pass: &mut Pass, lines: &str) -> Result<()> {
    for line in lines.lines() {
        let event = serde_json::from_str(line).with_context(|| format!("from pyverbs: {line}"))?;
        match event {
            Event::List { ids } => {
                pass.ids = ids;
                pass.listed = true;
            }
            Event::Start { id } => pass.open = Some(id),
            Event::End {
                id,
                outcome,
                detail,
            } => {
                pass.open = None;
                pass.ended.insert(id, Ended { outcome, detail });
            }
            Event::Done => pass.done = true,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The script on a package of tests laid out as rdma-core's, with one
    /// test of each fate.
    #[test]
    fn script_reports_every_outcome() {
        let python = std::process::Command::new("python3")
            .arg("--version")
            .output();
        if !python.is_ok_and(|out| out.status.success()) {
            eprintln!("not run: no python3 on this machine");
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
        let once = |parts: &str, wanted: &str, known: &str| {
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
            let mut pass = Pass::default();
            take(&mut pass, &fs::read_to_string(dir.join("results")).unwrap()).unwrap();
            (out.status.success(), pass)
        };
        let name = |test: &str| format!("tests.test_fates.Fates.{test}");

        let (good, pass) = once("", "", "");
        assert!(!good);
        assert_eq!(pass.ids.len(), 6);
        let outcome = |test: &str| pass.ended[&name(test)].outcome;
        assert_eq!(outcome("test_a_pass"), Outcome::Pass);
        assert_eq!(outcome("test_b_skip"), Outcome::Skip);
        assert_eq!(outcome("test_c_fail"), Outcome::Fail);
        assert_eq!(outcome("test_d_late"), Outcome::Fail);
        assert_eq!(pass.open, Some(name("test_e_crash")));
        assert!(!pass.done && !pass.ended.contains_key(&name("test_f_after")));

        let (good, pass) = once("", &name("test_f_after"), "");
        assert!(good && pass.done);
        assert_eq!(pass.ended.len(), 1);

        // What is not asked for is neither listed nor run.
        let (good, pass) = once("fates.Fates.test_a\n_skip", "", "");
        assert!(good && pass.done);
        assert_eq!(pass.ids, [name("test_a_pass"), name("test_b_skip")]);
        assert!(pass.ended.keys().eq(&pass.ids));
        // What is known is listed and not run.
        let (good, pass) = once("Fates.test_a\nFates.test_f", "", &name("test_a_pass"));
        assert!(good && pass.done);
        assert_eq!(pass.ids, [name("test_a_pass"), name("test_f_after")]);
        assert!(pass.ended.keys().eq([&name("test_f_after")]));
        let (good, pass) = once("no such test", "", "");
        assert!(good && pass.done && pass.listed);
        assert!(pass.ids.is_empty() && pass.ended.is_empty());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_crash_belongs_to_the_test_that_was_open() {
        let mut pass = Pass::default();
        let lines = r#"{"event":"list","ids":["a","b","c"]}
{"event":"start","id":"a"}
{"event":"end","id":"a","outcome":"pass","detail":""}
{"event":"start","id":"b"}
"#;
        take(&mut pass, lines).unwrap();
        assert_eq!(pass.open.as_deref(), Some("b"));
        assert_eq!(pass.ended["a"].outcome, Outcome::Pass);
        assert!(!pass.done);
        assert!(take(&mut pass, "nonsense").is_err());
    }
}
