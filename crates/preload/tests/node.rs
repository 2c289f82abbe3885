//! What devices say that they are (`RINGVERBS_CARD`), and the node that programs see
//! (`RINGVERBS_NODE`).

#[macro_use]
mod common;

use std::fs;

use common::*;

/// Two devices below one bridge, of which the second has no interface, and a GPU.
const NODE: &str = "ringverbs-node 1\n\
    device\tpci0000:16/0000:16:01.0/0000:17:00.0\t0\t0-1\teth7\n\
    device\tpci0000:16/0000:16:01.0/0000:17:00.1\t-1\t\t\n\
    link\tbus/pci/devices/0000:19:00.0\t../../../devices/pci0000:18/0000:18:01.0/0000:19:00.0\n\
    text\tdevices/pci0000:18/0000:18:01.0/0000:19:00.0/class\t0x030200\n\
    text\tdevices/pci0000:18/0000:18:01.0/pci_bus/0000:19/cpulistaffinity\t0\n\
    link\tclass/pci_bus/0000:19\t../../devices/pci0000:18/0000:18:01.0/pci_bus/0000:19\n\
    text\tdevices/system/node/online\t0-2\n\
    mask\tdevices/system/node/node0/cpumap\t0-1\n";

fn facts(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce,ib");
    let libraries = ["-libverbs", "-lmlx5"];
    let Some(program) = compiled("cc", "node.c", &libraries, &world.directory) else {
        return;
    };
    let said = |cards: &str, node: Option<&str>| {
        let argument = if node.is_some() { " node" } else { "" };
        let mut command = world.command(&format!("{}{argument}", program.display()));
        command.env("RINGVERBS_CARD", cards);
        if let Some(lines) = node {
            let file = world.directory.join("node-lines");
            fs::write(&file, lines).unwrap();
            command.env("RINGVERBS_NODE", file);
        }
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.success(),
            text(&output.stdout) + &text(&output.stderr),
        )
    };
    let (good, text) = said("cx7,bf3", None);
    assert!(good, "{text}");
    for line in [
        "mlx5_0: 4129 0 28.42.1000 0x25321c36",
        "mlx5_1: 41692 1 32.43.1014 0x1321c36",
        "limits: 131072 16777216 16777216 8388608 8388608 2097152",
        "speed: 128",
        "hca_type: MT4129",
        "board_id: MT_0000000884",
        "rate: 400 Gb/sec (4X NDR)",
        "rate: 200 Gb/sec (4X HDR)",
        "device: 0xa2dc",
        "max_link_speed: 32.0 GT/s PCIe",
        "place: /sys/devices/ringverbs/ffff:00:01.0",
        "0: lo",
        "resource: 13 lines",
        "driver: /sys/bus/pci/drivers/mlx5_core",
        "config: b3 15 21 10",
        "config: b3 15 dc a2",
        "function: ffff:00:00.0",
        "function: ffff:00:01.0",
    ] {
        assert!(text.contains(&format!("{line}\n")), "{line}: {text}");
    }
    // Those of the host are listed, too.
    for entry in fs::read_dir("/sys/bus/pci/devices").into_iter().flatten() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(text.contains(&format!("function: {name}\n")), "{text}");
    }
    let host = fs::read_to_string("/proc/self/status").unwrap();
    for line in host.lines().filter(|it| it.starts_with("Mems_allowed")) {
        assert!(text.contains(&format!("status: {line}\n")), "{text}");
    }
    let (_, text) = said("cx5", None);
    assert!(text.contains("limits: 262144 "), "{text}");
    if provider == Provider::Stock {
        assert!(text.contains("log_max_qp: 18\n"), "{text}");
    }
    let (good, text) = said("cx6dx", Some(NODE));
    assert!(good, "{text}");
    for line in [
        "place: /sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0",
        "place: /sys/devices/pci0000:16/0000:16:01.0/0000:17:00.1",
        "numa_node: 0",
        "numa_node: -1",
        "local_cpulist: 0-1",
        "0: eth7",
        "gpu: /sys/devices/pci0000:18/0000:18:01.0/0000:19:00.0",
        "class: 0x030200",
        "cpumap: 3",
        "status: Mems_allowed_list:\t0-2",
    ] {
        assert!(text.contains(&format!("{line}\n")), "{line}: {text}");
    }
    // As wide as the host's.
    let mask = text
        .lines()
        .find_map(|it| it.strip_prefix("status: Mems_allowed:\t"));
    let wide = host
        .lines()
        .find_map(|it| it.strip_prefix("Mems_allowed:\t"));
    assert_eq!(mask.map(str::len), wide.map(str::len), "{text}");
    assert!(mask.unwrap().ends_with('7'), "{text}");
    assert!(text.contains("status: Pid:\t"), "{text}");
    assert!(
        text.ends_with("function: 0000:17:00.0\nfunction: 0000:17:00.1\nfunction: 0000:19:00.0\n"),
        "{text}"
    );
    for (cards, node, expected) in [
        (
            "cx8",
            None,
            "RINGVERBS_CARD: there is no card \"cx8\"; use cx5, ",
        ),
        ("cx5,cx5,cx5", None, "RINGVERBS_CARD: not one card"),
        ("cx5", Some("nothing"), "RINGVERBS_NODE: "),
    ] {
        let (good, text) = said(cards, node);
        assert!(!good && text.contains(expected), "{text}");
    }
    world.finish();
}

with_each_provider! {
    devices_say_what_they_are: facts;
}
