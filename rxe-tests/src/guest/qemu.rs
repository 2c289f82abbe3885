//! A QEMU newer than this machine's, from a Debian tree of its own.
//!
//! Devices that another process serves over vfio-user need QEMU 11.1. The
//! program runs from the tree through the tree's own loader and libraries,
//! with no change of root, so that it sees the files of this machine.

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

/// The release that has it. It moves, so the tree is named for the recipe and
/// kept until that changes: a newer QEMU is no better for the purpose.
const SUITE: Suite = Suite::Sid;

/// Raised when this code makes something else of the same inputs.
const RECIPE: u32 = 1;

/// The loader within the tree.
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
/// QEMU within the tree.
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";

/// QEMU in a tree of the cache. While it lives, no other process removes it.
#[derive(Debug)]
pub struct Qemu {
    tree: PathBuf,
    _in_use: Flock<File>,
}

impl Qemu {
    /// From the cache, or newly made.
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
            .context("another process is making the tree of QEMU and does not end")?;
        if let Some(qemu) = Qemu::open(&dir)? {
            return Ok(qemu);
        }
        if !host::is_root() {
            bail!(
                "making the tree of QEMU needs root (debootstrap and chroot); \
                 run the same command as root"
            );
        }
        host::require(host::TO_BUILD, true)?;
        remove_partial(&cache, "qemu")?;
        let partial = cache.join(format!("{name}.partial"));
        eprintln!("making a tree with a newer QEMU in {}", dir.display());
        let began = Instant::now();
        fs::create_dir(&partial)?;
        let builder = Builder::new(SUITE, "", &partial);
        builder.bootstrap()?;
        builder.configure()?;
        builder.install(&["qemu-system-x86", "seabios"])?;
        builder.tidy()?;
        // Run by whoever runs the guest, but nobody else's set-uid programs.
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o700))?;
        fs::write(partial.join("complete"), "")?;
        fs::rename(&partial, &dir)?;
        eprintln!(
            "QEMU is installed in its tree ({:.0} s)",
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

    /// The command that starts it, to be given QEMU's arguments.
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
