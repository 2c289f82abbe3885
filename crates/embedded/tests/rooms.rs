//! The rooms of the crate: which folder may use which, and how many files import each other.

use std::collections::BTreeSet;

use testing::modules::Modules;

/// The rooms, each with those below it. Files in no room are the ground, below all.
const ROOMS: [(&str, &[&str]); 5] = [
    ("driver", &[]),
    ("wires", &[]),
    ("cm", &["wires"]),
    ("runtime", &["cm", "driver", "wires"]),
    ("sysfs", &["runtime"]),
];
/// Most files that import each other in a circle.
const MAX_CIRCLE: usize = 10;

fn modules() -> Modules {
    let modules = Modules::read(env!("CARGO_MANIFEST_DIR"), &["hostile"]);
    assert!(modules.text.len() > 50, "{}", modules.text.len());
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

/// The error of a refused command is made of what broke which rule, not of an error number.
#[test]
fn errors_of_the_driver_have_causes() {
    let modules = modules().text;
    // Events are read from files, not by commands.
    let may = ["driver::cause", "driver::event"];
    let mut bare = Vec::new();
    for (module, code) in &modules {
        if !module.starts_with("driver") || may.contains(&module.as_str()) {
            continue;
        }
        for (number, line) in code.lines().enumerate() {
            let makes = ["libc::E", "Errno::new", "refuse(libc"];
            if makes.iter().any(|text| line.contains(text)) {
                bare.push(format!("{module}, line {}: {line}", number + 1));
            }
        }
    }
    assert!(bare.is_empty(), "{bare:#?}");
}

/// Functions that receive management datagrams: none drops one without a cause.
const RECEIVERS: [&str; 8] = [
    "agent_for",
    "receive",
    "receive_management",
    "handle_request",
    "handle_response",
    "handle_message",
    "acknowledge_unknown",
    "queue",
];

/// Returns the bodies of the functions of a name in a module.
fn bodies<'a>(code: &'a str, name: &str) -> Vec<&'a str> {
    let start = format!("fn {name}(");
    let begins = code.match_indices(&start).map(|(at, _)| &code[at..]);
    // Functions of an `impl` or of the module itself.
    let end = |it: &str| {
        it.find("\n    }\n")
            .min(it.find("\n}\n"))
            .unwrap_or(it.len())
    };
    begins.map(|it| &it[..end(it)]).collect()
}

#[test]
fn drops_of_management_datagrams_have_causes() {
    let modules = modules().text;
    let mut bare = Vec::new();
    let mut found = BTreeSet::new();
    for module in ["cm::machine", "wires::agent", "wires::segment"] {
        for name in RECEIVERS {
            for body in bodies(&modules[module], name) {
                found.insert(name);
                let drops = [
                    "return;",
                    "return None;",
                    "_ => {}",
                    "_ => return",
                    "tracing::",
                ];
                let lines = body
                    .lines()
                    .filter(|line| drops.iter().any(|it| line.contains(it)));
                bare.extend(lines.map(|line| format!("{module}, {name}: {line}")));
            }
        }
    }
    // A connection that is looked up where it is known.
    bare.retain(|it| it.trim_end() != "cm::machine, handle_message:             return;");
    assert!(bare.is_empty(), "{bare:#?}");
    assert_eq!(found.len(), RECEIVERS.len(), "{found:?}");
    let text = &modules["management"];
    let list = variants(text, "DropCause");
    assert!(list.len() > 8, "{list:?}");
    for variant in list {
        let path = format!("DropCause::{variant}");
        let made = |(name, code): (&String, &String)| *name != "management" && code.contains(&path);
        assert!(modules.iter().any(made), "nothing makes {path}");
    }
}

/// Returns the names of the variants of an enum.
fn variants(code: &str, name: &str) -> Vec<String> {
    let body = code.split_once(&format!("enum {name} {{\n")).unwrap().1;
    let body = body.split("\n}\n").next().unwrap();
    let lines = body.lines().filter_map(|it| it.strip_prefix("    "));
    let is_variant = |it: &&str| it.starts_with(|c: char| c.is_ascii_uppercase());
    let names = lines.filter(is_variant);
    let end = |c: char| !c.is_ascii_alphanumeric();
    names
        .map(|it| it.split(end).next().unwrap().to_owned())
        .collect()
}
