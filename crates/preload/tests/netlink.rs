//! RDMA netlink of embedded devices.

#[macro_use]
mod common;

use common::*;
use testing::hosts::free_port;

#[test]
fn requests_are_answered_and_strangers_ignored() {
    let world = World::new(Provider::Stock, "roce,ib");
    if let Some(program) = compiled("cc", "netlink.c", &[], &world.directory) {
        let mut run = world.start(&program.display().to_string(), "output.txt");
        assert_eq!(run.good().trim(), "well");
        world.finish();
    }
}

/// Objects and counters; the same program runs on softhca under mlx5_ib.
fn resources(provider: Provider) {
    let _turn = turn();
    for devices in ["roce", "ib"] {
        let world = World::new(provider, devices);
        let source = "../../../../rxe-tests/programs/resources.c";
        let options = ["-DWITH_CM", "-libverbs", "-lrdmacm"];
        let Some(program) = compiled("cc", source, &options, &world.directory) else {
            return;
        };
        let line = format!("{} 127.0.0.1 5000", program.display());
        assert_eq!(world.start(&line, "output.txt").good().trim(), "well");
        world.finish();
    }
}

/// The lines of a project's script that sets up rdma_rxe.
fn names(provider: Provider) {
    let _turn = turn();
    if !installed(&["rdma", "ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(provider, "roce,ib");
    let named = |line: &str| format!("env RINGVERBS_NAMES=rxe0 {line}");
    let added = named("rdma link add rxe0 type rxe netdev lo");
    world.start(&added, "output.txt").good();
    let links = world.start(&named("rdma link show"), "output.txt").good();
    assert!(links.contains("link rxe0/1 state ACTIVE"), "{links}");
    assert!(links.contains("link mlx5_1/1 "), "{links}");
    let line = named(&format!("ibv_rc_pingpong -d rxe0 -g 1 -p {}", free_port()));
    world.pair(&line, &format!("{line} localhost"));
    world
        .start(&named("rdma link delete rxe0"), "output.txt")
        .good();
    let mut unknown = world.start(
        &named("rdma link add rxe1 type rxe netdev lo"),
        "output.txt",
    );
    assert_ne!(unknown.end(), Some(0));
    let said = unknown.said();
    assert!(
        said.contains("there is no embedded device \"rxe1\""),
        "{said}"
    );
    let mut wrong = world.start("env RINGVERBS_NAMES=a,a ibv_devinfo", "output.txt");
    assert_ne!(wrong.end(), Some(0));
    let said = wrong.said();
    assert!(said.contains("two devices have the name \"a\""), "{said}");
}

with_each_provider! {
    devices_have_other_names: names;
    objects_and_counters_are_shown: resources;
}

#[test]
fn the_command_rdma_lists_devices_and_ports() {
    if !installed(&["rdma"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce,ib");
    let devices = world.start("rdma dev show -d", "devices.txt").good();
    assert!(
        devices.contains("1: mlx5_1: node_type ca fw 16."),
        "{devices}"
    );
    let ports = world.start("rdma link show -j", "ports.txt").good();
    for part in [
        r#""ifname":"mlx5_0","port":1,"state":"ACTIVE""#,
        r#""netdev":"lo""#,
        r#""ifname":"mlx5_1","port":1,"subnet_prefix":"fe80:0000:0000:0000","lid":"#,
    ] {
        assert!(ports.contains(part), "{part}: {ports}");
    }
    let objects = world.start("rdma resource show", "objects.txt").good();
    for device in [0, 1] {
        let line = format!("{device}: mlx5_{device}: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0 srq 0");
        assert!(objects.contains(&line), "{objects}");
    }
    let counters = world.start("rdma statistic show", "counters.txt").good();
    for part in ["link mlx5_0/1", "link mlx5_1/1", "out_of_sequence 0"] {
        assert!(counters.contains(part), "{part}: {counters}");
    }
    let system = world.start("rdma system show", "system.txt").good();
    assert!(system.contains("copy-on-fork on"), "{system}");
    world.finish();
}
