//! The guide and the examples are what they are said to be. That the guide's
//! snippets compile is a matter of `cargo test --doc`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The examples: name and text.
fn examples() -> BTreeMap<String, String> {
    let folder = "crates/ringverbs/examples";
    let files = fs::read_dir(root().join(folder)).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names
        .map(|name| (name.clone(), read(&format!("{folder}/{name}"))))
        .collect()
}

/// The blocks of a page: the line in front of each, its label, its text.
fn blocks(page: &str) -> Vec<(&str, &str, String)> {
    let mut blocks = Vec::new();
    let mut before = "";
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(label) = line.strip_prefix("```") else {
            if !line.is_empty() {
                before = line;
            }
            continue;
        };
        let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        blocks.push((before, label, text.join("\n") + "\n"));
    }
    blocks
}

/// Nothing in Rust is kept from being compiled, and all that claims to be an
/// example is that, to the letter.
#[test]
fn the_guide_s_programs_are_the_examples() {
    let guide = read("docs/guide.md");
    let examples = examples();
    let mut whole = Vec::new();
    for (before, label, text) in blocks(&guide) {
        assert!(["rust,no_run", "text"].contains(&label), "{label}: {text}");
        let example = before
            .rsplit_once("(../crates/ringverbs/examples/")
            .and_then(|(_, link)| link.split_once(')'))
            .filter(|_| text.contains("fn main()"));
        if let Some((name, _)) = example {
            assert_eq!(text, examples[name], "the guide has another {name}");
            whole.push(name);
        }
        let main = text.contains("fn main()");
        assert_eq!(main, example.is_some(), "after {before}:\n{text}");
        assert!(label != "text" || !text.contains("fn "), "{text}");
    }
    assert_eq!(whole, ["hello.rs", "hello_tcp.rs", "stream_echo.rs"]);
}

#[test]
fn the_guide_s_links_lead_somewhere() {
    let guide = read("docs/guide.md");
    let mut links = 0;
    for (_, rest) in guide
        .match_indices("](")
        .map(|(at, _)| guide.split_at(at + 2))
    {
        let (target, _) = rest.split_once(')').unwrap();
        links += 1;
        match target.strip_prefix('#') {
            Some(anchor) => assert!(
                guide.lines().any(|line| {
                    let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
                    let title = line.trim_start_matches('#').trim().to_lowercase();
                    let title: String = title.chars().filter(kept).collect();
                    line.starts_with('#') && title.replace(' ', "-") == anchor
                }),
                "#{anchor}"
            ),
            None => assert!(root().join("docs").join(target).exists(), "{target}"),
        }
    }
    assert!(links > 30, "{links}");
}

/// The text of all Rust files under a folder.
fn sources(folder: &str) -> String {
    let mut text = String::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                text += &fs::read_to_string(path).unwrap();
            }
        }
    }
    text
}

/// Every promise of the page on soundness has tests, and they are where it says.
#[test]
fn tests_that_promises_name_exist() {
    let page = read("docs/internals/soundness.md");
    let (table, below) = page.split_once("## What does not compile").unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let mut count = 0;
    for row in rows {
        count += 1;
        let tests = row.trim_end_matches(" |").split(" | ").nth(2).unwrap();
        let mut named = 0;
        for group in tests.split("; ") {
            if let Some(numbers) = group.strip_prefix("below ") {
                for number in numbers.split(", ") {
                    assert!(below.contains(&format!("\n{number}. ")), "below {number}");
                    named += 1;
                }
                continue;
            }
            let (folder, names) = match group.split_once(": ") {
                Some(("fake", names)) => ("crates/ringverbs/tests/fake", names),
                Some(("device", names)) => ("crates/ringverbs/tests/device", names),
                Some(("unit", names)) => ("crates/ringverbs/src", names),
                Some(("loom", names)) => ("crates/ring/tests", names),
                Some(("provider", names)) => ("provider-plugin", names),
                Some(("softhca", names)) => ("crates/softhca/src", names),
                Some(("embedded", names)) => ("crates/embedded", names),
                Some(("uverbs", names)) => ("crates/uverbs", names),
                Some(("mlx5", names)) => ("crates/mlx5", names),
                Some(("command", names)) => ("crates/cli", names),
                Some(("attacker", names)) => ("crates/ringverbs/tests/attacker", names),
                Some(other) => panic!("{other:?}: {row}"),
                None => ("crates/ringverbs/tests/completions", group),
            };
            let there = sources(folder);
            for name in names.split(", ").map(|name| name.trim_matches('`')) {
                let there = match name.contains('/') {
                    true => root().join(name).exists(),
                    false => there.contains(&format!("fn {name}(")),
                };
                assert!(there, "{name} is not in {folder}: {row}");
                named += 1;
            }
        }
        assert!(named > 0, "no test: {row}");
    }
    // As many as there are known ways to go wrong.
    assert!(count >= 17, "{count}");
    for (before, label, text) in blocks(below) {
        let code = label.strip_prefix("rust,compile_fail,E");
        let is_code = |code: &str| code.len() == 4 && code.parse::<u16>().is_ok();
        assert!(code.is_some_and(is_code), "{label} after {before}:\n{text}");
    }
}

