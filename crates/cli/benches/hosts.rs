//! RoCE v2 over UDP between two network namespaces, compared with plain UDP sockets. Needs
//! root and ip(8).

use std::io::{IoSlice, Read};
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrIn, sendmsg, setsockopt, sockopt};
use testing::hosts::{Namespaces, free_port, has_listener};

const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_secs(1);
const MTU: u32 = 1500;
/// UDP port of the sockets.
const PORT: u16 = 4790;
/// Payload of a RoCE datagram with this MTU.
const PAYLOAD: usize = 1024;
/// Length of that datagram.
const DATAGRAM: u16 = PAYLOAD as u16 + 16;
/// Number of datagrams in one message.
const SEGMENTS: usize = 62;
/// Number of buffers that are used in turn, as in `ringverbs perf`.
const BUFFERS: usize = 64;
/// Size of the receiver's socket buffer, as that of the device.
const SOCKET_BUFFER: usize = 4 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Sends messages of many datagrams for two rounds.
fn send(to: SocketAddrV4) {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
    let length = usize::from(DATAGRAM) * SEGMENTS;
    let bytes = vec![7; length * BUFFERS];
    let end = Instant::now() + 2 * ROUND;
    let to = SockaddrIn::from(to);
    for message in bytes.chunks(length).cycle() {
        if Instant::now() >= end {
            return;
        }
        let datagrams: Vec<IoSlice<'_>> =
            message.chunks(DATAGRAM.into()).map(IoSlice::new).collect();
        let segments = [ControlMessage::UdpGsoSegments(&DATAGRAM)];
        // A datagram is lost if the receiver's socket buffer is full.
        let _ = sendmsg(
            socket.as_raw_fd(),
            &datagrams,
            &segments,
            MsgFlags::empty(),
            Some(&to),
        );
    }
}

/// Prints the payload received per second, in bytes.
fn receive() {
    let socket = UdpSocket::bind(("0.0.0.0", PORT)).expect("a socket");
    setsockopt(&socket, sockopt::UdpGroSegment, &true).expect("UDP_GRO");
    setsockopt(&socket, sockopt::RcvBufForce, &SOCKET_BUFFER).expect("SO_RCVBUFFORCE");
    socket.set_nonblocking(true).expect("a non-blocking socket");
    let mut buffers = vec![0; BUFFERS << 16];
    let (mut start, mut bytes, mut next) = (None, 0, 0);
    loop {
        let Ok(length) = socket.recv(&mut buffers[next << 16..][..1 << 16]) else {
            continue;
        };
        next = (next + 1) % BUFFERS;
        let start = *start.get_or_insert_with(Instant::now);
        bytes += length;
        if start.elapsed() >= ROUND {
            let payload = bytes * PAYLOAD / usize::from(DATAGRAM);
            println!("{}", payload as f64 / start.elapsed().as_secs_f64());
            return;
        }
    }
}

/// Sends each datagram back.
fn echo() {
    let socket = UdpSocket::bind(("0.0.0.0", PORT)).expect("a socket");
    socket.set_nonblocking(true).expect("a non-blocking socket");
    let mut buffer = [0; 64];
    loop {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    }
}

