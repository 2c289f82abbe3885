//! Trees of Debian packages of another architecture or release, built by this machine's apt
//! and dpkg-deb: packages are unpacked, and their scripts are not run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::progress::step;

/// Unpacks packages: $1 their folder, $2 the tree. tar keeps the tree's links to
/// folders (`/lib`), which `dpkg-deb -x` would replace.
const UNPACK: &str = r#"
mkdir -p "$2/var/lib/dpkg"
for deb in "$1"/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" > "$2.tar"
    tar -x --keep-directory-symlink -C "$2" -f "$2.tar"
    dpkg-deb -f "$deb" > "$2.control"
    sed 's/^Package: .*/&\nStatus: install ok installed/' "$2.control"
    echo
done > "$2/var/lib/dpkg/status"
rm "$2.tar" "$2.control""#;

/// The list of a tree's packages.
pub const STATUS: &str = "var/lib/dpkg/status";

/// An apt with lists, packages and settings of its own.
pub struct Apt {
    folder: PathBuf,
    options: Vec<String>,
}

impl Apt {
    /// Creates an apt for `architecture`, by Debian's name, in `folder`, and updates its
    /// lists. `sources` is a sources.list; the default is this machine's.
    ///
    /// # Errors
    /// Folders cannot be created, or the archive is unreachable.
    pub fn new(folder: &Path, architecture: &str, sources: Option<&str>) -> Result<Apt> {
        let (state, cache) = (folder.join("state"), folder.join("cache"));
        for folder in [state.join("lists/partial"), cache.join("archives/partial")] {
            fs::create_dir_all(&folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let status = state.join("status");
        fs::write(&status, "").with_context(|| format!("cannot write {}", status.display()))?;
        let mut options = vec![
            format!("APT::Architecture={architecture}"),
            format!("APT::Architectures={architecture}"),
            "APT::Install-Recommends=false".to_owned(),
            format!("Dir::State={}", state.display()),
            format!("Dir::State::status={}", status.display()),
            format!("Dir::Cache={}", cache.display()),
        ];
        if let Some(sources) = sources {
            let list = folder.join("sources.list");
            fs::write(&list, sources)
                .with_context(|| format!("cannot write {}", list.display()))?;
            options.push(format!("Dir::Etc::SourceList={}", list.display()));
            options.push("Dir::Etc::SourceParts=-".to_owned());
        }
        let apt = Apt {
            folder: folder.to_owned(),
            options,
        };
        apt.get("fetching lists of packages", &["update"])?;
        Ok(apt)
    }

    /// Takes the packages of another tree for installed, so that they are not unpacked.
    ///
    /// # Errors
    /// The tree has no list of its packages.
    pub fn assume_installed(&self, tree: &Path) -> Result<()> {
        let (from, to) = (tree.join(STATUS), self.folder.join("state/status"));
        fs::copy(&from, to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    }

    /// Unpacks packages and their dependencies into the folder `tree`.
    ///
    /// # Errors
    /// Packages cannot be fetched or unpacked.
    pub fn unpack(&self, packages: &[&str], tree: &Path) -> Result<()> {
        let install = ["install", "--download-only"];
        self.get("fetching packages", &[&install, packages].concat())?;
        let mut unpack = Command::new("sh");
        unpack
            .args(["-ec", UNPACK, "sh"])
            .arg(self.folder.join("cache/archives"))
            .arg(tree);
        self.step("unpacking packages", &mut unpack)
    }

    fn get(&self, what: &str, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new("apt-get");
        command.current_dir(&self.folder).args(["-q", "-y"]);
        for option in &self.options {
            command.args(["-o", option]);
        }
        self.step(what, command.args(arguments))
    }

    fn step(&self, what: &str, command: &mut Command) -> Result<()> {
        let log = self.folder.join("log");
        step(what, &log, Duration::from_secs(1800), command)
    }
}
