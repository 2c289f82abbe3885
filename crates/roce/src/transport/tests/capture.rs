//! Captures dissected by tshark; skipped where it is not installed.

use std::fs::File;
use std::process::Command;

use super::*;
use crate::packet::{Grh, Path};
use crate::pcap::Capture;

/// Runs all operations of a service between two HCAs.
fn run_all_operations(world: &mut World, config: &QpConfig, change: impl Fn(&mut Path)) {
    for (local, remote) in [((0, 100), (1, 200)), ((1, 200), (0, 100))] {
        let hca = &mut world.hcas[local.0];
        let mut path = hca.path_to(remote.0);
        change(&mut path);
        let config = QpConfig {
            path: Some(path),
            remote_qpn: remote.1,
            ..config.clone()
        };
        hca.transport.create(local.1, config.clone()).unwrap();
        hca.raise(local.1, &config, world.now);
        open(hca, 1 << 16);
    }
    for id in 0..3 {
        world.hcas[1].post_recv(200, id, 0, 5000);
    }
    let mut all = vec![
        Operation::Send,
        Operation::SendImm,
        Operation::Write,
        Operation::WriteImm,
    ];
    if config.service == Service::Rc {
        all.extend([
            Operation::Read,
            ADD,
            Operation::CompareSwap {
                compare: 1,
                swap: 2,
            },
        ]);
    }
    for (id, operation) in all.into_iter().enumerate() {
        world.hcas[0].post_send(100, work(id as u64, operation, 0, 3001, 0));
    }
    world.settle(SECOND);
    assert!(
        statuses(&mut world.hcas[0], 100)
            .iter()
            .all(|s| s.1 == Status::Success)
    );
    for (index, qpn) in [(0, 100), (1, 200)] {
        let hca = &mut world.hcas[index];
        hca.transport.destroy(qpn);
        *hca.host.queues(qpn) = super::super::model::Queues {
            qpn,
            ..Default::default()
        };
    }
}

const ADD: Operation = Operation::FetchAdd { add: 1 };

/// Returns the fields that tshark prints for each frame of a capture.
fn dissect(
    name: &str,
    fields: &[&str],
    run: impl FnOnce(&mut dyn FnMut(&World)),
) -> Option<Vec<String>> {
    let path = std::env::temp_dir().join(format!("ringverbs-{}-{name}.pcapng", std::process::id()));
    let file = File::create(&path).unwrap();
    let capture =
        std::cell::RefCell::new(Some(Capture::new(std::io::BufWriter::new(file)).unwrap()));
    run(&mut |world| world.fabric.capture(capture.borrow_mut().take()));
    let mut command = Command::new("tshark");
    command
        .arg("-n")
        .arg("-r")
        .arg(&path)
        .args(["-T", "fields", "-E", "separator=;"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output();
    let _ = std::fs::remove_file(&path);
    let Ok(output) = output else {
        testing::skip!(missing: "tshark", "tshark is not installed");
        return None;
    };
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(
        String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect(),
    )
}

const FIELDS: [&str; 7] = [
    "frame.protocols",
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.reth.dmalen",
    "infiniband.aeth.msn",
    "infiniband.payload",
    "_ws.malformed",
];

/// Opcodes of the requests of [`converse`] for RC with 3001 bytes and an MTU of 1024.
const RC_REQUESTS: [u8; 15] = [0, 1, 2, 0, 1, 3, 6, 7, 8, 6, 7, 9, 0x0c, 0x14, 0x13];

#[test]
fn tshark_reads_roce_v2() {
    type Change = fn(&mut Path);
    let v4: Change = |_| {};
    let v6: Change = |path| {
        let grh = path.grh.unwrap();
        let gid = |mut gid: [u8; 16]| {
            gid[..12].copy_from_slice(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            gid
        };
        path.grh = Some(Grh {
            sgid: gid(grh.sgid),
            dgid: gid(grh.dgid),
            ..grh
        });
    };
    for (kind, name, change, protocols) in [
        (
            LinkKind::Ethernet,
            "v4",
            v4,
            "eth:ethertype:ip:udp:infiniband",
        ),
        (
            LinkKind::Ethernet,
            "v6",
            v6,
            "eth:ethertype:ipv6:udp:infiniband",
        ),
        (LinkKind::Ip, "ip-v4", v4, "raw:ip:udp:infiniband"),
        (LinkKind::Ip, "ip-v6", v6, "raw:ipv6:udp:infiniband"),
    ] {
        let lines = dissect(name, &FIELDS, |start| {
            let mut world = World::new(2, kind, 1 << 16, 1);
            start(&world);
            run_all_operations(&mut world, &QpConfig::default(), change);
            let uc = QpConfig {
                service: Service::Uc,
                ..QpConfig::default()
            };
            run_all_operations(&mut world, &uc, change);
            world.fabric.capture(None);
        });
        let Some(lines) = lines else { return };
        let mut requests = Vec::new();
        let mut responses = 0;
        for line in &lines {
            let fields: Vec<&str> = line.split(';').collect();
            assert!(fields[0].starts_with(protocols), "{line}");
            assert_eq!(fields[6], "", "malformed: {line}");
            let opcode: u8 = fields[1].parse().unwrap();
            match fields[2] {
                "0x0000c8" => requests.push(opcode),
                "0x000064" => responses += 1,
                other => panic!("destination {other}"),
            }
            if opcode & 0x1f == 6 {
                assert_eq!(fields[3], "3001");
            }
        }
        let uc = RC_REQUESTS[..12].iter().map(|o| o | 0x20);
        assert_eq!(
            requests,
            RC_REQUESTS.into_iter().chain(uc).collect::<Vec<_>>()
        );
        // Acknowledgements, three packets of read response, two atomics.
        assert!(responses >= 6, "{responses}");
    }
}

#[test]
fn tshark_reads_infiniband() {
    let lines = dissect("ib", &FIELDS, |start| {
        let mut world = World::new(2, LinkKind::Ib, 1 << 16, 1);
        start(&world);
        run_all_operations(&mut world, &QpConfig::default(), |_| {});
        run_all_operations(&mut world, &QpConfig::default(), |path| {
            let (sgid, dgid) = ([0xfe; 16], [0xfd; 16]);
            path.grh = Some(Grh {
                sgid,
                dgid,
                ..Grh::default()
            });
        });
        world.fabric.capture(None);
    });
    let Some(lines) = lines else { return };
    let mut requests = Vec::new();
    for line in &lines {
        let fields: Vec<&str> = line.split(';').collect();
        assert!(fields[0].contains("infiniband"), "{line}");
        assert_eq!(fields[6], "", "malformed: {line}");
        if fields[2] == "0x0000c8" {
            requests.push(fields[1].parse::<u8>().unwrap());
        }
    }
    assert_eq!(requests, RC_REQUESTS.repeat(2));
}
