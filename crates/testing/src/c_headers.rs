//! Compiling static assertions against the installed C headers.
//!
//! Tests describe Rust structures by a C file of `_Static_assert`s, which the C
//! compiler checks.

use std::io::Write;
use std::process::{Command, Stdio};

/// The compilers of the machine that this is built for: types of the C library
/// differ. A test for aarch64 may run under QEMU, where `cc` is another machine's.
const COMPILERS: &[&str] = if cfg!(target_arch = "aarch64") {
    &["aarch64-linux-gnu-gcc", "cc"]
} else {
    &["cc"]
};

/// Runs the C compiler's front end (`cc -fsyntax-only`) on `text`. Returns its
/// errors; `None` if it cannot be run.
pub fn compile(c: &str) -> Option<Result<(), String>> {
    let start = |compiler: &&str| {
        // A cross compiler has its own C library, and the other headers are here.
        Command::new(compiler)
            .args([
                "-fsyntax-only",
                "-idirafter",
                "/usr/include",
                "-x",
                "c",
                "-",
            ])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .ok()
    };
    let mut compiler = COMPILERS.iter().find_map(start)?;
    compiler.stdin.take()?.write_all(c.as_bytes()).ok()?;
    let output = compiler.wait_with_output().ok()?;
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    Some(if output.status.success() {
        Ok(())
    } else {
        Err(complaints)
    })
}

/// Returns whether there is a C compiler, and the headers that `includes` names; otherwise the
/// caller is skipped for lack of these packages.
pub fn are_installed(includes: &str, packages: &str) -> bool {
    match compile(includes) {
        None => crate::skip!(missing: "gcc", "there is no C compiler (cc)"),
        Some(Err(complaints)) => {
            let complaint = complaints.lines().next().unwrap_or_default();
            crate::skip!(missing: packages, "C headers cannot be used: {complaint}");
        }
        Some(Ok(())) => return true,
    }
    false
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_assertion_that_does_not_hold_is_a_complaint() {
        let Some(held) = super::compile("_Static_assert(sizeof(char) == 1, \"one\");\n") else {
            return crate::skip!(missing: "gcc", "there is no C compiler (cc)");
        };
        assert_eq!(held, Ok(()));
        let broken = super::compile("_Static_assert(sizeof(char) == 2, \"not two\");\n").unwrap();
        assert!(broken.unwrap_err().contains("not two"));
    }
}
