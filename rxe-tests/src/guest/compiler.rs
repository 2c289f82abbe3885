//! Debian 13's Rust compiler, the oldest supported one, in a tree.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::fcntl::Flock;

use super::host;
use super::suite::Suite;
use super::tree::{Builder, lock_shared, lock_within, remove_partial};

/// Part of the tree's name: trees of other recipes are not used.
const RECIPE: u32 = 1;

/// Runs a command in the tree: $1 the tree, $2 the sources, $3 a writable folder.
const ENTER: &str = r#"
tree=$1; mount --bind -o ro "$2" "$tree/mnt"; mount --bind "$3" "$tree/srv"
mount -t proc proc "$tree/proc"; mount --rbind /dev "$tree/dev"; mount -t tmpfs tmp "$tree/tmp"
shift 3
exec chroot "$tree" /usr/bin/env -i --chdir=/mnt PATH=/usr/bin:/bin HOME=/root \
    CARGO_HOME=/srv/cargo CARGO_TARGET_DIR=/srv/target "$@""#;

/// The compiler's tree. No other process replaces it while this value exists.
pub struct Compiler {
    tree: PathBuf,
    _in_use: Flock<File>,
}

impl Compiler {
    /// Returns the tree from the cache, or builds it.
    pub fn get() -> Result<Compiler> {
        if !host::is_root() {
            bail!("Debian's compiler needs root (debootstrap and chroot)");
        }
        let cache = host::cache()?;
        fs::create_dir_all(&cache)
            .with_context(|| format!("cannot make the cache folder {}", cache.display()))?;
        let name = format!("compiler-{RECIPE}");
        let dir = cache.join(&name);
        let guard = File::create(cache.join("compiler.building"))?;
        let _guard = lock_within(guard, Duration::from_secs(1800))
            .context("another process is building the compiler's tree and does not finish")?;
        if !dir.join("complete").exists() {
            host::require(host::BUILD_TOOLS, true)?;
            remove_partial(&cache, "compiler")?;
            let partial = cache.join(format!("{name}.partial"));
            eprintln!(
                "building a tree with Debian's compiler in {}",
                dir.display()
            );
            fs::create_dir(&partial)?;
            fs::set_permissions(&partial, fs::Permissions::from_mode(0o700))?;
            let builder = Builder::new(Suite::Trixie, "", &partial);
            builder.bootstrap()?;
            builder.configure()?;
            builder.install(&["cargo", "gcc", "libc6-dev", "rustc"])?;
            builder.clean_up()?;
            fs::write(partial.join("complete"), "")?;
            fs::rename(&partial, &dir)?;
        }
        Ok(Compiler {
            tree: dir.join("tree"),
            _in_use: lock_shared(File::open(dir.join("complete"))?)?,
        })
    }

    /// Returns a command that runs a program of the tree, which the caller adds with its
    /// arguments. It runs in `sources`, which is read-only; cargo's files are in `target`
    /// and `cargo` of `output`.
    pub fn command(&self, sources: &Path, output: &Path) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--", "sh", "-ec", ENTER, "sh"]);
        command.args([&self.tree, sources, output]);
        command
    }
}
