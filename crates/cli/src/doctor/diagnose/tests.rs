use std::process::Command;

use super::*;

/// Returns the facts of a host on which everything works.
fn healthy() -> Facts {
    Facts {
        release: "6.12.1-amd64".into(),
        ib_uverbs: Module::Loaded,
        rdma_rxe: Module::Loaded,
        rdma_ucm: Module::Loaded,
        connection_manager_node: Some(Node {
            name: "rdma_cm".into(),
            device: "the connection manager".into(),
            number: (10, 122),
            state: NodeState::Usable,
        }),
        kernel_devices: vec!["rxe0".into()],
        nodes: vec![Node {
            name: "uverbs0".into(),
            device: "rxe0".into(),
            number: (231, 192),
            state: NodeState::Usable,
        }],
        devices: vec![OpenedDevice {
            name: "rxe0".into(),
            driver: "rdma_rxe".into(),
            interface: Some(Interface {
                name: "eth0".into(),
                up: true,
                state: "up".into(),
                mtu: Some(9000),
            }),
            ports: Ok(vec![PortFacts {
                number: 1,
                active: true,
                state: "PORT_ACTIVE",
                ethernet: true,
                mtu: Some(4096),
                gids: 2,
                routable: true,
            }]),
        }],
        memlock: Memlock::default(),
        interfaces: vec![Interface {
            name: "eth0".into(),
            up: true,
            ..Interface::default()
        }],
        ..Facts::default()
    }
}

fn first_port(facts: &mut Facts) -> &mut PortFacts {
    &mut facts.devices[0].ports.as_mut().unwrap()[0]
}

/// Returns the finding that is not `Ok`; there must be one.
#[track_caller]
fn only_finding(facts: &Facts) -> Finding {
    let mut findings = diagnose(facts);
    findings.retain(|finding| finding.level != Level::Ok);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings.remove(0)
}

#[track_caller]
fn expect(facts: &Facts, level: Level, check: &str, found: &str, fix: &str) {
    let finding = only_finding(facts);
    assert_eq!(
        (finding.level, finding.check),
        (level, check),
        "{finding:?}"
    );
    assert!(finding.found.contains(found), "{finding:?}");
    let command = finding.fix.as_deref().unwrap();
    assert!(command.contains(fix), "{finding:?}");
    // The command must be valid in a shell.
    let shell = Command::new("sh")
        .args(["-n", "-c", command])
        .output()
        .unwrap();
    assert!(shell.status.success(), "{finding:?}: {shell:?}");
}

#[test]
fn healthy_host_has_no_problem() {
    let findings = diagnose(&healthy());
    assert!(
        findings.iter().all(|finding| finding.level == Level::Ok),
        "{findings:#?}"
    );
    assert!(findings.iter().all(|finding| finding.fix.is_none()));
}

#[test]
fn missing_module() {
    let mut facts = healthy();
    facts.ib_uverbs = Module::Available;
    expect(
        &facts,
        Level::Problem,
        "module",
        "not loaded",
        "modprobe ib_uverbs",
    );
    facts.ib_uverbs = Module::Missing;
    expect(
        &facts,
        Level::Problem,
        "module",
        "6.12.1-amd64",
        "linux-modules-extra-6.12.1-amd64",
    );
    facts.container = Some("docker".into());
    expect(&facts, Level::Problem, "module", "host", "on the host");
}

#[test]
fn no_device() {
    let mut facts = Facts {
        kernel_devices: vec![],
        nodes: vec![],
        devices: vec![],
        ..healthy()
    };
    let create = "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0";
    expect(&facts, Level::Problem, "device", "no RDMA device", create);
    facts.interfaces.clear();
    expect(
        &facts,
        Level::Problem,
        "device",
        "no RDMA device",
        "ip link add rx0 type dummy",
    );
    facts.rdma_rxe = Module::Missing;
    expect(
        &facts,
        Level::Problem,
        "device",
        "no rdma_rxe module",
        "linux-modules-extra",
    );
}

#[test]
fn old_kernel() {
    let mut facts = healthy();
    for (release, level) in [
        ("5.15.0-91-generic", Level::Warning),
        ("6.0.9", Level::Warning),
        ("6.1.0-13-amd64", Level::Ok),
        ("10.0", Level::Ok),
        ("", Level::Warning),
        ("nonsense", Level::Warning),
        ("99999999999999.1", Level::Warning),
    ] {
        facts.release = release.into();
        assert_eq!(diagnose(&facts)[0].level, level, "{release}");
    }
}

