//! Selects the packages that `--quick` tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::driver;

/// Packages whose tests read files of other packages: prefix or suffix of the changed
/// file's path, and the package.
const READERS: [(&str, &str); 4] = [
    ("docs/", "ringverbs"),
    ("README.md", "ringverbs"),
    (".rs", "ringverbs-uverbs"),
    ("rxe-tests/", "xtask"),
];

/// All packages depend on these files.
const COMMON: [&str; 4] = ["Cargo.toml", "Cargo.lock", ".cargo/", "rust-toolchain"];

/// Folder of packages that use the others' public interface alone: these are not tested as
/// dependents of others.
const EXTRAS: &str = "extras/";

/// The packages to test.
pub(super) struct Areas {
    names: BTreeSet<String>,
    all: bool,
}

impl Areas {
    /// Returns the requested areas, or the packages with changed files; both with their
    /// dependents, of which extras are those of other extras.
    pub(super) fn choose(requested: &[String]) -> Result<Areas> {
        let workspace = Workspace::read()?;
        if requested.is_empty() {
            return Ok(workspace.changed(&changed_files()?));
        }
        if requested.iter().any(|area| area == "all") {
            return Ok(workspace.all());
        }
        let mut names = BTreeSet::new();
        for area in requested {
            let full = format!("ringverbs-{area}");
            match [area, &full]
                .into_iter()
                .find(|name| workspace.packages.contains_key(*name))
            {
                Some(name) => names.insert(name.clone()),
                None => bail!(
                    "no package {area}; there are {}",
                    workspace.names().join(", ")
                ),
            };
        }
        Ok(workspace.with_dependents(names))
    }

    /// Returns cargo's options that select the packages.
    pub(super) fn packages(&self) -> Vec<String> {
        if self.all {
            return vec!["--workspace".to_owned()];
        }
        let names = self.names.iter();
        names
            .flat_map(|name| ["-p".to_owned(), name.clone()])
            .collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}

impl fmt::Display for Areas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.all {
            return f.write_str("all packages");
        }
        let short = |name: &String| name.trim_start_matches("ringverbs-").to_owned();
        let names: Vec<_> = self.names.iter().map(short).collect();
        f.write_str(&names.join(", "))
    }
}

struct Package {
    /// Path of its folder in the repository, with a slash at the end.
    folder: String,
    /// Its dependencies in the workspace, including those of tests.
    needs: BTreeSet<String>,
}

impl Package {
    fn is_extra(&self) -> bool {
        self.folder.starts_with(EXTRAS)
    }
}

/// The packages, by name.
struct Workspace {
    packages: BTreeMap<String, Package>,
}

impl Workspace {
    fn read() -> Result<Workspace> {
        let out = Command::new(driver::cargo())
            .current_dir(driver::root())
            .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
            .stderr(Stdio::inherit())
            .output()
            .context("cannot run cargo")?;
        ensure!(out.status.success(), "cargo metadata: {}", out.status);
        Workspace::from_metadata(&serde_json::from_slice(&out.stdout)?, driver::root())
    }

    fn from_metadata(metadata: &Value, root: &Path) -> Result<Workspace> {
        let mut packages = BTreeMap::new();
        for package in metadata["packages"].as_array().context("no packages")? {
            let name = package["name"].as_str().context("no name")?;
            let manifest = package["manifest_path"].as_str().context("no manifest")?;
            let folder = Path::new(manifest).parent().context("no folder")?;
            let folder = folder.strip_prefix(root)?;
            let needs = package["dependencies"].as_array().into_iter().flatten();
            let needs = needs.filter(|it| it["path"].is_string());
            packages.insert(
                name.to_owned(),
                Package {
                    folder: format!("{}/", folder.display()),
                    needs: needs
                        .filter_map(|it| it["name"].as_str().map(str::to_owned))
                        .collect(),
                },
            );
        }
        Ok(Workspace { packages })
    }

    fn names(&self) -> Vec<&str> {
        self.packages.keys().map(String::as_str).collect()
    }

    fn all(&self) -> Areas {
        Areas {
            names: self.packages.keys().cloned().collect(),
            all: true,
        }
    }

    fn changed(&self, files: &[String]) -> Areas {
        let is_common = |file: &String| COMMON.iter().any(|it| file.starts_with(it));
        if files.iter().any(is_common) {
            return self.all();
        }
        let mut names = BTreeSet::new();
        let mut readers = BTreeSet::new();
        for file in files {
            let has_file = |package: &&String| file.starts_with(&self.packages[*package].folder);
            names.extend(self.packages.keys().find(has_file).cloned());
            let is_read =
                |(part, _): &&(&str, &str)| file.starts_with(part) || file.ends_with(part);
            readers.extend(
                READERS
                    .iter()
                    .filter(is_read)
                    .map(|(_, name)| (*name).to_owned()),
            );
        }
        let mut areas = self.with_dependents(names);
        readers.retain(|name| self.packages.contains_key(name));
        areas.names.extend(readers);
        areas.all = areas.names.len() == self.packages.len();
        areas
    }

