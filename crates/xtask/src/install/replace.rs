//! Replaces rdma-core's `libmlx5.so.1` by ours, and restores it.
//!
//! libmlx5 has two links: `libmlx5.so.1`, to which programs are linked, and
//! `libmlx5-rdmavN.so` in libibverbs's folder of providers, which libibverbs loads for a
//! ConnectX. Both lead to `libmlx5.so.1.MINOR.RELEASE`.
//!
//! **Diversion**, if the links belong to a package of dpkg. Our file is beside
//! rdma-core's, and the two links are diverted and replaced by links to ours. They have
//! the same names in every release, unlike the file, so upgrades write the diverted
//! links. rdma-core's file is not moved: of two files with one soname in a folder,
//! ldconfig links the one with the higher number, so [`FILE`] has a number that no
//! release has. The diverted links are in a folder that ldconfig does not read. The names
//! for later private ABIs are diverted in advance.
//!
//! **Folder**, on other systems: rpm has no diversions, and each upgrade writes its links
//! again. Our file is in a folder of its own. A file in `ld.so.conf.d` that sorts first
//! makes the dynamic linker find it first; `mlx5.driver` names it to libibverbs, and
//! upgrades keep that as an edited configuration file (`%config(noreplace)`).
//!
//! Each step can be repeated, and only dpkg's diversions are recorded: an interrupted run
//! is completed by another run, or undone by a removal. Names are replaced by rename(2),
//! so that a program which starts at any time finds one library or the other.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::{InstallPaths, have_dpkg};
use crate::dist::{CONFIG, LIBRARY, LINKS};
use crate::libmlx5::LIBMLX5;

/// Our file beside rdma-core's.
const FILE: &str = "libmlx5.so.1.9999.ringverbs";

/// The folder, below that of libraries, for our library or the diverted links. It is
/// created first and removed last: while it exists, a removal is incomplete.
const FOLDER: &str = "ringverbs";

/// The folder of the diverted links in [`FOLDER`].
const DIVERTED: &str = "rdma-core";

/// The dynamic linker's configuration for our folder.
const CONF: &str = "00-ringverbs-libmlx5.conf";

/// The configuration of libibverbs for libmlx5.
pub const DRIVER: &str = "mlx5.driver";

/// Returns whether a configuration of libibverbs names a libmlx5 of ours.
pub fn is_in_driver_file(driver: &Path) -> bool {
    let text = fs::read_to_string(driver).unwrap_or_default();
    let end = format!("/{FOLDER}/libmlx5");
    text.lines().any(|line| line.ends_with(&end))
}

/// Returns the names of the mlx5 provider for each private ABI that ours supports.
fn providers() -> impl Iterator<Item = String> {
    let names = [LIBRARY].into_iter().chain(LINKS.iter().copied());
    names.map(|name| name.replace("ringverbs", "mlx5"))
}

/// How ours replaces rdma-core's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Diversion,
    Folder,
}

/// A diversion of dpkg.
#[derive(Debug, PartialEq, Eq)]
struct Diversion {
    path: PathBuf,
    /// The path that packages' files are diverted to.
    to: PathBuf,
    /// The package that diverts; `None` for a local diversion.
    package: Option<String>,
}

/// dpkg and ldconfig.
trait Tools {
    /// Returns the package that a file belongs to; `None` without dpkg.
    fn owner(&self, path: &Path) -> Result<Option<String>>;
    /// Returns all diversions.
    fn diversions(&self) -> Result<Vec<Diversion>>;
    /// Adds or removes a local diversion, without moving files.
    fn divert(&self, action: &str, path: &Path, to: &Path) -> Result<()>;
    /// Rebuilds the dynamic linker's cache.
    fn ldconfig(&self) -> Result<()>;
    /// Called before each change.
    fn before_change(&self) -> Result<()> {
        Ok(())
    }
}

/// The real programs, on the system or a tree. Paths are relative to the tree's root.
struct System {
    root: PathBuf,
    has_dpkg: bool,
}

impl System {
    /// Returns a command of dpkg with output in English, which is parsed.
    fn dpkg(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C");
        if self.root != Path::new("/") {
            command.arg("--root").arg(&self.root);
        }
        command
    }
}

