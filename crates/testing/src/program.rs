//! Tests in processes of their own: the test program again, and examples.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Names the device for all processes of a test.
pub const DEVICE: &str = "RINGVERBS_DEVICE";

/// The address of an RDMA device's network interface, without a port.
pub fn address() -> SocketAddr {
    let ip = std::env::var("RXE_ADDR").expect("RXE_ADDR: the address of an RDMA device");
    SocketAddr::from((ip.parse::<IpAddr>().expect("an address"), 0))
}

/// This test program, on an embedded device that its processes share.
struct Again {
    command: Command,
    directory: PathBuf,
}

impl Again {
    fn new(purpose: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let name = program.file_stem().unwrap_or_default().to_string_lossy();
        let name = format!("ringverbs-{name}-{purpose}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let mut command = Command::new(program);
        command.env(DEVICE, format!("embedded:{}", directory.display()));
        Self { command, directory }
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Runs the ignored tests of this program, which need a device, on the embedded one.
/// `passed` of them must pass; `more` are further arguments.
pub fn ignored_tests_pass(passed: usize, more: &[&str]) {
    let mut again = Again::new("ignored");
    let command = again.command.arg("--ignored").args(more);
    let output = command.env("RXE_ADDR", "127.0.0.1").output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.contains(&format!("{passed} passed; 0 failed")), "{out}");
    println!("{out}");
}

/// Runs a test in a process of its own that has [`DEVICE`], and returns true; false in
/// that process.
pub fn ran_with_device(test: &str) -> bool {
    if std::env::var(DEVICE).is_ok() {
        return false;
    }
    let mut again = Again::new("device");
    let command = again.command.args([test, "--exact", "--nocapture"]);
    assert!(command.status().unwrap().success());
    true
}

/// Waits for a process to end, for `patience` at most. What it prints is less than a
/// pipe holds.
pub fn finish(mut child: Child, patience: Duration) -> Output {
    let end = Instant::now() + patience;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("no end: {:?}", child.wait_with_output());
        }
        sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Where cargo puts an example when it builds tests: beside the folder of this program.
pub fn example(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.ancestors().nth(2).unwrap_or(Path::new(""));
    let path = folder.join("examples").join(name);
    assert!(
        path.exists(),
        "{} is built by `cargo test`, or by `cargo build --examples`",
        path.display()
    );
    path
}

/// An example that is a server. It does not outlive this value.
pub struct Server {
    process: Child,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Server {
    /// Starts it on a port of its own; it prints which.
    pub fn start(name: &str) -> Self {
        Self::of(Command::new(example(name)).arg("127.0.0.1:0"))
    }

    /// Starts a server by a command that prints where it listens.
    pub fn of(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut lines = BufReader::new(process.stdout.take().unwrap());
        lines.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap();
        let address = address.parse().unwrap();
        Self { process, address }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
