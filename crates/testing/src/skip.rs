//! Skipped tests and parts of tests, which a run counts.

use std::env;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::thread;

/// The variable that names a file, to which a line is appended for all that is left out.
pub const SKIPS: &str = "RINGVERBS_SKIPS";
/// The variable with the packages that are installed: leaving a test out because one of
/// them is missing is a failure. `all` stands for every package.
pub const INSTALLED: &str = "RINGVERBS_INSTALLED";

/// Reports that a test, or a part of it, is left out, and why: `skip!("only root may mount")`,
/// or `skip!(missing: "gcc libc6-dev", "no C compiler")` with the packages that mend it.
/// The test then returns.
///
/// A run of `cargo xtask test` counts such a test as skipped, and lists it with the reason.
///
/// # Panics
/// If the packages are said to be installed ([`INSTALLED`](crate::skip::INSTALLED)).
#[macro_export]
macro_rules! skip {
    (missing: $packages:expr, $($reason:tt)+) => {
        $crate::skip::report($packages, &format!($($reason)+))
    };
    ($($reason:tt)+) => {
        $crate::skip::report("", &format!($($reason)+))
    };
}

/// Implementation of [`skip!`](crate::skip!).
pub fn report(packages: &str, reason: &str) {
    let mut reason = reason.trim().replace('\n', " / ");
    if !packages.is_empty() {
        reason += &format!(" (apt-get install {packages})");
    }
    println!("skipped: {reason}");
    if let Some(path) = env::var_os(SKIPS) {
        let line = format!("{}\t{reason}\n", test_name());
        // The file may be closed to a test that runs as another user. Written at once:
        // other tests append too.
        if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(path) {
            let _ = file.write_all(line.as_bytes());
        }
    }
    let installed = env::var(INSTALLED).unwrap_or_default();
    assert!(
        !is_installed(packages, &installed),
        "{INSTALLED} names {packages}: {reason}"
    );
}

/// Returns the names of the test program and of the test, whose thread has its name unless
/// tests run one at a time.
fn test_name() -> String {
    let program = env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().to_string_lossy();
    // Cargo appends a hash.
    let name = program.rsplit_once('-').map_or(&*program, |(name, _)| name);
    let name = Path::new(name).display();
    match thread::current().name() {
        Some(test) if test != "main" => format!("{name} {test}"),
        _ => name.to_string(),
    }
}

fn is_installed(packages: &str, installed: &str) -> bool {
    let has = |package| installed.split_whitespace().any(|it| it == package);
    !packages.is_empty() && (installed == "all" || packages.split_whitespace().all(has))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::Command;

    use super::{INSTALLED, SKIPS, is_installed};

    #[test]
    fn packages_are_installed_if_all_are_named() {
        for (packages, installed, expected) in [
            ("gcc", "", false),
            ("", "gcc", false),
            ("", "all", false),
            ("gcc", "all", true),
            ("gcc", "libgcc gcc", true),
            ("gcc libibverbs-dev", "gcc", false),
            ("gcc libibverbs-dev", "libibverbs-dev gcc", true),
        ] {
            assert_eq!(is_installed(packages, installed), expected, "{packages}");
        }
    }

    /// A run does not see what is only printed.
    #[test]
    fn tests_leave_nothing_out_silently() {
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")];
        let mut found = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if path.is_dir() && name != "target" && !name.starts_with('.') {
                    folders.push(path);
                } else if name.ends_with(".rs") && !path.ends_with("testing/src/skip.rs") {
                    let text = fs::read_to_string(&path).unwrap().to_lowercase();
                    let said = text.split("println!(").skip(1);
                    let said = said.map(|it| it.trim_start().trim_start_matches('"'));
                    let count = said.filter(|it| it.starts_with("skipped:")).count();
                    found.extend((count > 0).then_some(path));
                }
            }
        }
        assert!(found.is_empty(), "not by skip!: {found:?}");
    }

    #[test]
    #[ignore = "run by another test"]
    fn subject() {
        crate::skip!("no {}\nhere", "device");
        crate::skip!(missing: "gcc", "no compiler");
    }

    #[test]
    fn what_is_left_out_is_appended_to_a_file_and_fails_if_installed() {
        let path = std::env::temp_dir().join(format!("ringverbs-skips-{}", std::process::id()));
        let passes = |installed| {
            let mut subject = Command::new(std::env::current_exe().unwrap());
            let subject = subject.args(["skip::tests::subject", "--exact", "--ignored"]);
            let subject = subject.env(SKIPS, &path).env(INSTALLED, installed);
            subject.output().unwrap().status.success()
        };
        assert!(passes("libibverbs-dev"));
        assert!(!passes("gcc"));
        let said = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let test = "ringverbs_testing skip::tests::subject";
        let lines =
            format!("{test}\tno device / here\n{test}\tno compiler (apt-get install gcc)\n");
        assert_eq!(said, lines.repeat(2));
    }
}
