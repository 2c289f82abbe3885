//! The plugin as files: `target/dist`, an installation, a Debian package.
//!
//! libibverbs asks for a provider by the name of its private ABI, so the one
//! file gets a link for each. Which provider gets a device is decided by the
//! order in which they register: libibverbs loads what `RDMAV_DRIVERS` names
//! first, then the `driver` lines of the files in its configuration directory.
//! It reads those files in directory order, which nobody controls, and loads
//! the lines in the opposite order of reading. Within one file the order is
//! therefore certain, between files it is not. So our file names the stock
//! provider and then ringverbs, which makes ringverbs the first to register
//! and the stock one its substitute where ringverbs refuses; and the stock
//! provider's own file is moved out of the directory while ours is there.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::driver::{cargo, root, target_dir};

/// The file itself is named for the oldest private ABI.
const LIBRARY: &str = "libringverbs-rdmav34.so";

/// What the other private ABIs ask for.
const LINKS: &[&str] = &[
    "libringverbs-rdmav57.so",
    "libringverbs-rdmav59.so",
    "libringverbs-rdmav64.so",
    "libringverbs-rdmav65.so",
];

/// Our configuration for libibverbs.
const CONFIG: &str = "ringverbs.driver";
const CONFIG_TEXT: &str = "\
# libibverbs loads the drivers named in a file from the last to the first, and
# the first one loaded that can drive a device gets it: ringverbs, and if that
# refuses to work with this libibverbs, the C provider.
driver rxe
driver ringverbs
";

/// The stock provider's configuration.
const STOCK: &str = "rxe.driver";

/// Builds the plugin and lays it out in `target/dist`, which is emptied first.
pub fn dist() -> Result<PathBuf> {
    let target = target_dir();
    let status = Command::new(cargo())
        .current_dir(root())
        .args([
            "build",
            "--quiet",
            "--release",
            "-p",
            "ringverbs-provider",
            "--target-dir",
        ])
        .arg(&target)
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the plugin does not build");
    let built = target.join("release/libringverbs_provider.so");
    let dist = target.join("dist");
    if dist.exists() {
        fs::remove_dir_all(&dist).with_context(|| format!("cannot empty {}", dist.display()))?;
    }
    fs::create_dir_all(&dist).with_context(|| format!("cannot make {}", dist.display()))?;
    fs::copy(&built, dist.join(LIBRARY))
        .with_context(|| format!("cannot copy {}", built.display()))?;
    for link in LINKS {
        symlink(LIBRARY, dist.join(link)).with_context(|| format!("cannot link {link}"))?;
    }
    fs::write(dist.join(CONFIG), CONFIG_TEXT).with_context(|| format!("cannot write {CONFIG}"))?;
    Ok(dist)
}

/// Where an installation goes.
#[derive(Debug, PartialEq, Eq)]
struct Places {
    /// libibverbs's folder of providers.
    providers: PathBuf,
    /// libibverbs's folder of configuration files.
    config: PathBuf,
    /// Where the stock provider's configuration waits meanwhile.
    aside: PathBuf,
    /// Whether these are the folders of the running system.
    system: bool,
}

impl Places {
    /// The folders under a prefix; `/usr` is the system's, `TREE/usr` that of
    /// another tree, whose configuration is in `TREE/etc`.
    fn under(prefix: &Path) -> Result<Places> {
        let prefix = std::path::absolute(prefix)
            .with_context(|| format!("no such prefix: {}", prefix.display()))?;
        let etc = match prefix.file_name() {
            Some(name) if name == "usr" => prefix.with_file_name("etc"),
            _ => prefix.join("etc"),
        };
        let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
        let candidates = [
            prefix.join("lib").join(&triplet).join("libibverbs"),
            prefix.join("lib64/libibverbs"),
            prefix.join("lib/libibverbs"),
        ];
        let providers = candidates.iter().find(|dir| dir.is_dir());
        Ok(Places {
            providers: providers.unwrap_or(&candidates[0]).clone(),
            config: etc.join("libibverbs.d"),
            aside: etc.join("ringverbs").join(STOCK),
            system: prefix == Path::new("/usr"),
        })
    }

    fn stock(&self) -> PathBuf {
        self.config.join(STOCK)
    }
}

/// Puts the plugin where the libibverbs under `prefix` (`/usr` for the
/// system's) looks, so that rxe devices use it; with `uninstall`, takes it
/// away and puts the stock provider back in its place.
///
/// Its files are those of `built`, a folder that [`dist`] has made; without it
/// they are made now.
pub fn install(prefix: &Path, uninstall: bool, built: Option<&Path>) -> Result<()> {
    let places = Places::under(prefix)?;
    if uninstall {
        remove(&places)?;
        println!("ringverbs is removed; rxe devices use the stock provider");
        return Ok(());
    }
    let dist = match built {
        Some(folder) => folder.to_owned(),
        None => dist()?,
    };
    for dir in [&places.providers, &places.config] {
        fs::create_dir_all(dir).with_context(|| cannot("make", dir))?;
    }
    let library = places.providers.join(LIBRARY);
    // A new file under a new name: the old one may be mapped by programs.
    let fresh = places.providers.join(format!(".{LIBRARY}.new"));
    fs::copy(dist.join(LIBRARY), &fresh).with_context(|| cannot("write", &fresh))?;
    fs::rename(&fresh, &library).with_context(|| cannot("write", &library))?;
    for link in LINKS {
        let link = places.providers.join(link);
        remove_file(&link)?;
        symlink(LIBRARY, &link).with_context(|| cannot("make", &link))?;
    }
    put_aside(&places)?;
    let config = places.config.join(CONFIG);
    fs::write(&config, CONFIG_TEXT).with_context(|| cannot("write", &config))?;
    println!(
        "installed {} and {}; rxe devices use ringverbs",
        library.display(),
        config.display()
    );
    Ok(())
}

