//! Two processes that use RoCE v2 over UDP: on addresses of the loopback interface, and,
//! with root and ip(8), in network namespaces as two hosts.

use std::net::UdpSocket;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use testing::hosts::{Namespaces, free_port, has_listener, succeeds};
use testing::program;

/// Only a heavily loaded machine needs as much time.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Serializes the tests, because all their processes poll.
static SERIAL: Mutex<()> = Mutex::new(());

fn serialize() -> MutexGuard<'static, ()> {
    SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A host: an address, and the network namespace if it is in one.
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

    /// Returns whether a server listens on a TCP port.
    fn is_listening(&self, port: u16) -> bool {
        // Without connecting, because a server accepts one client only.
        let mut command = self.command("cat", &["/proc/net/tcp", "/proc/net/tcp6"]);
        let table = command.output().unwrap().stdout;
        has_listener(&String::from_utf8_lossy(&table), port)
    }
}

fn finish(child: Child) -> Output {
    program::wait_with_timeout(child, TIMEOUT)
}

/// Runs a server and a client, which must both succeed. On a loaded machine a process may
/// not run for half a second, so that its peer's retries are exceeded: such a run is
/// repeated once.
fn run(server: &Host, client: &Host, args: &[&str]) {
    run_with_attempts(server, client, args, 2);
}

/// Runs a server and a client over a network that loses packets. If the last
/// acknowledgement is lost (1 %), its sender has exited before the retransmission arrives:
/// such a run is repeated.
fn run_lossy(server: &Host, client: &Host, args: &[&str]) {
    run_with_attempts(server, client, args, 3);
}

/// Runs a server and a client, up to `attempts` times if retries are exceeded.
fn run_with_attempts(server: &Host, client: &Host, args: &[&str], attempts: usize) {
    for _ in 0..attempts {
        let outputs = outputs(server, client, args);
        if outputs.iter().all(|output| output.status.success()) {
            return;
        }
        let retries_exceeded = outputs.iter().any(|output| {
            String::from_utf8_lossy(&output.stderr).contains("transport retries exceeded")
        });
        assert!(retries_exceeded, "{args:?}: {outputs:?}");
        eprintln!("{args:?} is repeated: {outputs:?}");
    }
    panic!("{args:?}: no success in {attempts} attempts");
}

/// Starts a server, and returns it with the TCP port on which it listens.
fn start_server(server: &Host, args: &[&str]) -> (Child, String) {
    let port = free_port();
    let port_text = port.to_string();
    let mut child = server.start(&[args, &["--port", &port_text, "--server"]].concat());
    let end = Instant::now() + TIMEOUT;
    while !server.is_listening(port) {
        let status = child.try_wait().unwrap();
        assert!(
            Instant::now() < end && status.is_none(),
            "the server does not listen"
        );
        sleep(Duration::from_millis(5));
    }
    (child, port_text)
}

/// Runs a server and a client, and returns their outputs.
fn outputs(server: &Host, client: &Host, args: &[&str]) -> [Output; 2] {
    let [server, client] = start_both(server, client, args);
    let output = finish(client);
    [finish(server), output]
}

fn run_pingpongs(a: &Host, b: &Host, iterations: &str) {
    for kind in ["rc", "uc", "ud", "srq"] {
        for option in ["--chk", "--events"] {
            run(
                a,
                b,
                &["pingpong", "--type", kind, option, "-n", iterations],
            );
        }
    }
}

fn run_perfs(a: &Host, b: &Host, iterations: &str) {
    for operation in ["send", "write", "read", "atomic"] {
        let args = ["perf", "--op", operation, "--sizes", "8,5000,100000"];
        run(a, b, &[&args[..], &["-n", iterations]].concat());
    }
}

#[test]
fn two_processes_on_the_loopback_interface() {
    let _guard = serialize();
    let (a, b) = (Host::local("127.46.0.1"), Host::local("127.46.0.2"));
    run_pingpongs(&a, &b, "100");
    run_perfs(&b, &a, "100");
}

#[test]
fn unusable_addresses_are_reported() {
    let _guard = serialize();
    // rdma_rxe binds this port, too.
    let _in_use = UdpSocket::bind(("127.47.0.1", 4791)).unwrap();
    let expect_error = |host: &Host, error: &str| {
        let output = finish(host.start(&["info"]));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{text}");
        assert!(text.contains(error) && text.lines().count() == 1, "{text}");
    };
    expect_error(
        &Host::local("127.47.0.1"),
        "UDP port 4791 of this address is in use",
    );
    expect_error(
        &Host::local("no-such-interface"),
        "no network interface has this name",
    );
    expect_error(
        &Host::local("192.0.2.77"),
        "no network interface of this host has this address",
    );
}

/// Starts a server and its client.
fn start_both(server: &Host, client: &Host, args: &[&str]) -> [Child; 2] {
    let (serving, port) = start_server(server, args);
    let client = client.start(&[args, &["--port", &port, &server.address]].concat());
    [serving, client]
}

