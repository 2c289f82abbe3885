//! Programs of libibverbs, librdmacm, perftest, libfabric, UCX and Open MPI on
//! embedded devices, with rdma-core's provider and with ours. `cargo xtask programs`
//! runs longer lists.
//!
//! Skipped where a program is not installed: `apt-get install ibverbs-utils
//! ibverbs-providers rdmacm-utils perftest libfabric-bin ucx-utils openmpi-bin
//! libopenmpi-dev`.

#[macro_use]
mod common;

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use testing::hosts::free_port;

fn devices(provider: Provider) {
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(provider, "roce,ib");
    let said = world.start("ibv_devinfo -v", "devices.txt").good();
    for part in [
        "hca_id:\tmlx5_0",
        "hca_id:\tmlx5_1",
        "link_layer:\t\tEthernet",
        "link_layer:\t\tInfiniBand",
        "RoCE v2",
        "fw_ver:\t\t\t\t16.35.4030",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    world.finish();
}

fn pingpongs(provider: Provider) {
    let _turn = turn();
    let names = ["ibv_rc_pingpong", "ibv_xsrq_pingpong"];
    if !installed(&names) {
        return;
    }
    for (devices, gid) in [("roce", " -g 1"), ("ib", "")] {
        let world = World::new(provider, devices);
        for kind in ["rc", "uc", "ud", "srq", "xsrq"] {
            for more in ["", " -e"] {
                let line = format!("ibv_{kind}_pingpong{gid}{more} -n 200 -p {}", free_port());
                world.pair(&line, &format!("{line} localhost"));
            }
        }
        // Their programs check what they receive.
        let line = format!(
            "ibv_rc_pingpong{gid} -c -n 100 -s 100000 -p {}",
            free_port()
        );
        world.pair(&line, &format!("{line} localhost"));
        world.finish();
    }
}

fn perftest(provider: Provider) {
    let _turn = turn();
    if !installed(&["ib_send_lat"]) {
        return;
    }
    let world = World::new(provider, "roce");
    for operation in ["send", "write", "read", "atomic"] {
        for what in ["lat", "bw"] {
            let line = format!("ib_{operation}_{what} -x 1 -n 200 -p {}", free_port());
            let said = world.pair(&line, &format!("{line} localhost"));
            assert!(said.contains("#bytes"), "{said}");
        }
    }
    for more in ["-e", "-c UD", "-c UC -q 4", "-R"] {
        let program = if more.contains("UC") {
            "write_bw"
        } else {
            "send_bw"
        };
        let line = format!("ib_{program} -x 1 -n 200 -p {} {more}", free_port());
        world.pair(&line, &format!("{line} 127.0.0.1"));
    }
    world.finish();
}

fn connections(provider: Provider) {
    let _turn = turn();
    if !installed(&["rping", "ucmatose", "udaddy", "mckey", "rstream"]) {
        return;
    }
    // Ports belong to the network, so the default ones are free.
    let world = World::new(provider, "roce");
    for (server, client) in [
        (
            "rping -s -a 127.0.0.1 -C 20 -V",
            "rping -c -a 127.0.0.1 -C 20 -V",
        ),
        ("ucmatose -C 5", "ucmatose -C 5 -s 127.0.0.1"),
        ("udaddy", "udaddy -s 127.0.0.1"),
        ("rdma_server", "rdma_client -s 127.0.0.1"),
        (
            "rstream -S 1024 -C 50",
            "rstream -S 1024 -C 50 -s 127.0.0.1",
        ),
        (
            "riostream -S 1024 -C 50",
            "riostream -S 1024 -C 50 -s 127.0.0.1",
        ),
        (
            "mckey -m 239.1.1.1 -b 127.0.0.1 -C 3",
            "mckey -m 239.1.1.1 -b 127.0.0.1 -C 3 -s",
        ),
    ] {
        world.pair(server, client);
    }
    world.finish();
}

/// Each readable channel has an event, and each event makes its channel readable.
fn channels(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let libraries = ["-lrdmacm", "-libverbs"];
    let Some(program) = compiled("cc", "channel.c", &libraries, &world.directory) else {
        return;
    };
    let program = program.display();
    for mode in ["poll", "edge", "block"] {
        world.pair(&format!("{program} {mode}"), &format!("{program} client"));
    }
    world.finish();
}

/// Descriptors of events behave as the kernel's.
fn readiness(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let libraries = ["-lrdmacm", "-libverbs"];
    let Some(program) = compiled("cc", "readiness.c", &libraries, &world.directory) else {
        return;
    };
    let line = format!("env RXE_ADDR=127.0.0.1 {}", program.display());
    world.start(&line, "readiness.txt").good();
    world.finish();
}

/// Rules for binding ids; the same program runs on devices of the kernel.
fn ports(provider: Provider) {
    let _turn = turn();
    let [.., high, low] = std::process::id().to_be_bytes();
    let host: &str = String::leak(format!("127.198.{high}.{low}"));
    let device = String::leak(format!("roce:{host}"));
    // The source address of packets to others, if there is one.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let routed = socket.connect("192.0.2.1:9").and(socket.local_addr());
    let routed = routed.map(|it| it.ip().to_string());
    let own = routed.iter().map(|it| ("roce", it.as_str()));
    for (devices, address) in own.chain([("roce", "127.0.0.1"), (device, host)]) {
        let world = World::new(provider, devices);
        let source = "../../../../rxe-tests/programs/ports.c";
        let libraries = ["-lrdmacm", "-libverbs"];
        let Some(program) = compiled("cc", source, &libraries, &world.directory) else {
            return;
        };
        let line = format!("env RXE_ADDR={address} {}", program.display());
        assert_eq!(world.start(&line, "ports.txt").good().trim(), "well");
    }
}

/// Killing a peer breaks its connections, and has no other effect.
fn killed(provider: Provider) {
    let _turn = turn();
    if !installed(&["ib_write_bw", "ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(provider, "roce");
    let line = format!("ib_write_bw -x 1 -D 60 -p {}", free_port());
    let mut server = world.start(&line, "server.txt");
    world.wait_for(&mut server);
    let mut client = world.start(&format!("{line} localhost"), "client.txt");
    sleep(Duration::from_millis(700));
    server.child.kill().unwrap();
    // "transport retry counter exceeded", after seconds.
    let began = Instant::now();
    assert_ne!(client.end(), Some(0), "{}", client.said());
    assert!(
        began.elapsed() < Duration::from_secs(50),
        "{}",
        client.said()
    );
    drop((server, client));
    let line = format!("ibv_rc_pingpong -g 1 -n 100 -p {}", free_port());
    world.pair(&line, &format!("{line} localhost"));
    world.finish();
}

fn plays_with_libfabric(world: &World, kind: &str) {
    // libfabric destroys a queue pair whose peer has disconnected. A completion that the
    // program has not read by then becomes an error, which is a matter of time.
    const ATTEMPTS: usize = 4;
    const UNREAD: &str = "cq_readerr: Work Request Flushed Error";
    for attempt in 1.. {
        let port = free_port();
        let line = format!("fi_pingpong -p {kind} -c -I 20");
        // Searched here: `-p` names a provider.
        let mut server = world.start(&format!("{line} -B {port}"), "server.txt");
        wait_for_port(port, &mut server);
        let client = format!("{line} -P {port} 127.0.0.1");
        let mut client = world.start(&client, "client.txt");
        client.end();
        server.end();
        let unread = [&client, &server]
            .iter()
            .any(|end| end.said().contains(UNREAD));
        if attempt == ATTEMPTS || !unread {
            client.good();
            server.good();
            return;
        }
    }
}

fn frameworks(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let mut ran = false;
    if installed(&["fi_pingpong"]) {
        ran = true;
        for kind in ["verbs -e msg", "verbs;ofi_rxm -e rdm"] {
            plays_with_libfabric(&world, kind);
        }
    }
    if installed(&["ucx_perftest"]) {
        ran = true;
        for transport in ["rc", "ud", "dc_mlx5,ud_mlx5"] {
            let line = format!("env UCX_TLS={transport} UCX_NET_DEVICES=mlx5_0:1 ucx_perftest");
            let line = format!("{line} -p {}", free_port());
            let more = "-t tag_lat -s 8192 -n 30 -w 3";
            world.pair(&line, &format!("{line} 127.0.0.1 {more}"));
        }
    }
    if ran {
        world.finish();
    }
}

/// Two processes of one address, which write the queues themselves: their devices are driven by
/// threads alone, which must not sleep on packets that have arrived.
fn reads_on_one_address(provider: Provider) {
    let _turn = turn();
    if !installed(&["ucx_perftest"]) {
        return;
    }
    let [.., high, low] = std::process::id().to_be_bytes();
    let world = World::new(provider, String::leak(format!("roce:127.189.{high}.{low}")));
    let transports = "UCX_TLS=dc_mlx5,ud_mlx5 UCX_NET_DEVICES=mlx5_0:1 UCX_RNDV_SCHEME=get_zcopy";
    let line = format!("env {transports} ucx_perftest -p {}", free_port());
    let said = world.pair(
        &line,
        &format!("{line} 127.0.0.1 -t ucp_get -s 131072 -n 40 -w 3"),
    );
    // Iterations, median, average, overall average.
    let last = said.lines().find(|it| it.starts_with("Final:")).unwrap();
    let average: f64 = last.split_whitespace().nth(4).unwrap().parse().unwrap();
    assert!(average < 150_000.0, "{average} us: {said}");
    world.finish();
}

/// Each rank checks what it receives.
fn collectives(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    if !installed(&["mpirun"]) {
        return;
    }
    let Some(program) = compiled("mpicc", "collectives.c", &[], &world.directory) else {
        return;
    };
    let ways = [
        "--mca pml ucx --mca osc ucx -x UCX_TLS=rc,self -x UCX_NET_DEVICES=mlx5_0:1 -n 2",
        "--mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include verbs;ofi_rxm -n 3",
    ];
    for way in ways {
        let line = format!(
            "mpirun --allow-run-as-root --oversubscribe --mca btl ^openib,vader,ofi {way} {}",
            program.display()
        );
        let said = world.start(&line, "mpi.txt").good();
        assert!(said.contains("all right"), "{said}");
    }
    world.finish();
}

with_each_provider! {
    lists_devices: devices;
    plays_ping_pong: pingpongs;
    runs_perftest: perftest;
    connects_by_address: connections;
    waits_for_channels: channels;
    reports_readiness: readiness;
    binds_ports: ports;
    survives_a_killed_peer: killed;
    runs_libfabric_and_ucx: frameworks;
    reads_between_processes_of_one_address: reads_on_one_address;
    runs_open_mpi: collectives;
}

#[test]
fn an_invalid_environment_is_reported_in_one_line() {
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let said = |name: &str, value: &Path| {
        let mut command = world.command("ibv_devinfo");
        command.env(name, value);
        let output = command.output().unwrap();
        assert_ne!(output.status.code(), Some(0));
        let text = String::from_utf8(output.stderr).unwrap();
        let lines = text.lines().filter(|line| line.starts_with("ringverbs: "));
        assert_eq!(lines.count(), 1, "{text}");
        text
    };
    let unknown = said("RINGVERBS_EMBEDDED", Path::new("card"));
    assert!(unknown.contains("no device \"card\""), "{unknown}");
    let open = world.directory.join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let writable = said("RINGVERBS_DIRECTORY", &open);
    assert!(writable.contains("chmod go-w"), "{writable}");
    assert_eq!(fs::read_dir(&open).unwrap().count(), 0);
    let nowhere = said("RINGVERBS_DIRECTORY", Path::new("/nowhere/x"));
    assert!(nowhere.contains("/nowhere/x"), "{nowhere}");
}

/// `ls -l` also reads extended attributes, and follows links.
#[test]
fn folders_of_devices_are_listed() {
    let world = World::new(Provider::Stock, "roce");
    let mut command = world.command("ls -lR /sys/class/infiniband/mlx5_0/ /sys/class/infiniband");
    let listed = command.output().unwrap();
    let out = String::from_utf8_lossy(&listed.stdout);
    let errors = String::from_utf8_lossy(&listed.stderr);
    assert!(listed.status.success() && errors.is_empty(), "{errors}");
    assert!(out.lines().count() > 400);
}

#[test]
fn a_program_without_devices_is_left_alone() {
    let world = World::new(Provider::Stock, "roce");
    let mut command = world.command("ls /sys/class");
    let with = command.output().unwrap();
    let without = Command::new("ls").arg("/sys/class").output().unwrap();
    assert!(with.status.success());
    assert_eq!(with.stdout, without.stdout);
    assert!(!Path::new(&world.directory).join("0.lock").exists());
}
