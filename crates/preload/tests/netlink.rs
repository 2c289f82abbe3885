//! RDMA netlink of embedded devices.

#[macro_use]
#[allow(unused_macros, reason = "each file of tests uses a part")]
mod common;

use common::*;

#[test]
fn requests_are_answered_and_strangers_ignored() {
    let world = World::new(Provider::Stock, "roce,ib");
    if let Some(program) = compiled("cc", "netlink.c", &[], &world.directory) {
        let mut run = world.start(&program.display().to_string(), "output.txt");
        assert_eq!(run.good().trim(), "well");
        world.finish();
    }
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
    let system = world.start("rdma system show", "system.txt").good();
    assert!(system.contains("copy-on-fork on"), "{system}");
    world.finish();
}