#[test]
fn unusable_nodes() {
    let mut facts = healthy();
    facts.devices.clear();
    let node = |facts: &mut Facts, state| facts.nodes[0].state = state;

    node(&mut facts, NodeState::Missing);
    expect(
        &facts,
        Level::Problem,
        "node",
        "uverbs0 of rxe0",
        "mknod -m 666 /dev/infiniband/uverbs0 c 231 192",
    );
    facts.container = Some("podman".into());
    expect(
        &facts,
        Level::Problem,
        "node",
        "container",
        "podman run --device /dev/infiniband/uverbs0",
    );
    facts.container = Some("lxc".into());
    expect(&facts, Level::Problem, "node", "container", "231:192");
    facts.container = None;

    node(&mut facts, NodeState::WrongDevice);
    expect(&facts, Level::Problem, "node", "231:192", "mknod");
    node(
        &mut facts,
        NodeState::Denied {
            mode: 0o600,
            uid: 0,
            gid: 0,
        },
    );
    expect(
        &facts,
        Level::Problem,
        "node",
        "mode 600",
        "chmod 666 /dev/infiniband/uverbs0",
    );
    node(
        &mut facts,
        NodeState::Denied {
            mode: 0o660,
            uid: 0,
            gid: 112,
        },
    );
    expect(
        &facts,
        Level::Problem,
        "node",
        "group 112",
        "usermod -aG 112",
    );
    node(&mut facts, NodeState::Failed("No such device".into()));
    expect(&facts, Level::Problem, "node", "No such device", "dmesg");
    facts.container = Some("lxc".into());
    expect(&facts, Level::Problem, "node", "No such device", "cgroup");
}

#[test]
fn missing_connection_manager() {
    let mut facts = healthy();
    let node = facts.connection_manager_node.take();
    facts.rdma_ucm = Module::Available;
    expect(
        &facts,
        Level::Warning,
        "rdma_cm",
        "rdma_ucm is not loaded",
        "modprobe rdma_ucm",
    );
    facts.connection_manager_node = node.map(|node| Node {
        state: NodeState::Denied {
            mode: 0o600,
            uid: 0,
            gid: 0,
        },
        ..node
    });
    expect(
        &facts,
        Level::Warning,
        "node",
        "rdma_cm of the connection manager",
        "chmod 666 /dev/infiniband/rdma_cm",
    );
}

#[test]
fn inactive_links() {
    let mut facts = healthy();
    first_port(&mut facts).active = false;
    first_port(&mut facts).state = "PORT_DOWN";
    expect(
        &facts,
        Level::Problem,
        "link",
        "eth0 is up",
        "other end of eth0",
    );
    facts.devices[0].interface.as_mut().unwrap().up = false;
    expect(
        &facts,
        Level::Problem,
        "link",
        "because eth0 is down",
        "ip link set eth0 up",
    );
    first_port(&mut facts).ethernet = false;
    expect(&facts, Level::Problem, "link", "PORT_DOWN", "opensm");
}

#[test]
fn missing_and_link_local_gids() {
    let mut facts = healthy();
    first_port(&mut facts).routable = false;
    expect(
        &facts,
        Level::Warning,
        "address",
        "link-local",
        "ip addr add 192.168.77.1/24 dev eth0",
    );
    first_port(&mut facts).gids = 0;
    expect(
        &facts,
        Level::Problem,
        "address",
        "no GID",
        "ip addr add 192.168.77.1/24 dev eth0",
    );
}

#[test]
fn small_interface_mtu() {
    let mut facts = healthy();
    facts.devices[0].interface.as_mut().unwrap().mtu = Some(1500);
    expect(&facts, Level::Warning, "mtu", "1500", "mtu 4200");
}

#[test]
fn device_that_cannot_be_opened() {
    let mut facts = healthy();
    facts.devices[0].ports = Err("opening rxe0: no".into());
    expect(&facts, Level::Problem, "context", "opening rxe0", "dmesg");
}

#[test]
fn locked_memory_limits() {
    let mut facts = healthy();
    let limit = |soft, hard| Memlock {
        soft: Some(soft),
        hard,
        exempt: false,
    };
    facts.memlock = limit(8 << 20, Some(8 << 20));
    expect(&facts, Level::Warning, "memlock", "8 MiB", "limits.d");
    facts.memlock = limit(32 << 10, None);
    expect(
        &facts,
        Level::Problem,
        "memlock",
        "32 KiB",
        "ulimit -l unlimited",
    );
    facts.memlock.exempt = true;
    assert!(
        diagnose(&facts)
            .iter()
            .all(|finding| finding.level == Level::Ok)
    );
    facts.memlock = limit(1 << 30, Some(1 << 30));
    assert!(
        diagnose(&facts)
            .iter()
            .all(|finding| finding.level == Level::Ok)
    );
}

