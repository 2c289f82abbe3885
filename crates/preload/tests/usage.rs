//! Programs count the devices that they open and the bytes that they move, however they end.

#[macro_use]
mod common;

use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use embedded::usage::{Totals, Usage};
use testing::hosts::free_port;

fn start(world: &World, usage: &Usage, line: &str) -> Child {
    let mut command = world.command(line);
    let command = command.env("RINGVERBS_USAGE", usage.path());
    let command = command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        sleep(Duration::from_millis(10));
    }
}

fn counts(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong", "ibv_devinfo"]) {
        return;
    }
    let world = World::new(provider, "roce");
    let usage = Usage::create(&world.directory).unwrap();
    let mut child = start(&world, &usage, "true");
    assert!(child.wait().unwrap().success());
    assert_eq!(usage.totals().unwrap(), Totals::default());
    let mut child = start(&world, &usage, "ibv_devinfo");
    assert!(child.wait().unwrap().success());
    let totals = usage.totals().unwrap();
    assert!(totals.opened > 0 && totals.bytes == 0, "{totals:?}");

    // Work requests that fail are opened devices, and no bytes.
    let options = &["-g", "-libverbs"];
    if let Some(program) = compiled("cc", "faults.c", options, &world.directory) {
        for mistake in ["local", "right", "no-receive"] {
            let mut child = start(&world, &usage, &format!("{} {mistake}", program.display()));
            assert!(child.wait().unwrap().success());
            let failed = usage.totals().unwrap();
            assert!(failed.opened > totals.opened, "{mistake}: {failed:?}");
            assert_eq!(failed.bytes, 0, "{mistake}");
        }
    }

    // Two processes that do not end by themselves.
    let port = free_port();
    let line = format!("ibv_rc_pingpong -g 1 -n 100000000 -s 1000 -p {port}");
    let mut server = start(&world, &usage, &line);
    wait_for("the server does not listen", || listens(port));
    let mut client = start(&world, &usage, &format!("{line} localhost"));
    wait_for("nothing is counted", || {
        usage.totals().unwrap().bytes > 20_000
    });
    for child in [&mut server, &mut client] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let killed = usage.totals().unwrap();
    assert!(killed.opened > totals.opened + 1, "{killed:?}");

    // Each message is counted, and once: by its sender, and by its receiver.
    let line = format!("ibv_rc_pingpong -g 1 -n 200 -s 1000 -p {port}");
    let mut server = start(&world, &usage, &line);
    wait_for("the server does not listen", || listens(port));
    let mut client = start(&world, &usage, &format!("{line} localhost"));
    assert!(client.wait().unwrap().success() && server.wait().unwrap().success());
    let moved = usage.totals().unwrap().bytes - killed.bytes;
    // A message of the killed programs may have been sent and not received.
    assert!((399_000..=401_000).contains(&moved), "{moved}");
    drop(usage);
    world.finish();
}

with_each_provider! {
    usage: counts;
}
