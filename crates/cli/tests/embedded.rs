//! On the ConnectX in the process, which needs nothing of the machine: both
//! sides in one process, and two processes.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use testing::hosts::free_port;
use testing::program;

/// Nothing here takes so long, but on a machine with much else to do.
const PATIENCE: Duration = Duration::from_secs(120);

fn start(args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringverbs"));
    let command = command.args(args).stdin(Stdio::null());
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn finish(child: Child) -> Output {
    program::finish(child, PATIENCE)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What it prints, if it ends well.
fn run(args: &[&str]) -> String {
    let output = finish(start(args));
    assert!(output.status.success(), "{args:?}: {output:?}");
    text(&output.stdout)
}

/// A directory to meet in, and a TCP port that nobody has.
struct SharedDirectory {
    directory: PathBuf,
    port: String,
}

impl SharedDirectory {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-cli-{name}-{}", std::process::id());
        Self {
            directory: std::env::temp_dir().join(name),
            port: free_port().to_string(),
        }
    }

    fn args<'a>(&'a self, device: &'a str, args: &[&'a str]) -> Vec<&'a str> {
        [args, &["--port", &self.port, "--device", device]].concat()
    }

    fn device(&self) -> String {
        format!("embedded:{}", self.directory.display())
    }

    fn serve(&self, args: &[&str]) -> Child {
        start(&self.args(&self.device(), args))
    }

    /// A client that has found the server, which may not listen yet.
    fn meet(&self, args: &[&str]) -> Child {
        let end = Instant::now() + PATIENCE;
        let port: u16 = self.port.parse().unwrap();
        // Looked for without connecting: a server takes one client.
        let listens = |port: u16| {
            ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
                let table = std::fs::read_to_string(table).unwrap_or_default();
                let at = format!(":{port:04X} ");
                let mut lines = table.lines();
                lines.any(|line| line.contains(&at) && line.contains(" 0A "))
            })
        };
        while !listens(port) {
            assert!(Instant::now() < end, "nobody listens");
            sleep(Duration::from_millis(5));
        }
        start(&self.args(&self.device(), args))
    }
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

#[test]
fn pingpong_names_its_device() {
    let text = run(&["pingpong", "--iters", "100", "--chk"]);
    assert!(text.starts_with("  device:         "), "{text}");
    assert!(text.contains("\n100 iters in "), "{text}");
    let text = run(&["pingpong", "-n", "10", "--device", "embedded"]);
    let first = text.lines().next().unwrap();
    assert_eq!(
        first,
        "  device:         embedded, a ConnectX in this process"
    );
}

#[test]
fn pingpong_of_each_type_polled_and_on_events() {
    for kind in ["rc", "uc", "ud", "srq"] {
        for how in ["--chk", "--events"] {
            let device = ["--device", "embedded", "--json", "-n", "200"];
            let args = [&["pingpong", "--type", kind, how][..], &device].concat();
            let report: serde_json::Value = serde_json::from_str(&run(&args)).unwrap();
            assert_eq!(report["device"], "embedded");
            assert_eq!(report["transport"], kind);
            assert_eq!(report["iterations"], 200);
        }
    }
}

#[test]
fn perf_of_each_operation() {
    for operation in ["send", "write", "read", "atomic"] {
        let sizes = ["--sizes", "8,5000", "-n", "100", "--json"];
        let device = ["--op", operation, "--device", "embedded"];
        let text = run(&[&["perf"][..], &device, &sizes].concat());
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(report["device"], "embedded");
        for row in report["rows"].as_array().unwrap() {
            assert!(row["latency_ns"]["p50"].as_u64().unwrap() > 0, "{row}");
        }
    }
}

fn measured(args: &[&str]) -> serde_json::Value {
    let before = ["perf", "--device", "embedded", "--json"];
    serde_json::from_str(&run(&[&before, args].concat())).unwrap()
}

/// Operations of a row's latency, the rate, and the lost messages.
fn numbers(row: &serde_json::Value) -> (u64, f64, Option<u64>) {
    let rate = row["bandwidth"]["messages_per_second"].as_f64().unwrap();
    (
        row["iterations"].as_u64().unwrap(),
        rate,
        row["lost"].as_u64(),
    )
}

#[test]
fn perf_of_each_transport_on_several_queue_pairs_in_both_directions() {
    for (transport, operation) in [
        ("rc", "send"),
        ("rc", "write"),
        ("rc", "read"),
        ("rc", "atomic"),
        ("uc", "send"),
        ("uc", "write"),
        ("ud", "send"),
    ] {
        for how in [
            &["-q", "3"][..],
            &["-q", "3", "-b"],
            &["-q", "2", "-b", "-e"],
        ] {
            let what = ["--type", transport, "--op", operation];
            let sizes = ["-n", "60", "--depth", "5", "--sizes", "1,1024"];
            let report = measured(&[&what[..], how, &sizes].concat());
            assert_eq!(report["transport"], transport);
            assert_eq!(report["depth"], 5);
            assert_eq!(report["bidirectional"], how.contains(&"-b"));
            let rows = report["rows"].as_array().unwrap();
            assert_eq!(rows.len(), if operation == "atomic" { 1 } else { 2 });
            for row in rows {
                let (iterations, rate, lost) = numbers(row);
                assert!(rate > 0.0, "{what:?} {how:?}: {row}");
                assert_eq!(lost.is_some(), transport != "rc", "{row}");
                assert!(
                    iterations <= 60 && iterations + lost.unwrap_or(0) >= 60,
                    "{row}"
                );
            }
        }
    }
}

