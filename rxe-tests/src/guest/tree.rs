//! Making a guest: a Debian tree, a kernel, an initramfs and a disk image,
//! kept between runs.
//!
//! A tree lies in the cache under a name with a hash of everything that made
//! it, so a change here makes a new one. It is built beside that name and
//! renamed when it is complete, so an interrupted build is never taken for a
//! good one.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::apt::Apt;
use super::progress::step;
use super::suite::{PACKAGES, Suite};
use super::{host, initramfs};

/// Raised when this code makes something else of the same inputs.
const RECIPE: u32 = 1;

/// How old the tree of a suite that moves may grow.
const MOVING_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Marks a tree whose rdma-core tests could not be fetched.
const LACKS_TESTS: &str = "lacks-rdma-core-tests";

/// How long such a tree is used before it is tried again.
const LACKING_AGE: Duration = Duration::from_secs(24 * 3600);

/// The first process of the initramfs.
const INIT: &str = include_str!("../../guest/init");

/// Ends the making of a tree, in the tree.
const TIDY: &str = "
rm -rf var/lib/apt/lists/* etc/resolv.conf usr/share/doc/*
printf '127.0.0.1 localhost ringverbs\\n::1 localhost\\n' > etc/hosts
mkdir -p ctl share opt
";

/// Does the work of maintainer scripts in a tree of another architecture, in which they
/// cannot run; $1 is the guest's folder.
const SETTLE: &str = r#"
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

/// The tests in rdma-core's source archive, $1.
const UNPACK_TESTS: &str = r#"
mkdir -p opt/rdma-core
tar -xf "$1" -C opt/rdma-core --strip-components=1 --wildcards '*/tests/*'
test -f opt/rdma-core/tests/run_tests.py"#;

/// A guest that is ready to boot. While it lives, no other process removes
/// its files.
#[derive(Debug)]
pub struct Image {
    /// What it was made from.
    pub suite: Suite,
    /// The folder with all of it.
    pub dir: PathBuf,
    _in_use: Flock<File>,
}

impl Image {
    /// The kernel.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// The initramfs.
    pub fn initrd(&self) -> PathBuf {
        self.dir.join("initrd")
    }

    /// The disk image; boots leave it as it is.
    pub fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    /// The tree that the disk image was made from.
    pub fn tree(&self) -> PathBuf {
        self.dir.join("tree")
    }

    /// The rdma-core release in the tree, as its package names it, for
    /// example `56.1-1`.
    pub fn rdma_core(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dir.join("rdma-core-version"))?
            .trim()
            .to_owned())
    }
}

/// The guest of a suite, from the cache or newly made.
///
/// `kernel` names a kernel package of that suite other than the default.
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
    // One builder per suite; the others wait and then find it made.
    let guard = File::create(cache.join(format!("{suite}.building")))?;
    let _guard = lock_within(guard, Duration::from_secs(1800)).with_context(|| {
        format!("another process is making the guest of {suite} and does not end")
    })?;
    if let Some(image) = open(suite, &dir)? {
        return Ok(image);
    }
    if !host::is_root() {
        bail!(
            "making the guest of {suite} needs root (debootstrap and chroot); \
             run the same command as root"
        );
    }
    host::require(host::TO_BUILD, true)?;
    if let Some(user) = suite.architecture().user {
        host::require(&[(user, "qemu-user"), ("depmod", "kmod")], false)?;
    }
    remove_partial(&cache, suite.name())?;
    let partial = cache.join(format!("{name}.partial"));
    eprintln!("making the guest of {suite} in {}", dir.display());
    let began = Instant::now();
    fs::create_dir(&partial)?;
    // Nobody but root goes in: the tree holds set-uid programs.
    fs::set_permissions(&partial, fs::Permissions::from_mode(0o700))?;
    Builder::new(suite, kernel, &partial).build()?;
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::rename(&partial, &dir)?;
    eprintln!(
        "the guest of {suite} is made ({:.0} s)",
        began.elapsed().as_secs_f64()
    );
    prune(&cache, suite, &name);
    open(suite, &dir)?.with_context(|| format!("{} vanished", dir.display()))
}

/// The guest of a suite if it is in the cache; nothing is made.
pub fn cached(suite: Suite, kernel: Option<&str>) -> Result<Option<Image>> {
    let kernel = kernel.unwrap_or(suite.architecture().kernel);
    let name = format!("{suite}-{:016x}", key(suite, kernel));
    open(suite, &host::cache()?.join(name))
}

/// Opens a complete guest that is not too old, and marks it as in use.
fn open(suite: Suite, dir: &Path) -> Result<Option<Image>> {
    let Ok(mark) = File::open(dir.join("complete")) else {
        return Ok(None);
    };
    let age = SystemTime::now()
        .duration_since(mark.metadata()?.modified()?)
        .unwrap_or_default();
    let lacks_tests = dir.join(LACKS_TESTS).exists();
    if (suite.moves() && age > MOVING_AGE) || (lacks_tests && age > LACKING_AGE) {
        return Ok(None);
    }
    let mark = lock_shared(mark)?;
    // Says when it was last used; a reader who may not write goes without.
    let _ = fs::write(dir.join("used"), "");
    Ok(Some(Image {
        suite,
        dir: dir.to_owned(),
        _in_use: mark,
    }))
}

/// A hash of everything that makes a tree what it is.
fn key(suite: Suite, kernel: &str) -> u64 {
    let recipe = RECIPE.to_string();
    let parts = [suite.name(), kernel, &recipe, INIT]
        .into_iter()
        .chain(PACKAGES.iter().copied())
        .chain(initramfs::MODULES.iter().copied());
    fnv(parts.map(str::as_bytes))
}

/// FNV-1a of some parts: stable from one compiler to the next, unlike std's
/// hashers.
pub(super) fn fnv<'p>(parts: impl IntoIterator<Item = &'p [u8]>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        for byte in part.iter().chain(&[0]) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    hash
}

/// Takes a shared lock; waits for whoever holds an exclusive one.
pub(super) fn lock_shared(file: File) -> Result<Flock<File>> {
    Flock::lock(file, FlockArg::LockShared).map_err(|(_, errno)| errno.into())
}

/// Takes an exclusive lock, waiting no longer than `limit`.
pub(super) fn lock_within(mut file: File, limit: Duration) -> Result<Flock<File>> {
    let began = Instant::now();
    let mut said = false;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(locked),
            Err((unlocked, Errno::EWOULDBLOCK)) => file = unlocked,
            Err((_, errno)) => return Err(errno.into()),
        }
        ensure!(began.elapsed() < limit, "waited for {} s", limit.as_secs());
        if !said {
            eprintln!("waiting for another process that makes the same guest");
            said = true;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Whether a folder of the cache is one of `what`: trixie-arm64 is no kind of trixie.
fn is_of(folder: &str, what: &str) -> bool {
    let rest = folder.strip_prefix(what);
    rest.and_then(|rest| rest.strip_prefix('-'))
        .is_some_and(|hash| !hash.contains('-'))
}

/// Removes what interrupted builds of `what` left. The caller holds the
/// build lock.
pub(super) fn remove_partial(cache: &Path, what: &str) -> Result<()> {
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_of(&name, what) && name.ends_with(".partial") {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// How long a tree is kept that nobody uses. Not at once: other kernels and
/// other versions of this code have trees of their own.
const UNUSED: Duration = Duration::from_secs(3 * 24 * 3600);

/// Removes other trees of `suite` that nobody uses or has used for long.
fn prune(cache: &Path, suite: Suite, keep: &str) {
    let Ok(entries) = fs::read_dir(cache) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == keep || !is_of(&name, suite.name()) {
            continue;
        }
        let used = fs::metadata(entry.path().join("used")).and_then(|m| m.modified());
        let age = used.ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age < UNUSED) {
            continue;
        }
        // A user holds a shared lock on the mark.
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

/// The steps that make one guest in `dir`.
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
        let tests = match self.suite.architecture().user {
            None => self.installed()?,
            Some(_) => self.unpacked()?,
        };
        if let Err(error) = tests {
            // Archives do lack a source package now and then. All else works
            // without; the suite reports these tests as skipped.
            eprintln!("{error:#}");
            eprintln!("{}: going on without rdma-core's own tests", self.suite);
            fs::write(self.dir.join(LACKS_TESTS), "")?;
        }
        initramfs::make(&self.tree, self.suite, INIT, &self.dir.join("initrd"))?;
        self.disk()?;
        fs::write(self.dir.join("complete"), "")?;
        Ok(())
    }

    /// The tree. The inner result is that of fetching rdma-core's tests.
    fn installed(&self) -> Result<Result<()>> {
        self.bootstrap()?;
        self.configure()?;
        self.packages()?;
        self.kernel()?;
        let tests = self.pyverbs_tests();
        self.tidy()?;
        Ok(tests)
    }

    /// Runs a command in a mount namespace of its own, so that whatever it
    /// mounts in the tree is gone when it ends, however it ends.
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
    fn inside(&self, what: &str, minutes: u64, script: &str) -> Result<()> {
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

    /// The base system.
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
        // An older debootstrap does not know newer releases by name, but
        // they are all made as unstable is.
        let known = Path::new("/usr/share/debootstrap/scripts").join(self.suite.release());
        if let Some(mirror) = &mirror {
            command.push(mirror);
        }
        if !known.exists() {
            ensure!(
                mirror.is_some(),
                "this debootstrap does not know {}; set {} to the address of a Debian archive",
                self.suite,
                host::MIRROR_VARIABLE
            );
            command.push("/usr/share/debootstrap/scripts/sid");
        }
        self.step("unpacking the base system", 20, &command)
    }

    /// Settings of the tree's apt and dpkg, and the way to the archive.
    pub(super) fn configure(&self) -> Result<()> {
        let put = |name: &str, text: &str| -> Result<()> {
            let path = self.tree.join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        // No service starts in the tree.
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
        // debootstrap wrote the archive that it used.
        let list = self.tree.join("etc/apt/sources.list");
        let text = fs::read_to_string(&list)
            .with_context(|| format!("debootstrap has not created {}", list.display()))?;
        let deb = text
            .lines()
            .find(|line| line.starts_with("deb "))
            .with_context(|| format!("no archive in {}", list.display()))?;
        let source = deb.replacen("deb ", "deb-src ", 1);
        put("etc/apt/sources.list", &format!("{deb}\n{source}\n"))?;
        for name in ["etc/resolv.conf", "etc/hosts"] {
            let ours = Path::new("/").join(name);
            if let Ok(text) = fs::read_to_string(ours) {
                put(name, &text)?;
            }
        }
        Ok(())
    }

    /// Packages with what they depend on.
    pub(super) fn install(&self, packages: &[&str]) -> Result<()> {
        let packages = packages.join(" ");
        self.inside(
            "installing packages",
            30,
            &format!("apt-get -q update\napt-get -q -y install {packages}"),
        )
    }

    fn packages(&self) -> Result<()> {
        self.install(PACKAGES)?;
        self.inside(
            "noting versions",
            1,
            "dpkg-query -W -f '${Version}\\n' rdma-core > /rdma-core-version",
        )?;
        fs::rename(
            self.tree.join("rdma-core-version"),
            self.dir.join("rdma-core-version"),
        )?;
        Ok(())
    }

    /// Unpacks the kernel's package, and those with its modules where they
    /// are separate, without the scripts that would make it bootable on a
    /// real machine. Unpacked aside: `dpkg-deb -x` would replace the link
    /// `/lib` by a folder.
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
        self.inside(
            "fetching and unpacking the kernel",
            20,
            &script.replace("KERNEL", self.kernel),
        )?;
        fs::copy(self.tree.join("boot/vmlinuz"), self.dir.join("vmlinuz"))?;
        Ok(())
    }

    /// The tests of rdma-core's Python bindings, from the source package of
    /// the very version that is installed.
    fn pyverbs_tests(&self) -> Result<()> {
        self.inside(
            "fetching rdma-core's own tests",
            10,
            r#"
version=$(dpkg-query -W -f '${source:Version}' rdma-core)
mkdir -p /source; cd /source
for pause in 5 20 0; do
    if apt-get -q source --download-only --tar-only rdma-core="$version"; then break; fi
    sleep $pause
done
mkdir -p /opt/rdma-core
tar -xf rdma-core_*.orig.tar.* -C /opt/rdma-core --strip-components=1 --wildcards '*/tests/*'
test -f /opt/rdma-core/tests/run_tests.py
cd /; rm -rf /source
"#,
        )
    }

    pub(super) fn tidy(&self) -> Result<()> {
        self.inside("tidying up", 5, &format!("apt-get clean\ncd /\n{TIDY}"))
    }

    /// As [`Builder::installed`], where the tree's programs do not run here: packages
    /// as they are, and by hand what their scripts would do.
    fn unpacked(&self) -> Result<Result<()>> {
        fs::create_dir(&self.tree)?;
        let mirror = host::mirror()?;
        let mirror = mirror.with_context(|| {
            let variable = host::MIRROR_VARIABLE;
            format!("apt has no Debian archive here; {variable}=URL names one")
        })?;
        let line = |kind| {
            let (keyring, release) = (host::KEYRING, self.suite.release());
            format!("{kind} [signed-by={keyring}] {mirror} {release} main\n")
        };
        let sources = line("deb") + &line("deb-src");
        let folder = self.dir.join("apt");
        let apt = Apt::new(&folder, self.suite.architecture().debian, Some(&sources))?;
        let packages = [&["?essential", self.kernel], PACKAGES].concat();
        apt.unpack(&packages, &self.tree)?;
        let settle = |what: &str, script: &str, argument: &Path| {
            let mut command = Command::new("sh");
            command.current_dir(&self.tree).args(["-ec", script, "sh"]);
            let what = format!("{}: {what}", self.suite);
            step(
                &what,
                &self.log,
                Duration::from_secs(300),
                command.arg(argument),
            )
        };
        settle("settling packages", &format!("{SETTLE}{TIDY}"), self.dir)?;
        let version = fs::read_to_string(self.dir.join("rdma-core-version"))?;
        let tests = apt
            .source(&format!("rdma-core={}", version.trim()))
            .and_then(|archive| settle("unpacking rdma-core's own tests", UNPACK_TESTS, &archive));
        fs::remove_dir_all(&folder)?;
        Ok(tests)
    }

    fn disk(&self) -> Result<()> {
        let disk = self.dir.join("disk");
        // Sparse: only what is used takes room.
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
