//! Child processes of tests: the test program itself, and examples.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The variable that names the device for all processes of a test.
pub const DEVICE: &str = "RINGVERBS_DEVICE";

/// Returns the address of an RDMA device's network interface, with port 0.
pub fn address() -> SocketAddr {
    let ip = std::env::var("RXE_ADDR").expect("RXE_ADDR: the address of an RDMA device");
    SocketAddr::from((ip.parse::<IpAddr>().expect("an address"), 0))
}

/// A child process of this test program, with an embedded device that its processes share.
struct TestProgram {
    command: Command,
    directory: PathBuf,
}

impl TestProgram {
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

impl Drop for TestProgram {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Runs the ignored tests of this program, which need a device, on an embedded device.
/// `count` tests must pass; `args` are further arguments.
pub fn run_ignored_tests(count: usize, args: &[&str]) {
    let mut program = TestProgram::new("ignored");
    let command = program.command.arg("--ignored").args(args);
    run_tests(count, command.env("RXE_ADDR", "127.0.0.1"));
}

/// Runs a test program, of which `count` tests must pass. Its lines are printed with a
/// prefix: its results are not those of the caller.
pub fn run_tests(count: usize, command: &mut Command) {
    let output = command.output().unwrap();
    for bytes in [&output.stdout, &output.stderr] {
        for line in String::from_utf8_lossy(bytes).lines() {
            println!("| {line}");
        }
    }
    assert!(output.status.success(), "{}", output.status);
    let result = format!(" ok. {count} passed; 0 failed");
    assert!(
        String::from_utf8_lossy(&output.stdout).contains(&result),
        "not{result}"
    );
}

/// Runs a test in a child process in which [`DEVICE`] is set, and returns true. Returns
/// false in the child.
pub fn ran_in_child(test: &str) -> bool {
    if std::env::var(DEVICE).is_ok() {
        return false;
    }
    let mut program = TestProgram::new(test);
    run_tests(1, program.command.args([test, "--exact", "--nocapture"]));
    true
}

/// Waits up to `timeout` for a process to exit. Its output must fit into a pipe.
pub fn wait_with_timeout(mut child: Child, timeout: Duration) -> Output {
    let end = Instant::now() + timeout;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("timeout: {:?}", child.wait_with_output());
        }
        sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Returns the path of an example, which cargo builds with the tests.
pub fn example_path(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let directory = program.ancestors().nth(2).unwrap_or(Path::new(""));
    let path = directory.join("examples").join(name);
    assert!(
        path.exists(),
        "{} does not exist; `cargo test` or `cargo build --examples` builds it",
        path.display()
    );
    path
}

/// A running server. Dropping the value kills it.
pub struct Server {
    process: Child,
    /// The address on which the server listens.
    pub address: SocketAddr,
}

impl Server {
    /// Starts an example that is a server, on a free port.
    pub fn start(name: &str) -> Self {
        Self::spawn(Command::new(example_path(name)).arg("127.0.0.1:0"))
    }

    /// Starts a server by a command that prints its address.
    pub fn spawn(command: &mut Command) -> Self {
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