#[test]
fn perf_for_a_time_takes_that_time() {
    let began = Instant::now();
    let report = measured(&["--duration", "0.4", "--sizes", "8", "--op", "send", "-b"]);
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(800), "{took:?}");
    let (iterations, rate, _) = numbers(&report["rows"][0]);
    assert!(iterations > 100 && rate > 100.0, "{report}");
}

#[test]
fn the_depth_is_what_was_asked_for_or_said() {
    let sizes = ["--sizes", "8,16777216", "-n", "1"];
    assert_eq!(measured(&sizes)["depth"], 64);
    let send = [&sizes[..], &["--op", "send"]].concat();
    assert_eq!(measured(&send)["depth"], 32);
    let said = run(&[&["perf", "--device", "embedded"], &send[..]].concat());
    let first = said.lines().next().unwrap();
    assert!(first.starts_with("32 outstanding in place of 64"), "{said}");
    assert_eq!(measured(&["--depth", "7", "-n", "9"])["depth"], 7);
}

#[test]
fn a_plot_is_what_its_name_says() {
    let shared_directory = SharedDirectory::new("plot");
    let directory = &shared_directory.directory;
    std::fs::create_dir_all(directory).unwrap();
    for (name, start) in [("a.svg", &b"<svg"[..]), ("a.png", b"\x89PNG")] {
        let path = directory.join(name);
        let plot = ["--plot", path.to_str().unwrap()];
        measured(&[&["-n", "50", "--sizes", "8..64"], &plot[..]].concat());
        assert!(std::fs::read(&path).unwrap().starts_with(start), "{name}");
    }
    // A failed measurement leaves no file behind.
    let path = directory.join("b.svg");
    let args = ["perf", "--plot", path.to_str().unwrap(), "--device", "no"];
    assert!(!finish(start(&args)).status.success());
    assert!(!path.exists());
}

/// Queue pairs, both directions and datagrams between processes, and a server that
/// ends with its client.
#[test]
fn perf_between_two_processes() {
    for how in [
        &["--type", "ud", "--op", "send", "--sizes", "64,4096", "-b"][..],
        &["--op", "send", "-q", "4", "-b"],
        &["--op", "read", "-q", "2", "--duration", "0.2"],
    ] {
        let shared_directory = SharedDirectory::new("perf");
        let server = shared_directory.serve(&["perf", "--server"]);
        let client = [&["perf", "-n", "300", "127.0.0.1", "--json"], how].concat();
        let client: Vec<&str> = match how.contains(&"--duration") {
            true => client
                .into_iter()
                .filter(|it| !["-n", "300"].contains(it))
                .collect(),
            false => client,
        };
        let client = finish(shared_directory.meet(&client));
        assert!(client.status.success(), "{how:?}: {client:?}");
        let server = finish(server);
        assert!(server.status.success(), "{how:?}: {server:?}");
    }
}

#[test]
fn info_names_the_embedded_device() {
    let text = run(&["info", "--device", "embedded"]);
    assert!(
        text.contains("embedded") && text.contains("PORT_ACTIVE"),
        "{text}"
    );
}

#[test]
fn pingpong_between_processes_checks_its_data() {
    for kind in ["rc", "uc", "ud", "srq"] {
        let shared_directory = SharedDirectory::new(kind);
        let args = ["--type", kind, "-n", "300", "--chk"];
        let server = shared_directory.serve(&[&["pingpong", "--server"][..], &args].concat());
        let client = shared_directory.meet(&[&["pingpong"][..], &args, &["127.0.0.1"]].concat());
        for side in [finish(client), finish(server)] {
            assert!(side.status.success(), "{kind}: {side:?}");
            let text = text(&side.stdout);
            assert!(text.contains("\n300 iters in "), "{kind}: {text}");
        }
    }
}

#[test]
fn a_client_of_a_killed_server_ends_with_retries_exceeded() {
    let shared_directory = SharedDirectory::new("killed");
    let mut server = shared_directory.serve(&["perf", "--server"]);
    let endless = ["perf", "-n", "100000000", "127.0.0.1"];
    let mut client = shared_directory.meet(&endless);
    // In the middle, as far as time tells: long after the beginning.
    sleep(Duration::from_secs(2));
    assert!(client.try_wait().unwrap().is_none());
    server.kill().unwrap();
    server.wait().unwrap();
    let client = finish(client);
    assert_eq!(client.status.code(), Some(1));
    let said = text(&client.stderr);
    assert!(said.contains("transport retries exceeded"), "{said}");
}

/// Rows come when they are measured, and stay if a later size fails.
#[test]
fn perf_keeps_rows_before_an_error() {
    let shared_directory = SharedDirectory::new("rows");
    let mut server = shared_directory.serve(&["perf", "--server"]);
    let sizes = ["perf", "-n", "5000", "--sizes", "8,1000000", "127.0.0.1"];
    let mut client = shared_directory.meet(&sizes);
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    let of_8_bytes = |line: Result<String, _>| line.unwrap().trim_start().starts_with("8 ");
    assert!(lines.by_ref().any(of_8_bytes), "{:?}", finish(client));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(lines.next().is_none(), "no further row");
    let client = finish(client);
    assert_eq!(client.status.code(), Some(1));
}

/// Threads that compute for as long as this value lives, twice as many as there are
/// processors.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn new() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let processors = thread::available_parallelism().unwrap().get();
        let compute = |_| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
        };
        let threads = (0..2 * processors).map(compute).collect();
        Self { stop, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

/// A polling thread that took its turn with the busy ones would need some 20 ms an
/// exchange; one that sleeps between polls needs below 1 ms, or, before Linux 6.12,
/// some milliseconds.
#[test]
fn exchanges_go_on_beside_busy_threads() {
    let _busy = Busy::new();
    let began = Instant::now();
    run(&["pingpong", "--device", "embedded", "-n", "250"]);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "250 exchanges took {took:?}");
}
