//! The embedded device on a busy machine: whole programs, alone and beside twice as many
//! busy loops as there are processors.

use std::hint::black_box;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, available_parallelism};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::embedded;

/// The time on the busy machine over that on the idle one, at most.
const MOST: f64 = 3.0;
/// Seconds after which a program has failed.
const LONGEST: &str = "120";

/// The cases, by the title of their row.
const CASES: &[(&str, Case)] = &[
    (
        "1,000 exchanges in one process",
        Case::One(&["pingpong", "-n", "1000"]),
    ),
    (
        "the same, waiting for events",
        Case::One(&["pingpong", "-e", "-n", "1000"]),
    ),
    (
        "1,000 exchanges between two processes",
        Case::Two(&["pingpong", "-n", "1000"]),
    ),
    (
        "the same, waiting for events",
        Case::Two(&["pingpong", "-e", "-n", "1000"]),
    ),
    ("a server of 64 clients, 640 exchanges", Case::Clients),
    (
        "a sweep of sizes in one process",
        Case::One(&["perf", "--op", "send", "--sizes", "8..65536", "-n", "500"]),
    ),
];

enum Case {
    /// The command with these arguments.
    One(&'static [&'static str]),
    /// A server and a client with these arguments.
    Two(&'static [&'static str]),
    /// The example with a shared receive queue.
    Clients,
}

/// Runs each case `runs` times idle and as often busy; the table, and the cases that
/// take too long.
///
/// # Errors
/// A program that fails or hangs.
pub fn bench(runs: usize) -> Result<Vec<String>> {
    let command = embedded::build(&["-p", "ringverbs-cli"])?.join("ringverbs");
    let echo = [
        "-p",
        "ringverbs",
        "--features",
        "embedded",
        "--example",
        "srq_echo",
    ];
    let echo = embedded::build(&echo)?.join("examples/srq_echo");
    let loops = 2 * available_parallelism().map_or(1, usize::from);
    println!(
        "Whole programs, {runs} runs each; busy: beside {loops} busy loops. \
         The load average was {} before.\n\n\
         | | idle, median s | busy, median s | ratio | busy, longest s |\n|---|---|---|---|---|",
        embedded::load()
    );
    let mut slow = Vec::new();
    for (name, case) in CASES {
        let all = || {
            (0..runs)
                .map(|_| time(case, &command, &echo))
                .collect::<Result<Vec<_>>>()
        };
        let idle = median(all().with_context(|| format!("{name}, idle"))?);
        let busy = beside(loops, all).with_context(|| format!("{name}, busy"))?;
        let longest = busy.iter().copied().fold(0.0, f64::max);
        let busy = median(busy);
        let ratio = busy / idle;
        println!("| {name} | {idle:.3} | {busy:.3} | {ratio:.1} | {longest:.3} |");
        if ratio > MOST {
            slow.push(format!(
                "{name}: {ratio:.1} times as long as idle, at most {MOST}"
            ));
        }
    }
    Ok(slow)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Does `work` while that many threads keep the processors busy.
fn beside<T>(loops: usize, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..loops {
            scope.spawn(|| {
                // Without the instruction for a pause, after many of which a virtual machine
                // gives its processor away.
                while !stop.load(Ordering::Relaxed) {
                    black_box(());
                }
            });
        }
        let result = work();
        stop.store(true, Ordering::Relaxed);
        result
    })
}

/// Seconds that a case takes.
fn time(case: &Case, command: &Path, echo: &Path) -> Result<f64> {
    let started = Instant::now();
    match case {
        Case::One(arguments) => {
            run(bounded(command)
                .args(*arguments)
                .args(["--device", "embedded"]))?;
        }
        Case::Two(arguments) => return between(command, arguments),
        Case::Clients => run(bounded(echo).args(["embedded", "64"]))?,
    }
    Ok(started.elapsed().as_secs_f64())
}

/// Seconds that the client takes that finds the server listening.
fn between(command: &Path, arguments: &[&str]) -> Result<f64> {
    let (directory, port) = (embedded::Directory::new(), embedded::free_port()?);
    let side = || {
        let mut side = bounded(command);
        side.args(arguments)
            .args(["--device", &directory.device(), "--port", &port]);
        side
    };
    let server = side()
        .arg("--server")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let server = thread::spawn(|| server.wait_with_output());
    let time = embedded::when_listening(|| {
        let started = Instant::now();
        run(side().arg("127.0.0.1")).map(|()| started.elapsed())
    })?;
    let server = server.join().unwrap_or_else(|_| unreachable!())?;
    succeeded(&server)?;
    Ok(time.as_secs_f64())
}

/// The program under coreutils' `timeout`.
fn bounded(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg(LONGEST).arg(program);
    command
}

fn run(command: &mut Command) -> Result<()> {
    succeeded(&command.output().context("cannot run a program")?)
}

fn succeeded(output: &Output) -> Result<()> {
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", output.status);
    Ok(())
}
