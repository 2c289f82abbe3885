//! Two processes that speak RoCE v2 over UDP: on addresses of the loopback interface,
//! and, as root and with ip(8), as two hosts in network namespaces.

use std::net::UdpSocket;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use testing::hosts::{Namespaces, free_port, has_listener, tool};
use testing::program;

/// Nothing here takes so long, but on a machine with much else to do.
const PATIENCE: Duration = Duration::from_secs(120);

/// One test at a time: each of its processes polls.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A host: an address and, in a network namespace, its name.
#[derive(Clone)]
struct Host {
    namespace: Option<String>,
    address: String,
}

impl Host {
    fn local(address: &str) -> Self {
        Self {
            namespace: None,
            address: address.to_owned(),
        }
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = match &self.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, program]);
                command
            }
            None => Command::new(program),
        };
        command.args(args).stdin(Stdio::null());
        command
    }

    fn start(&self, args: &[&str]) -> Child {
        let device = format!("roce:{}", self.address);
        let mut command = self.command(env!("CARGO_BIN_EXE_ringverbs"), args);
        let command = command.args(["--device", &device]);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Returns whether somebody listens on a TCP port.
    fn listens(&self, port: u16) -> bool {
        // Looked for without connecting: a server takes one client.
        let mut command = self.command("cat", &["/proc/net/tcp", "/proc/net/tcp6"]);
        let table = command.output().unwrap().stdout;
        has_listener(&String::from_utf8_lossy(&table), port)
    }
}

fn finish(child: Child) -> Output {
    program::finish(child, PATIENCE)
}

/// Runs a server and a client, which must both succeed. On a machine with much else to
/// do a process may get no processor for half a second, after which its peer gives up:
/// such a run is repeated once.
fn between(server: &Host, client: &Host, args: &[&str]) {
    run(server, client, args, 2);
}

/// Runs a server and a client over a network that loses packets. If the last
/// acknowledgement is lost, one in a hundred times, its sender has ended before it is
/// asked again: such a run is repeated.
fn survive(server: &Host, client: &Host, args: &[&str]) {
    run(server, client, args, 3);
}

/// Runs a server and a client, up to so many times if one of them does not answer.
fn run(server: &Host, client: &Host, args: &[&str], times: usize) {
    for _ in 0..times {
        let outputs = outputs(server, client, args);
        if outputs.iter().all(|output| output.status.success()) {
            return;
        }
        let gone = outputs.iter().any(|output| {
            String::from_utf8_lossy(&output.stderr).contains("transport retries exceeded")
        });
        assert!(gone, "{args:?}: {outputs:?}");
        eprintln!("{args:?} once more: {outputs:?}");
    }
    panic!("{args:?}: {times} times without an end");
}

/// Starts a server; returns its TCP port, too, on which it listens.
fn serve(server: &Host, args: &[&str]) -> (Child, String) {
    let port = free_port();
    let text = port.to_string();
    let mut serving = server.start(&[args, &["--port", &text, "--server"]].concat());
    let end = Instant::now() + PATIENCE;
    while !server.listens(port) {
        let ended = serving.try_wait().unwrap();
        assert!(Instant::now() < end && ended.is_none(), "nobody listens");
        sleep(Duration::from_millis(5));
    }
    (serving, text)
}

/// Runs a server and a client to their ends.
fn outputs(server: &Host, client: &Host, args: &[&str]) -> [Output; 2] {
    let (serving, port) = serve(server, args);
    let asking = client.start(&[args, &["--port", &port, &server.address]].concat());
    let asked = finish(asking);
    [finish(serving), asked]
}

fn ping_pongs(a: &Host, b: &Host, iterations: &str) {
    for kind in ["rc", "uc", "ud", "srq"] {
        for how in ["--chk", "--events"] {
            between(a, b, &["pingpong", "--type", kind, how, "-n", iterations]);
        }
    }
}

fn measurements(a: &Host, b: &Host, iterations: &str) {
    for operation in ["send", "write", "read", "atomic"] {
        let args = ["perf", "--op", operation, "--sizes", "8,5000,100000"];
        between(a, b, &[&args[..], &["-n", iterations]].concat());
    }
}

