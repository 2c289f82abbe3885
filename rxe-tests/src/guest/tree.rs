//! Builds guests: a Debian tree, a kernel, an initramfs and a disk image, kept in the
//! cache between runs.
//!
//! The name of a tree has a hash of its inputs, so a change of these builds a new one.
//! It is built under another name and renamed when it is complete, so an interrupted
//! build is never used.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::apt::{Apt, STATUS};
use super::progress::step;
use super::suite::{PACKAGES, Suite};
use super::{host, initramfs};

/// Version of this code; raised when the same inputs give another tree.
const RECIPE: u32 = 2;

/// Maximum age of the tree of a suite that is updated daily.
const MAX_MOVING_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// The first process of the initramfs.
const INIT: &str = include_str!("../../guest/init");

/// Keeps the tests of rdma-core, which python3-pyverbs has among its documentation.
const KEEP_TESTS: &str = "
mkdir -p opt/rdma-core
cp -r usr/share/doc/rdma-core/tests opt/rdma-core
gzip -dr opt/rdma-core/tests
";

/// The last step of building a tree, run in the tree.
const CLEAN_UP: &str = "
mkdir -p ctl share
rm -rf var/lib/apt/lists/* etc/resolv.conf usr/share/doc/*
printf '127.0.0.1 localhost ringverbs\\n::1 localhost\\n' > etc/hosts
";

/// Replaces the maintainer scripts, which cannot run in a tree of another architecture;
/// $1 is the guest's folder.
const MAINTAINER_STEPS: &str = r#"
cp usr/share/base-passwd/passwd.master etc/passwd
cp usr/share/base-passwd/group.master etc/group
ln -s mawk usr/bin/awk
mkdir -p usr/local/bin
version=$(ls usr/lib/modules)
depmod -b . "$version"
mv "boot/vmlinuz-$version" "$1/vmlinuz"
echo "$version" > boot/version
sed -n '/^Package: rdma-core$/,/^$/s/^Version: //p' var/lib/dpkg/status > "$1/rdma-core-version"
"#;

/// A guest that is ready to boot. No other process removes its files while this value
/// exists.
#[derive(Debug)]
pub struct Image {
    /// The guest's suite.
    pub suite: Suite,
    /// The guest's folder.
    pub dir: PathBuf,
    _in_use: Flock<File>,
}

impl Image {
    /// Returns the path of the kernel.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// Returns the path of the initramfs.
    pub fn initrd(&self) -> PathBuf {
        self.dir.join("initrd")
    }

    /// Returns the path of the disk image, which boots do not change.
    pub fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    /// Returns the tree that the disk image was made from.
    pub fn tree(&self) -> PathBuf {
        self.dir.join("tree")
    }

    /// Returns the version of the tree's rdma-core package, for example `56.1-1`.
    pub fn rdma_core(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dir.join("rdma-core-version"))?
            .trim()
            .to_owned())
    }
}

/// Unpacks packages, and what they depend on and the guest lacks, into the folder `to`. A
/// guest that copies it to its root can run their programs.
///
/// # Errors
/// The packages cannot be fetched or unpacked.
pub fn unpack_more(image: &Image, packages: &[&str], to: &Path) -> Result<()> {
    let folder = to.with_extension("apt");
    let apt = apt_of(image.suite, &folder)?;
    apt.assume_installed(&image.tree())?;
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    apt.unpack(packages, to)?;
    // It would replace the guest's own.
    fs::remove_file(to.join(STATUS))?;
    fs::remove_dir_all(&folder)?;
    Ok(())
}

/// Creates an apt with the packages of a suite, in `folder`.
fn apt_of(suite: Suite, folder: &Path) -> Result<Apt> {
    let mirror = host::mirror()?;
    let mirror = mirror.with_context(|| {
        let variable = host::MIRROR_VARIABLE;
        format!("apt has no Debian archive configured; set {variable} to the URL of one")
    })?;
    let (keyring, release) = (host::KEYRING, suite.release());
    let sources = format!("deb [signed-by={keyring}] {mirror} {release} main\n");
    Apt::new(folder, suite.architecture().debian, Some(&sources))
}

/// Returns the guest of a suite, from the cache or newly built.
///
/// `kernel` is a kernel package of that suite other than the default.
pub fn image(suite: Suite, kernel: Option<&str>) -> Result<Image> {
    let kernel = kernel.unwrap_or(suite.architecture().kernel);
    let cache = host::cache()?;
    fs::create_dir_all(&cache)
        .with_context(|| format!("cannot make the cache folder {}", cache.display()))?;
    let name = format!("{suite}-{:016x}", key(suite, kernel));
    let dir = cache.join(&name);

    if let Some(image) = open(suite, &dir)? {
        return Ok(image);
    }
    // One process builds a suite; others wait and then open it.
    let guard = File::create(cache.join(format!("{suite}.building")))?;
    let _guard = lock_within(guard, Duration::from_secs(1800)).with_context(|| {
        format!("another process is building the guest of {suite} and does not finish")
    })?;
    if let Some(image) = open(suite, &dir)? {
        return Ok(image);
    }
    if !host::is_root() {
        bail!(
            "building the guest of {suite} needs root (debootstrap and chroot); \
             run the same command as root"
        );
    }
    host::require(host::BUILD_TOOLS, true)?;
    if let Some(user) = suite.architecture().user {
        host::require(&[(user, "qemu-user"), ("depmod", "kmod")], false)?;
    }
    remove_partial(&cache, suite.name())?;
    let partial = cache.join(format!("{name}.partial"));
    eprintln!("building the guest of {suite} in {}", dir.display());
    let began = Instant::now();
    fs::create_dir(&partial)?;
    // Only root may enter: the tree has set-uid programs.
    fs::set_permissions(&partial, fs::Permissions::from_mode(0o700))?;
    Builder::new(suite, kernel, &partial).build()?;
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::rename(&partial, &dir)?;
    eprintln!(
        "built the guest of {suite} ({:.0} s)",
        began.elapsed().as_secs_f64()
    );
    prune(&cache, suite, &name);
    open(suite, &dir)?.with_context(|| format!("{} vanished", dir.display()))
}

/// Returns the guest of a suite if it is in the cache.
pub fn cached(suite: Suite, kernel: Option<&str>) -> Result<Option<Image>> {
    let kernel = kernel.unwrap_or(suite.architecture().kernel);
    let name = format!("{suite}-{:016x}", key(suite, kernel));
    open(suite, &host::cache()?.join(name))
}

/// Opens a complete guest that is not too old, and locks it as in use.
fn open(suite: Suite, dir: &Path) -> Result<Option<Image>> {
    let Ok(mark) = File::open(dir.join("complete")) else {
        return Ok(None);
    };
    let age = SystemTime::now()
        .duration_since(mark.metadata()?.modified()?)
        .unwrap_or_default();
    if suite.is_rolling() && age > MAX_MOVING_AGE {
        return Ok(None);
    }
    let mark = lock_shared(mark)?;
    // Records the time of the last use, if the folder is writable.
    let _ = fs::write(dir.join("used"), "");
    Ok(Some(Image {
        suite,
        dir: dir.to_owned(),
        _in_use: mark,
    }))
}

/// Returns a hash of all inputs of a tree.
fn key(suite: Suite, kernel: &str) -> u64 {
    let recipe = RECIPE.to_string();
    let parts = [suite.name(), kernel, &recipe, INIT]
        .into_iter()
        .chain(PACKAGES.iter().copied())
        .chain(initramfs::MODULES.iter().copied());
    fnv(parts.map(str::as_bytes))
}

/// Returns the FNV-1a hash of some parts. Unlike std's hashers, it is stable across
/// compiler versions.
pub(super) fn fnv<'p>(parts: impl IntoIterator<Item = &'p [u8]>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        for byte in part.iter().chain(&[0]) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    hash
}

/// Takes a shared lock; waits for the holder of an exclusive one.
pub(super) fn lock_shared(file: File) -> Result<Flock<File>> {
    Flock::lock(file, FlockArg::LockShared).map_err(|(_, errno)| errno.into())
}

/// Takes an exclusive lock; waits at most `limit`.
pub(super) fn lock_within(mut file: File, limit: Duration) -> Result<Flock<File>> {
    let began = Instant::now();
    let mut printed = false;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(locked),
            Err((unlocked, Errno::EWOULDBLOCK)) => file = unlocked,
            Err((_, errno)) => return Err(errno.into()),
        }
        ensure!(began.elapsed() < limit, "waited for {} s", limit.as_secs());
        if !printed {
            eprintln!("waiting for another process that builds the same guest");
            printed = true;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns whether a folder of the cache is one of `what`: those of trixie-arm64 are not
/// folders of trixie.
fn is_folder_of(folder: &str, what: &str) -> bool {
    let rest = folder.strip_prefix(what);
    rest.and_then(|rest| rest.strip_prefix('-'))
        .is_some_and(|hash| !hash.contains('-'))
}

/// Removes interrupted builds of `what`. The caller holds the build lock.
pub(super) fn remove_partial(cache: &Path, what: &str) -> Result<()> {
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_folder_of(&name, what) && name.ends_with(".partial") {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// How long an unused tree is kept: other kernels and other versions of this code have
/// trees of their own.
const MAX_UNUSED_AGE: Duration = Duration::from_secs(3 * 24 * 3600);

/// Removes other trees of `suite` that are not in use and have not been used recently.
fn prune(cache: &Path, suite: Suite, keep: &str) {
    let Ok(entries) = fs::read_dir(cache) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == keep || !is_folder_of(&name, suite.name()) {
            continue;
        }
        let used = fs::metadata(entry.path().join("used")).and_then(|m| m.modified());
        let age = used.ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age < MAX_UNUSED_AGE) {
            continue;
        }
        // Users hold a shared lock on the file `complete`.
        if let Ok(mark) = File::open(entry.path().join("complete")) {
            let mark = Flock::lock(mark, FlockArg::LockExclusiveNonblock);
            if mark.is_ok() {
                if let Err(error) = fs::remove_dir_all(entry.path()) {
                    eprintln!("cannot remove {}: {error}", entry.path().display());
                }
            }
        }
    }
}

/// Builds one guest in `dir`.
pub(super) struct Builder<'a> {
    suite: Suite,
    kernel: &'a str,
    dir: &'a Path,
    tree: PathBuf,
    log: PathBuf,
}

impl<'a> Builder<'a> {
    pub(super) fn new(suite: Suite, kernel: &'a str, dir: &'a Path) -> Self {
        Builder {
            suite,
            kernel,
            dir,
            tree: dir.join("tree"),
            log: dir.join("build.log"),
        }
    }

    fn build(&self) -> Result<()> {
        match self.suite.architecture().user {
            None => self.build_by_debootstrap()?,
            Some(_) => self.build_by_unpacking()?,
        }
        initramfs::make(&self.tree, self.suite, INIT, &self.dir.join("initrd"))?;
        self.disk()?;
        fs::write(self.dir.join("complete"), "")?;
        Ok(())
    }

    fn build_by_debootstrap(&self) -> Result<()> {
        self.bootstrap()?;
        self.configure()?;
        self.packages()?;
        self.kernel()?;
        self.run_in_tree("copying tests", 5, &format!("cd /\n{KEEP_TESTS}"))?;
        self.clean_up()
    }

    /// Runs a command in a mount namespace of its own, so that its mounts in the tree
    /// vanish with it.
    fn step(&self, what: &str, minutes: u64, command: &[&str]) -> Result<()> {
        step(
            &format!("{}: {what}", self.suite),
            &self.log,
            Duration::from_secs(minutes * 60),
            Command::new("unshare")
                .arg("--mount")
                .arg("--")
                .args(command),
        )
    }

    /// Runs a shell command in the tree.
    fn run_in_tree(&self, what: &str, minutes: u64, script: &str) -> Result<()> {
        let tree = self.tree.to_string_lossy();
        let script =
            format!("mount -t proc proc /proc && mount -t tmpfs tmpfs /tmp && set -e\n{script}");
        self.step(
            what,
            minutes,
            &[
                "chroot",
                &tree,
                "/usr/bin/env",
                "-i",
                "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME=/root",
                "LC_ALL=C.UTF-8",
                "DEBIAN_FRONTEND=noninteractive",
                "/bin/sh",
                "-c",
                &script,
            ],
        )
    }

    /// Installs the base system.
    pub(super) fn bootstrap(&self) -> Result<()> {
        let tree = self.tree.to_string_lossy();
        let keyring = format!("--keyring={}", host::KEYRING);
        let mirror = host::mirror()?;
        let mut command = vec![
            "debootstrap",
            "--variant=minbase",
            &keyring,
            self.suite.release(),
            &tree,
        ];
        // An older debootstrap lacks scripts of newer releases; that of unstable works for
        // all.
        let known = Path::new("/usr/share/debootstrap/scripts").join(self.suite.release());
        if let Some(mirror) = &mirror {
            command.push(mirror);
        }
        if !known.exists() {
            ensure!(
                mirror.is_some(),
                "this debootstrap does not know {}; set {} to the URL of a Debian archive",
                self.suite,
                host::MIRROR_VARIABLE
            );
            command.push("/usr/share/debootstrap/scripts/sid");
        }
        self.step("unpacking the base system", 20, &command)
    }

    /// Writes the settings of the tree's apt and dpkg, and of name resolution.
    pub(super) fn configure(&self) -> Result<()> {
        let put = |name: &str, text: &str| -> Result<()> {
            let path = self.tree.join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        // Services must not start in the tree.
        put("usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n")?;
        fs::set_permissions(
            self.tree.join("usr/sbin/policy-rc.d"),
            fs::Permissions::from_mode(0o755),
        )?;
        let mut apt = String::from(
            "Acquire::Check-Valid-Until \"false\";\n\
             Acquire::Languages \"none\";\n\
             Acquire::Retries \"3\";\n\
             APT::Install-Recommends \"false\";\n",
        );
        apt.push_str(&host::apt_proxies());
        put("etc/apt/apt.conf.d/90ringverbs", &apt)?;
        put(
            "etc/dpkg/dpkg.cfg.d/90ringverbs",
            "force-unsafe-io\npath-exclude=/usr/share/man/*\npath-exclude=/usr/share/locale/*\n",
        )?;
        // debootstrap has written its archive there.
        let list = self.tree.join("etc/apt/sources.list");
        let text = fs::read_to_string(&list)
            .with_context(|| format!("debootstrap has not created {}", list.display()))?;
        let deb = text
            .lines()
            .find(|line| line.starts_with("deb "))
            .with_context(|| format!("no archive in {}", list.display()))?;
        put("etc/apt/sources.list", &format!("{deb}\n"))?;
        for name in ["etc/resolv.conf", "etc/hosts"] {
            let ours = Path::new("/").join(name);
            if let Ok(text) = fs::read_to_string(ours) {
                put(name, &text)?;
            }
        }
        Ok(())
    }

    /// Installs packages and their dependencies.
    pub(super) fn install(&self, packages: &[&str]) -> Result<()> {
        let packages = packages.join(" ");
        self.run_in_tree(
            "installing packages",
            30,
            &format!("apt-get -q update\napt-get -q -y install {packages}"),
        )
    }

    fn packages(&self) -> Result<()> {
        self.install(PACKAGES)?;
        self.run_in_tree(
            "recording versions",
            1,
            "dpkg-query -W -f '${Version}\\n' rdma-core > /rdma-core-version",
        )?;
        fs::rename(
            self.tree.join("rdma-core-version"),
            self.dir.join("rdma-core-version"),
        )?;
        Ok(())
    }

    /// Unpacks the packages of the kernel and its modules without their scripts, which
    /// would install a boot loader's files. They are unpacked elsewhere and copied:
    /// `dpkg-deb -x` would replace the link `/lib` by a folder.
    fn kernel(&self) -> Result<()> {
        let script = r#"
dir=/kernel; mkdir $dir; cd $dir
todo=KERNEL; done=
while set -- $todo; [ $# -gt 0 ]; do
    package=$1; shift; todo="$*"
    case " $done " in *" $package "*) continue;; esac
    done="$done $package"
    apt-get -q download "$package"
    more=$(apt-cache depends --no-recommends --no-suggests --no-conflicts --no-breaks \
        --no-replaces --no-enhances "$package" |
        sed -n -E 's/^ *\|?(Pre)?Depends: (linux-(image|modules|binary|base)-[0-9].*)$/\2/p')
    todo="$todo $more"
done
for deb in *.deb; do dpkg-deb -x "$deb" unpacked; done
mkdir -p /usr/lib/modules
for from in unpacked/lib/modules unpacked/usr/lib/modules; do
    if [ -d $from ]; then cp -a $from/. /usr/lib/modules/; fi
done
set -- unpacked/boot/vmlinuz-* unpacked/usr/lib/modules/*/vmlinuz
for image; do if [ -f "$image" ]; then cp "$image" /boot/vmlinuz; fi; done
test -f /boot/vmlinuz
cd /; rm -rf $dir
set -- /usr/lib/modules/*
test $# = 1
version=${1##*/}
depmod "$version"
echo "$version" > /boot/version
"#;
        self.run_in_tree(
            "fetching and unpacking the kernel",
            20,
            &script.replace("KERNEL", self.kernel),
        )?;
        fs::copy(self.tree.join("boot/vmlinuz"), self.dir.join("vmlinuz"))?;
        Ok(())
    }

    pub(super) fn clean_up(&self) -> Result<()> {
        self.run_in_tree(
            "cleaning up",
            5,
            &format!("apt-get clean\ncd /\n{CLEAN_UP}"),
        )
    }

    /// As [`Builder::build_by_debootstrap`], for a tree whose programs cannot run here:
    /// unpacks packages, and replaces their scripts.
    fn build_by_unpacking(&self) -> Result<()> {
        fs::create_dir(&self.tree)?;
        let folder = self.dir.join("apt");
        let apt = apt_of(self.suite, &folder)?;
        let packages = [&["?essential", self.kernel], PACKAGES].concat();
        apt.unpack(&packages, &self.tree)?;
        let mut command = Command::new("sh");
        command
            .current_dir(&self.tree)
            .args([
                "-ec",
                &format!("{MAINTAINER_STEPS}{KEEP_TESTS}{CLEAN_UP}"),
                "sh",
            ])
            .arg(self.dir);
        step(
            &format!("{}: configuring packages", self.suite),
            &self.log,
            Duration::from_secs(300),
            &mut command,
        )?;
        fs::remove_dir_all(&folder)?;
        Ok(())
    }

    fn disk(&self) -> Result<()> {
        let disk = self.dir.join("disk");
        // The file is sparse.
        File::create(&disk)?.set_len(4 << 30)?;
        let (disk, tree) = (disk.to_string_lossy(), self.tree.to_string_lossy());
        self.step(
            "making the disk image",
            10,
            &[
                "mkfs.ext4",
                "-q",
                "-F",
                "-O",
                "^has_journal",
                "-d",
                &tree,
                &disk,
            ],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_differs_by_suite_and_kernel() {
        let kernel = Suite::Trixie.architecture().kernel;
        let trixie = key(Suite::Trixie, kernel);
        assert_eq!(trixie, key(Suite::Trixie, kernel));
        assert_ne!(trixie, key(Suite::Sid, kernel));
        assert_ne!(trixie, key(Suite::Trixie, "linux-image-rt-amd64"));
    }

    #[test]
    fn an_incomplete_tree_is_not_opened() {
        let dir = std::env::temp_dir().join(format!("rv-tree-{}", std::process::id()));
        fs::create_dir_all(dir.join("tree")).unwrap();
        assert!(open(Suite::Trixie, &dir).unwrap().is_none());
        fs::write(dir.join("complete"), "").unwrap();
        assert!(open(Suite::Trixie, &dir).unwrap().is_some());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_tree_in_use_is_not_pruned() {
        let cache = std::env::temp_dir().join(format!("rv-prune-{}", std::process::id()));
        for name in [
            "trixie-old",
            "trixie-recent",
            "trixie-used",
            "trixie-new",
            "trixie-arm64-old",
            "sid-old",
        ] {
            fs::create_dir_all(cache.join(name)).unwrap();
            fs::write(cache.join(name).join("complete"), "").unwrap();
        }
        let used = open(Suite::Trixie, &cache.join("trixie-used")).unwrap();
        fs::remove_file(cache.join("trixie-used/used")).unwrap();
        drop(open(Suite::Trixie, &cache.join("trixie-recent")).unwrap());
        prune(&cache, Suite::Trixie, "trixie-new");
        assert!(!cache.join("trixie-old").exists());
        assert!(cache.join("trixie-used").exists());
        assert!(cache.join("trixie-recent").exists());
        assert!(cache.join("trixie-new").exists());
        assert!(cache.join("trixie-arm64-old").exists());
        assert!(cache.join("sid-old").exists());
        drop(used);
        fs::remove_dir_all(&cache).unwrap();
    }
}