    fn with_dependents(&self, mut names: BTreeSet<String>) -> Areas {
        loop {
            let is_extra = |name: &String| self.packages.get(name).is_some_and(Package::is_extra);
            let needs = |package: &Package| {
                let needed = package.needs.iter().filter(|it| names.contains(*it));
                let mut needed = needed.filter(|it| !package.is_extra() || is_extra(it));
                needed.next().is_some()
            };
            let more: Vec<_> = self
                .packages
                .iter()
                .filter(|(name, package)| !names.contains(*name) && needs(package))
                .map(|(name, _)| name.clone())
                .collect();
            if more.is_empty() {
                let all = names.len() == self.packages.len();
                return Areas { names, all };
            }
            names.extend(more);
        }
    }
}

/// Returns the files that differ from the merge base with main; on main itself those
/// that differ from the last commit, or if there are none, from its parent.
fn changed_files() -> Result<Vec<String>> {
    let base = ["origin/main", "main"]
        .iter()
        .find_map(|main| git(&["merge-base", "HEAD", main]).ok());
    let base = base.and_then(|lines| lines.into_iter().next());
    let mut files = git(&["ls-files", "--others", "--exclude-standard"])?;
    files.extend(git(&[
        "diff",
        "--name-only",
        base.as_deref().unwrap_or("HEAD"),
    ])?);
    if files.is_empty() {
        files = git(&["diff", "--name-only", "HEAD~1"])?;
    }
    Ok(files)
}

fn git(arguments: &[&str]) -> Result<Vec<String>> {
    let out = Command::new("git")
        .current_dir(driver::root())
        .args(arguments)
        .output()
        .context("cannot run git; --area all tests everything")?;
    ensure!(
        out.status.success(),
        "git {}: {}; --area all tests everything",
        arguments.join(" "),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    let text = String::from_utf8_lossy(&out.stdout);
    Ok(text.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn workspace() -> Workspace {
        let package = |name: &str, folder: &str, needs: &[&str]| {
            let needs: Vec<_> = needs
                .iter()
                .map(|name| json!({ "name": name, "path": "/r/x" }))
                .chain([json!({ "name": "serde", "path": null })])
                .collect();
            json!({ "name": name, "manifest_path": format!("/r/{folder}/Cargo.toml"),
                    "dependencies": needs })
        };
        let metadata = json!({ "packages": [
            package("ringverbs-ring", "crates/ring", &[]),
            package("ringverbs-uverbs", "crates/uverbs", &[]),
            package("ringverbs", "crates/ringverbs", &["ringverbs-ring"]),
            package("ringverbs-cli", "crates/cli", &["ringverbs"]),
            package("ringverbs-hyper", "extras/ringverbs-hyper", &["ringverbs"]),
            package("ringverbs-tonic", "extras/ringverbs-tonic", &["ringverbs-hyper"]),
        ] });
        Workspace::from_metadata(&metadata, Path::new("/r")).unwrap()
    }

    fn changed(files: &[&str]) -> String {
        let files: Vec<_> = files.iter().map(|&file| file.to_owned()).collect();
        workspace().changed(&files).to_string()
    }

    #[test]
    fn dependents_of_a_changed_package_are_tested() {
        assert_eq!(changed(&["crates/ring/Cargo.toml"]), "ringverbs, cli, ring");
        // The test of the environment reads each source.
        assert_eq!(
            changed(&["crates/ring/src/lib.rs"]),
            "ringverbs, cli, ring, uverbs"
        );
        assert_eq!(changed(&["crates/cli/src/main.rs"]), "cli, uverbs");
        assert_eq!(changed(&["Cargo.lock"]), "all packages");
        // crates/ringverbs is not a prefix of other packages' folders.
        assert_eq!(changed(&["crates/ringverbs/x.txt"]), "ringverbs, cli");
    }

    #[test]
    fn extras_are_tested_when_an_extra_has_changed() {
        assert_eq!(changed(&["extras/ringverbs-hyper/x"]), "hyper, tonic");
        assert_eq!(changed(&["extras/ringverbs-tonic/x"]), "tonic");
    }

    #[test]
    fn pages_are_read_by_the_tests_of_the_guide() {
        assert_eq!(changed(&["docs/guide.md"]), "ringverbs");
        assert_eq!(changed(&["LICENSE"]), "");
        assert!(workspace().changed(&[]).is_empty());
    }
}