/// Prints the median of half of the round trip, in seconds.
fn ping(to: SocketAddrV4) {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
    socket.set_nonblocking(true).expect("a non-blocking socket");
    let (mut buffer, mut times) = ([0; 64], Vec::new());
    let end = Instant::now() + ROUND;
    while Instant::now() < end {
        let start = Instant::now();
        socket
            .send_to(&[1; 64], SocketAddr::V4(to))
            .expect("to send");
        while socket.recv(&mut buffer).is_err() {
            if start.elapsed() > ROUND {
                break;
            }
        }
        times.push(start.elapsed().as_secs_f64() / 2.0);
    }
    println!("{}", median(times));
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A program in a namespace. Dropping the value kills it.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        // After a success it has exited by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command(namespace: &str, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new("ip");
    command
        .args(["netns", "exec", namespace, program])
        .args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

fn start(namespace: &str, program: &str, args: &[&str]) -> Program {
    Program(command(namespace, program, args).spawn().expect("ip(8)"))
}

/// Returns the standard output of a program, which must succeed.
fn output(mut command: Command) -> String {
    let output = command.output().expect("ip(8)");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

struct Hosts(Namespaces);

impl Hosts {
    /// Runs `ringverbs perf` between the hosts, and returns the number at the path `key` of
    /// the report's first row.
    fn perf(&self, args: &[&str], key: &[&str]) -> f64 {
        let program = env!("CARGO_BIN_EXE_ringverbs");
        let port = free_port();
        let number = port.to_string();
        let args = [&["perf", "--port", &number, "--duration", "1"], args].concat();
        let [server, client] = [0, 1].map(|host| {
            let device = ["--device", "roce:veth0"];
            let role: &[_] = if host == 0 {
                &["--server"]
            } else {
                &["--json", "192.0.2.1"]
            };
            ([&args[..], &device, role].concat(), self.0.0[host].as_str())
        });
        let _server = start(server.1, program, &server.0);
        let end = Instant::now() + TIMEOUT;
        let is_listening = || {
            has_listener(
                &output(command(
                    server.1,
                    "cat",
                    &["/proc/net/tcp", "/proc/net/tcp6"],
                )),
                port,
            )
        };
        while !is_listening() {
            assert!(Instant::now() < end, "the server does not listen");
            sleep(Duration::from_millis(20));
        }
        let report = output(command(client.1, program, &client.0));
        let mut value =
            &serde_json::from_str::<serde_json::Value>(&report).expect("a report")["rows"][0];
        for name in key {
            value = &value[name];
        }
        value.as_f64().expect("a number")
    }

    /// Runs a receiver and a sender of datagrams on the two hosts, and returns the number
    /// that `host` prints.
    fn sockets(&self, receiver: &str, sender: &str, host: usize) -> f64 {
        let program = std::env::current_exe().expect("this program");
        let program = program.to_str().expect("a path");
        let mut server = start(&self.0.0[0], program, &[receiver]);
        sleep(Duration::from_millis(100));
        let sent = output(command(&self.0.0[1], program, &[sender]));
        let printed = match host {
            0 => {
                let mut text = String::new();
                let pipe = server.0.stdout.as_mut().expect("a pipe");
                pipe.read_to_string(&mut text).expect("its output");
                text
            }
            _ => sent,
        };
        printed.trim().parse().expect("a number")
    }
}

/// Prints a line for each row of `cargo xtask bench`: name, value of the device, value of
/// sockets; in bytes per second or seconds.
fn figures() {
    let Some(namespaces) = Namespaces::new("bench", MTU) else {
        return;
    };
    let hosts = Hosts(namespaces);
    let write = ["--op", "write", "--sizes", "65536"];
    let read = ["--op", "read", "--sizes", "65536"];
    let send = ["--op", "send", "--sizes", "64"];
    let rate = ["bandwidth", "bytes_per_second"];
    let mut values: [Vec<f64>; 5] = Default::default();
    for _ in 0..ROUNDS {
        values[0].push(hosts.perf(&write, &rate));
        values[1].push(hosts.perf(&read, &rate));
        values[2].push(hosts.sockets("receive", "send", 0));
        values[3].push(hosts.perf(&send, &["latency_ns", "p50"]) * 1e-9);
        values[4].push(hosts.sockets("echo", "ping", 1));
    }
    let [write, read, sockets, send, ping] = values.map(median);
    println!("hosts-write-65536 {write} {sockets}");
    println!("hosts-read-65536 {read} {sockets}");
    println!("hosts-send-64 {send} {ping}");
}

fn main() {
    let server = || SocketAddrV4::new([192, 0, 2, 1].into(), PORT);
    match std::env::args().nth(1).as_deref() {
        Some("send") => send(server()),
        Some("receive") => receive(),
        Some("echo") => echo(),
        Some("ping") => ping(server()),
        Some("figures" | "--bench") => figures(),
        // `cargo test` may run benches, too.
        _ => {}
    }
}
