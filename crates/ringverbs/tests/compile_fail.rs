//! Each example that must not compile is refused with the error that it names.
//! Stable rustdoc accepts any error, a misspelt name included.
//!
//! All examples are compiled at once, each in a function of its own; errors are
//! told apart by their lines.
#![allow(missing_docs, reason = "a test")]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An example that must not compile.
struct Example {
    /// File and line of its text.
    place: String,
    code: String,
    text: Vec<String>,
}

/// The examples of a page, or of the documentation in a source file.
fn examples(path: &Path) -> Vec<Example> {
    let file = fs::read_to_string(path).unwrap();
    let is_page = path.extension().is_some_and(|end| end == "md");
    let mut lines = file.lines().zip(1..).filter_map(|(line, number)| {
        let comment = line.trim_start();
        let comment = comment
            .strip_prefix("///")
            .or_else(|| comment.strip_prefix("//!"));
        let comment = comment.map(|text| text.strip_prefix(' ').unwrap_or(text));
        Some((if is_page { line } else { comment? }, number))
    });
    let mut examples = Vec::new();
    while let Some((line, number)) = lines.next() {
        let Some(label) = line.strip_prefix("```") else {
            continue;
        };
        let text = lines.by_ref().map(|(line, _)| line);
        let text = text.take_while(|line| !line.starts_with("```"));
        // What rustdoc does not show begins with a hash.
        let text = text.map(|line| line.strip_prefix("# ").unwrap_or(line).to_owned());
        let text: Vec<String> = text.collect();
        if let Some((_, code)) = label.split_once("compile_fail") {
            let place = format!("{}:{number}", path.display());
            let code = code.strip_prefix(',').unwrap_or_default().to_owned();
            assert!(code.starts_with('E'), "{place}: no error code");
            examples.push(Example { place, code, text });
        }
    }
    examples
}

/// The Rust files under a folder.
fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, files);
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
}

/// The library that this test was linked to: the newest that was there then.
fn library(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    let linked = modified(&program);
    let files = fs::read_dir(program.parent().unwrap()).unwrap();
    let libraries = files.map(|file| file.unwrap().path()).filter(|path| {
        let file = path.file_name().and_then(|file| file.to_str());
        let hash = file.and_then(|file| file.strip_prefix("lib")?.strip_prefix(name));
        hash.is_some_and(|rest| rest.starts_with('-') && rest.ends_with(".rlib"))
            && modified(path) <= linked
    });
    let newest = libraries.max_by_key(|path| modified(path));
    newest.unwrap_or_else(|| panic!("no {name} beside {}", program.display()))
}

/// The codes of the errors in each example, all compiled as one crate.
fn errors(examples: &[&Example]) -> Vec<BTreeSet<String>> {
    // By line, the example that is there.
    let mut owners = vec![None];
    let mut program = String::new();
    for (number, example) in examples.iter().enumerate() {
        let text = example.text.join("\n");
        writeln!(program, "pub fn example_{number}() {{\n{text}\n}}").unwrap();
        owners.resize(program.lines().count() + 1, Some(number));
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = folder.join("compile_fail.rs");
    fs::write(&source, program).unwrap();

    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
    rustc.args(["--edition=2024", "--crate-type=lib", "--emit=metadata"]);
    rustc.args(["--error-format=json", "--cap-lints=allow"]);
    rustc.arg("--out-dir").arg(folder).arg(&source);
    for name in ["ringverbs", "ringverbs_rdmacm", "ringverbs_uverbs"] {
        let library = library(name);
        rustc.arg("-L").arg(library.parent().unwrap());
        rustc.arg(format!("--extern={name}={}", library.display()));
    }
    let output = rustc.output().unwrap();
    let mut found = vec![BTreeSet::new(); examples.len()];
    for line in String::from_utf8(output.stderr).unwrap().lines() {
        let error: serde_json::Value = serde_json::from_str(line).expect(line);
        let spans = error["spans"].as_array().unwrap();
        let Some(span) = spans.iter().find(|span| span["is_primary"] == true) else {
            // How many there were. Or the crates were not found, and then no
            // example has the error that it names.
            continue;
        };
        let line = span["line_start"].as_u64().unwrap();
        let code = error["code"]["code"].as_str().unwrap_or("syntax");
        found[owners[line as usize].unwrap()].insert(code.to_owned());
    }
    found
}

#[test]
fn compile_fail_examples_fail_with_the_named_error() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = vec![root.join("crates/ringverbs/tests/compile_fail.md")];
    for folder in ["ringverbs", "rdmacm", "uverbs"] {
        sources(&root.join("crates").join(folder).join("src"), &mut files);
    }
    let examples: Vec<Example> = files.iter().flat_map(|file| examples(file)).collect();
    let together: Vec<&Example> = examples.iter().collect();
    assert!(together.len() > 40, "{}", together.len());

    let mut wrong = Vec::new();
    for (example, mut found) in together.iter().zip(errors(&together)) {
        if found.is_empty() {
            // Privacy, for one, is not checked where types are wrong.
            found = errors(&[example]).remove(0);
        }
        let Example { place, code, .. } = example;
        if !found.contains(code) {
            wrong.push(format!("{place} must be {code}, and is {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
