//! The examples, on the ConnectX in the process, which needs nothing of the
//! machine: what they print is what they are to do. In a guest they run on
//! rdma_rxe and on softhca, too.
#![allow(missing_docs, reason = "a test")]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// They take milliseconds; the machine may have other things to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where cargo puts the examples when it builds tests: beside this one's folder.
fn example(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.extend(["examples", name]);
    assert!(
        path.exists(),
        "{} is built by `cargo test`, or by `cargo build --examples`",
        path.display()
    );
    path
}

/// What it prints, if it ends well and in time.
fn run(name: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(example(name));
    let command = command.args(arguments).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + PATIENCE;
    // None prints more than a pipe holds.
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{name} has not ended in {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{name}: {}: {text}", output.status);
    text
}

#[test]
fn hello() {
    let text = run("hello", &["embedded"]);
    assert!(text.contains("embedded port 1: "), "{text}");
    assert!(text.contains("received: hello over RDMA\n"), "{text}");
    assert!(text.contains("sent 15 bytes\n"), "{text}");
}

#[test]
fn atomics() {
    let text = run("atomics", &["embedded"]);
    let right = "counter: 40 + 2 = 42\n\
                 7 has taken the lock\n\
                 8 finds that 7 holds it\n\
                 the lock's word: 7\n";
    assert_eq!(text, right);
}

#[test]
fn datagram() {
    let text = run("datagram", &["embedded"]);
    let mut lines: Vec<_> = text.lines().map(|line| line.rsplit_once(": ")).collect();
    lines.sort();
    let said: Vec<_> = lines.iter().map(|line| line.unwrap().1).collect();
    assert_eq!(said, ["hello, first", "hello, second", "hello, third"]);
    assert!(
        lines
            .iter()
            .all(|line| line.unwrap().0.starts_with("the sender, "))
    );
}

#[test]
fn epoll() {
    let text = run("epoll", &["embedded"]);
    let mut lines: Vec<String> = (0..10).map(|line| format!("{line}: line {line}")).collect();
    lines.push("10 lines came by RDMA".into());
    assert_eq!(text.lines().collect::<Vec<_>>(), lines);
}

#[test]
fn srq_echo() {
    let text = run("srq_echo", &["embedded"]);
    assert!(text.starts_with("8 clients, 80 messages echoed"), "{text}");
}

#[test]
fn tagged() {
    let text = run("tagged", &["embedded"]);
    let right = "sum of the results: 14\n\
                 log, line 2: step 2\n\
                 report of 600 bytes: all went well....\n";
    assert_eq!(text, right);
}

#[test]
fn write_with_immediate() {
    let text = run("write_with_immediate", &["embedded"]);
    assert!(text.contains("at 100: written from afar\n"), "{text}");
    assert!(!text.contains("failed"), "{text}");
}
