//! Second attempts of tests that cargo runs: some depend on timing, and guests and
//! builds load the processors at the same time.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::thread;

/// Maximum number of failed tests that are retried: more failures are not a matter of
/// timing.
const MAX_RETRIED_TESTS: usize = 3;

/// Output and success of a run of `cargo test`.
pub(super) struct TestRun {
    pub(super) ok: bool,
    pub(super) text: String,
    /// Arguments of cargo that select each target with a failed test.
    targets: Vec<Vec<String>>,
}

/// Runs `cargo test --no-fail-fast`, and prints its progress.
pub(super) fn run(command: &mut Command) -> std::io::Result<TestRun> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let progress = child.stderr.take();
    let mut text = Vec::new();
    let targets = thread::scope(|scope| {
        let targets = scope.spawn(|| progress.map_or(Vec::new(), forward_progress));
        if let Some(mut output) = child.stdout.take() {
            output.read_to_end(&mut text)?;
        }
        std::io::Result::Ok(targets.join().unwrap_or_default())
    })?;
    Ok(TestRun {
        ok: child.wait()?.success(),
        text: String::from_utf8_lossy(&text).into_owned(),
        targets,
    })
}

/// Prints cargo's progress; returns the failed targets, which cargo lists at the end.
fn forward_progress(progress: impl Read) -> Vec<Vec<String>> {
    let mut targets = Vec::new();
    for line in BufReader::new(progress).lines() {
        let Ok(line) = line else { continue };
        targets.extend(parse_target(&line));
        eprintln!("{line}");
    }
    targets
}

/// Returns the arguments of a line such as
/// ``    `-p ringverbs --test device` ``.
fn parse_target(line: &str) -> Option<Vec<String>> {
    let arguments = line.trim().strip_prefix('`')?.strip_suffix('`')?;
    let arguments: Vec<_> = arguments.split(' ').map(str::to_owned).collect();
    (arguments.first()? == "-p").then_some(arguments)
}

/// Returns the names of failed tests.
fn failed_tests(text: &str) -> BTreeSet<String> {
    let results = text.lines().filter_map(|line| line.strip_prefix("test "));
    let failed = results.filter_map(|line| line.strip_suffix(" ... FAILED"));
    failed.map(str::to_owned).collect()
}

/// Returns the arguments that select a target again. After a run of the whole workspace it is
/// selected in all packages: with `-p`, dependencies would be built again with other features.
fn selection<'a>(target: &'a [String], command: &Command) -> Vec<&'a str> {
    let target: Vec<&str> = target.iter().map(String::as_str).collect();
    let of_workspace = command.get_args().any(|it| it == "--workspace");
    match target[..] {
        ["-p", _, ref kind @ ..] if of_workspace && !kind.is_empty() => {
            [&["--workspace"], kind].concat()
        }
        _ => target,
    }
}

impl TestRun {
    /// Runs the failed tests again, with the options and variables of `command` except
    /// its selection of tests. Returns their names if all of them pass.
    pub(super) fn retry_failed_tests(&self, command: &Command) -> Option<Vec<String>> {
        let names: Vec<String> = failed_tests(&self.text).into_iter().collect();
        let results = self
            .text
            .lines()
            .filter(|line| line.starts_with("test result: FAILED"));
        // A target without a result has crashed.
        if names.is_empty()
            || names.len() > MAX_RETRIED_TESTS
            || self.targets.len() != results.count()
        {
            return None;
        }
        let mut passed = 0;
        for target in &self.targets {
            let mut again = Command::new(command.get_program());
            again.arg("test").args(selection(target, command));
            let mut options = command.get_args();
            if options.any(|option| option == "--target") {
                again.arg("--target").args(options.next());
            }
            again.args(["--", "--exact"]);
            again.args(&names);
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => again.env(name, value),
                    None => again.env_remove(name),
                };
            }
            if let Some(directory) = command.get_current_dir() {
                again.current_dir(directory);
            }
            eprintln!("== retry: {} of {}", names.join(", "), target.join(" "));
            let run = run(&mut again).ok()?;
            print!("{}", run.text);
            if !run.ok {
                return None;
            }
            let tests = run.text.lines().filter(|line| line.starts_with("test "));
            passed += tests.filter(|line| line.ends_with(" ... ok")).count();
        }
        (passed >= names.len()).then_some(names)
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_RETRIED_TESTS, TestRun, failed_tests, parse_target, selection};

    #[test]
    fn failed_tests_and_their_targets_are_recognised() {
        let text = "test a::b ... ok\ntest a::c ... FAILED\n---- a::c stdout ----\n\
                    test result: FAILED. 1 passed; 1 failed\n";
        assert_eq!(failed_tests(text).into_iter().collect::<Vec<_>>(), ["a::c"]);
        let line = "    `-p ringverbs --test device`";
        let arguments = ["-p", "ringverbs", "--test", "device"];
        assert_eq!(parse_target(line).unwrap(), arguments);
        assert_eq!(parse_target("error: 1 target failed:"), None);
        assert_eq!(parse_target("`cargo build`"), None);
    }

    #[test]
    fn a_target_is_selected_as_it_was_built() {
        let target = ["-p", "ringverbs", "--test", "device"].map(str::to_owned);
        let mut command = std::process::Command::new("cargo");
        command.args(["test", "-p", "ringverbs"]);
        assert_eq!(selection(&target, &command), target);
        command.arg("--workspace");
        let selected = ["--workspace", "--test", "device"];
        assert_eq!(selection(&target, &command), selected);
        assert_eq!(selection(&target[..2], &command), target[..2]);
    }

    #[test]
    fn a_few_failures_are_retried() {
        let run = |failures: usize, result: &str| TestRun {
            ok: false,
            text: (0..failures).fold(result.to_owned(), |text, at| {
                text + &format!("test t{at} ... FAILED\n")
            }),
            targets: vec![vec!["-p".to_owned(), "none".to_owned()]],
        };
        let result = "test result: FAILED. 0 passed\n";
        // A program that succeeds, and prints no result of a test.
        let command = std::process::Command::new("true");
        assert!(run(1, result).retry_failed_tests(&command).is_none());
        // The script run by `sh test` prints the results, like a test harness.
        let directory = std::env::temp_dir();
        let directory = directory.join(format!("ringverbs-attempts-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let script = "for name; do last=$name; done\necho \"test $last ... ok\"\n";
        std::fs::write(directory.join("test"), script).unwrap();
        let mut command = std::process::Command::new("sh");
        command.current_dir(&directory);
        let again = |run: TestRun| run.retry_failed_tests(&command);
        assert_eq!(again(run(1, result)).unwrap(), ["t0"]);
        assert!(again(run(MAX_RETRIED_TESTS + 1, result)).is_none());
        assert!(again(run(1, "")).is_none());
        let _ = std::fs::remove_dir_all(&directory);
    }
}
