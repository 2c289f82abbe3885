//! Our `libmlx5.so.1` in the place of rdma-core's, and rdma-core's put back.
//!
//! Two names lead to libmlx5: `libmlx5.so.1`, which programs are linked to, and
//! `libmlx5-rdmavN.so` in libibverbs's folder of providers, which it loads for a
//! ConnectX. Both are links to `libmlx5.so.1.MINOR.RELEASE`.
//!
//! **Diversion**, where the names belong to a package of dpkg. Ours is a file beside
//! rdma-core's, and the two links are diverted and lead to it. They have the same names
//! in every release, unlike the file, so an upgrade goes on to write the diverted ones.
//! rdma-core's file stays where it is: of two files with one soname in a folder ldconfig
//! links the one with the higher number, so [`FILE`] has a number that no release has.
//! The diverted links are in a folder that ldconfig does not read. The names for later
//! private ABIs are diverted in advance.
//!
//! **Folder**, elsewhere: rpm has no diversions, and writes its links again at each
//! upgrade. Ours is in a folder of its own. A file in `ld.so.conf.d` that sorts first
//! makes the dynamic linker find it first; `mlx5.driver` names it to libibverbs and,
//! as an edited configuration file (`%config(noreplace)`), is kept by upgrades.
//!
//! Each step can be repeated, and no record is kept besides dpkg's: what was interrupted
//! is completed by running it again, or undone by removing it. Names are replaced by
//! rename(2), so that a program which starts meanwhile finds one library or the other.

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

/// The folder below that of libraries, of ours or of the diverted links. It is made first
/// and removed last: while it is there, something is left to remove.
const FOLDER: &str = "ringverbs";

/// The folder of the diverted links in that.
const DIVERTED: &str = "rdma-core";

/// The dynamic linker's configuration for our folder.
const CONF: &str = "00-ringverbs-libmlx5.conf";

/// The configuration of libibverbs for libmlx5.
pub const DRIVER: &str = "mlx5.driver";

/// Returns whether a configuration of libibverbs names a libmlx5 of ours.
pub fn is_named_by(driver: &Path) -> bool {
    let text = fs::read_to_string(driver).unwrap_or_default();
    let end = format!("/{FOLDER}/libmlx5");
    text.lines().any(|line| line.ends_with(&end))
}

/// Names of the provider, for each private ABI that ours supports.
fn providers() -> impl Iterator<Item = String> {
    let names = [LIBRARY].into_iter().chain(LINKS.iter().copied());
    names.map(|name| name.replace("ringverbs", "mlx5"))
}

/// How ours takes the place of rdma-core's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Diversion,
    Folder,
}

/// A diversion of dpkg.
#[derive(Debug, PartialEq, Eq)]
struct Diversion {
    path: PathBuf,
    /// Where packages' files of that path go.
    to: PathBuf,
    /// The package that diverts; none if it is local.
    package: Option<String>,
}

/// The programs of the system that know of its libraries.
trait Tools {
    /// The package that a file belongs to; none without dpkg.
    fn owner(&self, path: &Path) -> Result<Option<String>>;
    /// All diversions.
    fn diversions(&self) -> Result<Vec<Diversion>>;
    /// Adds or removes a local diversion, and moves no file.
    fn divert(&self, action: &str, path: &Path, to: &Path) -> Result<()>;
    /// Rebuilds the dynamic linker's cache.
    fn ldconfig(&self) -> Result<()>;
    /// Called before each change.
    fn before_change(&self) -> Result<()> {
        Ok(())
    }
}

/// The programs themselves, on the system or a tree. Paths are as seen in the tree.
struct System {
    root: PathBuf,
    has_dpkg: bool,
}

