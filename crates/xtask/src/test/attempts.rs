//! Second attempts of tests that cargo runs: some depend on timing, and guests and
//! builds occupy the processors meanwhile. Guest cases have more attempts, too.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::thread;

/// More failures than this are not for lack of time: no further attempt.
const MOST: usize = 3;

/// Output of a run of `cargo test`, and whether it succeeded.
pub(super) struct Run {
    pub(super) ok: bool,
    pub(super) text: String,
    /// Arguments of cargo that select each target with a failed test.
    targets: Vec<Vec<String>>,
}

/// Runs `cargo test --no-fail-fast`; passes its progress on.
pub(super) fn run(command: &mut Command) -> std::io::Result<Run> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let progress = child.stderr.take();
    let mut text = Vec::new();
    let targets = thread::scope(|scope| {
        let targets = scope.spawn(|| progress.map_or(Vec::new(), pass_on));
        if let Some(mut output) = child.stdout.take() {
            output.read_to_end(&mut text)?;
        }
        std::io::Result::Ok(targets.join().unwrap_or_default())
    })?;
    Ok(Run {
        ok: child.wait()?.success(),
        text: String::from_utf8_lossy(&text).into_owned(),
        targets,
    })
}

/// Prints cargo's progress; returns the targets that it names at the end.
fn pass_on(progress: impl Read) -> Vec<Vec<String>> {
    let mut targets = Vec::new();
    for line in BufReader::new(progress).lines() {
        let Ok(line) = line else { continue };
        targets.extend(target(&line));
        eprintln!("{line}");
    }
    targets
}

/// Returns the arguments of a line such as
/// ``    `-p ringverbs --test device` ``.
fn target(line: &str) -> Option<Vec<String>> {
    let arguments = line.trim().strip_prefix('`')?.strip_suffix('`')?;
    let arguments: Vec<_> = arguments.split(' ').map(str::to_owned).collect();
    (arguments.first()? == "-p").then_some(arguments)
}

/// Returns the names of failed tests.
fn failed(text: &str) -> BTreeSet<String> {
    let results = text.lines().filter_map(|line| line.strip_prefix("test "));
    let failed = results.filter_map(|line| line.strip_suffix(" ... FAILED"));
    failed.map(str::to_owned).collect()
}

impl Run {
    /// Runs the failed tests again, with the arguments and variables of `command`
    /// but for its selection of tests. Returns their names if all of them pass.
    pub(super) fn again(&self, command: &Command) -> Option<Vec<String>> {
        let names: Vec<String> = failed(&self.text).into_iter().collect();
        let results = self
            .text
            .lines()
            .filter(|line| line.starts_with("test result: FAILED"));
        // A target without a result has crashed.
        if names.is_empty() || names.len() > MOST || self.targets.len() != results.count() {
            return None;
        }
        let mut passed = 0;
        for target in &self.targets {
            let mut again = Command::new(command.get_program());
            again.arg("test").args(target);
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
            eprintln!("== again: {} of {}", names.join(", "), target.join(" "));
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
    use super::{MOST, Run, failed, target};

    #[test]
    fn failed_tests_and_their_targets_are_recognised() {
        let text = "test a::b ... ok\ntest a::c ... FAILED\n---- a::c stdout ----\n\
                    test result: FAILED. 1 passed; 1 failed\n";
        assert_eq!(failed(text).into_iter().collect::<Vec<_>>(), ["a::c"]);
        let line = "    `-p ringverbs --test device`";
        let arguments = ["-p", "ringverbs", "--test", "device"];
        assert_eq!(target(line).unwrap(), arguments);
        assert_eq!(target("error: 1 target failed:"), None);
        assert_eq!(target("`cargo build`"), None);
    }

    #[test]
    fn a_few_failures_have_a_second_attempt() {
        let run = |failures: usize, result: &str| Run {
            ok: false,
            text: (0..failures).fold(result.to_owned(), |text, at| {
                text + &format!("test t{at} ... FAILED\n")
            }),
            targets: vec![vec!["-p".to_owned(), "none".to_owned()]],
        };
        let result = "test result: FAILED. 0 passed\n";
        // A program that succeeds, and prints no result of a test.
        let command = std::process::Command::new("true");
        assert!(run(1, result).again(&command).is_none());
        // As a harness would, the script that `sh test` runs prints the results.
        let directory = std::env::temp_dir();
        let directory = directory.join(format!("ringverbs-attempts-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let script = "for name; do last=$name; done\necho \"test $last ... ok\"\n";
        std::fs::write(directory.join("test"), script).unwrap();
        let mut command = std::process::Command::new("sh");
        command.current_dir(&directory);
        let again = |run: Run| run.again(&command);
        assert_eq!(again(run(1, result)).unwrap(), ["t0"]);
        assert!(again(run(MOST + 1, result)).is_none());
        assert!(again(run(1, "")).is_none());
        let _ = std::fs::remove_dir_all(&directory);
    }
}