/// Runs several processes on each of two addresses, while other processes on these
/// addresses are killed.
fn run_sharing(a: &Host, b: &Host, iterations: &str) {
    for round in 0..3 {
        let idle = [a, b].map(|host| start_server(host, &["pingpong"]).0);
        let mut running = Vec::new();
        for kind in ["rc", "rc"] {
            let args = ["pingpong", "--type", kind, "--chk", "-n", iterations];
            running.extend(start_both(a, b, &args));
        }
        // Server and client on one address.
        running.extend(start_both(b, b, &["pingpong", "--chk", "-n", iterations]));
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
fn several_processes_on_one_address() {
    let _guard = serialize();
    let (a, b) = (Host::local("127.50.0.1"), Host::local("127.50.0.2"));
    run_sharing(&a, &b, "1000");
}

/// Two connected network namespaces.
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

    /// Makes the interfaces transmit single packets, not messages of several (GSO).
    fn disable_gso(&self) {
        for name in &self.0.0 {
            let link = format!("-n {name} link set veth0 gso_max_segs 1");
            assert!(succeeds("ip", &link));
        }
    }

    /// Makes both ends lose 1 % of the packets. Returns whether the system supports it.
    fn add_loss(&self) -> bool {
        let netem = |name: &String| {
            let options = "limit 100000 loss 1% duplicate 1%";
            succeeds(
                "tc",
                &format!("-n {name} qdisc add dev veth0 root netem {options}"),
            )
        };
        let filter = |name: &String| {
            let nft = |command: &str| succeeds("ip", &format!("netns exec {name} nft {command}"));
            nft("add table inet loss")
                && nft("add chain inet loss in { type filter hook input priority 0 ; }")
                && nft("add rule inet loss in udp dport 4791 numgen random mod 100 < 1 drop")
        };
        self.0.0.iter().all(netem) || self.0.0.iter().all(filter)
    }
}

#[test]
fn two_hosts_in_namespaces() {
    let _guard = serialize();
    for mtu in [1500, 9000] {
        let Some(namespaces) = Network::new(&format!("plain-{mtu}"), mtu) else {
            return;
        };
        for addresses in [["192.0.2.1", "192.0.2.2"], ["fd00::1", "fd00::2"]] {
            let (a, b) = namespaces.hosts(addresses);
            run_pingpongs(&a, &b, "50");
            run_sharing(&a, &b, "200");
            run_perfs(&b, &a, "50");
        }
    }
}

#[test]
fn two_hosts_on_a_lossy_network() {
    let _guard = serialize();
    let Some(namespaces) = Network::new("lossy", 1500) else {
        return;
    };
    let (a, b) = namespaces.hosts(["192.0.2.1", "192.0.2.2"]);
    if !namespaces.add_loss() {
        return testing::skip!(missing: "nftables", "the system has neither netem nor nft(8)");
    }
    for kind in ["rc", "srq"] {
        run_lossy(&a, &b, &["pingpong", "--type", kind, "--chk", "-n", "200"]);
    }
    // First whole messages of several packets are lost, then single packets.
    for segmented in [false, true] {
        if segmented {
            namespaces.disable_gso();
        }
        for operation in ["send", "write", "read", "atomic"] {
            let args = ["perf", "--op", operation, "--sizes", "8,5000,100000"];
            run_lossy(&a, &b, &[&args[..], &["-n", "100"]].concat());
        }
    }
}

/// Returns the bandwidth of messages of 64 KiB in MiB/s.
fn bandwidth(server: &Host, client: &Host, operation: &str) -> f64 {
    let args = ["perf", "--op", operation, "--sizes", "65536", "-D", "1"];
    let [server, client] = outputs(server, client, &args);
    let text = String::from_utf8_lossy(&client.stdout);
    let line = text.lines().last().unwrap_or_default();
    let column = line.split_whitespace().nth_back(1);
    let rate = column.and_then(|column| column.parse().ok());
    rate.unwrap_or_else(|| panic!("{operation}: {server:?} {client:?}"))
}

/// Bandwidth without marks in MiB/s, ten times the rate at which the network marks, below which
/// a machine is too busy to show what limits a rate.
const MIN_UNMARKED: f64 = 40.0;

/// The network marks packets beyond 4 MB/s. The receiver of a marked packet sends a CNP, and
/// the sender's rate falls. How close to 4 MB/s it settles is a test of the transport, with
/// simulated time: here it depends on when the processes run.
#[test]
fn two_hosts_on_a_network_that_marks_congestion() {
    let _guard = serialize();
    let Some(namespaces) = Network::new("marks", 1500) else {
        return;
    };
    let (a, b) = namespaces.hosts(["192.0.2.1", "192.0.2.2"]);
    let (a6, b6) = namespaces.hosts(["fd00::1", "fd00::2"]);
    let unmarked = bandwidth(&a, &b, "write").min(bandwidth(&a, &b, "read"));
    let add_marks = |name: &String| {
        let nft = |command: &str| succeeds("ip", &format!("netns exec {name} nft {command}"));
        let rule = |rule: &str| nft(&format!("add rule inet ecn_test in udp dport 4791 {rule}"));
        let over = "limit rate over 4000 kbytes/second burst 64 kbytes";
        nft("add table inet ecn_test")
            && nft("add chain inet ecn_test in { type filter hook prerouting priority 0 ; }")
            && ["ip", "ip6"].iter().all(|ip| {
                // CNPs: DSCP 48 without ECN, and opcode 0x81 after the UDP header.
                rule(&format!("{ip} dscp cs6 {ip} ecn 0 @th,64,8 0x81 counter"))
                    && rule(&format!("{ip} ecn 2 {over} counter {ip} ecn set ce"))
            })
    };
    if !namespaces.0.0.iter().all(add_marks) {
        return testing::skip!(missing: "nftables", "the system has no nft(8) that can set ECN marks");
    }
    // Packets that the rules of a host have counted.
    let counts = |host: &Host| -> [u32; 4] {
        let mut list = host.command("nft", &["list", "table", "inet", "ecn_test"]);
        let list = String::from_utf8(list.output().unwrap().stdout).unwrap();
        let counts = list.split("counter packets ").skip(1);
        let count = |rest: &str| rest.split(' ').next().unwrap().parse().unwrap();
        counts.map(count).collect::<Vec<_>>().try_into().unwrap()
    };
    let is_fast = unmarked >= MIN_UNMARKED;
    for (a, b) in [(&a, &b), (&a6, &b6)] {
        for operation in ["write", "read", "send"] {
            let rate = bandwidth(a, b, operation);
            assert!(
                !is_fast || rate < unmarked / 4.0,
                "{operation}: {unmarked} MiB/s without marks, {rate} MiB/s with them"
            );
        }
    }
    let [
        [cnps, marked, cnps6, marked6],
        [peer_cnps, peer_marked, peer_cnps6, peer_marked6],
    ] = [&a, &b].map(counts);
    for (marked, cnps) in [
        (marked, peer_cnps),
        (marked6, peer_cnps6),
        (peer_marked, cnps),
        (peer_marked6, cnps6),
    ] {
        assert_eq!(marked != 0, cnps != 0, "{marked} marked, {cnps} CNPs");
        assert!(!is_fast || marked != 0, "no packet was marked");
    }
    if !is_fast {
        testing::skip!("the machine is too busy to send faster than the network marks");
    }
}

/// Returns the ICRC of an Ethernet frame, according to annex A17 of the InfiniBand
/// specification.
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
    // The UDP checksum, and the byte before the destination QP.
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

/// Checks captured packets with Wireshark's dissector and a separate ICRC implementation.
/// Receivers of this library do not suffice: they may see another IP identification than
/// the one that was sent.
#[test]
fn captured_packets_are_valid() {
    let _guard = serialize();
    if !succeeds("tshark", "--version") {
        return testing::skip!(missing: "tshark", "tshark is not installed");
    }
    let Some(namespaces) = Network::new("wire", 1500) else {
        return;
    };
    // The capture must contain single packets.
    namespaces.disable_gso();
    let name = format!("ringverbs-wire-{}.pcap", std::process::id());
    let file = std::env::temp_dir().join(name);
    let path = file.to_str().unwrap();
    let (host, _) = namespaces.hosts(["192.0.2.1", "192.0.2.2"]);
    let filter = ["-q", "-i", "veth0", "-f", "udp port 4791"];
    let args = [&filter[..], &["-F", "pcap", "-w", path]].concat();
    let mut command = host.command("tshark", &args);
    let mut capture = command.stderr(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + TIMEOUT;
    while std::fs::metadata(&file).map_or(0, |it| it.len()) < 24 {
        assert!(Instant::now() < end, "no capture");
        sleep(Duration::from_millis(10));
    }
    for addresses in [["192.0.2.1", "192.0.2.2"], ["fd00::1", "fd00::2"]] {
        let (a, b) = namespaces.hosts(addresses);
        run_pingpongs(&a, &b, "10");
        run_perfs(&b, &a, "5");
    }
    // tshark drops the packets that it has not read when it exits.
    sleep(Duration::from_secs(1));
    assert!(succeeds("kill", &format!("-INT {}", capture.id())));
    capture.wait().unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let frames = frames(&bytes);
    let wrong_icrcs = frames.iter().filter(|frame| {
        let stored = frame[frame.len() - 4..].try_into().unwrap();
        u32::from_le_bytes(stored) != icrc(frame)
    });
    let wrong_icrcs = wrong_icrcs.count();
    let dissect = |filter: &str| {
        // This dissector guesses that a payload is RPC, and reports it as malformed.
        let options = ["--disable-protocol", "rpcordma"];
        let args = [&["-n", "-r", path, "-Y", filter][..], &options].concat();
        let output = Command::new("tshark").args(args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output:?}");
        text
    };
    let dissected = dissect("infiniband").lines().count();
    let malformed = dissect("_ws.malformed");
    std::fs::remove_file(&file).unwrap();
    assert!(frames.len() > 1000, "{} packets", frames.len());
    let longest = frames.iter().map(|frame| frame.len()).max();
    assert!(longest.is_some_and(|it| it < 1500), "{longest:?} bytes");
    assert_eq!(wrong_icrcs, 0, "wrong ICRCs of {} packets", frames.len());
    assert_eq!(dissected, frames.len());
    assert_eq!(malformed, "");
}
