//! Progress of a build on standard error: each step with its time, and the crate that cargo
//! compiles. Shown for commands that only build; tests build in silence.

use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

static SHOWN: AtomicBool = AtomicBool::new(false);

/// Longest silence while cargo compiles one crate.
const MAX_SILENCE: Duration = Duration::from_secs(15);

/// Shows the steps of this process from now on.
pub fn show() {
    SHOWN.store(true, Ordering::Relaxed);
}

fn is_shown() -> bool {
    SHOWN.load(Ordering::Relaxed)
}

/// A step; its end is shown with the time that it took.
pub struct Step {
    name: &'static str,
    began: Instant,
}

impl Step {
    pub fn begin(name: &'static str) -> Self {
        if is_shown() {
            eprintln!("{name} ...");
        }
        Self {
            name,
            began: Instant::now(),
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if is_shown() {
            let failed = if thread::panicking() { ", failed" } else { "" };
            eprintln!(
                "{}: {} s{failed}",
                self.name,
                self.began.elapsed().as_secs()
            );
        }
    }
}

/// Runs a build of cargo, whose options may follow those of `command`, and returns its output.
/// Its messages are inherited; in silence only errors and warnings.
pub fn run_cargo(command: &mut Command) -> Result<Output> {
    let cannot = "cannot run cargo";
    if !is_shown() {
        let command = command.arg("--quiet").stderr(Stdio::inherit());
        return command.output().context(cannot);
    }
    if std::io::stderr().is_terminal() {
        // cargo shows its own progress there.
        return command.stderr(Stdio::inherit()).output().context(cannot);
    }
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context(cannot)?;
    let messages = child.stderr.take().context("cargo has no messages")?;
    let relay = thread::spawn(move || {
        relay(messages, &mut std::io::stderr(), MAX_SILENCE);
    });
    let output = child.wait_with_output().context(cannot);
    // Fails only if the thread panicked.
    let _ = relay.join();
    output
}

/// Copies cargo's messages, and says what it compiles if there is none for a while.
fn relay(messages: impl std::io::Read + Send + 'static, to: &mut impl Write, silence: Duration) {
    let (sender, lines) = mpsc::channel::<String>();
    thread::spawn(move || {
        for line in BufReader::new(messages).lines().map_while(|line| line.ok()) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let (mut compiled, mut since) = (String::from("dependencies"), Instant::now());
    loop {
        // Errors of writing are ignored: the build goes on.
        let _ = match lines.recv_timeout(silence) {
            Ok(line) => {
                if let Some(name) = line.trim_start().strip_prefix("Compiling ") {
                    let name = name.split(" (").next().unwrap_or(name);
                    (compiled, since) = (name.to_owned(), Instant::now());
                }
                writeln!(to, "{line}")
            }
            Err(RecvTimeoutError::Timeout) => {
                let seconds = since.elapsed().as_secs();
                writeln!(to, "   ... still compiling {compiled} after {seconds} s")
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_names_the_crate() {
        let (read, mut write) = std::os::unix::net::UnixStream::pair().unwrap();
        let cargo = thread::spawn(move || {
            let line = "   Compiling ringverbs-cli v0.2.0 (/src/crates/cli)\n";
            write.write_all(line.as_bytes()).unwrap();
            thread::sleep(Duration::from_millis(500));
            write
                .write_all(b"    Finished `shipped` profile\n")
                .unwrap();
        });
        let mut shown = Vec::new();
        relay(read, &mut shown, Duration::from_millis(50));
        cargo.join().unwrap();
        let shown = String::from_utf8(shown).unwrap();
        let lines: Vec<_> = shown.lines().collect();
        assert!(
            lines[0].starts_with("   Compiling ringverbs-cli"),
            "{shown}"
        );
        let still = "   ... still compiling ringverbs-cli v0.2.0 after ";
        assert!(lines[1].starts_with(still), "{shown}");
        assert!(lines[lines.len() - 1].contains("Finished"), "{shown}");
    }
}
