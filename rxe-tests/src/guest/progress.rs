//! Long steps: a line when one starts, a sign of life while it runs, its time
//! when it ends, and a limit on each.

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

/// How often a step that goes on says so.
const SIGN_OF_LIFE: Duration = Duration::from_secs(10);

/// Runs `command` with its output in `log`, for at most `limit`.
///
/// The command leads a process group of its own, which is killed as a whole
/// at the limit. A failure names the step, the exit status and the end of
/// the log.
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
    let mut next = SIGN_OF_LIFE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let elapsed = began.elapsed();
        if elapsed > limit {
            // The group outlives its leader until the leader is reaped, so
            // this cannot reach another process.
            let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
            child.wait()?;
            bail!(
                "{what}: not done after {} s; its log is {}\n{}",
                limit.as_secs(),
                log.display(),
                tail(log, from, 15)
            );
        }
        if elapsed > next {
            let last = tail(log, from, 1);
            eprintln!("    {:>4} s  {}", elapsed.as_secs(), clip(last.trim(), 90));
            next += SIGN_OF_LIFE;
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

/// The last `lines` lines of a file from byte `from` on; empty when there are
/// none or the file cannot be read.
pub fn tail(path: &Path, from: u64, lines: usize) -> String {
    const MOST: u64 = 64 * 1024;
    let mut bytes = Vec::new();
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let start = from.max(fs::metadata(path)?.len().saturating_sub(MOST));
        file.seek(SeekFrom::Start(start))?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let text = String::from_utf8_lossy(&read().unwrap_or_default()).replace('\r', "");
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// At most `most` characters of `text`.
pub fn clip(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
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
    fn a_step_ends_at_its_limit_with_all_it_started() {
        let dir = std::env::temp_dir().join(format!("rv-limit-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let log = dir.join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 60 & sleep 60"]);
        let began = Instant::now();
        let error = step("a step", &log, Duration::from_millis(200), &mut command).unwrap_err();
        assert!(error.to_string().contains("not done after"));
        assert!(began.elapsed() < Duration::from_secs(20));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn clipping_respects_characters() {
        assert_eq!(clip("äöü", 2), "äö…");
        assert_eq!(clip("äöü", 3), "äöü");
    }
}
