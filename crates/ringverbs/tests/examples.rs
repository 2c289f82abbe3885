//! The examples, on the ConnectX in the process, which needs nothing of the
//! machine: what they print is what they are to do. Of some there are two processes. In a
//! guest they run on rdma_rxe and on softhca, too, and those that connect by
//! rdma_cm run only there: `cm_*`, `rping_*`, `stream_echo`.
#![allow(missing_docs, reason = "a test")]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
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

fn start(name: &str, arguments: &[&str], device: &str) -> Child {
    let mut command = Command::new(example(name));
    let command = command.args(arguments).env("DEVICE", device);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// What it prints, if it ends well and in time.
fn run(name: &str, arguments: &[&str]) -> String {
    finish(name, start(name, arguments, "embedded"))
}

fn finish(name: &str, mut child: Child) -> String {
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
    assert!(output.status.success(), "{name}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A directory that two processes meet in, and goes with the test.
struct Meeting(PathBuf);

impl Meeting {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn device(&self) -> String {
        format!("embedded:{}", self.0.display())
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process that does not outlive this value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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

#[test]
fn hello_tcp() {
    let meeting = Meeting::new("hello");
    let device = meeting.device();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let address = port.unwrap().to_string();
    let listening = start("hello_tcp", &["listen", &address, &device], "");
    let end = Instant::now() + PATIENCE;
    // Until the other one listens.
    let connected = loop {
        let connecting = start("hello_tcp", &["connect", &address, &device], "");
        let output = connecting.wait_with_output().unwrap();
        if output.status.success() {
            break String::from_utf8(output.stdout).unwrap();
        }
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("ConnectionRefused"), "{said}");
        assert!(Instant::now() < end, "nobody listens");
        std::thread::sleep(Duration::from_millis(5));
    };
    let said = |text: String, role| {
        let line = format!("received: hello from the side that said {role}\n");
        assert!(text.contains(&line), "{text}");
    };
    said(connected, "listen");
    said(finish("hello_tcp", listening), "connect");
}

#[test]
fn key_value_store() {
    let meeting = Meeting::new("kv");
    let device = meeting.device();
    let mut server = Server(start("kv_server", &["127.0.0.1:0", &device], ""));
    let mut line = String::new();
    let mut lines = BufReader::new(server.0.stdout.take().unwrap());
    lines.read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").unwrap();
    let names = ["one", "two"];
    let clients = names.map(|name| {
        let arguments = [address, "check", name, "20"];
        (name, start("kv_client", &arguments, &device))
    });
    for (name, client) in clients {
        let text = finish("kv_client", client);
        let right = format!("{name}: 20 keys are what they should be\n");
        assert_eq!(text, right);
    }
}
