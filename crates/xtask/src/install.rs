//! Installs and removes the plugin and the command, together or separately. Completions
//! and man pages belong to the command.
//!
//! The order of registration decides which provider gets a device: libibverbs loads
//! the providers of `RDMAV_DRIVERS` first, then the `driver` lines of the files in its
//! configuration directory. It reads those files in directory order, which is
//! unspecified, and loads the lines in the reverse order of reading. The order is
//! therefore defined within a file only. So our file names the stock providers and then
//! ringverbs: ringverbs registers first, and the stock providers serve where it refuses.
//! The stock providers' files are moved out of the directory while ours is installed.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::dist::{self, COMMAND, CONFIG, CONFIG_TEXT, LIBRARY, LINKS, PRELOAD, SHARE};

mod replace;

/// The stock providers' configuration files.
const STOCK: [&str; 2] = ["rxe.driver", "mlx5.driver"];

/// The paths of an installation.
#[derive(Debug, PartialEq, Eq)]
struct InstallPaths {
    /// libibverbs's folder of providers.
    providers: PathBuf,
    /// libibverbs's folder of configuration files.
    config: PathBuf,
    /// libibverbs's stock configuration files are moved to this folder.
    aside: PathBuf,
    /// The command's file.
    command: PathBuf,
    /// The library of embedded devices, where the command looks for it.
    preload: PathBuf,
    /// The folder of completions and man pages.
    share: PathBuf,
    /// Whether these are the folders of the running system.
    system: bool,
}

impl InstallPaths {
    /// Returns the paths for a prefix. `/usr` is that of the system, `TREE/usr` that of
    /// another tree, whose configuration is in `TREE/etc`.
    fn for_prefix(prefix: &Path) -> Result<InstallPaths> {
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
        Ok(InstallPaths {
            providers: providers.unwrap_or(&candidates[0]).clone(),
            config: etc.join("libibverbs.d"),
            aside: etc.join("ringverbs"),
            command: prefix.join("bin").join(COMMAND),
            preload: prefix.join("lib/ringverbs").join(PRELOAD),
            share: prefix.join(SHARE),
            system: prefix == Path::new("/usr"),
        })
    }

    /// Returns the stock providers' configuration files, and where they are moved to.
    fn stock(&self) -> [(PathBuf, PathBuf); 2] {
        STOCK.map(|name| (self.config.join(name), self.aside.join(name)))
    }

    /// Returns the path for a file of `share`: Debian's zsh has another folder for
    /// completions of packages.
    fn share_file(&self, file: &Path) -> PathBuf {
        let debian = self.share.join("zsh/vendor-completions");
        match file.strip_prefix("zsh/site-functions") {
            Ok(name) if debian.is_dir() => debian.join(name),
            _ => self.share.join(file),
        }
    }

    /// Returns the paths of completions, and the installed man pages.
    fn installed_share_files(&self) -> Result<Vec<PathBuf>> {
        let completions = [
            "bash-completion/completions/ringverbs",
            "fish/vendor_completions.d/ringverbs.fish",
            "zsh/site-functions/_ringverbs",
            "zsh/vendor-completions/_ringverbs",
        ];
        let mut files: Vec<PathBuf> = completions.map(|file| self.share.join(file)).into();
        let pages = self.share.join("man/man1");
        if pages.is_dir() {
            let is_ours = |name: &Path| {
                let name = name.to_string_lossy();
                name == "ringverbs.1" || name.starts_with("ringverbs-") && name.ends_with(".1")
            };
            let found = dist::files_below(&pages)?;
            files.extend(
                found
                    .iter()
                    .filter(|it| is_ours(it))
                    .map(|it| pages.join(it)),
            );
        }
        Ok(files)
    }
}

/// A component to install.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Component {
    /// The provider for libibverbs.
    Plugin,
    /// The command `ringverbs`.
    Command,
}