#[test]
fn incompatible_and_missing_providers() {
    use super::super::provider::Provider;
    let provider = |name: &str, from_environment, file| Provider {
        name: name.into(),
        configured_in: if from_environment {
            "RDMAV_DRIVERS"
        } else {
            "/etc/libibverbs.d/x.driver"
        }
        .into(),
        from_environment,
        file,
    };
    let library = |providers| Libibverbs {
        path: "/usr/lib/libibverbs.so.1".into(),
        abi: Some(57),
        config: Some("/etc/libibverbs.d".into()),
        providers,
    };
    let compatible = || {
        provider(
            "rxe",
            false,
            ProviderFile::Compatible("/usr/lib/librxe-rdmav57.so".into()),
        )
    };
    let mut facts = healthy();
    facts.libibverbs = Some(library(vec![
        compatible(),
        provider("mlx5", false, ProviderFile::Missing("x".into())),
    ]));
    assert!(
        diagnose(&facts)
            .iter()
            .all(|finding| finding.level == Level::Ok)
    );

    for (abi, is_old) in [(33, true), (34, false)] {
        let provider = provider("rxe", false, ProviderFile::Compatible("x".into()));
        facts.libibverbs = Some(Libibverbs {
            abi: Some(abi),
            ..library(vec![provider])
        });
        let findings = diagnose(&facts);
        let mut found = findings.iter().map(|finding| &finding.found);
        let is_found = found.any(|found| found.contains("older than rdma-core 34"));
        assert_eq!(is_found, is_old, "{abi}");
    }

    let old = ProviderFile::OtherAbi("/opt/libours-rdmav34.so".into());
    facts.libibverbs = Some(library(vec![
        provider("/opt/libours", true, old),
        compatible(),
    ]));
    expect(
        &facts,
        Level::Warning,
        "provider",
        "-rdmav57.so",
        "unset RDMAV_DRIVERS # or name a provider for ABI 57",
    );
    let old = ProviderFile::OtherAbi("/usr/lib/librxe-rdmav34.so".into());
    let other = ProviderFile::Compatible("/opt/librxe-rdmav57.so".into());
    facts.libibverbs = Some(library(vec![
        provider("rxe", false, old),
        provider("/opt/librxe", true, other),
    ]));
    expect(
        &facts,
        Level::Warning,
        "provider",
        "librxe-rdmav34.so",
        "apt install --reinstall ibverbs-providers",
    );

    let missing = ProviderFile::Missing("/opt/libours-rdmav57.so".into());
    facts.libibverbs = Some(library(vec![
        provider("/opt/libours", true, missing),
        compatible(),
    ]));
    expect(
        &facts,
        Level::Warning,
        "provider",
        "/opt/libours-rdmav57.so",
        "unset RDMAV_DRIVERS",
    );

    facts.libibverbs = Some(library(vec![]));
    expect(
        &facts,
        Level::Warning,
        "provider",
        "will not find rxe0",
        "ibverbs-providers",
    );
}

#[test]
fn libmlx5_in_use_is_reported() {
    let library = |path: &str, is_ours| {
        let path = path.into();
        Some(Library { path, is_ours })
    };
    let mut facts = healthy();
    let finding = |facts: &Facts| {
        let mut findings = diagnose(facts).into_iter();
        findings.find(|finding| finding.check == "libmlx5")
    };
    assert_eq!(finding(&facts), None);
    for (linked, provider, expected) in [
        (
            library("/a", false),
            library("/a", false),
            "/a, rdma-core's",
        ),
        (
            library("/b", true),
            library("/b", true),
            "/b, ringverbs in libmlx5's place",
        ),
        (library("/c", false), None, "/c, rdma-core's"),
        (
            None,
            library("/d", true),
            "/d, ringverbs in libmlx5's place",
        ),
    ] {
        facts.libmlx5 = Libmlx5 { linked, provider };
        let finding = finding(&facts).unwrap();
        assert_eq!((finding.level, &*finding.found), (Level::Ok, expected));
    }
    facts.libmlx5 = Libmlx5 {
        linked: library("/e", true),
        provider: library("/f", false),
    };
    expect(
        &facts,
        Level::Warning,
        "libmlx5",
        "/e, ringverbs in libmlx5's place, but libibverbs loads /f, rdma-core's",
        "--replace-libmlx5",
    );
}
