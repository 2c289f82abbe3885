//! Network namespaces as hosts: two that a veth pair connects, or more on a bridge.

use std::net::TcpListener;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Network namespaces, in which `veth0` has 192.0.2.1 and fd00::1, 192.0.2.2 and fd00::2,
/// and so on. Dropping the value deletes them.
pub struct Namespaces(pub Vec<String>);

/// Runs a program with arguments that spaces separate. Returns whether it succeeded.
pub fn succeeds(program: &str, args: &str) -> bool {
    let output = Command::new(program).args(args.split(' ')).output();
    output.is_ok_and(|output| output.status.success())
}

impl Namespaces {
    /// Creates two namespaces. Returns `None` without root or ip(8).
    pub fn new(name: &str, mtu: u32) -> Option<Self> {
        let namespaces = Self::create(name, &["a", "b"])?;
        let (a, b) = (&namespaces.0[0], &namespaces.0[1]);
        ip(&format!(
            "link add veth0 netns {a} type veth peer name veth0 netns {b}"
        ));
        configure(&namespaces.0, mtu);
        Some(namespaces)
    }

    /// Creates up to nine namespaces, connected by a bridge in a further namespace, the last
    /// one. Returns `None` without root or ip(8).
    pub fn bridged(name: &str, count: usize, mtu: u32) -> Option<Self> {
        let suffixes = ["1", "2", "3", "4", "5", "6", "7", "8", "9"];
        let suffixes = [&suffixes[..count], &["bridge"]].concat();
        let namespaces = Self::create(name, &suffixes)?;
        let (bridge, hosts) = namespaces.0.split_last()?;
        ip(&format!("-n {bridge} link add bridge type bridge"));
        ip(&format!("-n {bridge} link set bridge up"));
        for (number, name) in (1..).zip(hosts) {
            ip(&format!(
                "link add veth0 netns {name} type veth peer name port{number} netns {bridge}"
            ));
            let port = format!("-n {bridge} link set port{number} mtu {mtu}");
            ip(&format!("{port} master bridge up"));
        }
        configure(hosts, mtu);
        Some(namespaces)
    }

    fn create(name: &str, suffixes: &[&str]) -> Option<Self> {
        let mut namespaces = Self(Vec::new());
        for suffix in suffixes {
            let name = format!("rv-{name}-{}-{suffix}", std::process::id());
            if !succeeds("ip", &format!("netns add {name}")) {
                crate::skip!("network namespaces need root and ip(8)");
                return None;
            }
            namespaces.0.push(name);
        }
        Some(namespaces)
    }
}

fn configure(hosts: &[String], mtu: u32) {
    for (number, name) in (1..).zip(hosts) {
        let add = format!("-n {name} address add");
        ip(&format!("{add} 192.0.2.{number}/24 dev veth0"));
        ip(&format!("{add} fd00::{number}/64 dev veth0 nodad"));
        ip(&format!("-n {name} link set lo up"));
        ip(&format!("-n {name} link set veth0 mtu {mtu} up"));
    }
}

fn ip(args: &str) {
    assert!(succeeds("ip", args), "ip {args}");
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            succeeds("ip", &format!("netns delete {name}"));
        }
    }
}

/// Returns a free TCP port. It is below the ephemeral ports, so that no client can take it
/// before the server does.
pub fn free_port() -> u16 {
    const FIRST: u16 = 20_000;
    const COUNT: u32 = 12_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = std::process::id().wrapping_mul(97) + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + (number % COUNT) as u16;
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}

/// Returns whether a table of sockets (`/proc/net/tcp`, `tcp6`) has a listener on a port.
/// Connecting instead would occupy a server that serves one client.
pub fn has_listener(table: &str, port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    table.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, local, _, "0A", ..] if local.ends_with(&suffix))
    })
}
