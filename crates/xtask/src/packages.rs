//! Checks the packages for crates.io.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::driver;

/// The files that each package must contain besides its sources.
const FILES: [&str; 3] = ["Cargo.toml", "LICENSE", "README.md"];

/// The results of the check.
pub struct Outcome {
    pub packages: usize,
    /// Missing fields of manifests, and missing files of packages.
    pub problems: Vec<String>,
}

struct Package {
    name: String,
    version: String,
}

impl Package {
    /// Returns the folder in the package's archive, and the stem of the archive's name.
    fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// Packs all publishable packages, and checks their contents. With `build`, compiles
/// libraries and programs from the packed sources, which depend on each other's packed
/// versions.
pub fn check(build: bool) -> Result<Outcome> {
    let out = Command::new(driver::cargo())
        .current_dir(driver::root())
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(out.status.success(), "cargo metadata: {}", out.status);
    let metadata: Value = serde_json::from_slice(&out.stdout)?;
    let (packages, mut problems) =
        publishable(metadata["packages"].as_array().context("no packages")?)?;
    let target = driver::target_dir().join("packages");
    let mut pack = Command::new(driver::cargo());
    pack.current_dir(driver::root())
        // All packages are compiled below.
        .args(["package", "--quiet", "--no-verify", "--allow-dirty"])
        .args(["--locked", "--offline", "--target-dir"])
        .arg(&target)
        .args(packages.iter().flat_map(|it| ["-p", &it.name]));
    driver::run(&mut pack)?;
    let packed = target.join("package");
    for package in &packages {
        let folder = package.folder();
        let unpacked = packed.join(&folder);
        if unpacked.exists() {
            fs::remove_dir_all(&unpacked).with_context(|| folder.clone())?;
        }
        let mut unpack = Command::new("tar");
        // With the current time: cargo detects changes by it, and the archive's times are
        // constant.
        unpack.current_dir(&packed).arg("-xmf");
        driver::run(unpack.arg(format!("{folder}.crate")))?;
        for file in FILES {
            if !unpacked.join(file).is_file() {
                problems.push(format!("{folder}: no {file}"));
            }
        }
    }
    if build {
        compile(&packages, &packed)?;
    }
    Ok(Outcome {
        packages: packages.len(),
        problems,
    })
}

/// Returns the publishable packages, and the problems of their manifests.
fn publishable(packages: &[Value]) -> Result<(Vec<Package>, Vec<String>)> {
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    // `publish = false` is an empty list of registries.
    for package in packages.iter().filter(|it| it["publish"].is_null()) {
        let text = |field: &str| package[field].as_str().filter(|text| !text.is_empty());
        let name = text("name").context("a package without a name")?;
        for field in [
            "description",
            "documentation",
            "license",
            "readme",
            "rust_version",
        ] {
            if text(field).is_none() {
                problems.push(format!("{name}: no {field}"));
            }
        }
        for field in ["keywords", "categories"] {
            if package[field].as_array().is_none_or(Vec::is_empty) {
                problems.push(format!("{name}: no {field}"));
            }
        }
        let targets = package["targets"].as_array().into_iter().flatten();
        let mut kinds = targets.filter_map(|it| it["kind"][0].as_str());
        let docs = &package["metadata"]["docs"]["rs"]["all-features"];
        if kinds.any(|kind| kind == "lib") && docs != true {
            problems.push(format!("{name}: docs.rs without all features"));
        }
        found.push(Package {
            name: name.to_owned(),
            version: text("version").unwrap_or_default().to_owned(),
        });
    }
    Ok((found, problems))
}

/// Compiles the unpacked packages as one workspace.
fn compile(packages: &[Package], packed: &Path) -> Result<()> {
    let mut manifest = "[workspace]\nresolver = \"3\"\nmembers = [".to_owned();
    for package in packages {
        write!(manifest, "\"{}\", ", package.folder())?;
    }
    // The repository's profile, so that clippy's builds of dependencies are reused.
    manifest.push_str("]\n\n[profile.dev]\ndebug = \"line-tables-only\"\n");
    manifest.push_str("\n[patch.crates-io]\n");
    for package in packages {
        let folder = package.folder();
        writeln!(manifest, "{} = {{ path = \"{folder}\" }}", package.name)?;
    }
    fs::write(packed.join("Cargo.toml"), manifest)?;
    // The tested versions. cargo removes entries that these packages do not need.
    fs::copy(driver::root().join("Cargo.lock"), packed.join("Cargo.lock"))?;
    let mut check = Command::new(driver::cargo());
    check
        .current_dir(packed)
        .args(["check", "--quiet", "--workspace", "--all-features"])
        // clippy has already checked the dependencies there.
        .args(["--offline", "--target-dir"])
        .arg(driver::target_dir());
    driver::run(&mut check)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn incomplete_manifests_are_reported() {
        let fine = json!({ "name": "a", "version": "1.0.0", "publish": null, "description": "d",
            "documentation": "u", "license": "MIT", "readme": "README.md",
            "rust_version": "1.85", "keywords": ["k"], "categories": ["c"],
            "targets": [{ "kind": ["lib"] }],
            "metadata": { "docs": { "rs": { "all-features": true } } } });
        let mut bare = fine.clone();
        bare["name"] = "b".into();
        bare["readme"] = Value::Null;
        bare["keywords"] = json!([]);
        bare["metadata"] = Value::Null;
        let mut program = fine.clone();
        program["name"] = "c".into();
        program["targets"] = json!([{ "kind": ["bin"] }]);
        program["metadata"] = Value::Null;
        let own = json!({ "name": "xtask", "publish": [] });
        let (found, problems) = publishable(&[fine, bare, program, own]).unwrap();
        let names: Vec<_> = found.iter().map(Package::folder).collect();
        assert_eq!(names, ["a-1.0.0", "b-1.0.0", "c-1.0.0"]);
        let bare = [
            "b: no readme",
            "b: no keywords",
            "b: docs.rs without all features",
        ];
        assert_eq!(problems, bare);
    }
}