#[test]
fn two_processes_on_the_loopback_interface() {
    let _turn = turn();
    let (a, b) = (Host::local("127.46.0.1"), Host::local("127.46.0.2"));
    ping_pongs(&a, &b, "100");
    measurements(&b, &a, "100");
}

#[test]
fn an_address_that_cannot_be_had_is_reported() {
    let _turn = turn();
    // As rdma_rxe has it.
    let _taken = UdpSocket::bind(("127.47.0.1", 4791)).unwrap();
    let refused = |host: &Host, what: &str| {
        let output = finish(host.start(&["info"]));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{text}");
        assert!(text.contains(what) && text.lines().count() == 1, "{text}");
    };
    refused(
        &Host::local("127.47.0.1"),
        "UDP port 4791 of this address is in use",
    );
    refused(
        &Host::local("no-such-interface"),
        "no network interface has this name",
    );
    refused(
        &Host::local("192.0.2.77"),
        "no network interface of this host has this address",
    );
}

/// Starts a server and its client.
fn meet(server: &Host, client: &Host, args: &[&str]) -> [Child; 2] {
    let (serving, port) = serve(server, args);
    let asking = client.start(&[args, &["--port", &port, &server.address]].concat());
    [serving, asking]
}

/// Several processes on each of two addresses, while others there are killed.
fn share(a: &Host, b: &Host, iterations: &str) {
    for round in 0..3 {
        let idle = [a, b].map(|host| serve(host, &["pingpong"]).0);
        let mut running = Vec::new();
        for kind in ["rc", "rc"] {
            let args = ["pingpong", "--type", kind, "--chk", "-n", iterations];
            running.extend(meet(a, b, &args));
        }
        // Both ends on one address.
        running.extend(meet(b, b, &["pingpong", "--chk", "-n", iterations]));
        sleep(Duration::from_millis(20 * round));
        for mut child in idle {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        for child in running {
            let output = finish(child);
            assert!(output.status.success(), "{output:?}");
        }
    }
}

#[test]
fn processes_share_an_address() {
    let _turn = turn();
    let (a, b) = (Host::local("127.50.0.1"), Host::local("127.50.0.2"));
    share(&a, &b, "1000");
}

/// Two network namespaces that are connected.
struct Network(Namespaces);

impl Network {
    fn new(name: &str, mtu: u32) -> Option<Self> {
        Namespaces::new(name, mtu).map(Self)
    }

    fn hosts(&self, addresses: [&str; 2]) -> (Host, Host) {
        let host = |at: usize| Host {
            namespace: Some(self.0.0[at].clone()),
            address: addresses[at].to_owned(),
        };
        (host(0), host(1))
    }

    /// Lets no message of several packets through: each is segmented before.
    fn segment(&self) {
        for name in &self.0.0 {
            let link = format!("-n {name} link set veth0 gso_max_segs 1");
            assert!(tool("ip", &link));
        }
    }

    /// Makes both ends lose one of a hundred packets. Returns whether the system can.
    fn disturb(&self) -> bool {
        let netem = |name: &String| {
            let how = "limit 100000 loss 1% duplicate 1%";
            tool(
                "tc",
                &format!("-n {name} qdisc add dev veth0 root netem {how}"),
            )
        };
        let filter = |name: &String| {
            let nft = |command: &str| tool("ip", &format!("netns exec {name} nft {command}"));
            nft("add table inet loss")
                && nft("add chain inet loss in { type filter hook input priority 0 ; }")
                && nft("add rule inet loss in udp dport 4791 numgen random mod 100 < 1 drop")
        };
        self.0.0.iter().all(netem) || self.0.0.iter().all(filter)
    }
}

#[test]
fn two_hosts_in_namespaces() {
    let _turn = turn();
    for mtu in [1500, 9000] {
        let Some(namespaces) = Network::new(&format!("plain-{mtu}"), mtu) else {
            return;
        };
        for addresses in [["192.0.2.1", "192.0.2.2"], ["fd00::1", "fd00::2"]] {
            let (a, b) = namespaces.hosts(addresses);
            ping_pongs(&a, &b, "50");
            share(&a, &b, "200");
            measurements(&b, &a, "50");
        }
    }
}

#[test]
fn two_hosts_whose_network_loses_packets() {
    let _turn = turn();
    let Some(namespaces) = Network::new("lossy", 1500) else {
        return;
    };
    let (a, b) = namespaces.hosts(["192.0.2.1", "192.0.2.2"]);
    if !namespaces.disturb() {
        eprintln!("skipped: the system has neither netem nor nft(8)");
        return;
    }
    for kind in ["rc", "srq"] {
        survive(&a, &b, &["pingpong", "--type", kind, "--chk", "-n", "200"]);
    }
    // Lost are first messages of several packets, then single packets.
    for segmented in [false, true] {
        if segmented {
            namespaces.segment();
        }
        for operation in ["send", "write", "read", "atomic"] {
            let args = ["perf", "--op", operation, "--sizes", "8,5000,100000"];
            survive(&a, &b, &[&args[..], &["-n", "100"]].concat());
        }
    }
}

/// Returns the MiB/s of messages of 64 KiB.
fn bandwidth(server: &Host, client: &Host, operation: &str) -> f64 {
    let args = ["perf", "--op", operation, "--sizes", "65536", "-D", "1"];
    let [serving, asking] = outputs(server, client, &args);
    let text = String::from_utf8_lossy(&asking.stdout);
    let line = text.lines().last().unwrap_or_default();
    let column = line.split_whitespace().nth_back(1);
    let rate = column.and_then(|column| column.parse().ok());
    rate.unwrap_or_else(|| panic!("{operation}: {serving:?} {asking:?}"))
}

/// A network that marks what exceeds 4 MB/s: the peer notifies the sender, which settles
/// at about that rate.
#[test]
fn two_hosts_whose_network_marks_congestion() {
    let _turn = turn();
    let Some(namespaces) = Network::new("marks", 1500) else {
        return;
    };
    let (a, b) = namespaces.hosts(["192.0.2.1", "192.0.2.2"]);
    let (a6, b6) = namespaces.hosts(["fd00::1", "fd00::2"]);
    let free = bandwidth(&a, &b, "write").min(bandwidth(&a, &b, "read"));
    let rule = |name: &str, rule: &str| {
        let add = format!("netns exec {name} nft add rule inet ecn_test in {rule}");
        tool("ip", &add)
    };
    let marks = |name: &String| {
        let nft = |command: &str| tool("ip", &format!("netns exec {name} nft {command}"));
        let over = "limit rate over 4000 kbytes/second burst 64 kbytes";
        // Of the notifications: DSCP 48 without ECN, and the opcode after the UDP header.
        let count = "@th,64,8 0x81 counter";
        let notices = ["ip dscp cs6 ip ecn 0", "ip6 dscp cs6 ip6 ecn 0"];
        nft("add table inet ecn_test")
            && nft("add chain inet ecn_test in { type filter hook prerouting priority 0 ; }")
            && notices
                .iter()
                .all(|it| rule(name, &format!("{it} udp dport 4791 {count}")))
            && ["ip", "ip6"].iter().all(|ip| {
                rule(
                    name,
                    &format!("udp dport 4791 {ip} ecn 2 {over} {ip} ecn set ce"),
                )
            })
    };
    if !namespaces.0.0.iter().all(marks) {
        eprintln!("skipped: the system has no nft(8) that marks");
        return;
    }
    for (a, b) in [(&a, &b), (&a6, &b6)] {
        for operation in ["write", "read", "send"] {
            let rate = bandwidth(a, b, operation);
            assert!((1.0..8.0).contains(&rate), "{operation}: {rate} MiB/s");
            assert!(free > 2.0 * rate, "{free} without marks, {rate} with them");
        }
    }
    for host in [&a, &b] {
        let list = host
            .command("nft", &["list", "table", "inet", "ecn_test"])
            .output();
        let list = String::from_utf8(list.unwrap().stdout).unwrap();
        let counts = list.split("counter packets ").skip(1);
        let counts: Vec<u32> = counts
            .map(|rest| rest.split(' ').next().unwrap().parse().unwrap())
            .collect();
        assert!(counts.len() == 2 && !counts.contains(&0), "{list}");
    }
}

/// Returns the ICRC of an Ethernet frame, as InfiniBand's annex 17 has it.
fn icrc(frame: &[u8]) -> u32 {
    let mut bytes = vec![0xff; 8];
    bytes.extend_from_slice(&frame[14..frame.len() - 4]);
    let header = if bytes[8] >> 4 == 4 {
        for masked in [1, 8, 10, 11] {
            bytes[8 + masked] = 0xff;
        }
        20
    } else {
        bytes[8] |= 0x0f;
        for masked in [1, 2, 3, 7] {
            bytes[8 + masked] = 0xff;
        }
        40
    };
    // The UDP checksum, and the byte before the queue pair's number.
    for masked in [6, 7, 8 + 4] {
        bytes[8 + header + masked] = 0xff;
    }
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 }
        })
    });
    !crc
}