impl Tools for System {
    fn owner(&self, path: &Path) -> Result<Option<String>> {
        if !self.has_dpkg {
            return Ok(None);
        }
        let mut query = self.dpkg("dpkg-query");
        let output = query.arg("--search").arg(path).output();
        let output = output.context("cannot run dpkg-query")?;
        Ok(owner(&String::from_utf8_lossy(&output.stdout)).map(str::to_owned))
    }

    fn diversions(&self) -> Result<Vec<Diversion>> {
        if !self.has_dpkg {
            return Ok(Vec::new());
        }
        let text = run(self.dpkg("dpkg-divert").args(["--list", "*mlx5*"]))?;
        Ok(text.lines().filter_map(diversion).collect())
    }

    fn divert(&self, action: &str, path: &Path, to: &Path) -> Result<()> {
        let mut divert = self.dpkg("dpkg-divert");
        divert.args(["--quiet", "--local", "--no-rename", "--divert"]);
        run(divert.arg(to).arg(action).arg(path)).map(drop)
    }

    fn ldconfig(&self) -> Result<()> {
        // Debian's PATH of users lacks /sbin.
        let paths = ["/sbin/ldconfig", "/usr/sbin/ldconfig"];
        let path = paths.iter().find(|path| Path::new(path).exists());
        let mut command = Command::new(path.unwrap_or(&"ldconfig"));
        if self.root != Path::new("/") {
            command.arg("-r").arg(&self.root);
        }
        run(&mut command).map(drop)
    }
}

