//! The examples, on the ConnectX in the process, which needs nothing of the
//! machine: what they print is what they are to do. Of some there are two
//! processes; those that connect by address are told of the device by
//! `RINGVERBS_DEVICE`. In a guest they run on rdma_rxe and on softhca, too.
#![allow(missing_docs, reason = "a test")]

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use testing::hosts::free_port;
use testing::program::example_path;

/// They take milliseconds; the machine may have other things to do.
const PATIENCE: Duration = Duration::from_secs(60);

fn start(name: &str, arguments: &[&str], device: &str) -> Child {
    let mut command = Command::new(example_path(name));
    let command = command.args(arguments).env("RINGVERBS_DEVICE", device);
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

#[test]
fn examples_run_without_a_device_to_name() {
    let mut hello = Command::new(example_path("hello"));
    let output = hello.env_remove("RINGVERBS_DEVICE").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("received: hello over RDMA"), "{text}");
    // Without a device in the kernel, the embedded one, and it says so.
    if ringverbs::devices().is_ok_and(|devices| devices.is_empty()) {
        assert!(text.starts_with("embedded port 1: "), "{text}");
    }
}

#[test]
fn a_device_that_is_not_there_is_named_in_the_error() {
    for name in ["hello", "hello_tcp"] {
        let mut command = Command::new(example_path(name));
        let command = command.args(
            ["listen", "127.0.0.1:0"]
                .iter()
                .skip(2 * usize::from(name == "hello")),
        );
        let output = command.env("RINGVERBS_DEVICE", "rxe77").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success());
        assert!(
            text.starts_with("Error: there is no RDMA device rxe77; "),
            "{text}"
        );
    }
}

/// A directory that two processes meet in, and goes with the test.
struct SharedDirectory(PathBuf);

