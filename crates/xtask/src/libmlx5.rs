//! Links `libmlx5.so.1`: the plugin with libmlx5's soname, symbols and versions, so that
//! it can replace that library.
//!
//! rustc's version script of a shared library has no versions, so the C compiler links
//! this one from the plugin as a static library. Functions that the plugin lacks are
//! jumps to functions that refuse (`provider-plugin/libmlx5.map`).

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::driver::{root, run};

/// The library's file.
pub const LIBMLX5: &str = "libmlx5.so.1";

/// The plugin as a static library.
const ARCHIVE: &str = "libringverbs_provider.a";

/// A function of a version.
#[derive(Debug, PartialEq, Eq)]
struct Symbol<'a> {
    name: &'a str,
    /// The function that it jumps to; `None` if the plugin has this function.
    target: Option<String>,
    /// Whether the symbol has an older version than the plugin's function of this name.
    is_old: bool,
}

/// A version and its predecessor.
#[derive(Debug, PartialEq, Eq)]
struct Version<'a> {
    name: &'a str,
    before: &'a str,
    symbols: Vec<Symbol<'a>>,
}

fn parse(map: &str) -> Result<Vec<Version<'_>>> {
    let mut versions: Vec<Version<'_>> = Vec::new();
    let lines = map.lines().filter(|line| !line.starts_with('#'));
    for line in lines.filter(|line| !line.trim().is_empty()) {
        let Some(symbol) = line.strip_prefix("    ") else {
            let (name, before) = line.split_once(' ').unwrap_or((line, ""));
            versions.push(Version {
                name,
                before,
                symbols: Vec::new(),
            });
            continue;
        };
        let (name, target, is_old) = if let Some((name, other)) = symbol.split_once(" = ") {
            (name, Some(other.to_owned()), true)
        } else if let Some((name, kind)) = symbol.split_once(": ") {
            (name, Some(format!("ringverbs_refused_{kind}")), false)
        } else {
            (symbol, None, false)
        };
        ensure!(
            name.bytes()
                .all(|byte| byte == b'_' || byte.is_ascii_alphanumeric()),
            "libmlx5.map: {line}"
        );
        let Some(version) = versions.last_mut() else {
            bail!("libmlx5.map: {name} has no version");
        };
        version.symbols.push(Symbol {
            name,
            target,
            is_old,
        });
    }
    Ok(versions)
}

/// Returns the linker's version script. Its last version makes all other symbols local:
/// in the version of an old symbol, `local` would hide that symbol.
fn version_script(versions: &[Version<'_>]) -> String {
    let mut script = String::new();
    for (number, version) in versions.iter().enumerate() {
        let named = version.symbols.iter().filter(|symbol| !symbol.is_old);
        let named: String = named.map(|symbol| format!(" {};", symbol.name)).collect();
        let _ = writeln!(script, "{} {{", version.name);
        if !named.is_empty() {
            let _ = writeln!(script, "  global:{named}");
        }
        if number + 1 == versions.len() {
            script.push_str("  local: *;\n");
        }
        let _ = writeln!(script, "}} {};", version.before);
    }
    script
}

/// Returns assembly with the functions that jump to others.
fn jumps(versions: &[Version<'_>], jump: &str) -> String {
    let mut text = "    .text\n".to_owned();
    for version in versions {
        for symbol in &version.symbols {
            let Some(target) = &symbol.target else {
                continue;
            };
            let name = match symbol.is_old {
                true => format!("old_{}", symbol.name),
                false => symbol.name.to_owned(),
            };
            let _ = write!(
                text,
                "    .globl {name}\n    .type {name}, %function\n{name}:\n    {jump} {target}\n    \
                 .size {name}, . - {name}\n"
            );
            if symbol.is_old {
                let _ = writeln!(text, "    .symver {name}, {}@{}", symbol.name, version.name);
            }
        }
    }
    text.push_str("    .section .note.GNU-stack, \"\", %progbits\n");
    text
}

/// Links the static library in `built` into `folder`.
pub fn link(built: &Path, folder: &Path, compiler: &str, aarch64: bool) -> Result<PathBuf> {
    let map = root().join("provider-plugin/libmlx5.map");
    let map = fs::read_to_string(&map).with_context(|| format!("cannot read {}", map.display()))?;
    let versions = parse(&map)?;
    let (script, source) = (built.join("libmlx5.version"), built.join("libmlx5.s"));
    fs::write(&script, version_script(&versions))?;
    fs::write(&source, jumps(&versions, if aarch64 { "b" } else { "jmp" }))?;
    // A stand-in for libibverbs, which need not be installed here, makes the library
    // depend on it.
    let stand_in = built.join("libibverbs.so.1");
    run(Command::new(compiler)
        .args(["-shared", "-nostdlib", "-Wl,-soname,libibverbs.so.1", "-o"])
        .arg(&stand_in)
        .args(["-x", "c", "/dev/null"]))?;
    let library = folder.join(LIBMLX5);
    let mut version = std::ffi::OsString::from("-Wl,--version-script=");
    version.push(&script);
    run(Command::new(compiler)
        .args(["-shared", "-Wl,-soname,libmlx5.so.1"])
        .args(["-Wl,--gc-sections,-O1,--strip-all,-z,relro,-z,now"])
        .arg(version)
        .arg("-o")
        .arg(&library)
        .arg(&source)
        .arg("-Wl,--whole-archive")
        .arg(built.join(ARCHIVE))
        .args(["-Wl,--no-whole-archive", "-Wl,--no-as-needed"])
        .arg(&stand_in)
        .args(["-Wl,--as-needed", "-lpthread", "-lm", "-ldl", "-lc"]))?;
    Ok(library)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "\
# A comment.
ONE
    first
    second = other
TWO ONE
    second
    third: status
";

    #[test]
    fn the_map_becomes_versions_and_jumps() {
        let versions = parse(MAP).unwrap();
        assert_eq!(
            version_script(&versions),
            "ONE {\n  global: first;\n} ;\nTWO {\n  global: second; third;\n  local: *;\n} ONE;\n"
        );
        let text = jumps(&versions, "jmp");
        assert!(text.contains("old_second:\n    jmp other\n"), "{text}");
        assert!(text.contains(".symver old_second, second@ONE"), "{text}");
        assert!(text.contains("third:\n    jmp ringverbs_refused_status"));
        assert!(!text.contains("first"), "{text}");
        assert!(parse("    alone\n").is_err());
        assert!(parse("ONE\n    two words\n").is_err());
    }

    #[test]
    fn the_map_names_each_version_once() {
        let map = include_str!("../../../provider-plugin/libmlx5.map");
        let versions = parse(map).unwrap();
        let mut names: Vec<_> = versions.iter().map(|version| version.name).collect();
        assert_eq!(names[0], "MLX5_1.0");
        assert!(names.len() > 25);
        for version in &versions[1..] {
            assert!(names.contains(&version.before), "{}", version.before);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), versions.len());
    }
}