fn cannot(what: &str, path: &Path) -> String {
    format!("cannot {what} {} (are you root?)", path.display())
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.with_context(|| cannot("remove", path)),
    }
}

fn remove(places: &Places) -> Result<()> {
    remove_file(&places.config.join(CONFIG))?;
    for name in LINKS.iter().chain([&LIBRARY]) {
        remove_file(&places.providers.join(name))?;
    }
    put_back(places)
}

/// Moves the stock provider's configuration aside. On a Debian system dpkg is
/// told, so that an upgrade of the stock package does not bring it back.
fn put_aside(places: &Places) -> Result<()> {
    let parent = places.aside.parent().unwrap_or(&places.aside);
    fs::create_dir_all(parent).with_context(|| cannot("make", parent))?;
    if places.system && have_dpkg()? {
        return divert("--add", places);
    }
    let stock = places.stock();
    if stock.exists() {
        fs::rename(&stock, &places.aside).with_context(|| cannot("move", &stock))?;
    }
    Ok(())
}

fn put_back(places: &Places) -> Result<()> {
    if places.system && have_dpkg()? {
        divert("--remove", places)?;
    } else if places.aside.exists() {
        let stock = places.stock();
        fs::rename(&places.aside, &stock).with_context(|| cannot("put back", &stock))?;
    }
    if let Some(parent) = places.aside.parent() {
        let _ = fs::remove_dir(parent); // if it is empty
    }
    Ok(())
}

/// Whether this is a Debian system. What is there and does not start is an
/// error: without a diversion the next upgrade would bring the file back.
fn have_dpkg() -> Result<bool> {
    match Command::new("dpkg-divert").arg("--version").output() {
        Ok(output) if output.status.success() => Ok(true),
        Ok(output) => bail!("dpkg-divert --version: {}", output.status),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).context("cannot run dpkg-divert"),
    }
}

fn divert(action: &str, places: &Places) -> Result<()> {
    let output = Command::new("dpkg-divert")
        .args(["--local", "--rename", action, "--divert"])
        .arg(&places.aside)
        .arg(places.stock())
        .output()
        .context("cannot run dpkg-divert")?;
    if !output.status.success() {
        bail!(
            "dpkg-divert: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// Whether what makes Debian packages is installed.
pub fn can_make_deb() -> bool {
    let have = Command::new(cargo()).args(["deb", "--version"]).output();
    have.is_ok_and(|output| output.status.success())
}

/// Makes the Debian package of the plugin; gives its path.
pub fn deb() -> Result<PathBuf> {
    if !can_make_deb() {
        bail!("cargo-deb is missing: cargo install cargo-deb");
    }
    let dist = dist()?;
    // cargo-deb takes its files from here, whatever the target directory.
    let staged = root().join("target/dist");
    if dist != staged {
        copy_dist(&dist, &staged)?;
    }
    let out = target_dir().join("debian");
    fs::create_dir_all(&out).with_context(|| cannot("make", &out))?;
    let output = Command::new(cargo())
        .current_dir(root())
        .args([
            "deb",
            "--quiet",
            "--no-build",
            "-p",
            "ringverbs-provider",
            "--output",
        ])
        .arg(&out)
        .output()
        .context("cannot run cargo deb")?;
    ensure!(
        output.status.success(),
        "cargo deb: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let packages = fs::read_dir(&out).with_context(|| cannot("read", &out))?;
    packages
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "deb"))
        .max_by_key(|path| path.metadata().and_then(|m| m.modified()).ok())
        .context("cargo deb left no package")
}

fn copy_dist(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        fs::remove_dir_all(to).with_context(|| cannot("empty", to))?;
    }
    fs::create_dir_all(to).with_context(|| cannot("make", to))?;
    for name in [LIBRARY, CONFIG] {
        fs::copy(from.join(name), to.join(name)).with_context(|| cannot("write", to))?;
    }
    for link in LINKS {
        symlink(LIBRARY, to.join(link)).with_context(|| cannot("write", to))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Tree {
            let path =
                std::env::temp_dir().join(format!("ringverbs-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(path.join("usr/lib64/libibverbs")).unwrap();
            fs::create_dir_all(path.join("etc/libibverbs.d")).unwrap();
            fs::write(path.join("etc/libibverbs.d").join(STOCK), "driver rxe\n").unwrap();
            Tree(path)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn folders_are_those_that_libibverbs_looks_in() {
        let tree = Tree::new("places");
        let places = Places::under(&tree.0.join("usr")).unwrap();
        assert_eq!(places.providers, tree.0.join("usr/lib64/libibverbs"));
        assert_eq!(places.config, tree.0.join("etc/libibverbs.d"));
        assert!(!places.system);
        let local = Places::under(Path::new("/opt/verbs")).unwrap();
        assert_eq!(local.config, Path::new("/opt/verbs/etc/libibverbs.d"));
        assert!(Places::under(Path::new("/usr")).unwrap().system);
    }

    #[test]
    fn the_stock_configuration_is_put_aside_and_back() {
        let tree = Tree::new("aside");
        let places = Places::under(&tree.0.join("usr")).unwrap();
        for _ in 0..2 {
            put_aside(&places).unwrap();
            assert!(!places.stock().exists() && places.aside.exists());
        }
        remove(&places).unwrap();
        assert_eq!(fs::read_to_string(places.stock()).unwrap(), "driver rxe\n");
        assert!(!places.aside.parent().unwrap().exists());
        remove(&places).unwrap();
        assert!(places.stock().exists());
    }
}
