//! Which modules of a crate use which, for tests of its structure.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The modules of a crate, without its root and its tests.
pub struct Modules {
    /// The text of each module, without its tests, by path: `folder::file`.
    pub text: BTreeMap<String, String>,
    /// The modules that each module uses.
    pub uses: BTreeMap<String, BTreeSet<String>>,
}

impl Modules {
    /// Reads the crate in a folder. `excluded` are modules, with those inside them.
    pub fn read(folder: &str, excluded: &[&str]) -> Self {
        let source = Path::new(folder).join("src");
        let mut text = BTreeMap::new();
        collect(&source, &source, &mut text);
        let is_excluded = |name: &str| {
            let first = name.split("::").next().unwrap();
            let is_test = name.split("::").any(|part| part == "tests");
            is_test || name == "lib" || excluded.contains(&first)
        };
        text.retain(|name, _| !is_excluded(name));
        let uses = text.iter().map(|module| uses(&text, module)).collect();
        Self { text, uses }
    }

    /// Asserts that the rooms exist, and that no module uses a module of a room which it may not
    /// use. `rooms` are folders or files with the rooms that each may use; all others are below
    /// them.
    pub fn assert_no_arrow_points_up(&self, rooms: &[(&str, &[&str])]) {
        for (name, _) in rooms {
            assert!(self.uses.contains_key(*name), "there is no room {name}");
        }
        let upwards = self.uses_upwards(rooms);
        assert!(upwards.is_empty(), "{upwards:#?}");
    }

    fn uses_upwards(&self, rooms: &[(&str, &[&str])]) -> Vec<String> {
        let room = |module: &str| {
            let first = module.split("::").next().unwrap();
            rooms.iter().find(|(name, _)| *name == first)
        };
        let mut upwards = Vec::new();
        for (module, used) in &self.uses {
            let from = room(module);
            for other in used {
                let Some((to, _)) = room(other) else {
                    continue;
                };
                if !from.is_some_and(|(name, below)| name == to || below.contains(to)) {
                    upwards.push(format!("{module} uses {other}"));
                }
            }
        }
        upwards
    }

    /// Asserts that at most `limit` modules use each other in a circle.
    pub fn assert_circles_are_small(&self, limit: usize) {
        let circle = self.largest_circle();
        assert!(circle.len() <= limit, "{circle:?}");
    }

    /// Returns the largest set of modules that all use each other, by others or directly.
    fn largest_circle(&self) -> Vec<&String> {
        let reach = |from: &String| {
            let mut seen = BTreeSet::new();
            let mut open = vec![from];
            while let Some(module) = open.pop() {
                for next in &self.uses[module] {
                    if seen.insert(next) {
                        open.push(next);
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<_, _> = self.uses.keys().map(|it| (it, reach(it))).collect();
        let circle = |module: &String| -> Vec<&String> {
            let others = reached[module].iter().copied();
            others.filter(|it| reached[it].contains(module)).collect()
        };
        let circles = self.uses.keys().map(circle);
        circles.max_by_key(Vec::len).unwrap_or_default()
    }
}

/// Returns the text of a file without its module of tests, which is its last.
pub fn without_tests(text: &str) -> &str {
    let starts = [
        "#[cfg(test)]\nmod tests",
        "#[cfg(test)]\npub(crate) mod tests",
    ];
    let ends = starts.iter().filter_map(|start| text.find(start));
    &text[..ends.min().unwrap_or(text.len())]
}

fn collect(source: &Path, folder: &Path, modules: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(source, &path, modules);
            continue;
        }
        let name = path.strip_prefix(source).unwrap().with_extension("");
        let name = name.to_str().unwrap().replace('/', "::");
        let name = name.trim_end_matches("::mod").to_owned();
        let text = fs::read_to_string(&path).unwrap();
        modules.insert(name, without_tests(&text).to_owned());
    }
}

/// Returns the modules that a module uses.
fn uses(
    modules: &BTreeMap<String, String>,
    (name, code): (&String, &String),
) -> (String, BTreeSet<String>) {
    let resolve = |path: &str| {
        let mut path = path;
        loop {
            if modules.contains_key(path) {
                return Some(path.to_owned());
            }
            path = path.rsplit_once("::")?.0;
        }
    };
    let parent = name.rsplit_once("::").map_or("", |it| it.0);
    let absolute = paths(code, "crate::");
    let beside = paths(code, "super::");
    let beside = beside.iter().map(|it| format!("{parent}::{it}"));
    let mut used: BTreeSet<String> = absolute
        .into_iter()
        .chain(beside)
        .filter_map(|it| resolve(it.trim_start_matches("::")))
        .collect();
    used.remove(name);
    (name.clone(), used)
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
