//! Times whole programs on the embedded device, on an idle machine and beside twice as
//! many busy loops as there are processors.

use std::hint::black_box;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, available_parallelism};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{embedded, report};

/// Maximum of the time on the busy machine over that on the idle one.
const MAX_SLOWDOWN: f64 = 3.0;
/// Seconds after which a program has failed.
const TIMEOUT_SECONDS: &str = "120";

/// Titles of the rows, and cases.
const CASES: &[(&str, Case)] = &[
    (
        "1,000 exchanges in one process",
        Case::OneProcess(&["pingpong", "-n", "1000"]),
    ),
    (
        "the same, waiting for events",
        Case::OneProcess(&["pingpong", "-e", "-n", "1000"]),
    ),
    (
        "1,000 exchanges between two processes",
        Case::TwoProcesses(&["pingpong", "-n", "1000"]),
    ),
    (
        "the same, waiting for events",
        Case::TwoProcesses(&["pingpong", "-e", "-n", "1000"]),
    ),
    (
        "a server of 64 clients, 640 exchanges",
        Case::SharedReceiveQueue,
    ),
    (
        "a sweep of sizes in one process",
        Case::OneProcess(&["perf", "--op", "send", "--sizes", "8..65536", "-n", "500"]),
    ),
];

enum Case {
    /// The command with these arguments.
    OneProcess(&'static [&'static str]),
    /// A server and a client with these arguments.
    TwoProcesses(&'static [&'static str]),
    /// The example with a shared receive queue.
    SharedReceiveQueue,
}

/// Runs each case `runs` times idle and `runs` times busy. Prints the table, and returns
/// the cases that take too long.
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
         The load average was {} before.\n",
        embedded::load()
    );
    let (mut rows, mut slow) = (Vec::new(), Vec::new());
    for (name, case) in CASES {
        let run_all = || {
            (0..runs)
                .map(|_| time(case, &command, &echo))
                .collect::<Result<Vec<_>>>()
        };
        let idle = median(run_all().with_context(|| format!("{name}, idle"))?);
        let busy = with_busy_loops(loops, run_all).with_context(|| format!("{name}, busy"))?;
        let longest = busy.iter().copied().fold(0.0, f64::max);
        let busy = median(busy);
        let ratio = busy / idle;
        let row = [idle, busy, longest].map(|seconds| format!("{seconds:.3}"));
        let [idle, busy, longest] = row;
        rows.push(vec![
            (*name).to_owned(),
            idle,
            busy,
            format!("{ratio:.1}"),
            longest,
        ]);
        if ratio > MAX_SLOWDOWN {
            slow.push(format!(
                "{name}: {ratio:.1} times as long as idle, at most {MAX_SLOWDOWN}"
            ));
        }
    }
    println!("{}", report::markdown(&HEADINGS, &rows));
    Ok(slow)
}

const HEADINGS: [&str; 5] = [
    "",
    "idle, median s",
    "busy, median s",
    "ratio",
    "busy, longest s",
];

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Runs `work` while that many threads keep the processors busy.
fn with_busy_loops<T>(loops: usize, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..loops {
            scope.spawn(|| {
                // Without a spin-loop hint: hypervisors deschedule a processor that
                // executes many.
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

/// Returns the duration of a case in seconds.
fn time(case: &Case, command: &Path, echo: &Path) -> Result<f64> {
    let started = Instant::now();
    match case {
        Case::OneProcess(arguments) => {
            run(with_timeout(command)
                .args(*arguments)
                .args(["--device", "embedded"]))?;
        }
        Case::TwoProcesses(arguments) => return time_between_processes(command, arguments),
        Case::SharedReceiveQueue => run(with_timeout(echo).args(["embedded", "64"]))?,
    }
    Ok(started.elapsed().as_secs_f64())
}

/// Returns the duration in seconds of the first client that finds the server listening.
fn time_between_processes(command: &Path, arguments: &[&str]) -> Result<f64> {
    let (directory, port) = (embedded::Directory::new(), embedded::free_port()?);
    let side = || {
        let mut side = with_timeout(command);
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
    require_success(&server)?;
    Ok(time.as_secs_f64())
}

/// Returns a command that runs the program under coreutils' `timeout`.
fn with_timeout(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg(TIMEOUT_SECONDS).arg(program);
    command
}

fn run(command: &mut Command) -> Result<()> {
    require_success(&command.output().context("cannot run a program")?)
}

fn require_success(output: &Output) -> Result<()> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {stderr}", output.status);
    Ok(())
}
