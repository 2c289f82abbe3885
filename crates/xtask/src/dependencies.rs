//! Checks dependencies against `deny.toml`, without cargo-deny, which takes minutes to
//! build.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rxe_tests::guest::host;
use serde_json::Value;

use crate::driver;

const DENY_FILE: &str = "deny.toml";
/// crates.io, as cargo names it.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The results of the check.
pub struct Outcome {
    pub packages: usize,
    /// Packages with a licence that is not allowed, or from a source other than crates.io.
    pub violations: Vec<String>,
    /// Crates in several versions that `deny.toml` does not list.
    pub duplicates: Vec<String>,
}

/// Checks licences, sources and duplicates of all packages.
pub fn check() -> Result<Outcome> {
    let rules = fs::read_to_string(driver::root().join(DENY_FILE)).context(DENY_FILE)?;
    let out = Command::new(driver::cargo())
        .current_dir(driver::root())
        .args(["metadata", "--format-version=1", "--locked"])
        .args([
            "--all-features",
            "--filter-platform=x86_64-unknown-linux-gnu",
        ])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(out.status.success(), "cargo metadata: {}", out.status);
    let metadata: Value = serde_json::from_slice(&out.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    evaluate(&rules, packages)
}

fn evaluate(rules: &str, packages: &[Value]) -> Result<Outcome> {
    let allowed = list(rules, "allow");
    ensure!(!allowed.is_empty(), "{DENY_FILE} allows no licence");
    let known = list(rules, "skip");
    let mut violations = Vec::new();
    let mut versions = BTreeMap::<&str, Vec<&str>>::new();
    for package in packages {
        let text = |field: &str| package[field].as_str();
        let name = text("name").context("a package without a name")?;
        let version = text("version").unwrap_or_default();
        let licence = text("license").unwrap_or("no licence");
        if !permits(&allowed, licence) {
            violations.push(format!("{name} {version}: {licence}"));
        }
        // Packages of the workspace have no source.
        if let Some(source) = text("source").filter(|source| *source != REGISTRY) {
            violations.push(format!("{name} {version}: from {source}"));
        }
        if !known.iter().any(|known| matches_spec(known, name, version)) {
            versions.entry(name).or_default().push(version);
        }
    }
    versions.retain(|_, versions| versions.len() > 1);
    let several = |(name, versions): (&str, Vec<&str>)| format!("{name} {}", versions.join(", "));
    Ok(Outcome {
        packages: packages.len(),
        violations,
        duplicates: versions.into_iter().map(several).collect(),
    })
}

/// Returns whether the allowed licences meet an SPDX expression.
fn permits(allowed: &[&str], licence: &str) -> bool {
    // Lax: older crates write `MIT/Apache-2.0`.
    spdx::Expression::parse_mode(licence, spdx::ParseMode::LAX).is_ok_and(|expression| {
        expression.evaluate(|requirement| allowed.contains(&requirement.to_string().as_str()))
    })
}

/// Returns whether `spec`, such as `syn@2`, matches this version of a crate.
fn matches_spec(spec: &str, name: &str, version: &str) -> bool {
    spec.split_once('@').is_some_and(|(spec_name, prefix)| {
        let rest = version.strip_prefix(prefix);
        spec_name == name && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// Returns the first string on each line of a list of `deny.toml`.
fn list<'t>(rules: &'t str, name: &str) -> Vec<&'t str> {
    let begin = format!("{name} = [");
    let lines = rules.lines().skip_while(|line| *line != begin).skip(1);
    let lines = lines.take_while(|line| *line != "]");
    lines.filter_map(|line| line.split('"').nth(1)).collect()
}

/// Returns the command that checks advisories with cargo-deny.
///
/// # Errors
/// cargo-deny is missing, or the advisory database is unreachable.
pub fn advisories() -> Result<Command> {
    ensure!(
        host::which("cargo-deny").is_some(),
        "cargo-deny is missing: cargo install --locked cargo-deny"
    );
    let deny = |arguments: &[&str]| {
        let mut command = Command::new(driver::cargo());
        command.current_dir(driver::root()).arg("deny");
        command.args(arguments);
        command
    };
    let fetch = deny(&["fetch", "db"]).stderr(Stdio::null()).status()?;
    ensure!(fetch.success(), "the advisory database is unreachable");
    Ok(deny(&["--offline", "check", "advisories"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const DENY_TOML: &str = "allow = [\n    \"MIT\",\n    \"Unicode-3.0\",\n]\n\
                         skip = [\n    { crate = \"a@1\", reason = \"b\" },\n]\n";

    fn package(name: &str, version: &str, license: &str, source: Option<&str>) -> Value {
        json!({ "name": name, "version": version, "license": license, "source": source })
    }

    #[test]
    fn licences_are_expressions() {
        let allowed = list(DENY_TOML, "allow");
        for fine in ["MIT", "MIT/Apache-2.0", "(GPL-2.0 OR MIT) AND Unicode-3.0"] {
            assert!(permits(&allowed, fine), "{fine}");
        }
        for not in ["", "no licence", "GPL-2.0-only", "MIT AND Zlib"] {
            assert!(!permits(&allowed, not), "{not}");
        }
    }

    #[test]
    fn licences_sources_and_duplicates_are_reported() {
        let packages = [
            package("ours", "0.1.0", "MIT", None),
            package("a", "1.2.3", "MIT", Some(REGISTRY)),
            package("a", "10.0.0", "MIT", Some(REGISTRY)),
            package("c", "1.0.0", "Zlib", Some(REGISTRY)),
            package("c", "2.0.0", "MIT", Some("git+ssh://c")),
        ];
        let outcome = evaluate(DENY_TOML, &packages).unwrap();
        assert_eq!(
            outcome.violations,
            ["c 1.0.0: Zlib", "c 2.0.0: from git+ssh://c"]
        );
        assert_eq!(outcome.duplicates, ["c 1.0.0, 2.0.0"]);
        assert!(evaluate("", &packages).is_err());
    }
}
