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
fn programs_of_the_guide_are_the_examples() {
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
    assert_eq!(whole, ["hello.rs"]);
}

/// The pages of the documentation, by their paths in the repository.
fn pages() -> Vec<String> {
    let mut pages: Vec<String> = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
        .map(String::from)
        .into();
    pages.push("provider-plugin/README.md".into());
    for folder in ["docs", "docs/internals"] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".md") {
                pages.push(format!("{folder}/{name}"));
            }
        }
    }
    pages
}

/// A page without its blocks of code.
fn prose(page: &str) -> String {
    let parts = page.split("\n```").step_by(2);
    parts.collect::<Vec<_>>().join("\n")
}

fn has_anchor(page: &str, anchor: &str) -> bool {
    prose(page).lines().any(|line| {
        let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let title: String = title.chars().filter(kept).collect();
        line.starts_with('#') && title.replace(' ', "-") == anchor
    })
}

#[test]
fn links_of_the_documentation_exist() {
    for name in pages() {
        let page = read(&name);
        let text = prose(&page);
        for (_, rest) in text
            .match_indices("](")
            .map(|(at, _)| text.split_at(at + 2))
        {
            let (target, _) = rest.split_once(')').unwrap();
            if target.starts_with("http") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = Path::new(&name).parent().unwrap().join(path);
            let path = if target.starts_with('#') {
                Path::new(&name)
            } else {
                &path
            };
            assert!(root().join(path).exists(), "{name}: {target}");
            let there = || has_anchor(&read(path.to_str().unwrap()), anchor);
            assert!(anchor.is_empty() || there(), "{name}: {target}");
        }
    }
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
fn tests_named_in_soundness_exist() {
    let page = read("docs/internals/soundness.md");
    let examples = read("crates/ringverbs/tests/compile_fail.md");
    let is_row = |line: &&str| line.starts_with("| ") && *line != "| promise | tests |";
    let mut count = 0;
    for row in page.lines().filter(is_row) {
        count += 1;
        let tests = row.trim_end_matches(" |").split(" | ").nth(1).unwrap();
        let mut named = 0;
        for group in tests.split("; ") {
            if let Some(numbers) = group.strip_prefix("compile_fail: ") {
                for number in numbers.split(", ") {
                    assert!(
                        examples.contains(&format!("\n{number}. ")),
                        "{number}: {row}"
                    );
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
                Some(("roce", names)) => ("crates/roce/src", names),
                Some(("softhca", names)) => ("crates/softhca/src", names),
                Some(("embedded", names)) => ("crates/embedded", names),
                Some(("uverbs", names)) => ("crates/uverbs", names),
                Some(("mlx5", names)) => ("crates/mlx5", names),
                Some(("command", names)) => ("crates/cli", names),
                Some(("dynamic", names)) => ("crates/ringverbs/tests/dynamic", names),
                Some(("packets", names)) => ("crates/ringverbs/tests/packets", names),
                Some(("future", names)) => ("crates/ringverbs/tests/future", names),
                Some(("libfabric", names)) => ("extras/ringverbs-libfabric", names),
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
    assert!(count > 40, "{count}");
    for (before, label, text) in blocks(&examples) {
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

/// The tests of each row of the page on completions, by the first name in its
/// last column. They are in `completions`, `device` or `fake`.
const COMPLETION_TESTS: [(&str, &[&str]); 31] = [
    ("CompletionQueueBuilder::entries", &["queue_size"]),
    (
        "CompletionQueueBuilder::comp_vector",
        &["completion_vector"],
    ),
    ("ContextFormat", &["formats_and_flags"]),
    (
        "WaitObject::{None, Unspecified, Fd, Condvar, Yield, Set}",
        &["wait_objects_and_timeouts", "wait_set_of_several_queues"],
    ),
    ("ReaderBuilder::threshold", &["wait_threshold"]),
    ("CompletionReader::read", &["batches_in_order"]),
    (
        "CompletionQueue::cursor",
        &["cursor_reads_entries_in_place"],
    ),
    (
        "ReadError::ErrorAvailable",
        &["errors_out_of_band_in_band_and_as_text"],
    ),
    (
        "Completion::result",
        &["errors_out_of_band_in_band_and_as_text"],
    ),
    (
        "provider_error_text",
        &["errors_out_of_band_in_band_and_as_text"],
    ),
    ("CompletionReader::read_from", &["source_addresses"]),
    ("Success::reply_address", &["datagrams"]),
    (
        "CompletionReader::read_timeout",
        &[
            "wait_objects_and_timeouts",
            "no_wake_up_is_lost",
            "spin_ends_with_timeout_or_device_removal",
        ],
    ),
    (
        "CompletionReader::signaler",
        &["signals_wake_and_are_not_lost"],
    ),
    ("ReadError::Overrun", &["overrun_is_sticky"]),
    ("CloseError", &["close_busy_and_with_entries"]),
    (
        "close",
        &[
            "close_busy_and_with_entries",
            "refused_close_returns_the_completion_queue",
        ],
    ),
    ("EntryFlags", &["formats_and_flags"]),
    (
        "CompletionLevel",
        &["completion_levels", "flush_types_are_separate_capabilities"],
    ),
    (
        "QueuePair::flush",
        &["flush_types_are_separate_capabilities"],
    ),
    ("WorkRequest::unsignaled", &["selective_completion"]),
    ("ProtectionDomain::queue_pair", &["separate_receive_queue"]),
    (
        "QueuePair::{read, write, flush, send, receive, send_with_imm, write_with_imm, atomic_write}",
        &["operations_of_librpma"],
    ),
    ("CompletionReader::wait", &["wait_then_read"]),
    (
        "CompletionQueue::resize",
        &["resize_keeps_pending_completions"],
    ),
    (
        "CompletionChannel",
        &["shared_channel_and_solicited_events"],
    ),
    (
        "CompletionQueue::arm(true)",
        &["shared_channel_and_solicited_events"],
    ),
    (
        "CompletionQueueBuilder::timestamps",
        &[
            "completions_have_device_timestamps",
            "failed_completion_has_no_timestamp",
            "timestamp_is_read_from_the_device",
            "timestamps_are_refused_when_the_queue_is_made",
        ],
    ),
    (
        "SharedCompletionQueue",
        &[
            "shared_reader_returns_each_entry_once",
            "queue_pairs_are_made_while_another_thread_polls",
        ],
    ),
    (
        "CompletionStream",
        &[
            "completion_stream_on_any_executor",
            "tokio_reader_and_a_cancelled_future",
        ],
    ),
    (
        "QueuePair::drain",
        &["draining_a_queue_pair", "halves_work_and_are_drained_apart"],
    ),
];

/// Each row of the page on completions names what exists, and has tests.
#[test]
fn rows_of_completions_have_a_name_and_a_test() {
    let page = read("docs/completions.md");
    let source = sources("crates/ringverbs/src") + &sources("crates/uverbs/src");
    let folders = ["completions", "device", "fake"];
    let tests: String = (folders.iter())
        .map(|folder| sources(&format!("crates/ringverbs/tests/{folder}")))
        .collect();
    let (_, tables) = page.split_once("\n## Names ").unwrap();
    let (tables, _) = tables.split_once("\n## ").unwrap();
    let is_row = |line: &&str| line.starts_with("| ") && *line != "| there | here |";
    let rows: Vec<&str> = tables.lines().filter(is_row).collect();
    let mut expected = COMPLETION_TESTS.to_vec();
    for row in &rows {
        let last = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        let code: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
        let first = code.first().unwrap_or_else(|| panic!("no name: {row}"));
        let at = expected.iter().position(|(name, _)| name == first);
        let (_, named) = expected.remove(at.unwrap_or_else(|| panic!("{first} has no tests")));
        for test in named {
            assert!(tests.contains(&format!("fn {test}()")), "{first}: {test}");
        }
        // Names, with paths, arguments and lists.
        let names = code
            .iter()
            .flat_map(|code| code.split('(').next())
            .flat_map(|code| code.split(|c: char| !(c.is_alphanumeric() || c == '_')))
            .filter(|name| !name.is_empty());
        for name in names {
            // Of the language, or names of features.
            let elsewhere = ["AsFd", "Display", "mut", "stream", "tokio"];
            let declared = |kind: &str| source.contains(&format!("{kind}{name}"));
            let kinds = ["fn ", "struct ", "enum ", "trait ", "type "];
            let is_variant = name.starts_with(char::is_uppercase) && declared("\n    ");
            let exists = kinds.iter().any(|kind| declared(kind)) || is_variant;
            assert!(
                exists || elsewhere.contains(&name),
                "{name} is nowhere: {row}"
            );
        }
    }
    assert!(expected.is_empty(), "no row: {expected:?}");
}
