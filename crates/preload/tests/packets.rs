//! Raw packets of a device on a network interface, to and from sockets of another network
//! namespace, and the sentence that a program without the right gets.

#[macro_use]
mod common;

use std::process::Command;

use common::*;
use testing::hosts::Namespaces;

fn interface(provider: Provider) {
    let _turn = turn();
    if !installed(&["ip"]) {
        return;
    }
    let name = format!("raw-{provider:?}").to_lowercase();
    let Some(namespaces) = Namespaces::new(&name, 1500) else {
        return;
    };
    let (own, peer) = (&namespaces.0[0], &namespaces.0[1]);
    let world = World::new(provider, "roce:veth0");
    let Some(program) = compiled("cc", "raw.c", &["-libverbs"], &world.directory) else {
        return;
    };
    let program = program.display();
    let mut device = world.start(
        &format!("ip netns exec {own} {program} device"),
        "device.txt",
    );
    let output = Command::new("ip")
        .args(["netns", "exec", peer, &program.to_string(), "peer"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?} {}", device.said());
    assert_eq!(device.good(), "well\n");
    let mut refused = world.start(
        &format!("ip netns exec {own} {program} refused"),
        "refused.txt",
    );
    let said = refused.good();
    assert_eq!(said.matches("take CAP_NET_RAW").count(), 1, "{said}");
    assert!(said.contains("unshare"), "{said}");
    world.finish();
}

with_each_provider! {
    the_interface_carries_raw_packets: interface;
}