/// Runs a command and returns its output.
fn run(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the package in dpkg-query's output, which lists diversions first.
fn owner(answer: &str) -> Option<&str> {
    let lines = answer.lines();
    let mut owners = lines
        .filter(|line| !line.starts_with("diversion by ") && !line.starts_with("local diversion "));
    owners.next()?.split_once(": ").map(|(package, _)| package)
}

/// Parses a line of `dpkg-divert --list`.
fn diversion(line: &str) -> Option<Diversion> {
    let (rest, is_local) = match line.strip_prefix("local ") {
        Some(rest) => (rest, true),
        None => (line, false),
    };
    let (path, rest) = rest.strip_prefix("diversion of ")?.split_once(" to ")?;
    let (to, package) = match is_local {
        true => (rest, None),
        false => {
            let (to, package) = rest.rsplit_once(" by ")?;
            (to, Some(package.to_owned()))
        }
    };
    Some(Diversion {
        path: path.into(),
        to: to.into(),
        package,
    })
}

/// The paths and tools of a system or a tree.
struct Replacement<T> {
    root: PathBuf,
    /// The folder of libraries, which contains that of providers.
    libraries: PathBuf,
    providers: PathBuf,
    etc: PathBuf,
    tools: T,
}

/// Replaces the libmlx5.so.1 under `prefix` by that in `dist`.
pub fn install(prefix: &Path, paths: &InstallPaths, dist: &Path) -> Result<()> {
    let ours = dist.join(LIBMLX5);
    ensure!(
        ours.is_file(),
        "there is no {}; cargo xtask dist builds it",
        ours.display()
    );
    let replacement = Replacement::on_system(prefix, paths)?;
    println!("{}", replacement.install(&ours)?);
    Ok(())
}

/// Restores rdma-core's libmlx5 if it was replaced; returns whether it was.
pub fn remove(prefix: &Path, paths: &InstallPaths) -> Result<bool> {
    Replacement::on_system(prefix, paths)?.remove()
}

impl Replacement<System> {
    fn on_system(prefix: &Path, paths: &InstallPaths) -> Result<Self> {
        let root = std::path::absolute(prefix)?;
        ensure!(
            root.file_name() == Some(OsStr::new("usr")),
            "{}: libmlx5 is replaced in a prefix named usr only; for another one set \
             LD_LIBRARY_PATH to the folder that cargo xtask dist builds",
            root.display()
        );
        let root = root.parent().unwrap_or(Path::new("/")).to_owned();
        let tools = System {
            has_dpkg: have_dpkg()?,
            root: root.clone(),
        };
        Ok(Self::new(root, paths, tools))
    }
}

impl<T: Tools> Replacement<T> {
    fn new(root: PathBuf, paths: &InstallPaths, tools: T) -> Self {
        let providers = paths.providers.clone();
        let libraries = providers.parent().unwrap_or(&providers).to_owned();
        let etc = root.join("etc");
        Self {
            root,
            libraries,
            providers,
            etc,
            tools,
        }
    }

    /// Returns a path relative to the root of the tree.
    fn path_in_root(&self, path: &Path) -> PathBuf {
        let below = path.strip_prefix(&self.root).unwrap_or(path);
        Path::new("/").join(below)
    }

    fn folder(&self) -> PathBuf {
        self.libraries.join(FOLDER)
    }

    fn diverted(&self) -> PathBuf {
        self.folder().join(DIVERTED)
    }

    /// Returns the diverted links, the paths they are diverted to, and the targets of
    /// our links.
    fn links(&self) -> Vec<(PathBuf, PathBuf, PathBuf)> {
        let main = (self.libraries.join(LIBMLX5), LIBMLX5.into(), FILE.into());
        let of_provider = |name: String| {
            let path = self.providers.join(&name);
            (path, name, Path::new("..").join(FILE))
        };
        let all = [main].into_iter().chain(providers().map(of_provider));
        all.map(|(path, name, target)| (path, self.diverted().join(name), target))
            .collect()
    }

    /// Returns whether a path is a link to our file.
    fn is_our_link(&self, path: &Path) -> bool {
        let target = fs::read_link(path);
        target.is_ok_and(|target| target.file_name() == Some(OsStr::new(FILE)))
    }

    fn method(&self) -> Result<Method> {
        let library = self.path_in_root(&self.libraries.join(LIBMLX5));
        let is_owned = self.tools.owner(&library)?.is_some();
        Ok(match is_owned || !self.diversions()?.is_empty() {
            true => Method::Diversion,
            false => Method::Folder,
        })
    }

    /// Returns our diversions.
    fn diversions(&self) -> Result<Vec<Diversion>> {
        let mut all = self.tools.diversions()?;
        let diverted = self.path_in_root(&self.diverted());
        all.retain(|it| it.package.is_none() && it.to.parent() == Some(&diverted));
        Ok(all)
    }

    /// Installs ours, and returns a message.
    fn install(&self, ours: &Path) -> Result<String> {
        let method = self.method()?;
        let library = self.libraries.join(LIBMLX5);
        let exists = library.exists() || method == Method::Diversion;
        ensure!(
            exists && self.providers.is_dir(),
            "there is no {}: install rdma-core's providers first (package ibverbs-providers \
             of Debian, libibverbs of Fedora)",
            library.display()
        );
        match method {
            Method::Diversion => self.divert(ours)?,
            Method::Folder => self.add_folder(ours)?,
        }
        self.ldconfig()?;
        Ok(match method {
            Method::Diversion => format!(
                "installed {}; libmlx5.so.1 and the mlx5 provider are links to it\n\
                 rdma-core's links are diverted to {}, also by upgrades",
                self.libraries.join(FILE).display(),
                self.diverted().display()
            ),
            Method::Folder => format!(
                "installed {}; {} puts it before rdma-core's, and {} names it to libibverbs\n\
                 libmlx5-rdmavN.so in {} is still rdma-core's, and is the fallback",
                self.folder().join(LIBMLX5).display(),
                self.conf().display(),
                self.driver().display(),
                self.providers.display()
            ),
        })
    }

    fn divert(&self, ours: &Path) -> Result<()> {
        let existing = self.tools.diversions()?;
        let links = self.links();
        for (path, aside, _) in &links {
            let path = self.path_in_root(path);
            let other = existing.iter().find(|it| it.path == path);
            let Some(other) = other.filter(|it| it.to != self.path_in_root(aside)) else {
                continue;
            };
            match &other.package {
                Some(package) => bail!(
                    "{} is diverted by the package {package}: remove that first",
                    path.display()
                ),
                None => bail!(
                    "{path} is diverted to {}: undo that first, by dpkg-divert --local --rename \
                     --remove {path}",
                    other.to.display(),
                    path = path.display()
                ),
            }
        }
        self.make_folder(&self.folder())?;
        self.make_folder(&self.diverted())?;
        self.copy(ours, &self.libraries.join(FILE))?;
        for (path, aside, target) in &links {
            let path_in_root = self.path_in_root(path);
            if !existing.iter().any(|it| it.path == path_in_root) {
                self.tools.before_change()?;
                self.tools
                    .divert("--add", &path_in_root, &self.path_in_root(aside))?;
            }
            if self.is_our_link(path) {
                continue;
            }
            self.keep_original(path, aside)?;
            self.rename_new(path, |temporary| symlink(target, temporary))?;
        }
        Ok(())
    }

    /// Links a file to `aside`, unless that exists: it is the same file, or a newer one
    /// written by an upgrade.
    fn keep_original(&self, path: &Path, aside: &Path) -> Result<()> {
        let exists = path.symlink_metadata().is_ok();
        if !exists || aside.symlink_metadata().is_ok() {
            return Ok(());
        }
        self.tools.before_change()?;
        fs::hard_link(path, aside).map_err(|error| io_error("make", aside, error))
    }

    fn add_folder(&self, ours: &Path) -> Result<()> {
        let conf = self.etc.join("ld.so.conf");
        let text = fs::read_to_string(&conf).unwrap_or_default();
        ensure!(
            includes_folder(&text),
            "{} does not include ld.so.conf.d/*.conf: add that line first",
            conf.display()
        );
        let folder = self.folder();
        self.make_folder(&folder)?;
        self.copy(ours, &folder.join(LIBMLX5))?;
        for name in providers() {
            self.rename_new(&folder.join(name), |temporary| symlink(LIBMLX5, temporary))?;
        }
        let driver = self.driver();
        if self.plugin_has_driver() {
            self.tools.before_change()?;
            let aside = self.driver_aside();
            fs::rename(&aside, &driver).map_err(|error| io_error("put back", &driver, error))?;
        }
        let text = fs::read_to_string(&driver).unwrap_or_else(|_| "driver mlx5\n".into());
        let line = self.driver_line();
        if !text.ends_with(&line) {
            for parent in [driver.parent(), self.driver_aside().parent()] {
                self.make_folder(parent.unwrap_or(&self.etc))?;
            }
            // The file is not ours, so the copy aside is from an earlier installation.
            self.delete(&self.driver_aside())?;
            self.keep_original(&driver, &self.driver_aside())?;
            let newline = if text.ends_with('\n') { "" } else { "\n" };
            self.write(&driver, &format!("{text}{newline}{line}"))?;
        }
        let conf = self.conf();
        self.make_folder(conf.parent().unwrap_or(&conf))?;
        self.write(
            &conf,
            &format!("{}\n", self.path_in_root(&folder).display()),
        )
    }

    fn conf(&self) -> PathBuf {
        self.etc.join("ld.so.conf.d").join(CONF)
    }

    fn driver(&self) -> PathBuf {
        self.etc.join("libibverbs.d").join(DRIVER)
    }

    fn driver_aside(&self) -> PathBuf {
        self.etc.join("ringverbs").join(DRIVER)
    }

    /// Returns whether the plugin's installation has moved `mlx5.driver` aside.
    fn plugin_has_driver(&self) -> bool {
        let driver = self.driver();
        driver.with_file_name(CONFIG).exists() && !driver.exists() && self.driver_aside().exists()
    }

    /// Returns the line that names ours. libibverbs loads the last driver of a file first.
    fn driver_line(&self) -> String {
        let stem = self.path_in_root(&self.folder().join("libmlx5"));
        format!("driver {}\n", stem.display())
    }

    /// Undoes a complete or partial installation by either method. Returns whether there
    /// was one.
    fn remove(&self) -> Result<bool> {
        let folder = self.folder();
        let diversions = self.diversions()?;
        if !folder.is_dir() && diversions.is_empty() {
            return Ok(false);
        }
        for (path, aside, _) in self.links() {
            let path_in_root = self.path_in_root(&path);
            let diversion = diversions.iter().find(|it| it.path == path_in_root);
            let is_ours = self.is_our_link(&path);
            // While a path is diverted, upgrades write to `aside`.
            self.put_back(&path, &aside, is_ours || diversion.is_some(), is_ours)?;
            if let Some(diversion) = diversion {
                self.tools.before_change()?;
                self.tools
                    .divert("--remove", &path_in_root, &diversion.to)?;
            }
            self.delete(&temporary_path(&path)?)?;
        }
        let (file, conf) = (self.libraries.join(FILE), self.conf());
        let (driver, aside) = (self.driver(), self.driver_aside());
        let text = fs::read_to_string(&driver).unwrap_or_default();
        let is_ours = text.ends_with(&self.driver_line());
        if !self.plugin_has_driver() {
            self.put_back(&driver, &aside, is_ours, is_ours)?;
        }
        for path in [&file, &conf, &driver] {
            self.delete(&temporary_path(path)?)?;
        }
        // ldconfig would link libmlx5.so.1 to our file.
        self.delete(&file)?;
        self.delete(&conf)?;
        self.ldconfig()?;
        for name in providers().chain([LIBMLX5.to_owned()]) {
            self.delete(&folder.join(&name))?;
            self.delete(&temporary_path(&folder.join(&name))?)?;
        }
        for folder in [self.etc.join("ringverbs"), self.diverted(), folder] {
            let _ = fs::remove_dir(folder); // only if it is empty
        }
        Ok(true)
    }

    /// Renames the file at `aside` to `path`, unless another file has that name and
    /// must not be `replaced`. A file of ours at `path` is deleted even if there is none
    /// at `aside`.
    fn put_back(&self, path: &Path, aside: &Path, replaced: bool, is_ours: bool) -> Result<()> {
        let is_aside = aside.symlink_metadata().is_ok();
        if is_aside && (replaced || path.symlink_metadata().is_err()) {
            self.tools.before_change()?;
            fs::rename(aside, path).map_err(|error| io_error("put back", path, error))?;
        } else if is_ours {
            self.delete(path)?;
        }
        // rename(2) leaves both names if they are links to the same file.
        self.delete(aside)
    }

    fn ldconfig(&self) -> Result<()> {
        self.tools.before_change()?;
        self.tools.ldconfig()
    }

    /// Creates a folder that everybody may read, independently of the umask.
    fn make_folder(&self, folder: &Path) -> Result<()> {
        let is_new = !folder.is_dir();
        if is_new {
            self.tools.before_change()?;
            fs::create_dir(folder).map_err(|error| io_error("make", folder, error))?;
        }
        // A run may have been interrupted between the two steps.
        if is_new || folder.starts_with(self.folder()) {
            self.tools.before_change()?;
            set_mode(folder, 0o755).map_err(|error| io_error("change", folder, error))?;
        }
        Ok(())
    }

    fn copy(&self, from: &Path, to: &Path) -> Result<()> {
        self.rename_new(to, |temporary| {
            fs::copy(from, temporary)?;
            set_mode(temporary, 0o755)
        })
    }

    fn write(&self, path: &Path, text: &str) -> Result<()> {
        self.rename_new(path, |temporary| {
            fs::write(temporary, text)?;
            set_mode(temporary, 0o644)
        })
    }

    /// Creates a file or link under a temporary name, and renames it.
    fn rename_new(&self, path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
        let temporary = temporary_path(path)?;
        self.delete(&temporary)?;
        self.tools.before_change()?;
        make(&temporary).map_err(|error| io_error("make", &temporary, error))?;
        self.tools.before_change()?;
        fs::rename(&temporary, path).map_err(|error| io_error("write", path, error))
    }

    /// Deletes a file or link, if it exists.
    fn delete(&self, path: &Path) -> Result<()> {
        if path.symlink_metadata().is_err() {
            return Ok(());
        }
        self.tools.before_change()?;
        fs::remove_file(path).map_err(|error| io_error("remove", path, error))
    }
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// Returns the temporary name of a file.
fn temporary_path(path: &Path) -> Result<PathBuf> {
    let name = path.file_name().context("a path without a name")?;
    Ok(path.with_file_name(format!(".{}.new", name.to_string_lossy())))
}

/// Returns whether the dynamic linker's configuration includes the files of its folder.
fn includes_folder(text: &str) -> bool {
    text.lines().any(|line| {
        let mut words = line.split_ascii_whitespace();
        words.next() == Some("include")
            && words.any(|word| word.trim_start_matches("/etc/") == "ld.so.conf.d/*.conf")
    })
}

/// Returns an error with advice.
fn io_error(what: &str, path: &Path, error: io::Error) -> anyhow::Error {
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied => "; run this as root",
        io::ErrorKind::ReadOnlyFilesystem => {
            "; remount it writable, or replace libmlx5 where the system's image is made, \
             with --prefix TREE/usr"
        }
        io::ErrorKind::StorageFull => "; free some space and run this again",
        _ => "",
    };
    anyhow::anyhow!("cannot {what} {}: {error}{advice}", path.display())
}

#[cfg(test)]
mod tests;
