//! Files and netlink answers about embedded devices, compared with the verbs.

#[macro_use]
mod common;

use common::*;
use testing::hosts::{free_port, succeeds};

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

/// An allocator reads a file of the system in its first call, which may be one of this library's.
fn allocators(provider: Provider) {
    let world = World::new(provider, "roce");
    if let Some(program) = compiled("cc", "first_call.c", &["-libverbs"], &world.directory) {
        let line = program.display().to_string();
        world.start(&line, "output.txt").good();
        world.finish();
    }
}

/// Working directories, and paths that are relative to them or to open directories.
#[test]
fn programs_work_in_folders_of_sysfs() {
    let _turn = turn();
    if !installed(&["python3", "find"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce,ib");
    let script = world.directory.join("folders.sh");
    std::fs::write(&script, FOLDERS).unwrap();
    let said = world
        .start(&format!("sh {}", script.display()), "output.txt")
        .good();
    let said: Vec<_> = said.lines().collect();
    let function = "/sys/devices/ringverbs/ffff:00:00.0";
    let device = format!("{function}/infiniband/mlx5_0");
    let expected = [
        "/sys/class/infiniband",
        "mlx5_0",
        "mlx5_1",
        &device,
        "0250:5300:0000:0001",
        "4: ACTIVE",
        "0250:5300:0000:0002",
        function,
        "0x15b3",
        "lo",
        "0250:5300:0000:0001",
        &format!("{device}/ports/1"),
        "5: LinkUp",
        "4: ACTIVE",
        "InfiniBand",
        "../../../ffff:00:00.0",
        &device,
        "True",
        "/tmp",
    ];
    assert_eq!(said, expected);
    world.finish();
}

const FOLDERS: &str = r#"
cd /sys/class/infiniband
/bin/pwd
ls
cd mlx5_0
/bin/pwd
cat node_guid ./ports/1/state ../../../ffff:00:01.0/infiniband/mlx5_1/node_guid
cd device
/bin/pwd
cat vendor
ls -d ../../../class/net/lo/../lo | sed 's/.*\///'
find /sys/class/infiniband/mlx5_0/ -maxdepth 1 -name node_guid -execdir cat {} \;
exec python3 -c '
import os
port = os.open("/sys/class/infiniband/mlx5_0/ports/1", os.O_RDONLY | os.O_DIRECTORY)
def read(name, **more):
    fd = os.open(name, os.O_RDONLY, **more)
    print(os.read(fd, 100).decode().strip())
    os.close(fd)
os.fchdir(port)
print(os.getcwd())
read("phys_state")
os.chdir("/tmp")
read("state", dir_fd=port)
read("../../../../../ffff:00:01.0/infiniband/mlx5_1/ports/1/link_layer", dir_fd=port)
print(os.readlink("../../device", dir_fd=port))
os.fchdir(port)
print(os.path.realpath("../.."))
os.chdir("../../../../../../../class/net/lo")
print(os.path.samefile(".", "/sys/class/net/lo"))
os.chdir("/tmp")
print(os.getcwd())
'
"#;

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

/// Other shapes of the GID table.
fn shapes(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_devinfo", "ibv_rc_pingpong", "rping"]) {
        return;
    }
    let world = World::new(provider, "roce");
    let with = |gids: &str, line: &str| format!("env RINGVERBS_GIDS={gids} {line}");
    let line = with("none,v2-ipv4,v1,v2-ipv4,none,v2-ipv6", "ibv_devinfo -v");
    let said = world.start(&line, "output.txt").good();
    let gids: Vec<_> = said
        .lines()
        .filter_map(|line| line.split_once("GID["))
        .collect();
    let gids: Vec<_> = gids
        .iter()
        .map(|(_, it)| it.replace([' ', '\t'], ""))
        .collect();
    let expected = [
        ("1]:", "::ffff:127.80.", "RoCEv2"),
        ("2]:", "fe80:", "RoCEv1"),
        ("3]:", "::ffff:127.81.", "RoCEv2"),
        ("5]:", "fd52:5600::", "RoCEv2"),
    ];
    assert_eq!(gids.len(), expected.len(), "{said}");
    for (gid, (index, address, version)) in gids.iter().zip(expected) {
        let address = format!("{index}{address}");
        assert!(gid.starts_with(&address) && gid.ends_with(version), "{gid}");
    }
    for (gids, index) in [
        ("v2", 0),
        ("none,v2-ipv4,v2-ipv4", 2),
        ("v1-ipv6,v2-ipv6", 1),
        ("v1-ipv4", 0),
    ] {
        let port = free_port();
        let line = format!("ibv_rc_pingpong -g {index} -c -n 100 -p {port}");
        let line = with(gids, &line);
        world.pair(&line, &format!("{line} localhost"));
    }
    // The connection manager takes what there is.
    for gids in ["v2", "v2-ipv4", "none,v1"] {
        let server = with(gids, "rping -s -C 10 -v -a 127.0.0.1");
        world.pair(&server, &with(gids, "rping -c -C 10 -v -a 127.0.0.1"));
    }
    let line = with("v2,v3", "ibv_devinfo");
    let mut wrong = world.start(&line, "output.txt");
    assert_ne!(wrong.end(), Some(0));
    let said = wrong.said();
    assert!(
        said.contains("RINGVERBS_GIDS: there is no GID \"v3\""),
        "{said}"
    );
    world.finish();
}

/// Numbers of queue pairs repeat with a seed alone.
fn seeds(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let numbers = |seed: &str| {
        let world = World::new(provider, "roce");
        let line = format!(
            "env RINGVERBS_SEED={seed} ibv_rc_pingpong -g 1 -p {}",
            free_port()
        );
        let said = world.pair(&line, &format!("{line} localhost"));
        let mut numbers: Vec<_> = said
            .split("QPN ")
            .skip(1)
            .map(|it| it.split(',').next().unwrap().to_owned())
            .collect();
        assert!(numbers.len() == 2 && numbers[0] != numbers[1], "{said}");
        // The order in which the programs start decides which one is whose.
        numbers.sort_unstable();
        world.finish();
        numbers
    };
    assert_eq!(numbers("7"), numbers("7"));
    assert_ne!(numbers("7"), numbers("8"));
    assert_ne!(numbers(""), numbers(""));
    let world = World::new(Provider::Stock, "roce");
    let mut wrong = world.start("env RINGVERBS_SEED=-1 ibv_devinfo", "output.txt");
    assert_ne!(wrong.end(), Some(0));
    let said = wrong.said();
    assert!(
        said.contains("RINGVERBS_SEED: not a number from 0"),
        "{said}"
    );
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

/// Small cases with a known right answer, from public reports.
fn cases(provider: Provider) {
    let _turn = turn();
    for devices in ["roce,roce", "ib,ib"] {
        let world = World::new(provider, devices);
        let libraries = ["-lrdmacm", "-libverbs", "-lpthread"];
        let Some(program) = compiled("cc", "cases.c", &libraries, &world.directory) else {
            return;
        };
        let program = program.display();
        let mut names = vec!["keys", "children", "depths", "device-memory"];
        if provider == Provider::Ours {
            names.push("results");
        }
        for name in names {
            let line = format!("env MLX5_CQE_SIZE=128 {program} {name}");
            assert_eq!(world.start(&line, "output.txt").good().trim(), "well");
        }
        world.finish();
    }
}

/// Programs that run on softhca under mlx5_ib as well: counted violations of queue and
/// partition keys, counters of the port in sysfs.
fn shared_programs(provider: Provider) {
    shared_program(provider, "partitions", &["-libverbs"]);
    let options = ["-DWITH_CM", "-lrdmacm", "-libverbs"];
    shared_program(provider, "counters", &options);
}

fn shared_program(provider: Provider, name: &str, options: &[&str]) {
    let _turn = turn();
    for devices in ["roce", "ib"] {
        let world = World::new(provider, devices);
        let source = &format!("../../../../rxe-tests/programs/{name}.c");
        let Some(program) = compiled("cc", source, options, &world.directory) else {
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
    violations_and_traffic_are_counted: shared_programs;
    allocators_may_read_sysfs: allocators;
    small_cases_are_right: cases;
    gid_tables_have_other_shapes: shapes;
    numbers_follow_from_a_seed: seeds;
    each_gid_carries_packets: each_gid;
}

/// What the devices need is missing: a sentence says so, and the program has no devices.
#[test]
fn missing_rights_and_resources_are_named() {
    const FILTER: &str = "a system call that the devices need is refused, perhaps by a filter";
    let _turn = turn();
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let Some(denied) = compiled("cc", "denied.c", &[], &world.directory) else {
        return;
    };
    let denied = denied.display();
    let without = |call: libc::c_long, errno: i32| format!("{denied} {call} {errno} ibv_devinfo");
    let mut lines = vec![
        (without(libc::SYS_memfd_create, libc::EPERM), FILTER),
        (without(libc::SYS_memfd_create, libc::ENOSYS), FILTER),
        (without(libc::SYS_flock, libc::EPERM), FILTER),
        (without(libc::SYS_eventfd2, libc::ENOSYS), FILTER),
        (without(libc::SYS_socket, libc::EPERM), FILTER),
    ];
    let script = |name: &str, text: &str| {
        let path = world.directory.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let few = script("few.sh", "ulimit -n 10; exec ibv_devinfo");
    lines.push((
        format!("sh {few}"),
        "no descriptor is left: allow more (ulimit -n)",
    ));
    let mount = script("mount.sh", "umount -l /proc && exec ibv_devinfo");
    // As root, or in a user namespace.
    let unshare = ["unshare --mount sh", "unshare --map-root-user --mount sh"];
    let may = |it: &&str| {
        let (program, options) = it.split_once(' ').unwrap();
        succeeds(program, &format!("{options} -c true"))
    };
    match unshare.into_iter().find(may) {
        Some(unshare) => {
            lines.push((format!("{unshare} {mount}"), "/proc is not mounted"));
        }
        None => testing::skip!("mount namespaces are not permitted"),
    }
    for (line, sentence) in lines {
        let mut program = world.start(&line, "output.txt");
        let status = program.end();
        let said = program.said();
        assert!(
            status.is_some_and(|it| it != 0),
            "{line}: {status:?} {said}"
        );
        let named = said.lines().filter(|it| it.starts_with("ringverbs: "));
        assert_eq!(named.count(), 1, "{line}: {said}");
        assert!(said.contains(sentence), "{line}: {said}");
    }
    // They are there for speed, or do without.
    for call in [
        libc::SYS_process_vm_readv,
        libc::SYS_membarrier,
        libc::SYS_pidfd_open,
    ] {
        world
            .start(&without(call, libc::ENOSYS), "output.txt")
            .good();
    }
}
