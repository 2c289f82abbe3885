//! A QEMU newer than the host's, in a Debian tree.
//!
//! Devices served by another process over vfio-user need QEMU 11.1. The program runs with
//! the tree's loader and libraries, without chroot, so that it sees the host's files.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use nix::fcntl::Flock;

use super::host;
use super::suite::Suite;
use super::tree::{Builder, lock_shared, lock_within, remove_partial};

/// The release with that QEMU. It is updated daily, but the tree is kept until the
/// recipe changes: a newer QEMU is not needed.
const SUITE: Suite = Suite::Sid;

/// Version of this code; raised when the same inputs give another tree.
const RECIPE: u32 = 1;

/// The loader within the tree.
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
/// QEMU within the tree.
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";

/// QEMU in a tree of the cache. No other process removes it while this value exists.
#[derive(Debug)]
pub struct Qemu {
    tree: PathBuf,
    _in_use: Flock<File>,
}

impl Qemu {
    /// Returns the tree from the cache, or builds it.
    pub fn get() -> Result<Qemu> {
        let cache = host::cache()?;
        fs::create_dir_all(&cache)
            .with_context(|| format!("cannot make the cache folder {}", cache.display()))?;
        let name = format!("qemu-{RECIPE}");
        let dir = cache.join(&name);
        if let Some(qemu) = Qemu::open(&dir)? {
            return Ok(qemu);
        }
        let guard = File::create(cache.join("qemu.building"))?;
        let _guard = lock_within(guard, std::time::Duration::from_secs(1800))
            .context("another process is building QEMU's tree and does not finish")?;
        if let Some(qemu) = Qemu::open(&dir)? {
            return Ok(qemu);
        }
        if !host::is_root() {
            bail!(
                "building QEMU's tree needs root (debootstrap and chroot); \
                 run the same command as root"
            );
        }
        host::require(host::BUILD_TOOLS, true)?;
        remove_partial(&cache, "qemu")?;
        let partial = cache.join(format!("{name}.partial"));
        eprintln!("building a tree with a newer QEMU in {}", dir.display());
        let began = Instant::now();
        fs::create_dir(&partial)?;
        let builder = Builder::new(SUITE, "", &partial);
        builder.bootstrap()?;
        builder.configure()?;
        builder.install(&["qemu-system-x86", "seabios"])?;
        builder.clean_up()?;
        // Only this user may enter: the tree has set-uid programs.
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o700))?;
        fs::write(partial.join("complete"), "")?;
        fs::rename(&partial, &dir)?;
        eprintln!(
            "built the tree with QEMU ({:.0} s)",
            began.elapsed().as_secs_f64()
        );
        Qemu::open(&dir)?.with_context(|| format!("{} vanished", dir.display()))
    }

    fn open(dir: &std::path::Path) -> Result<Option<Qemu>> {
        let Ok(mark) = File::open(dir.join("complete")) else {
            return Ok(None);
        };
        Ok(Some(Qemu {
            tree: dir.join("tree"),
            _in_use: lock_shared(mark)?,
        }))
    }

    /// Returns a command that runs QEMU; the caller adds the arguments.
    pub fn command(&self) -> Command {
        let at = |path: &str| self.tree.join(path);
        let libraries = [
            "usr/lib/x86_64-linux-gnu",
            "usr/lib/x86_64-linux-gnu/pulseaudio",
            "usr/lib",
        ]
        .map(|path| at(path).to_string_lossy().into_owned())
        .join(":");
        let mut command = Command::new(at(LOADER));
        command
            .args(["--library-path", &libraries])
            .arg(at(PROGRAM))
            .env("QEMU_MODULE_DIR", at("usr/lib/x86_64-linux-gnu/qemu"));
        for firmware in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            command.arg("-L").arg(at(firmware));
        }
        command
    }
}
