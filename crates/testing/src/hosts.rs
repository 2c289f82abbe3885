//! Two hosts on one machine: network namespaces that a veth pair connects.

use std::process::Command;

/// Two network namespaces, in which `veth0` has 192.0.2.1 and fd00::1, and 192.0.2.2 and
/// fd00::2. They do not outlive this value.
pub struct Namespaces(pub Vec<String>);

/// Runs a program with words between spaces; returns whether it succeeded.
pub fn tool(program: &str, args: &str) -> bool {
    let output = Command::new(program).args(args.split(' ')).output();
    output.is_ok_and(|output| output.status.success())
}

impl Namespaces {
    /// Returns `None` without the right to, or without ip(8).
    pub fn new(name: &str, mtu: u32) -> Option<Self> {
        let name = format!("rv-{name}-{}", std::process::id());
        let mut made = Self(Vec::new());
        for end in ["a", "b"] {
            let name = format!("{name}-{end}");
            if !tool("ip", &format!("netns add {name}")) {
                println!("skipped: network namespaces need root and ip(8)");
                return None;
            }
            made.0.push(name);
        }
        let both = format!(
            "link add veth0 netns {} type veth peer name veth0 netns {}",
            made.0[0], made.0[1]
        );
        assert!(tool("ip", &both));
        for (number, name) in (1..).zip(&made.0) {
            for command in [
                format!("-n {name} address add 192.0.2.{number}/24 dev veth0"),
                format!("-n {name} address add fd00::{number}/64 dev veth0 nodad"),
                format!("-n {name} link set lo up"),
                format!("-n {name} link set veth0 mtu {mtu} up"),
            ] {
                assert!(tool("ip", &command), "ip {command}");
            }
        }
        Some(made)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            tool("ip", &format!("netns delete {name}"));
        }
    }
}

/// Returns whether a table of the system's (`/proc/net/tcp`, `tcp6`) has a listener on a
/// port. A server that serves one client is looked for without connecting.
pub fn has_listener(table: &str, port: u16) -> bool {
    let end = format!(":{port:04X}");
    table.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, local, _, "0A", ..] if local.ends_with(&end))
    })
}
