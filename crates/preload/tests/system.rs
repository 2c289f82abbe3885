//! What the system shows of embedded devices, beside what the verbs say.

#[macro_use]
mod common;

use common::*;
use testing::hosts::free_port;

fn gids(provider: Provider) {
    for devices in ["roce,ib,roce", "roce:lo", "roce:127.51.0.1"] {
        let world = World::new(provider, devices);
        let Some(program) = compiled("cc", "gids.c", &["-libverbs"], &world.directory) else {
            return;
        };
        let plain = if devices.contains(':') { "" } else { " plain" };
        let line = format!("{} lo{plain}", program.display());
        assert_eq!(world.start(&line, "output.txt").good().trim(), "well");
        world.finish();
    }
}

/// Both versions of RoCE, over link-local and IPv4 addresses.
fn each_gid(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(provider, "roce");
    for gid in 0..4 {
        for kind in ["rc", "uc", "ud"] {
            let port = free_port();
            let line = format!("ibv_{kind}_pingpong -g {gid} -c -n 100 -p {port}");
            // Only ibv_rc_pingpong and ibv_uc_pingpong check what they receive.
            let line = line.replace(" -c", if kind == "ud" { "" } else { " -c" });
            world.pair(&line, &format!("{line} localhost"));
        }
    }
    world.finish();
}

/// Capability flags, limits and port attributes.
fn promises(provider: Provider) {
    let _turn = turn();
    for devices in ["roce", "ib"] {
        let world = World::new(provider, devices);
        let Some(program) = compiled("cc", "promises.c", &["-libverbs"], &world.directory) else {
            return;
        };
        let line = program.display().to_string();
        assert_eq!(world.start(&line, "output.txt").good().trim(), "well");
        world.finish();
    }
}

with_each_provider! {
    capabilities_keep_their_promises: promises;
    gids_are_shown: gids;
    each_gid_carries_packets: each_gid;
}
