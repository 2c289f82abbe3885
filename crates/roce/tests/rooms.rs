//! The rooms of the crate: which folder may use which, and how many files import each other;
//! and that no packet is dropped without a cause.

use testing::modules::Modules;

/// The rooms, each with those below it. All other files are below them.
const ROOMS: [(&str, &[&str]); 4] = [
    ("packet", &[]),
    ("pcap", &["packet"]),
    ("fabric", &["packet", "pcap"]),
    ("transport", &["fabric", "packet", "pcap"]),
];
/// Most files that import each other in a circle.
const MAX_CIRCLE: usize = 10;

/// Functions that get a packet and need not return why it is dropped: they read it, count it,
/// or answer it (a duplicate, which its caller drops), or drop what others return.
const CONSUMERS: [&str; 15] = [
    "accepts_cnp",
    "acknowledge_if_asked",
    "back",
    "deliver",
    "duplicate",
    "executes_next",
    "is_from_peer",
    "is_own",
    "multicast",
    "of",
    "process_mark",
    "store",
    "take_response",
    "target",
    "xrc_srqn",
];

fn modules() -> Modules {
    let modules = Modules::read(env!("CARGO_MANIFEST_DIR"), &[]);
    assert!(modules.text.len() > 30, "{}", modules.text.len());
    modules
}

#[test]
fn no_arrow_points_up() {
    modules().assert_no_arrow_points_up(&ROOMS);
}

#[test]
fn circles_are_small() {
    modules().assert_circles_are_small(MAX_CIRCLE);
}

#[test]
fn functions_that_drop_packets_return_causes() {
    let modules = modules();
    let mut without = Vec::new();
    let mut found = 0;
    for (module, code) in &modules.text {
        if !module.starts_with("transport::") && module != "transport" {
            continue;
        }
        for (at, _) in code.match_indices("fn ") {
            let signature = &code[at + 3..];
            let signature = signature.split(" {").next().unwrap();
            let takes = signature.contains("View<") && !signature.contains(';');
            if !takes || ["hostile", "model"].iter().any(|it| module.ends_with(it)) {
                continue;
            }
            found += 1;
            let causes = ["DropCause", "Refusal"];
            let name = signature.split(['<', '(']).next().unwrap();
            if !causes.iter().any(|it| signature.contains(it)) && !CONSUMERS.contains(&name) {
                without.push(format!("{module}: {name}"));
            }
        }
    }
    assert!(found > 20, "{found}");
    assert!(without.is_empty(), "{without:#?}");
    // The counters of drops derive from the causes.
    let io = &modules.text["transport::io"];
    let (_, drop) = io.split_once("fn drop_packet").unwrap();
    let body = drop.split("\n    }\n").next().unwrap();
    assert!(body.contains("cause.counter(") && body.contains("host.report("));
}
