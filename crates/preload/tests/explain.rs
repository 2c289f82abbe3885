//! The reasons that are reported for mistakes of a program, once each, with both sides of what
//! was compared.

#[macro_use]
mod common;

use common::*;

/// A mistake of `c/faults.c`, parts of the line that explains it, and the number of lines.
const MISTAKES: [(&str, &[&str], usize); 10] = [
    ("well", &[], 0),
    (
        "right",
        &[
            "request of the peer refused: RDMA write of 64 bytes",
            "the key has LOCAL_READ and LOCAL_WRITE and REMOTE_READ, not REMOTE_WRITE",
        ],
        1,
    ),
    (
        "beyond",
        &["RDMA read of 64 bytes", "the key is for 4096 bytes from"],
        1,
    ),
    (
        "local",
        &[
            "work request failed: its local buffers",
            "the key is for 4096 bytes",
        ],
        1,
    ),
    (
        "key",
        &["request of the peer refused", "no key has this number"],
        1,
    ),
    (
        "no-receive",
        &["the peer had no receive posted", "(RNR)"],
        1,
    ),
    (
        "short",
        &["a message of 64 bytes or more does not fit into the receive of 16"],
        1,
    ),
    (
        "ud-qkey",
        &["packet dropped: Q_Key 0x11 is not 0x22 of the queue pair"],
        1,
    ),
    ("ud-none", &["packet dropped: no receive is posted"], 1),
    (
        "busy",
        &[
            "protection domain",
            "is used by other objects",
            "(os error 16)",
        ],
        1,
    ),
];

fn explains_mistakes(provider: Provider) {
    let _turn = turn();
    for port in ["roce", "ib"] {
        let world = World::new(provider, port);
        let Some(program) = compiled("cc", "faults.c", &["-libverbs"], &world.directory) else {
            return;
        };
        let file = world.directory.join("explanations");
        for (mistake, parts, count) in MISTAKES {
            let line = format!("{} {mistake}", program.display());
            let run = |target: Option<&str>| {
                let mut command = world.command(&line);
                if let Some(target) = target {
                    command.env("RINGVERBS_EXPLAIN", target);
                }
                let output = command.output().unwrap();
                assert!(output.status.success(), "{port} {mistake}: {output:?}");
                String::from_utf8(output.stderr).unwrap()
            };
            assert_eq!(run(None), "", "{port} {mistake}");
            let printed = run(Some("1"));
            assert_eq!(run(Some(file.to_str().unwrap())), "", "{port} {mistake}");
            let written = std::fs::read_to_string(&file).unwrap();
            std::fs::remove_file(&file).unwrap();
            for said in [printed, written] {
                // A NAK may arrive before the queue pair, which is its own peer, is in error.
                let lines: Vec<&str> = (said.lines())
                    .filter(|line| !line.contains("failed: the peer refused it"))
                    .collect();
                assert_eq!(lines.len(), count, "{port} {mistake}: {said}");
                let begins = |line: &&str| line.starts_with("ringverbs: mlx5_0: ");
                assert!(lines.iter().all(begins), "{port} {mistake}: {said}");
                for part in parts {
                    assert!(lines[0].contains(part), "{port} {mistake}: {said}");
                }
            }
        }
        world.finish();
    }
}

with_each_provider! {
    mistakes_are_explained: explains_mistakes;
}
