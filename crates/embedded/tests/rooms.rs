//! The rooms of the crate: which folder may use which, and how many files import each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The rooms, each with those below it. Files in no room are the ground, below all.
const ROOMS: [(&str, &[&str]); 4] = [
    ("driver", &[]),
    ("wires", &[]),
    ("cm", &["wires"]),
    ("runtime", &["cm", "driver", "wires"]),
];
/// Most files that import each other in a circle.
const MAX_CIRCLE: usize = 10;

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn collect(folder: &Path, modules: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, modules);
            continue;
        }
        let name = path.strip_prefix(source()).unwrap().with_extension("");
        let name = name.to_str().unwrap().replace('/', "::");
        let name = name.trim_end_matches("::mod").to_owned();
        let is_test = name.ends_with("tests") || name == "lib" || name == "hostile";
        if !is_test {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
            modules.insert(name, code.to_owned());
        }
    }
}

/// Returns the paths that begin with `start` in code, also those in one pair of braces.
fn paths(code: &str, start: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    for (at, _) in code.match_indices(start) {
        let rest = &code[at + start.len()..];
        match rest.strip_prefix('{') {
            Some(list) => {
                let list = list.split('}').next().unwrap();
                found.extend(list.split(',').map(|it| it.trim().to_owned()));
            }
            None => found.push(rest.chars().take_while(|c| is_part(*c)).collect()),
        }
    }
    found
}

/// Returns the modules that each module uses.
fn uses() -> BTreeMap<String, BTreeSet<String>> {
    let mut modules = BTreeMap::new();
    collect(&source(), &mut modules);
    assert!(modules.len() > 50, "{}", modules.len());
    let resolve = |path: &str| {
        let mut path = path;
        loop {
            if modules.contains_key(path) {
                return Some(path.to_owned());
            }
            path = path.rsplit_once("::")?.0;
        }
    };
    let of = |(name, code): (&String, &String)| {
        let parent = name.rsplit_once("::").map_or("", |it| it.0);
        let mut used: BTreeSet<String> = paths(code, "crate::")
            .iter()
            .filter_map(|it| resolve(it))
            .collect();
        let beside = paths(code, "super::");
        let beside = beside.iter().map(|it| format!("{parent}::{it}"));
        used.extend(beside.filter_map(|it| resolve(it.trim_start_matches("::"))));
        used.remove(name);
        (name.clone(), used)
    };
    modules.iter().map(of).collect()
}

fn room(module: &str) -> Option<&'static (&'static str, &'static [&'static str])> {
    let folder = module.split("::").next().unwrap();
    ROOMS.iter().find(|(name, _)| *name == folder)
}

#[test]
fn no_arrow_points_up() {
    let uses = uses();
    for (name, _) in ROOMS {
        assert!(uses.contains_key(name), "there is no room {name}");
    }
    let mut up = Vec::new();
    for (module, used) in &uses {
        let from = room(module);
        for other in used {
            let Some((to, _)) = room(other) else {
                continue;
            };
            if !from.is_some_and(|(name, below)| name == to || below.contains(to)) {
                up.push(format!("{module} uses {other}"));
            }
        }
    }
    assert!(up.is_empty(), "{up:#?}");
}

#[test]
fn circles_are_small() {
    let uses = uses();
    let reach = |from: &String| {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(module) = open.pop() {
            for next in &uses[module] {
                if seen.insert(next) {
                    open.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<_, _> = uses.keys().map(|it| (it, reach(it))).collect();
    for module in uses.keys() {
        let circle = |other: &&&String| reached[**other].contains(module);
        let circle: Vec<_> = reached[module].iter().filter(circle).collect();
        assert!(circle.len() <= MAX_CIRCLE, "{module}: {circle:?}");
    }
}

/// The error of a refused command is made of what broke which rule, not of an error number.
#[test]
fn errors_of_the_driver_have_causes() {
    let mut modules = BTreeMap::new();
    collect(&source(), &mut modules);
    // Events are read from files, not by commands.
    let may = ["driver::cause", "driver::event"];
    let mut bare = Vec::new();
    for (module, code) in modules.iter().filter(|(name, _)| room(name).is_some()) {
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
    let mut modules = BTreeMap::new();
    collect(&source(), &mut modules);
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