/// Installs the plugin for the libibverbs under `prefix` (`/usr` for the system's), so
/// that rxe and ConnectX devices use it, and the command; with `uninstall`, removes both
/// and restores the stock providers. `only` selects one component.
///
/// The files are those of `built`, a folder of [`dist::dist_with_command`]; without it
/// they are built now.
///
/// Without `only`, `uninstall` also restores rdma-core's libmlx5.
pub fn install(
    prefix: &Path,
    uninstall: bool,
    only: Option<Component>,
    built: Option<&Path>,
) -> Result<()> {
    let paths = InstallPaths::for_prefix(prefix)?;
    let wanted = |part| only.is_none_or(|only| only == part);
    if uninstall {
        if wanted(Component::Plugin) {
            remove_plugin(&paths)?;
            println!("removed the plugin; devices use the stock providers");
        }
        if wanted(Component::Command) {
            remove_file(&paths.command)?;
            remove_file(&paths.preload)?;
            // Only if it is empty.
            let _ = paths.preload.parent().map(fs::remove_dir);
            for file in paths.installed_share_files()? {
                remove_file(&file)?;
            }
            println!("removed {}", paths.command.display());
        }
        if only.is_none() && paths.providers.is_dir() && is_named_usr(prefix) {
            restore_libmlx5(prefix, &paths)?;
        }
        return Ok(());
    }
    let dist = match (built, only) {
        (Some(folder), _) => folder.to_owned(),
        (None, Some(Component::Plugin)) => dist::dist()?,
        (None, _) => dist::dist_with_command()?,
    };
    if wanted(Component::Plugin) {
        install_plugin(&dist, &paths)?;
    }
    if wanted(Component::Command) {
        replace(&dist.join(PRELOAD), &paths.preload)?;
        replace(&dist.join(COMMAND), &paths.command)?;
        for file in dist::files_below(&dist.join(SHARE))? {
            replace(&dist.join(SHARE).join(&file), &paths.share_file(&file))?;
        }
        println!("installed {}", paths.command.display());
    }
    Ok(())
}

fn is_named_usr(prefix: &Path) -> bool {
    std::path::absolute(prefix).is_ok_and(|it| it.file_name() == Some("usr".as_ref()))
}

/// Replaces the `libmlx5.so.1` under `prefix` by ours, or with `uninstall` restores
/// rdma-core's. Nothing else is installed or removed.
pub fn replace_libmlx5(prefix: &Path, uninstall: bool, built: Option<&Path>) -> Result<()> {
    let paths = InstallPaths::for_prefix(prefix)?;
    if uninstall {
        if !restore_libmlx5(prefix, &paths)? {
            println!("libmlx5 is rdma-core's; there is nothing to remove");
        }
        return Ok(());
    }
    let dist = match built {
        Some(folder) => folder.to_owned(),
        None => dist::dist()?,
    };
    replace::install(prefix, &paths, &dist)?;
    reconfigure(&paths)
}

/// Updates the plugin's configuration, if it is installed.
fn reconfigure(paths: &InstallPaths) -> Result<()> {
    match paths.config.join(CONFIG).exists() {
        true => configure(paths),
        false => Ok(()),
    }
}

fn restore_libmlx5(prefix: &Path, paths: &InstallPaths) -> Result<bool> {
    let restored = replace::remove(prefix, paths)?;
    if restored {
        reconfigure(paths)?;
        println!("libmlx5 is rdma-core's again");
    }
    Ok(restored)
}

fn install_plugin(dist: &Path, paths: &InstallPaths) -> Result<()> {
    fs::create_dir_all(&paths.config).with_context(|| cannot("make", &paths.config))?;
    let library = paths.providers.join(LIBRARY);
    replace(&dist.join(LIBRARY), &library)?;
    for link in LINKS {
        let link = paths.providers.join(link);
        remove_file(&link)?;
        symlink(LIBRARY, &link).with_context(|| cannot("make", &link))?;
    }
    configure(paths)?;
    println!(
        "installed {} and {}; rxe and ConnectX devices use ringverbs",
        library.display(),
        paths.config.join(CONFIG).display()
    );
    Ok(())
}

/// Writes our configuration and moves the stock providers' aside. A `mlx5.driver` that
/// names a libmlx5.so.1 of ours stays, and serves ConnectX instead of the plugin.
fn configure(paths: &InstallPaths) -> Result<()> {
    let has_libmlx5 = replace::is_in_driver_file(&paths.config.join(replace::DRIVER));
    let text = match has_libmlx5 {
        true => CONFIG_TEXT.replace("driver mlx5\n", ""),
        false => CONFIG_TEXT.to_owned(),
    };
    move_stock_aside(paths, has_libmlx5)?;
    let config = paths.config.join(CONFIG);
    fs::write(&config, text).with_context(|| cannot("write", &config))
}

/// Copies a file under a temporary name and renames it: programs may map the old file.
fn replace(from: &Path, to: &Path) -> Result<()> {
    let (Some(folder), Some(name)) = (to.parent(), to.file_name()) else {
        bail!("{} names no file", to.display());
    };
    fs::create_dir_all(folder).with_context(|| cannot("make", folder))?;
    let temporary = folder.join(format!(".{}.new", name.to_string_lossy()));
    fs::copy(from, &temporary)
        .with_context(|| format!("cannot copy {} to {}", from.display(), temporary.display()))?;
    fs::rename(&temporary, to).with_context(|| cannot("write", to))
}