impl SharedDirectory {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn device(&self) -> String {
        format!("embedded:{}", self.0.display())
    }
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process that does not outlive this value.
struct Server(Child);

/// One that listens at a port that it was let choose.
struct Listening {
    server: Server,
    lines: BufReader<std::process::ChildStdout>,
    port: String,
}

impl Listening {
    fn start(name: &str, arguments: &[&str], device: &str) -> Self {
        let mut server = Server(start(name, arguments, device));
        let mut lines = BufReader::new(server.0.stdout.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(line.starts_with("listening on "), "{name}: {line}");
        let end = line.trim_end().trim_end_matches(')').rsplit_once(':');
        Self {
            server,
            lines,
            port: end.unwrap().1.to_owned(),
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line
    }

    /// What else it prints, if it ends well.
    fn rest(mut self) -> String {
        let mut text = String::new();
        // The end of its output is its own: it does not run for ever.
        self.lines.read_to_string(&mut text).unwrap();
        let status = self.server.0.wait().unwrap();
        assert!(status.success(), "{status}: {text}");
        text
    }
}

/// What a process prints and complains of that is to fail.
fn fails(name: &str, mut child: Child) -> (String, String) {
    let end = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{name} has not ended in {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{name}: {output:?}");
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr))
}

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
fn packets() {
    let text = run("packets", &["embedded", "256", "0.3"]);
    assert!(
        text.starts_with("device embedded, frames of 256 bytes\n"),
        "{text}"
    );
    for what in ["raw packets", "UDP sockets"] {
        let line = text.lines().find_map(|line| line.strip_prefix(what));
        let rate = line.unwrap().trim_start_matches(": ");
        assert!(rate.ends_with(", all as they were sent"), "{text}");
        assert!(!rate.starts_with("0 "), "{text}");
    }
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
fn async_echo() {
    let text = run("async_echo", &["embedded", "64", "10"]);
    let right = "640 messages of 64 clients were echoed in ";
    assert!(text.starts_with(right), "{text}");
}

#[test]
fn write_with_immediate() {
    let text = run("write_with_immediate", &["embedded"]);
    assert!(text.contains("at 100: written from afar\n"), "{text}");
    assert!(!text.contains("failed"), "{text}");
}

#[test]
fn hello_tcp() {
    let shared_directory = SharedDirectory::new("hello");
    let device = shared_directory.device();
    let address = format!("127.0.0.1:{}", free_port());
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
        assert!(said.contains("Connection refused"), "{said}");
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
    let shared_directory = SharedDirectory::new("kv");
    let device = shared_directory.device();
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

#[test]
fn connections_by_address() {
    let shared_directory = SharedDirectory::new("cm");
    let device = shared_directory.device();
    let server = Listening::start("cm_server", &["2", "0"], &device);
    let port = server.port.clone();
    for _ in 0..2 {
        let client = start("cm_client", &["127.0.0.1", &port], &device);
        let text = finish("cm_client", client);
        let address = format!("connected to Some(127.0.0.1:{port}), which says: \"welcome\"\n");
        assert!(text.starts_with(&address), "{text}");
        for (number, byte) in (b'a'..).take(10).enumerate() {
            let line = format!("message {number} begins with {:?}\n", [byte; 4]);
            assert!(text.contains(&line), "{text}");
        }
        assert!(
            text.ends_with("10 messages went back; disconnected\n"),
            "{text}"
        );
    }
    let client = start("cm_client", &["::1", &port], &device);
    let (said, why) = fails("cm_client", client);
    assert_eq!(said, "the server says: \"enough for today\"\n");
    assert!(why.contains("rejected by the program at the peer"), "{why}");
    let text = server.rest();
    let served = text.matches("10 messages of 100 bytes came back\ndisconnected\n");
    assert_eq!(served.count(), 2, "{text}");
    assert!(text.ends_with("one more was rejected\n"), "{text}");
    // The port is nobody's now.
    let client = start("cm_client", &["127.0.0.1", &port], &device);
    let (_, why) = fails("cm_client", client);
    assert!(why.contains("nobody listens on that port"), "{why}");
    assert!(why.contains(&format!("use {device}, too?")), "{why}");
}

/// The pings that a side has printed.
fn pings(text: &str, before: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(before));
    lines.map(str::to_owned).collect()
}

#[test]
fn rping() {
    let shared_directory = SharedDirectory::new("rping");
    let device = shared_directory.device();
    let server = Listening::start("rping_server", &["0"], &device);
    let arguments = ["127.0.0.1", "10", &server.port];
    let text = finish("rping_client", start("rping_client", &arguments, &device));
    assert!(
        text.ends_with("10 pings came back as they were sent\n"),
        "{text}"
    );
    let served = server.rest();
    let (asked, served) = (
        pings(&text, "ping data: "),
        pings(&served, "server ping data: "),
    );
    assert_eq!((asked.len(), asked), (10, served));
}

/// Who is killed is gone for the other one, in either direction.
#[test]
fn rping_with_a_killed_peer() {
    let shared_directory = SharedDirectory::new("killed");
    let device = shared_directory.device();
    let begin = |count: &str| {
        let mut server = Listening::start("rping_server", &["0"], &device);
        let arguments = ["127.0.0.1", count, &server.port];
        let client = Server(start("rping_client", &arguments, &device));
        while !server.line().contains("rdma-ping-5:") {}
        (server, client)
    };
    let (server, mut client) = begin("1000000");
    client.0.kill().unwrap();
    let text = server.rest();
    assert!(text.contains("then the client has disconnected"), "{text}");

    let (mut server, mut client) = begin("1000000");
    // It prints more than a pipe holds.
    let mut said = client.0.stdout.take().unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    server.server.0.kill().unwrap();
    let status = client.0.wait().unwrap();
    assert_eq!(status.code(), Some(1));
    reader.join().unwrap().unwrap();
    let mut why = String::new();
    let mut stderr = client.0.stderr.take().unwrap();
    stderr.read_to_string(&mut why).unwrap();
    assert!(why.starts_with("Error: "), "{why}");
}

#[test]
fn datagram_service() {
    let shared_directory = SharedDirectory::new("service");
    let device = shared_directory.device();
    let mut service = Server(start("cm_datagram", &[], &device));
    let end = Instant::now() + PATIENCE;
    // Until the service is there.
    let text = loop {
        let client = start("cm_datagram", &["127.0.0.1"], &device);
        let output = client.wait_with_output().unwrap();
        if output.status.success() {
            break String::from_utf8(output.stdout).unwrap();
        }
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("nobody listens on that port"), "{said}");
        assert!(Instant::now() < end, "nobody listens");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(text.starts_with("the service is queue pair "), "{text}");
    assert!(text.ends_with("10 datagrams there and back\n"), "{text}");
    let mut served = String::new();
    let mut stdout = service.0.stdout.take().unwrap();
    stdout.read_to_string(&mut served).unwrap();
    assert!(served.starts_with("from "), "{served}");
    assert!(
        served.ends_with("10 datagrams there and back\n"),
        "{served}"
    );
    assert!(service.0.wait().unwrap().success());
}

#[test]
fn stream_echo() {
    let shared_directory = SharedDirectory::new("stream");
    let device = shared_directory.device();
    let mut server = Listening::start("stream_echo", &["127.0.0.1:0"], &device);
    let address = format!("127.0.0.1:{}", server.port);
    let arguments = [&address, "there", "and", "back"];
    let client = start("stream_echo", &arguments, &device);
    assert_eq!(finish("stream_echo", client), "there and back\n");
    let line = server.line();
    assert!(line.ends_with(": 14 bytes\n"), "{line}");
    drop(server);
    let client = start("stream_echo", &arguments, &device);
    let (_, why) = fails("stream_echo", client);
    assert!(why.contains("nobody listens on that port"), "{why}");
}
