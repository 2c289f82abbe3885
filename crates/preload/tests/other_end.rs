//! The reason of the other end in another process: the requester's report names the rule that the
//! peer has found broken, which a NAK does not say.

#[macro_use]
mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use common::*;

/// A mistake of `c/other_end.c`, and parts of what the client is told of the server.
const MISTAKES: [(&str, &[&str]); 4] = [
    (
        "key",
        &[
            "request of the peer refused: RDMA write of 64 bytes",
            "no key has this number",
        ],
    ),
    (
        "right",
        &[
            "request of the peer refused: RDMA write of 64 bytes",
            "the key has LOCAL_READ and LOCAL_WRITE, not REMOTE_WRITE",
        ],
    ),
    (
        "no-receive",
        &["(RTS): request of the peer refused: no receive is posted, and none was since"],
    ),
    ("init", &[" is in INIT, and connected to no peer"]),
];

/// One end.
struct End {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl End {
    fn start(mut command: Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line
    }

    fn write(&mut self, line: &str) {
        self.input.write_all(line.as_bytes()).unwrap();
    }

    /// Returns what it writes to standard error until it ends, well.
    fn said(mut self) -> String {
        drop(self.input);
        let mut said = String::new();
        let mut errors = self.child.stderr.take().unwrap();
        errors.read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
        said
    }
}

/// Where the two ends are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Two addresses, and the processes of one.
    Addresses,
    Address,
    /// A directory, with this kind of port.
    Directory(&'static str),
}

impl Place {
    /// Returns the devices of both ends.
    fn devices(self) -> [String; 2] {
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = |number: u8| format!("roce:127.{number}.{high}.{low}");
        match self {
            Self::Addresses => [51, 52].map(address),
            Self::Address => [53, 53].map(address),
            Self::Directory(kind) => [kind; 2].map(str::to_owned),
        }
    }
}

/// Lets the client make a mistake. Returns what both ends write; the server explains causes if
/// `both` is true.
fn mistaken(
    world: &World,
    program: &Path,
    place: Place,
    (mistake, both, format): (&str, bool, &str),
) -> [String; 2] {
    let [server, client] = place.devices();
    let start = |role: &str, devices: &str, explains: bool| {
        let mut command = world.command(&format!("{} {role} {mistake}", program.display()));
        command.env("RINGVERBS_EMBEDDED", devices);
        if explains {
            command.env("RINGVERBS_EXPLAIN", "1");
            command.env("RINGVERBS_EXPLAIN_FORMAT", format);
        }
        End::start(command)
    };
    let mut server = start("server", &server, both);
    let mut client = start("client", &client, true);
    client.write(&server.line());
    server.write(&client.line());
    assert_eq!(server.line(), "ready\n");
    client.write("ready\n");
    let client = client.said();
    [server.said(), client]
}

fn names_the_rule_at_the_peer(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let options = &["-g", "-libverbs"];
    let Some(program) = compiled("cc", "other_end.c", options, &world.directory) else {
        return;
    };
    for place in [
        Place::Addresses,
        Place::Address,
        Place::Directory("roce"),
        Place::Directory("ib"),
    ] {
        for (mistake, parts) in MISTAKES {
            let [_, said] = mistaken(&world, &program, place, (mistake, true, "text"));
            let name = format!("{place:?} {mistake}: {said}");
            let lines: Vec<&str> = said
                .lines()
                .filter(|it| it.contains(": the other end says: "))
                .collect();
            let [line] = lines[..] else {
                panic!("{name}");
            };
            assert!(
                line.starts_with("ringverbs: mlx5_0: queue pair 0x"),
                "{name}"
            );
            assert!(line.contains(", wr_id 0x5e: "), "{name}");
            for part in parts {
                assert!(line.contains(part), "no {part}: {name}");
            }
        }
    }
    world.finish();
}

/// A peer that is not run with the option tells nothing, and the client says so.
fn both_ends_take_part(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let options = &["-g", "-libverbs"];
    let Some(program) = compiled("cc", "other_end.c", options, &world.directory) else {
        return;
    };
    let place = Place::Addresses;
    let [server, client] = mistaken(&world, &program, place, ("key", false, "text"));
    assert_eq!(server, "");
    let said = "the other end has not said why: queue pair 0x";
    assert!(client.contains(said), "{client}");
    let [_, client] = mistaken(&world, &program, place, ("key", true, "json"));
    let lines = client.lines().map(|it| serde_json::from_str(it).unwrap());
    let found: Vec<serde_json::Value> = lines
        .filter(|it: &serde_json::Value| it["type"] == "other_end")
        .collect();
    let [answer] = &found[..] else {
        panic!("{client}");
    };
    assert_eq!(
        (&answer["version"], &answer["device"]),
        (&1.into(), &"mlx5_0".into())
    );
    assert_eq!(
        (&answer["wr_id"], &answer["operation"]),
        (&"0x5e".into(), &"RDMA write".into())
    );
    assert!(answer["queue_pair"].is_u64() && answer["peer"].is_u64());
    assert!(answer["process"].is_u64());
    let message = answer["message"].as_str().unwrap();
    assert!(message.contains("no key has this number"), "{client}");
    world.finish();
}

with_each_provider! {
    reasons_of_other_processes: names_the_rule_at_the_peer;
    a_peer_without_the_option_tells_nothing: both_ends_take_part;
}