fn cannot(what: &str, path: &Path) -> String {
    format!("cannot {what} {} (are you root?)", path.display())
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.with_context(|| cannot("remove", path)),
    }
}

fn remove_plugin(paths: &InstallPaths) -> Result<()> {
    remove_file(&paths.config.join(CONFIG))?;
    for name in LINKS.iter().chain([&LIBRARY]) {
        remove_file(&paths.providers.join(name))?;
    }
    restore_stock(paths)
}

/// Moves the stock providers' configuration aside. On a Debian system by a diversion of
/// dpkg, so that upgrades of the stock package do not restore it.
fn move_stock_aside(paths: &InstallPaths, without_mlx5: bool) -> Result<()> {
    fs::create_dir_all(&paths.aside).with_context(|| cannot("make", &paths.aside))?;
    let is_diverted = paths.system && have_dpkg()?;
    for (stock, aside) in paths.stock() {
        if without_mlx5 && stock.ends_with(replace::DRIVER) {
            continue;
        }
        if is_diverted {
            divert("--add", &stock, &aside)?;
        } else if stock.exists() {
            fs::rename(&stock, &aside).with_context(|| cannot("move", &stock))?;
        }
    }
    Ok(())
}

fn restore_stock(paths: &InstallPaths) -> Result<()> {
    let is_diverted = paths.system && have_dpkg()?;
    for (stock, aside) in paths.stock() {
        if is_diverted {
            divert("--remove", &stock, &aside)?;
        } else if aside.exists() {
            fs::rename(&aside, &stock).with_context(|| cannot("put back", &stock))?;
        }
    }
    let _ = fs::remove_dir(&paths.aside); // only if it is empty
    Ok(())
}

/// Returns whether this is a Debian system.
///
/// # Errors
/// dpkg-divert exists but fails: without a diversion the next upgrade would restore the
/// file.
fn have_dpkg() -> Result<bool> {
    match Command::new("dpkg-divert").arg("--version").output() {
        Ok(output) if output.status.success() => Ok(true),
        Ok(output) => bail!("dpkg-divert --version: {}", output.status),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).context("cannot run dpkg-divert"),
    }
}

