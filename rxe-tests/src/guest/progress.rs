//! Runs long steps: prints a line at the start, progress while they run, and their
//! duration at the end; each has a time limit.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Interval between progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Runs `command` for at most `limit`, with its output in `log`.
///
/// The command leads a process group of its own, which is killed as a whole at the limit.
/// An error has the step, the exit status and the end of the log.
pub fn step(what: &str, log: &Path, limit: Duration, command: &mut Command) -> Result<()> {
    let began = Instant::now();
    eprintln!("  {what} ...");
    let out = File::options().create(true).append(true).open(log)?;
    let from = out.metadata()?.len();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .process_group(0)
        .spawn()
        .with_context(|| format!("{what}: cannot start {:?}", command.get_program()))?;
    let mut next = PROGRESS_INTERVAL;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let elapsed = began.elapsed();
        if elapsed > limit {
            // The leader is not reaped yet, so the group's number is not reused.
            let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
            child.wait()?;
            bail!(
                "{what}: timed out after {} s; its log is {}\n{}",
                limit.as_secs(),
                log.display(),
                tail(log, from, 15)
            );
        }
        if elapsed > next {
            let last = tail(log, from, 1);
            eprintln!("    {:>4} s  {}", elapsed.as_secs(), clip(last.trim(), 90));
            next += PROGRESS_INTERVAL;
        }
        thread::sleep(Duration::from_millis(50));
    };
    if !status.success() {
        bail!(
            "{what}: {status}; its log is {}\n{}",
            log.display(),
            tail(log, from, 15)
        );
    }
    eprintln!("    done in {:.0} s", began.elapsed().as_secs_f64());
    Ok(())
}

/// Returns the last `lines` lines of a file after byte `from`; empty if the file cannot
/// be read.
pub fn tail(path: &Path, from: u64, lines: usize) -> String {
    const MAX_BYTES: u64 = 64 * 1024;
    let mut bytes = Vec::new();
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let start = from.max(fs::metadata(path)?.len().saturating_sub(MAX_BYTES));
        file.seek(SeekFrom::Start(start))?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let text = String::from_utf8_lossy(&read().unwrap_or_default()).replace('\r', "");
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Returns at most `max` characters of `text`.
pub fn clip(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_fails_shows_the_end_of_its_log() {
        let dir = std::env::temp_dir().join(format!("rv-step-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let log = dir.join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "echo the reason; exit 3"]);
        let error = step("a step", &log, Duration::from_secs(10), &mut command).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("a step") && text.contains("the reason") && text.contains('3'));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_step_is_killed_at_its_limit_with_its_children() {
        let dir = std::env::temp_dir().join(format!("rv-limit-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let log = dir.join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 60 & sleep 60"]);
        let began = Instant::now();
        let error = step("a step", &log, Duration::from_millis(200), &mut command).unwrap_err();
        assert!(error.to_string().contains("timed out after"));
        assert!(began.elapsed() < Duration::from_secs(20));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn clipping_respects_characters() {
        assert_eq!(clip("äöü", 2), "äö…");
        assert_eq!(clip("äöü", 3), "äöü");
    }
}