/// An example is short, says what it is, and is run in the guest: by a case, or
/// by a script that a case runs.
#[test]
fn examples_are_short_and_run_in_the_guest() {
    let folder = "rxe-tests/native";
    let mut runs = String::new();
    for file in fs::read_dir(root().join(folder)).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        if name == "manifest.txt" || name.ends_with(".sh") {
            runs += &read(&format!("{folder}/{name}"));
        }
    }
    let commands: Vec<&str> = runs.lines().filter(|line| !line.starts_with('#')).collect();
    let examples = examples();
    assert!(examples.len() >= 12);
    for (name, text) in examples {
        assert!(text.lines().count() < 120, "{name} is too long");
        assert!(text.starts_with("//! "), "{name} does not say what it is");
        let stem = name.strip_suffix(".rs").unwrap();
        let mut words = commands
            .iter()
            .flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
        assert!(words.any(|word| word == stem), "{name} is run by no case");
    }
}

/// The page on completions has all 32 rows; each names what is there, and tests
/// that are.
#[test]
fn each_row_of_completions_has_a_name_and_a_test() {
    let page = read("docs/completions.md");
    let source = sources("crates/ringverbs/src") + &sources("crates/uverbs/src");
    let on_device = sources("crates/ringverbs/tests/completions");
    let others = sources("crates/ringverbs/tests/fake") + &sources("crates/ringverbs/tests/device");
    // The words between backticks: names, with paths, arguments and lists.
    let quoted = |cell: &str| -> Vec<String> {
        let inside = cell.split('`').skip(1).step_by(2);
        let names = inside.flat_map(|code| {
            let code = code.split('(').next().unwrap_or_default();
            code.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        });
        names
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect()
    };
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| ") && line.as_bytes()[2].is_ascii_digit())
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let numbers: Vec<usize> = rows.iter().map(|row| row[0].parse().unwrap()).collect();
    assert_eq!(numbers, (1..=32).collect::<Vec<_>>());
    for (number, row) in numbers.iter().zip(&rows) {
        let [.., here, tests] = &row[..] else {
            panic!("{row:?}");
        };
        let names = quoted(here);
        assert!(!names.is_empty(), "row {number}: {here}");
        for name in names {
            // Of the language, or names of features.
            let elsewhere = ["AsFd", "Display", "mut", "stream", "tokio"];
            let declared = |kind: &str| source.contains(&format!("{kind}{name}"));
            let kinds = ["fn ", "struct ", "enum ", "trait ", "type "];
            let is_variant = name.starts_with(char::is_uppercase) && declared("\n    ");
            let there = kinds.iter().any(|kind| declared(kind)) || is_variant;
            assert!(
                there || elsewhere.contains(&name.as_str()),
                "row {number}: {name} is nowhere"
            );
        }
        let names = quoted(tests);
        for name in &names {
            let there = match name.starts_with("row_") {
                true => on_device.contains(&format!("fn {name}")),
                false => others.contains(&format!("fn {name}()")),
            };
            assert!(there, "row {number}: there is no test {name}");
        }
        assert!(!names.is_empty(), "row {number} has no test: {tests}");
    }
}