fn divert(action: &str, stock: &Path, aside: &Path) -> Result<()> {
    let output = Command::new("dpkg-divert")
        .args(["--local", "--rename", action, "--divert"])
        .arg(aside)
        .arg(stock)
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
            for name in STOCK {
                let text = format!("driver {}\n", name.trim_end_matches(".driver"));
                fs::write(path.join("etc/libibverbs.d").join(name), text).unwrap();
            }
            Tree(path)
        }

        fn paths(&self) -> InstallPaths {
            InstallPaths::for_prefix(&self.0.join("usr")).unwrap()
        }

        /// Returns whether the stock providers' configuration is in libibverbs's folder.
        fn is_stock(&self) -> bool {
            let stock = self.paths().stock();
            let exist = stock.each_ref().map(|(path, aside)| {
                assert_ne!(path.exists(), aside.exists());
                path.exists()
            });
            assert_eq!(exist[0], exist[1]);
            exist[0]
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn folders_are_those_of_libibverbs() {
        let tree = Tree::new("paths");
        let paths = InstallPaths::for_prefix(&tree.0.join("usr")).unwrap();
        assert_eq!(paths.providers, tree.0.join("usr/lib64/libibverbs"));
        assert_eq!(paths.config, tree.0.join("etc/libibverbs.d"));
        assert!(!paths.system);
        let local = InstallPaths::for_prefix(Path::new("/opt/verbs")).unwrap();
        assert_eq!(local.config, Path::new("/opt/verbs/etc/libibverbs.d"));
        assert!(InstallPaths::for_prefix(Path::new("/usr")).unwrap().system);
    }

    #[test]
    fn the_stock_configuration_is_moved_aside_and_restored() {
        let tree = Tree::new("aside");
        let paths = tree.paths();
        for _ in 0..2 {
            configure(&paths).unwrap();
            assert!(!tree.is_stock());
        }
        remove_plugin(&paths).unwrap();
        assert!(tree.is_stock());
        let text = fs::read_to_string(paths.config.join("mlx5.driver")).unwrap();
        assert_eq!(text, "driver mlx5\n");
        assert!(!paths.aside.exists());
        remove_plugin(&paths).unwrap();
        assert!(tree.is_stock());
    }

    #[test]
    fn configuration_that_names_our_libmlx5_stays() {
        let tree = Tree::new("both");
        let paths = tree.paths();
        let mlx5 = paths.config.join("mlx5.driver");
        let line = "driver /usr/lib64/ringverbs/libmlx5\n";
        fs::write(&mlx5, format!("driver mlx5\n{line}")).unwrap();
        configure(&paths).unwrap();
        assert!(mlx5.exists() && !paths.config.join("rxe.driver").exists());
        let ours = || fs::read_to_string(paths.config.join(CONFIG)).unwrap();
        assert!(!ours().contains("driver mlx5\n"));
        // Our libmlx5 is removed.
        fs::write(&mlx5, "driver mlx5\n").unwrap();
        reconfigure(&paths).unwrap();
        assert!(!tree.is_stock());
        assert!(ours().ends_with("driver mlx5\ndriver ringverbs\n"));
    }

    /// Returns the names of the files and links below a folder.
    fn files(folder: &Path) -> Vec<String> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let is_folder = path.is_dir() && !path.is_symlink();
            match is_folder {
                true => found.extend(files(&path)),
                false => found.push(path.file_name().unwrap().to_str().unwrap().to_owned()),
            }
        }
        found.sort();
        found
    }

    #[test]
    fn components_are_installed_and_removed_separately() {
        let built = Tree::new("built");
        fs::write(built.0.join(LIBRARY), "the plugin").unwrap();
        fs::write(built.0.join(COMMAND), "the command").unwrap();
        fs::write(built.0.join(PRELOAD), "the library").unwrap();
        let share = [
            "share/bash-completion/completions/ringverbs",
            "share/man/man1/ringverbs-info.1",
            "share/man/man1/ringverbs.1",
            "share/zsh/site-functions/_ringverbs",
        ];
        for file in share {
            let path = built.0.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        let command = [
            COMMAND,
            PRELOAD,
            "_ringverbs",
            COMMAND,
            "ringverbs-info.1",
            "ringverbs.1",
        ];
        let mut plugin: Vec<&str> = LINKS
            .iter()
            .copied()
            .chain([LIBRARY, CONFIG])
            .chain(STOCK)
            .collect();
        plugin.sort_unstable();
        for (only, expect) in [
            (Some(Component::Command), [&command[..], &STOCK].concat()),
            (Some(Component::Plugin), plugin.clone()),
            (None, [&command[..], &plugin].concat()),
        ] {
            let tree = Tree::new("either");
            let prefix = tree.0.join("usr");
            let before = files(&tree.0);
            for _ in 0..2 {
                install(&prefix, false, only, Some(&built.0)).unwrap();
                let mut expect = expect.clone();
                expect.sort_unstable();
                assert_eq!(files(&tree.0), expect, "{only:?}");
            }
            assert_eq!(tree.is_stock(), only == Some(Component::Command));
            install(&prefix, true, only, None).unwrap();
            assert_eq!(files(&tree.0), before, "{only:?}");
            assert!(tree.is_stock());
        }
        // Debian's folder for zsh; the man page of another program stays.
        let tree = Tree::new("debian");
        let prefix = tree.0.join("usr");
        fs::create_dir_all(prefix.join("share/zsh/vendor-completions")).unwrap();
        fs::create_dir_all(prefix.join("share/man/man1")).unwrap();
        fs::write(prefix.join("share/man/man1/ringverbs2.1"), "").unwrap();
        let before = files(&tree.0);
        let only = Some(Component::Command);
        install(&prefix, false, only, Some(&built.0)).unwrap();
        assert!(
            prefix
                .join("share/zsh/vendor-completions/_ringverbs")
                .exists()
        );
        assert!(!prefix.join("share/zsh/site-functions").exists());
        install(&prefix, true, only, None).unwrap();
        assert_eq!(files(&tree.0), before);
        // One of both is removed.
        let tree = Tree::new("one");
        let prefix = tree.0.join("usr");
        install(&prefix, false, None, Some(&built.0)).unwrap();
        install(&prefix, true, Some(Component::Command), None).unwrap();
        assert_eq!(files(&tree.0), plugin);
        // Only the plugin can be installed from a folder without the command.
        fs::remove_file(built.0.join(COMMAND)).unwrap();
        install(&prefix, false, Some(Component::Plugin), Some(&built.0)).unwrap();
        let error = install(&prefix, false, None, Some(&built.0)).unwrap_err();
        assert!(format!("{error:#}").contains(COMMAND), "{error:#}");
    }
}
