//! Ports whose links go down and up: programs receive events, find the state by verbs, sysfs
//! and netlink, and their writes are repeated meanwhile.

#[macro_use]
mod common;

use std::io::Write;
use std::process::{ChildStdin, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use embedded::Network;
use testing::hosts::{Namespaces, succeeds};

const UP: &str = "4 5, 4: ACTIVE, 5: LinkUp";
const DOWN: &str = "1 3, 1: DOWN, 3: Disabled";

/// The program, and what of its output was read.
struct Program {
    running: Running,
    input: ChildStdin,
    read: usize,
}

impl Program {
    /// Starts the program in a world, in a network namespace if one is named.
    fn start(world: &World, namespace: Option<&str>, output: &str) -> Option<Self> {
        let libraries = ["-libverbs", "-lpthread"];
        let program = compiled("cc", "link.c", &libraries, &world.directory)?;
        let prefix = namespace.map_or(String::new(), |it| format!("ip netns exec {it} "));
        let line = format!("{prefix}{}", program.display());
        let mut running = world.start_with(&line, output, Stdio::piped());
        let input = running.child.stdin.take().unwrap();
        Some(Self {
            running,
            input,
            read: 0,
        })
    }

    /// Returns the next line of output.
    fn line(&mut self) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let said = self.running.said();
            if let Some((line, _)) = said[self.read..].split_once('\n') {
                self.read += line.len() + 1;
                return line.to_owned();
            }
            let ended = self.running.child.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < end, "{ended:?}: {said}");
            sleep(Duration::from_millis(5));
        }
    }

    /// Checks what follows: lines in any order, of which the last event shows the state.
    fn expect(&mut self, mut events: Vec<&str>, state: &str) {
        let mut shown = None;
        while !events.is_empty() {
            let line = self.line();
            let (event, found) = line.split_once(": ").unwrap_or((&line, ""));
            let at = events.iter().position(|it| *it == event);
            events.remove(at.unwrap_or_else(|| panic!("{line}: not of {events:?}")));
            if !found.is_empty() {
                shown = Some(found.to_owned());
            }
        }
        assert_eq!(shown.as_deref(), Some(state));
    }

    fn write(&mut self) {
        self.input.write_all(b"\n").unwrap();
    }
}

/// A device without an address, by the command.
fn plain(provider: Provider) {
    let _turn = turn();
    for devices in ["roce", "ib"] {
        let world = World::new(provider, devices);
        let set = |up| Network::set_link(&world.directory, 0, None, up).unwrap();
        let Some(mut program) = Program::start(&world, None, "first.txt") else {
            return;
        };
        let (gids, interface) = match devices {
            "roce" => ("4 GIDs", "lo"),
            _ => ("1 GIDs", ""),
        };
        let state = |state: &str| format!("{state}, {gids}, {interface}");
        let (up, down) = (state(UP), state(DOWN));
        program.expect(vec!["start"], &up);
        if devices == "roce" {
            program.write();
            assert_eq!(program.line(), "write 0");
        }
        assert_eq!(set(false), 1);
        program.expect(vec!["PORT_ERR"], &down);
        // Without a change there is no event.
        set(false);
        if devices == "roce" {
            // The write is repeated until the link is up.
            program.write();
            sleep(Duration::from_millis(300));
            assert_eq!(program.running.said().len(), program.read);
            set(true);
            program.expect(vec!["PORT_ACTIVE", "write 0"], &up);
            set(false);
            program.expect(vec!["PORT_ERR"], &down);
            program.write();
            // IBV_WC_RETRY_EXC_ERR
            assert_eq!(program.line(), "write 12");
        }
        // A process that starts meanwhile.
        let mut later = Program::start(&world, None, "later.txt").unwrap();
        later.expect(vec!["start"], &down);
        let of_first = Some(program.running.child.id());
        Network::set_link(&world.directory, 0, of_first, false).unwrap();
        assert_eq!(set(true), 2);
        for program in [&mut program, &mut later] {
            program.expect(vec!["PORT_ACTIVE"], &up);
        }
        Network::set_link(&world.directory, 0, of_first, false).unwrap();
        program.expect(vec!["PORT_ERR"], &down);
        sleep(Duration::from_millis(50));
        assert_eq!(later.running.said().len(), later.read);
        drop((program, later));
        world.finish();
    }
}

/// A device on an interface.
fn interface(provider: Provider) {
    let _turn = turn();
    if !installed(&["ip"]) {
        return;
    }
    let name = format!("link-{provider:?}").to_lowercase();
    let Some(namespaces) = Namespaces::new(&name, 1500) else {
        return;
    };
    let (own, peer) = (&namespaces.0[0], &namespaces.0[1]);
    let ip = |namespace: &str, args: &str| {
        assert!(succeeds("ip", &format!("-n {namespace} {args}")), "{args}");
    };
    // Without it the number of addresses depends on the time.
    ip(own, "link set veth0 addrgenmode none");
    ip(own, "link set veth0 down");
    let world = World::new(provider, "roce:veth0");
    let state = |state: &str, gids, interface| format!("{state}, {gids} GIDs, {interface}");
    let Some(mut program) = Program::start(&world, Some(own), "link.txt") else {
        return;
    };
    program.expect(vec!["start"], &state(DOWN, 1, "veth0"));
    ip(own, "link set veth0 up");
    program.expect(vec!["PORT_ACTIVE"], &state(UP, 1, "veth0"));
    ip(own, "address add fd00::7/64 dev veth0 nodad");
    program.expect(vec!["GID_CHANGE"], &state(UP, 2, "veth0"));
    program.write();
    assert_eq!(program.line(), "write 0");
    // The system removes IPv6 addresses of an interface that is set down, and no others.
    ip(own, "link set veth0 down");
    program.expect(vec!["PORT_ERR", "GID_CHANGE"], &state(DOWN, 1, "veth0"));
    program.write();
    sleep(Duration::from_millis(300));
    if installed(&["rdma"]) {
        let line = format!("ip netns exec {own} rdma link");
        let said = { world.command(&line) }.output().unwrap();
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(
            said.contains("state DOWN physical_state DISABLED netdev veth0"),
            "{said}"
        );
    }
    ip(own, "link set veth0 up");
    program.expect(vec!["PORT_ACTIVE", "write 0"], &state(UP, 1, "veth0"));
    // Carrier loss.
    ip(peer, "link set veth0 down");
    program.expect(vec!["PORT_ERR"], &state(DOWN, 1, "veth0"));
    ip(peer, "link set veth0 up");
    program.expect(vec!["PORT_ACTIVE"], &state(UP, 1, "veth0"));
    // A new name, for which older kernels need the interface down.
    ip(own, "link set veth0 down");
    program.expect(vec!["PORT_ERR"], &state(DOWN, 1, "veth0"));
    ip(own, "link set veth0 name other0");
    ip(own, "link set other0 up");
    program.expect(vec!["PORT_ACTIVE"], &state(UP, 1, "other0"));
    program.input.write_all(b"n\n").unwrap();
    assert_eq!(program.line(), "device/net: other0");
    ip(own, "link del other0");
    program.expect(vec!["PORT_ERR", "GID_CHANGE"], &state(DOWN, 0, "none"));
    program.write();
    assert_eq!(program.line(), "write 12");
    drop(program);
    world.finish();
}

with_each_provider! {
    a_command_sets_links: plain;
    links_are_those_of_the_interface: interface;
}
