//! Packages as crates.io would get them.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::driver;

/// What each package contains besides its sources.
const FILES: [&str; 3] = ["Cargo.toml", "LICENSE", "README.md"];

/// What is known of the packages.
pub struct Outcome {
    pub packages: usize,
    /// What manifests and packages lack.
    pub lacking: Vec<String>,
}

struct Package {
    name: String,
    version: String,
}

impl Package {
    /// The folder in its archive, and what cargo calls that.
    fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// Packs all packages that can be published, and checks what is in them. With
/// `build`, compiles libraries and programs from the packed sources: each
/// dependency among them is the packed one, with its version.
pub fn check(build: bool) -> Result<Outcome> {
    let out = Command::new(driver::cargo())
        .current_dir(driver::root())
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(out.status.success(), "cargo metadata: {}", out.status);
    let metadata: Value = serde_json::from_slice(&out.stdout)?;
    let (packages, mut lacking) =
        publishable(metadata["packages"].as_array().context("no packages")?)?;
    let target = driver::target_dir().join("packages");
    let mut pack = Command::new(driver::cargo());
    pack.current_dir(driver::root())
        // Built below, all at once.
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
        // With new times: cargo goes by them, and those in the archive are always the same.
        unpack.current_dir(&packed).arg("-xmf");
        driver::run(unpack.arg(format!("{folder}.crate")))?;
        for file in FILES {
            if !unpacked.join(file).is_file() {
                lacking.push(format!("{folder}: no {file}"));
            }
        }
    }
    if build {
        compile(&packages, &packed)?;
    }
    Ok(Outcome {
        packages: packages.len(),
        lacking,
    })
}

/// The packages that can be published, and what their manifests lack.
fn publishable(packages: &[Value]) -> Result<(Vec<Package>, Vec<String>)> {
    let (mut found, mut lacking) = (Vec::new(), Vec::new());
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
                lacking.push(format!("{name}: no {field}"));
            }
        }
        for field in ["keywords", "categories"] {
            if package[field].as_array().is_none_or(Vec::is_empty) {
                lacking.push(format!("{name}: no {field}"));
            }
        }
        let targets = package["targets"].as_array().into_iter().flatten();
        let mut kinds = targets.filter_map(|it| it["kind"][0].as_str());
        let docs = &package["metadata"]["docs"]["rs"]["all-features"];
        if kinds.any(|kind| kind == "lib") && docs != true {
            lacking.push(format!("{name}: docs.rs without all features"));
        }
        found.push(Package {
            name: name.to_owned(),
            version: text("version").unwrap_or_default().to_owned(),
        });
    }
    Ok((found, lacking))
}

/// Compiles the unpacked packages as one workspace.
fn compile(packages: &[Package], packed: &Path) -> Result<()> {
    let mut manifest = "[workspace]\nresolver = \"3\"\nmembers = [".to_owned();
    for package in packages {
        write!(manifest, "\"{}\", ", package.folder())?;
    }
    // The repository's profile, so that dependencies are as clippy left them.
    manifest.push_str("]\n\n[profile.dev]\ndebug = \"line-tables-only\"\n");
    manifest.push_str("\n[patch.crates-io]\n");
    for package in packages {
        let folder = package.folder();
        writeln!(manifest, "{} = {{ path = \"{folder}\" }}", package.name)?;
    }
    fs::write(packed.join("Cargo.toml"), manifest)?;
    // The versions that are tested. It is shortened to what these packages need.
    fs::copy(driver::root().join("Cargo.lock"), packed.join("Cargo.lock"))?;
    let mut check = Command::new(driver::cargo());
    check
        .current_dir(packed)
        .args(["check", "--quiet", "--workspace", "--all-features"])
        // Other packages are what clippy has already checked.
        .args(["--offline", "--target-dir"])
        .arg(driver::target_dir());
    driver::run(&mut check)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_can_be_published_is_described() {
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
        let (found, lacking) = publishable(&[fine, bare, program, own]).unwrap();
        let names: Vec<_> = found.iter().map(Package::folder).collect();
        assert_eq!(names, ["a-1.0.0", "b-1.0.0", "c-1.0.0"]);
        let bare = [
            "b: no readme",
            "b: no keywords",
            "b: docs.rs without all features",
        ];
        assert_eq!(lacking, bare);
    }
}
