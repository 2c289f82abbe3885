//! The environment is read in one place.

use std::fs;
use std::path::{Path, PathBuf};

/// What reads the environment, or a path that it names.
const READS: [&str; 7] = [
    "env::var", "var_os(", "vars_os(", "getenv", "environ", "temp_dir", "home_dir",
];
/// Tools of this repository, which nobody installs.
const TOOLS: [&str; 3] = ["xtask", "device-testing", "testing"];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// Whether a line of shipped code reads it by itself.
fn reads(line: &str) -> bool {
    let code = line.trim_start();
    let words = code.split(|c: char| !(c.is_alphanumeric() || "_:(".contains(c)));
    !code.starts_with("//")
        && words
            .filter(|word| !word.contains("environment"))
            .any(|word| READS.iter().any(|read| word.contains(read)))
}

#[test]
fn only_one_module_reads_the_environment() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = here.parent().unwrap();
    let root = crates.parent().unwrap();
    let mut folders = vec![root.join("provider-plugin/src")];
    let extras = fs::read_dir(root.join("extras")).unwrap();
    for entry in fs::read_dir(crates).unwrap().chain(extras) {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap();
        if !TOOLS.contains(&name) && folder.join("src").is_dir() {
            folders.push(folder.join("src"));
        }
    }
    let mut files = Vec::new();
    for folder in &folders {
        sources(folder, &mut files);
    }
    assert!(folders.len() > 9 && files.len() > 100, "{folders:?}");
    let mut there = Vec::new();
    for file in files {
        let is_test = |part: &std::ffi::OsStr| part == "tests" || part == "tests.rs";
        if file.iter().any(is_test) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let shipped = testing::modules::without_tests(&text);
        for line in shipped.lines().filter(|line| reads(line)) {
            let file = file.strip_prefix(root).unwrap();
            there.push(format!("{}: {}", file.display(), line.trim()));
        }
    }
    let (own, others): (Vec<_>, Vec<_>) = there
        .into_iter()
        .partition(|it| it.starts_with("crates/uverbs/src/environment.rs: "));
    assert!(!own.is_empty());
    // That of another process.
    let expected = "crates/embedded/src/runtime/control.rs: let environment = \
                    fs::read(format!(\"/proc/{process}/environ\")).map_err(refused)?;";
    assert_eq!(
        others,
        [expected],
        "the environment is read by uverbs::environment alone"
    );
}

#[test]
fn reads_of_the_environment_are_detected() {
    for line in [
        "if let Ok(name) = std::env::var(VARIABLE)",
        "let all = env::vars();",
        "let value = libc::getenv(name.as_ptr());",
        "libc::secure_getenv(name)",
        "use std::env::var;",
        "    let at = env::temp_dir().join(name);",
    ] {
        assert!(reads(line), "{line}");
    }
    for line in ["// getenv is not called", "environment::variable(name)"] {
        assert!(!reads(line), "{line}");
    }
}