/// Returns the frames of a capture in pcap's format.
fn frames(capture: &[u8]) -> Vec<&[u8]> {
    let mut rest = &capture[24..];
    let mut frames = Vec::new();
    while let Some((header, after)) = rest.split_at_checked(16) {
        let length = u32::from_le_bytes(header[8..12].try_into().unwrap());
        let (frame, after) = after.split_at(length as usize);
        frames.push(frame);
        rest = after;
    }
    frames
}

/// A receiver of ours may find another identification than the one that was sent, so
/// this looks at the wire, with a dissector and an ICRC of others.
#[test]
fn packets_are_right_on_the_wire() {
    let _turn = turn();
    if !tool("tshark", "--version") {
        eprintln!("skipped: tshark is not installed (apt-get install tshark)");
        return;
    }
    let Some(namespaces) = Network::new("wire", 1500) else {
        return;
    };
    // So that the capture sees packets.
    namespaces.segment();
    let name = format!("ringverbs-wire-{}.pcap", std::process::id());
    let file = std::env::temp_dir().join(name);
    let path = file.to_str().unwrap();
    let (host, _) = namespaces.hosts(["192.0.2.1", "192.0.2.2"]);
    let filter = ["-q", "-i", "veth0", "-f", "udp port 4791"];
    let args = [&filter[..], &["-F", "pcap", "-w", path]].concat();
    let mut command = host.command("tshark", &args);
    let mut capture = command.stderr(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + PATIENCE;
    while std::fs::metadata(&file).map_or(0, |it| it.len()) < 24 {
        assert!(Instant::now() < end, "no capture");
        sleep(Duration::from_millis(10));
    }
    for addresses in [["192.0.2.1", "192.0.2.2"], ["fd00::1", "fd00::2"]] {
        let (a, b) = namespaces.hosts(addresses);
        ping_pongs(&a, &b, "10");
        measurements(&b, &a, "5");
    }
    // The capture loses packets that it has not read when it ends.
    sleep(Duration::from_secs(1));
    assert!(tool("kill", &format!("-INT {}", capture.id())));
    capture.wait().unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let frames = frames(&bytes);
    let wrong = frames.iter().filter(|frame| {
        let stored = frame[frame.len() - 4..].try_into().unwrap();
        u32::from_le_bytes(stored) != icrc(frame)
    });
    let wrong = wrong.count();
    let dissected = |what: &str| {
        // A guess at the payload, of which any bytes are right.
        let guess = ["--disable-protocol", "rpcordma"];
        let args = [&["-n", "-r", path, "-Y", what][..], &guess].concat();
        let output = Command::new("tshark").args(args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output:?}");
        text
    };
    let known = dissected("infiniband").lines().count();
    let malformed = dissected("_ws.malformed");
    std::fs::remove_file(&file).unwrap();
    assert!(frames.len() > 1000, "{} packets", frames.len());
    let longest = frames.iter().map(|frame| frame.len()).max();
    assert!(longest.is_some_and(|it| it < 1500), "{longest:?} bytes");
    assert_eq!(wrong, 0, "wrong ICRCs of {} packets", frames.len());
    assert_eq!(known, frames.len());
    assert_eq!(malformed, "");
}
