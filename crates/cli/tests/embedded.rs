//! The command on embedded devices, which need nothing of the host: both sides in one
//! process, and in two processes.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testing::hosts::free_port;
use testing::program;

/// Only a heavily loaded machine needs as much time.
const TIMEOUT: Duration = Duration::from_secs(120);

fn start(args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringverbs"));
    let command = command.args(args).stdin(Stdio::null());
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn finish(child: Child) -> Output {
    program::wait_with_timeout(child, TIMEOUT)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs the command, which must succeed, and returns its output.
fn run(args: &[&str]) -> String {
    let output = finish(start(args));
    assert!(output.status.success(), "{args:?}: {output:?}");
    text(&output.stdout)
}

/// A directory that embedded devices share, and a free TCP port.
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

    fn start_server(&self, args: &[&str]) -> Child {
        start(&self.args(&self.device(), args))
    }

    /// Starts a client once the server listens.
    fn start_client(&self, args: &[&str]) -> Child {
        let end = Instant::now() + TIMEOUT;
        let port: u16 = self.port.parse().unwrap();
        // Without connecting, because a server accepts one client only.
        let is_listening = |port: u16| {
            ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
                let table = std::fs::read_to_string(table).unwrap_or_default();
                let address = format!(":{port:04X} ");
                let mut lines = table.lines();
                lines.any(|line| line.contains(&address) && line.contains(" 0A "))
            })
        };
        while !is_listening(port) {
            assert!(Instant::now() < end, "the server does not listen");
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
fn pingpong_prints_its_device() {
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
fn pingpong_of_each_type_with_polling_and_events() {
    for kind in ["rc", "uc", "ud", "srq"] {
        for option in ["--chk", "--events"] {
            let device = ["--device", "embedded", "--json", "-n", "200"];
            let args = [&["pingpong", "--type", kind, option][..], &device].concat();
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

fn perf_report(args: &[&str]) -> serde_json::Value {
    let options = ["perf", "--device", "embedded", "--json"];
    serde_json::from_str(&run(&[&options, args].concat())).unwrap()
}

/// Returns a row's iterations, messages per second, and lost messages.
fn row_results(row: &serde_json::Value) -> (u64, f64, Option<u64>) {
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
        for options in [
            &["-q", "3"][..],
            &["-q", "3", "-b"],
            &["-q", "2", "-b", "-e"],
        ] {
            let kind = ["--type", transport, "--op", operation];
            let sizes = ["-n", "60", "--depth", "5", "--sizes", "1,1024"];
            let report = perf_report(&[&kind[..], options, &sizes].concat());
            assert_eq!(report["transport"], transport);
            assert_eq!(report["depth"], 5);
            assert_eq!(report["bidirectional"], options.contains(&"-b"));
            let rows = report["rows"].as_array().unwrap();
            assert_eq!(rows.len(), if operation == "atomic" { 1 } else { 2 });
            for row in rows {
                let (iterations, rate, lost) = row_results(row);
                assert!(rate > 0.0, "{kind:?} {options:?}: {row}");
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
fn perf_measures_for_the_duration() {
    let start = Instant::now();
    let report = perf_report(&["--duration", "0.4", "--sizes", "8", "--op", "send", "-b"]);
    let elapsed = start.elapsed();
    assert!(elapsed >= Duration::from_millis(800), "{elapsed:?}");
    let (iterations, rate, _) = row_results(&report["rows"][0]);
    assert!(iterations > 100 && rate > 100.0, "{report}");
}

#[test]
fn depth_is_as_requested_or_reported() {
    let sizes = ["--sizes", "8,33554432", "-n", "1"];
    assert_eq!(perf_report(&sizes)["depth"], 64);
    let send = [&sizes[..], &["--op", "send"]].concat();
    assert_eq!(perf_report(&send)["depth"], 32);
    let output = run(&[&["perf", "--device", "embedded"], &send[..]].concat());
    let first = output.lines().next().unwrap();
    assert!(
        first.starts_with("32 outstanding instead of 64"),
        "{output}"
    );
    assert_eq!(perf_report(&["--depth", "7", "-n", "9"])["depth"], 7);
}

#[test]
fn plot_has_the_format_of_its_extension() {
    let shared_directory = SharedDirectory::new("plot");
    let directory = &shared_directory.directory;
    std::fs::create_dir_all(directory).unwrap();
    for (name, start) in [("a.svg", &b"<svg"[..]), ("a.png", b"\x89PNG")] {
        let path = directory.join(name);
        let plot = ["--plot", path.to_str().unwrap()];
        perf_report(&[&["-n", "50", "--sizes", "8..64"], &plot[..]].concat());
        assert!(std::fs::read(&path).unwrap().starts_with(start), "{name}");
    }
    // A failed measurement leaves no file behind.
    let path = directory.join("b.svg");
    let args = ["perf", "--plot", path.to_str().unwrap(), "--device", "no"];
    assert!(!finish(start(&args)).status.success());
    assert!(!path.exists());
}

/// The server exits with its client.
#[test]
fn perf_between_two_processes() {
    for options in [
        &["--type", "ud", "--op", "send", "--sizes", "64,4096", "-b"][..],
        &["--op", "send", "-q", "4", "-b"],
        &["--op", "read", "-q", "2", "--duration", "0.2"],
    ] {
        let shared_directory = SharedDirectory::new("perf");
        let server = shared_directory.start_server(&["perf", "--server"]);
        let client = [&["perf", "-n", "300", "127.0.0.1", "--json"], options].concat();
        let client: Vec<&str> = match options.contains(&"--duration") {
            true => client
                .into_iter()
                .filter(|it| !["-n", "300"].contains(it))
                .collect(),
            false => client,
        };
        let client = finish(shared_directory.start_client(&client));
        assert!(client.status.success(), "{options:?}: {client:?}");
        let server = finish(server);
        assert!(server.status.success(), "{options:?}: {server:?}");
    }
}

#[test]
fn info_prints_the_embedded_device() {
    let text = run(&["info", "--device", "embedded"]);
    assert!(
        text.contains("embedded") && text.contains("PORT_ACTIVE"),
        "{text}"
    );
}

/// Another device than the named one would be a surprise.
/// Starts `top` on an empty network until it asks. Returns it, and the file that asks.
fn start_top(shared: &SharedDirectory, prefix: &[&str]) -> (Child, PathBuf) {
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&shared.directory)
        .unwrap();
    let directory = shared.directory.to_str().unwrap();
    let command = [prefix, &[env!("CARGO_BIN_EXE_ringverbs"), "top", directory]].concat();
    let mut child = Command::new(command[0]);
    let child = child.args(&command[1..]).stdin(Stdio::null());
    let child = child.stdout(Stdio::null()).spawn().unwrap();
    let question = shared.directory.join("status");
    let end = Instant::now() + TIMEOUT;
    while !question.exists() {
        assert!(Instant::now() < end, "it does not ask");
        sleep(Duration::from_millis(5));
    }
    (child, question)
}

#[test]
fn top_that_a_signal_ends_leaves_no_question() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        let shared = SharedDirectory::new("top");
        // The tests may run in the background of a script, where SIGINT is ignored.
        let script = r#"ulimit -c 0; exec "$@""#;
        let default = ["env", "--default-signal", "sh", "-c", script, "-"];
        let (child, question) = start_top(&shared, &default);
        send(&child, signal);
        let ended = finish(child).status;
        assert_eq!(ended.signal(), Some(signal), "{ended:?}");
        assert!(!question.exists(), "{signal}");
    }
    // As nohup starts it.
    let shared = SharedDirectory::new("top");
    let (mut child, question) = start_top(&shared, &["sh", "-c", r#"trap "" HUP; exec "$@""#, "-"]);
    send(&child, libc::SIGHUP);
    sleep(Duration::from_millis(100));
    assert_eq!(child.try_wait().unwrap(), None);
    send(&child, libc::SIGTERM);
    assert_eq!(finish(child).status.signal(), Some(libc::SIGTERM));
    assert!(!question.exists());
}

fn send(child: &Child, signal: i32) {
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    kill(pid, Signal::try_from(signal).unwrap()).unwrap();
}

#[test]
fn device_name_that_is_not_utf8_is_refused() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringverbs"));
    command.env("RINGVERBS_DEVICE", OsStr::from_bytes(b"embedded:/\xff"));
    let output = command.arg("info").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("RINGVERBS_DEVICE"), "{error}");
}

/// The protocol has addresses of 256 queue pairs.
#[test]
fn pingpong_of_the_most_queue_pairs() {
    let srq = ["pingpong", "--type", "srq", "--device", "embedded"];
    run(&[&srq[..], &["-q", "256", "-n", "300"]].concat());
    let output = finish(start(&[&srq[..], &["-q", "257"]].concat()));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn pingpong_between_processes_checks_its_data() {
    for kind in ["rc", "uc", "ud", "srq"] {
        let shared_directory = SharedDirectory::new(kind);
        let args = ["--type", kind, "-n", "300", "--chk"];
        let server =
            shared_directory.start_server(&[&["pingpong", "--server"][..], &args].concat());
        let client =
            shared_directory.start_client(&[&["pingpong"][..], &args, &["127.0.0.1"]].concat());
        for side in [finish(client), finish(server)] {
            assert!(side.status.success(), "{kind}: {side:?}");
            let text = text(&side.stdout);
            assert!(text.contains("\n300 iters in "), "{kind}: {text}");
        }
    }
}

#[test]
fn client_of_a_killed_server_fails_with_retries_exceeded() {
    let shared_directory = SharedDirectory::new("killed");
    let mut server = shared_directory.start_server(&["perf", "--server"]);
    let endless = ["perf", "-n", "100000000", "127.0.0.1"];
    let mut client = shared_directory.start_client(&endless);
    // By now the measurement has most likely begun.
    sleep(Duration::from_secs(2));
    assert!(client.try_wait().unwrap().is_none());
    server.kill().unwrap();
    server.wait().unwrap();
    let client = finish(client);
    assert_eq!(client.status.code(), Some(1));
    let error = text(&client.stderr);
    assert!(error.contains("transport retries exceeded"), "{error}");
}

/// On unreliable transports the operations of a side complete even if nobody receives them.
#[test]
fn perf_server_ends_when_its_client_is_gone() {
    let hello = |transport: &str| {
        format!(
            r#"{{"version":2,"setup":{{"operation":"write","transport":"{transport}","size":8,"depth":4,"queue_pairs":1,"events":false,"bidirectional":true}},"address":{{"endpoints":["ffffff:000001:0000:3:{}"],"memory":{{"addr":0,"rkey":0}}}}}}"#,
            "f".repeat(32)
        )
    };
    for (transport, goal) in [("uc", r#"{"milliseconds":100000000}"#), ("rc", "null")] {
        let port = free_port().to_string();
        let args = ["perf", "--server", "--device", "embedded", "--port", &port];
        let server = start(&args);
        let end = Instant::now() + TIMEOUT;
        let client = loop {
            match TcpStream::connect(("127.0.0.1", port.parse().unwrap())) {
                Ok(client) => break client,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
            sleep(Duration::from_millis(5));
        };
        let mut responses = BufReader::new(client.try_clone().unwrap()).lines();
        let phase = format!(r#"{{"number":1,"size":8,"echo":false,"goal":{goal}}}"#);
        for (message, response) in [(hello(transport), "endpoints"), (phase, "ready")] {
            writeln!(&client, "{message}").unwrap();
            let got = responses.next().unwrap().unwrap();
            assert!(got.contains(response), "{got}");
        }
        drop((client, responses));
        let server = finish(server);
        assert_eq!(server.status.code(), Some(1), "{transport}");
        let error = text(&server.stderr);
        assert!(error.contains("closed the connection"), "{error}");
    }
}

/// The server here connects the client's queue pair to itself.
#[test]
fn perf_client_survives_the_largest_numbers() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let args = ["-n", "5", "--device", "embedded", "--port", &port];
    let client = start(&[&["perf", "127.0.0.1"], &args[..]].concat());
    let (stream, _) = listener.accept().unwrap();
    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
        let message: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
        let response = match &message["address"] {
            address if address.is_object() => address.clone(),
            _ if message["number"].is_number() => serde_json::json!({ "ready": true }),
            _ => serde_json::json!({
                "received": u64::MAX, "operations": u64::MAX, "nanoseconds": u64::MAX,
            }),
        };
        writeln!(&stream, "{}", serde_json::json!({ "yes": response })).unwrap();
    }
    let client = finish(client);
    assert!(client.status.success(), "{client:?}");
}

/// Each row is printed when it is complete, even if a later size fails.
#[test]
fn perf_keeps_rows_before_an_error() {
    let shared_directory = SharedDirectory::new("rows");
    let mut server = shared_directory.start_server(&["perf", "--server"]);
    let sizes = ["perf", "-n", "5000", "--sizes", "8,1000000", "127.0.0.1"];
    let mut client = shared_directory.start_client(&sizes);
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    let of_8_bytes = |line: Result<String, _>| line.unwrap().trim_start().starts_with("8 ");
    assert!(lines.by_ref().any(of_8_bytes), "{:?}", finish(client));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(lines.next().is_none(), "no further row");
    let client = finish(client);
    assert_eq!(client.status.code(), Some(1));
}

/// Computing threads, two per processor, which end when this value is dropped.
struct BusyThreads {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyThreads {
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

impl Drop for BusyThreads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

/// If polling threads were scheduled like the busy ones, an exchange would take about
/// 20 ms. Threads that sleep between polls need less than 1 ms, or, before Linux 6.12, some
/// milliseconds.
#[test]
fn pingpong_makes_progress_beside_busy_threads() {
    let _busy = BusyThreads::new();
    let start = Instant::now();
    run(&["pingpong", "--device", "embedded", "-n", "250"]);
    let elapsed = start.elapsed();
    assert!(
        elapsed < Duration::from_secs(2),
        "250 exchanges took {elapsed:?}"
    );
}