impl System {
    /// A program of dpkg, whose messages are parsed.
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
        let text = said(self.dpkg("dpkg-divert").args(["--list", "*mlx5*"]))?;
        Ok(text.lines().filter_map(diversion).collect())
    }

    fn divert(&self, action: &str, path: &Path, to: &Path) -> Result<()> {
        let mut divert = self.dpkg("dpkg-divert");
        divert.args(["--quiet", "--local", "--no-rename", "--divert"]);
        said(divert.arg(to).arg(action).arg(path)).map(drop)
    }

    fn ldconfig(&self) -> Result<()> {
        // Debian's PATH of users lacks /sbin.
        let places = ["/sbin/ldconfig", "/usr/sbin/ldconfig"];
        let place = places.iter().find(|place| Path::new(place).exists());
        let mut command = Command::new(place.unwrap_or(&"ldconfig"));
        if self.root != Path::new("/") {
            command.arg("-r").arg(&self.root);
        }
        said(&mut command).map(drop)
    }
}

/// Runs a command to its end and gives its output.
fn said(command: &mut Command) -> Result<String> {
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

/// The package in dpkg-query's answer, which lists diversions first.
fn owner(answer: &str) -> Option<&str> {
    let lines = answer.lines();
    let mut owners = lines
        .filter(|line| !line.starts_with("diversion by ") && !line.starts_with("local diversion "));
    owners.next()?.split_once(": ").map(|(package, _)| package)
}

/// A line of `dpkg-divert --list`.
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

/// Where things are on a system or in a tree.
struct Replacement<T> {
    root: PathBuf,
    /// The folder of libraries, with that of providers in it.
    libraries: PathBuf,
    providers: PathBuf,
    etc: PathBuf,
    tools: T,
}

/// Puts the libmlx5.so.1 in `dist` in the place of that under `prefix`.
pub fn install(prefix: &Path, paths: &InstallPaths, dist: &Path) -> Result<()> {
    let ours = dist.join(LIBMLX5);
    ensure!(
        ours.is_file(),
        "there is no {}; cargo xtask dist makes it",
        ours.display()
    );
    let place = Replacement::on_system(prefix, paths)?;
    println!("{}", place.install(&ours)?);
    Ok(())
}

/// Puts rdma-core's libmlx5 back, if ours is in its place; says whether it was.
pub fn remove(prefix: &Path, paths: &InstallPaths) -> Result<bool> {
    Replacement::on_system(prefix, paths)?.remove()
}

impl Replacement<System> {
    fn on_system(prefix: &Path, paths: &InstallPaths) -> Result<Self> {
        let root = std::path::absolute(prefix)?;
        ensure!(
            root.file_name() == Some(OsStr::new("usr")),
            "{}: libmlx5 is replaced in a prefix named usr only; for another one set \
             LD_LIBRARY_PATH to the folder that cargo xtask dist makes",
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

    /// The path as seen in the tree.
    fn inside(&self, path: &Path) -> PathBuf {
        let below = path.strip_prefix(&self.root).unwrap_or(path);
        Path::new("/").join(below)
    }

    fn folder(&self) -> PathBuf {
        self.libraries.join(FOLDER)
    }

    fn diverted(&self) -> PathBuf {
        self.folder().join(DIVERTED)
    }

    /// The names that are diverted, where to, and what ours are links to.
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

    /// Whether a name is a link to our file.
    fn is_our_link(&self, path: &Path) -> bool {
        let target = fs::read_link(path);
        target.is_ok_and(|target| target.file_name() == Some(OsStr::new(FILE)))
    }

    fn method(&self) -> Result<Method> {
        let library = self.inside(&self.libraries.join(LIBMLX5));
        let is_owned = self.tools.owner(&library)?.is_some();
        Ok(match is_owned || !self.diversions()?.is_empty() {
            true => Method::Diversion,
            false => Method::Folder,
        })
    }

    /// The diversions that are ours.
    fn diversions(&self) -> Result<Vec<Diversion>> {
        let mut all = self.tools.diversions()?;
        let diverted = self.inside(&self.diverted());
        all.retain(|it| it.package.is_none() && it.to.parent() == Some(&diverted));
        Ok(all)
    }

    /// Returns what has been done.
    fn install(&self, ours: &Path) -> Result<String> {
        let method = self.method()?;
        let library = self.libraries.join(LIBMLX5);
        let is_there = library.exists() || method == Method::Diversion;
        ensure!(
            is_there && self.providers.is_dir(),
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
                 libmlx5-rdmavN.so in {} is rdma-core's still, and the substitute",
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
            let path = self.inside(path);
            let other = existing.iter().find(|it| it.path == path);
            let Some(other) = other.filter(|it| it.to != self.inside(aside)) else {
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
            let seen = self.inside(path);
            if !existing.iter().any(|it| it.path == seen) {
                self.tools.before_change()?;
                self.tools.divert("--add", &seen, &self.inside(aside))?;
            }
            if self.is_our_link(path) {
                continue;
            }
            self.keep(path, aside)?;
            self.rename_new(path, |fresh| symlink(target, fresh))?;
        }
        Ok(())
    }

    /// Gives a file a second name, under which it waits; one that waits already is
    /// newer, if an upgrade has written it.
    fn keep(&self, path: &Path, aside: &Path) -> Result<()> {
        let is_there = path.symlink_metadata().is_ok();
        if !is_there || aside.symlink_metadata().is_ok() {
            return Ok(());
        }
        self.tools.before_change()?;
        fs::hard_link(path, aside).map_err(|error| refused("make", aside, error))
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
            self.rename_new(&folder.join(name), |fresh| symlink(LIBMLX5, fresh))?;
        }
        let driver = self.driver();
        if self.plugin_has_driver() {
            self.tools.before_change()?;
            let aside = self.driver_aside();
            fs::rename(&aside, &driver).map_err(|error| refused("put back", &driver, error))?;
        }
        let text = fs::read_to_string(&driver).unwrap_or_else(|_| "driver mlx5\n".into());
        let line = self.driver_line();
        if !text.ends_with(&line) {
            for parent in [driver.parent(), self.driver_aside().parent()] {
                self.make_folder(parent.unwrap_or(&self.etc))?;
            }
            // The file is not ours, so the kept copy is that of an earlier installation.
            self.delete(&self.driver_aside())?;
            self.keep(&driver, &self.driver_aside())?;
            let newline = if text.ends_with('\n') { "" } else { "\n" };
            self.write(&driver, &format!("{text}{newline}{line}"))?;
        }
        let conf = self.conf();
        self.make_folder(conf.parent().unwrap_or(&conf))?;
        self.write(&conf, &format!("{}\n", self.inside(&folder).display()))
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

    /// Whether it waits there because the plugin's configuration is in its place.
    fn plugin_has_driver(&self) -> bool {
        let driver = self.driver();
        driver.with_file_name(CONFIG).exists() && !driver.exists() && self.driver_aside().exists()
    }

    /// The line that names ours. libibverbs loads the last driver of a file first.
    fn driver_line(&self) -> String {
        let stem = self.inside(&self.folder().join("libmlx5"));
        format!("driver {}\n", stem.display())
    }

    /// Undoes either method, whole or in part. Says whether there was anything.
    fn remove(&self) -> Result<bool> {
        let folder = self.folder();
        let diversions = self.diversions()?;
        if !folder.is_dir() && diversions.is_empty() {
            return Ok(false);
        }
        for (path, aside, _) in self.links() {
            let seen = self.inside(&path);
            let diversion = diversions.iter().find(|it| it.path == seen);
            let is_ours = self.is_our_link(&path);
            // While a name is diverted, upgrades write the other one.
            self.put_back(&path, &aside, is_ours || diversion.is_some(), is_ours)?;
            if let Some(diversion) = diversion {
                self.tools.before_change()?;
                self.tools.divert("--remove", &seen, &diversion.to)?;
            }
            self.delete(&fresh(&path)?)?;
        }
        let (file, conf) = (self.libraries.join(FILE), self.conf());
        let (driver, aside) = (self.driver(), self.driver_aside());
        let text = fs::read_to_string(&driver).unwrap_or_default();
        let is_ours = text.ends_with(&self.driver_line());
        if !self.plugin_has_driver() {
            self.put_back(&driver, &aside, is_ours, is_ours)?;
        }
        for path in [&file, &conf, &driver] {
            self.delete(&fresh(path)?)?;
        }
        // ldconfig would link libmlx5.so.1 to our file.
        self.delete(&file)?;
        self.delete(&conf)?;
        self.ldconfig()?;
        for name in providers().chain([LIBMLX5.to_owned()]) {
            self.delete(&folder.join(&name))?;
            self.delete(&fresh(&folder.join(&name))?)?;
        }
        for folder in [self.etc.join("ringverbs"), self.diverted(), folder] {
            let _ = fs::remove_dir(folder); // if it is empty
        }
        Ok(true)
    }

    /// Gives the file at `aside` its name back, unless another one that is not to be
    /// `replaced` has it. One of ours is deleted, also if no file waits.
    fn put_back(&self, path: &Path, aside: &Path, replaced: bool, is_ours: bool) -> Result<()> {
        let waits = aside.symlink_metadata().is_ok();
        if waits && (replaced || path.symlink_metadata().is_err()) {
            self.tools.before_change()?;
            fs::rename(aside, path).map_err(|error| refused("put back", path, error))?;
        } else if is_ours {
            self.delete(path)?;
        }
        // Also where rename(2) leaves both names of one file.
        self.delete(aside)
    }

    fn ldconfig(&self) -> Result<()> {
        self.tools.before_change()?;
        self.tools.ldconfig()
    }

    /// Makes a folder that everybody may read, whatever the umask.
    fn make_folder(&self, folder: &Path) -> Result<()> {
        let is_new = !folder.is_dir();
        if is_new {
            self.tools.before_change()?;
            fs::create_dir(folder).map_err(|error| refused("make", folder, error))?;
        }
        // One of ours may be of a run that was interrupted here.
        if is_new || folder.starts_with(self.folder()) {
            self.tools.before_change()?;
            readable(folder, 0o755).map_err(|error| refused("change", folder, error))?;
        }
        Ok(())
    }

    fn copy(&self, from: &Path, to: &Path) -> Result<()> {
        self.rename_new(to, |fresh| {
            fs::copy(from, fresh)?;
            readable(fresh, 0o755)
        })
    }

    fn write(&self, path: &Path, text: &str) -> Result<()> {
        self.rename_new(path, |fresh| {
            fs::write(fresh, text)?;
            readable(fresh, 0o644)
        })
    }

    /// Makes a file or link under a new name, which then takes the place of the old one.
    fn rename_new(&self, path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
        let fresh = fresh(path)?;
        self.delete(&fresh)?;
        self.tools.before_change()?;
        make(&fresh).map_err(|error| refused("make", &fresh, error))?;
        self.tools.before_change()?;
        fs::rename(&fresh, path).map_err(|error| refused("write", path, error))
    }

    /// Deletes a file or link, if it is there.
    fn delete(&self, path: &Path) -> Result<()> {
        if path.symlink_metadata().is_err() {
            return Ok(());
        }
        self.tools.before_change()?;
        fs::remove_file(path).map_err(|error| refused("remove", path, error))
    }
}

fn readable(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// The name under which a file is made.
fn fresh(path: &Path) -> Result<PathBuf> {
    let name = path.file_name().context("a path without a name")?;
    Ok(path.with_file_name(format!(".{}.new", name.to_string_lossy())))
}

/// Whether the dynamic linker's configuration includes the files of its folder.
fn includes_folder(text: &str) -> bool {
    text.lines().any(|line| {
        let mut words = line.split_ascii_whitespace();
        words.next() == Some("include")
            && words.any(|word| word.trim_start_matches("/etc/") == "ld.so.conf.d/*.conf")
    })
}

/// An error with what to do about it.
fn refused(what: &str, path: &Path, error: io::Error) -> anyhow::Error {
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
