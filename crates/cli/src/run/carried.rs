//! The libraries that the command itself contains, if `cargo xtask dist` has built it: a
//! copy of this one file is enough for `ringverbs run`.
//!
//! They are unpacked to a cache of this user, in a directory named for their contents. Each use
//! checks that nobody else could have changed them, and compares them.

use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process;

use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::geteuid;
use uverbs::environment;

use super::RunError;

/// Files, and links to them, of a directory.
struct Libraries {
    /// Of names and contents.
    hash: &'static str,
    files: &'static [(&'static str, &'static [u8])],
    links: &'static [(&'static str, &'static str)],
}

include!(concat!(env!("OUT_DIR"), "/carried.rs"));

/// Returns whether the command carries libraries.
pub fn exist() -> bool {
    !CARRIED.files.is_empty()
}

/// Returns the directory that has the carried libraries, which are unpacked if they are not
/// there; `None` if the command carries none.
///
/// # Errors
/// No directory can be used.
pub fn unpack() -> Result<Option<PathBuf>, RunError> {
    if !exist() {
        return Ok(None);
    }
    let mut reasons = Vec::new();
    for cache in caches(environment::variable) {
        match CARRIED.unpack(&cache) {
            Ok(directory) => return Ok(Some(directory)),
            Err(reason) => reasons.push((cache, reason.to_string())),
        }
    }
    Err(RunError::NoCache(reasons))
}

/// Returns the directories to try: the user's cache, then one for temporary files.
fn caches(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let absolute = |name| {
        let path = variable(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let cache = absolute("XDG_CACHE_HOME");
    let cache = cache.or_else(|| Some(absolute("HOME")?.join(".cache")));
    let cache = cache.map(|cache| cache.join("ringverbs"));
    let temporary = absolute("TMPDIR").unwrap_or_else(|| "/tmp".into());
    let temporary = temporary.join(format!("ringverbs-cache-{}", geteuid()));
    cache.into_iter().chain([temporary]).collect()
}

/// Returns whether nobody but this user and root may change a file or directory.
fn is_safe(found: &Metadata) -> bool {
    let owners = [0, geteuid().as_raw()];
    owners.contains(&found.uid()) && found.mode() & 0o022 == 0
}

/// Returns whether nobody but this user and root may change a file, or exchange it.
pub fn is_safe_file(path: &Path) -> bool {
    let is_safe = |path: &Path| path.metadata().is_ok_and(|found| is_safe(&found));
    is_safe(path) && path.parent().is_some_and(is_safe)
}

/// Creates a directory of this user if there is none, and checks it.
fn own_directory(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(path)?;
    let reason = if found.is_symlink() {
        "is a symbolic link"
    } else if !found.is_dir() {
        "is not a directory"
    } else if !is_safe(&found) {
        "could be changed by another user"
    } else {
        return Ok(());
    };
    Err(io::Error::other(format!("{} {reason}", path.display())))
}

/// Returns whether only this user and root may rename their entries of a directory of this owner
/// and mode.
fn may_hold(owner: u32, mode: u32) -> bool {
    let closed = mode & 0o022 == 0 || mode & libc::S_ISVTX != 0;
    closed && [0, geteuid().as_raw()].contains(&owner)
}

/// Checks that nobody can exchange what is in a directory: others may write there only if they
/// cannot rename what is not theirs, as the directory's owner always can.
fn check_parent(path: &Path) -> io::Result<()> {
    let found = path.metadata()?;
    match may_hold(found.uid(), found.mode()) {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{} could be changed by another user",
            path.display()
        ))),
    }
}

impl Libraries {
    fn unpack(&self, cache: &Path) -> io::Result<PathBuf> {
        if cache
            .as_os_str()
            .as_encoded_bytes()
            .iter()
            .any(|byte| b" :;".contains(byte))
        {
            return Err(io::Error::other("LD_PRELOAD cannot hold this path"));
        }
        if let Some(parent) = cache.parent() {
            // An error is that of the directory below.
            let _ = DirBuilder::new().mode(0o700).create(parent);
            check_parent(parent)?;
        }
        own_directory(cache)?;
        if statvfs(cache)?.flags().contains(FsFlags::ST_NOEXEC) {
            let reason = "its file system is mounted noexec, so that no library can be loaded";
            return Err(io::Error::other(reason));
        }
        let directory = cache.join(self.hash);
        own_directory(&directory)?;
        for (name, contents) in self.files {
            let path = directory.join(name);
            if !has_contents(&path, contents)? {
                replace(&path, |temporary| {
                    let mut options = OpenOptions::new();
                    let options = options.write(true).create_new(true).mode(0o600);
                    options.open(temporary)?.write_all(contents)
                })?;
            }
        }
        for (name, target) in self.links {
            let path = directory.join(name);
            if !fs::read_link(&path).is_ok_and(|found| found == Path::new(target)) {
                replace(&path, |temporary| symlink(target, temporary))?;
            }
        }
        Ok(directory)
    }
}

/// Returns whether a file is as it was unpacked, and nobody else may change it.
fn has_contents(path: &Path, contents: &[u8]) -> io::Result<bool> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let mut file = match file {
        Ok(file) => file,
        // Also a symbolic link, or a file that may not be read: it is replaced.
        Err(_) => return Ok(false),
    };
    let found = file.metadata()?;
    if !found.is_file() || !is_safe(&found) || found.len() != contents.len() as u64 {
        return Ok(false);
    }
    is_equal(&mut file, contents)
}

fn is_equal(file: &mut File, mut contents: &[u8]) -> io::Result<bool> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = file.read(&mut buffer)?;
        match contents.split_at_checked(count) {
            Some(([], rest)) => return Ok(rest.is_empty()),
            Some((part, rest)) if part == &buffer[..count] => contents = rest,
            _ => return Ok(false),
        }
    }
}

/// Makes a file under a name of this process, and renames it: others see all of it or nothing,
/// and programs may have mapped the old one.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", process::id()));
    let temporary = path.with_file_name(name);
    // Left by a process with the same number.
    let _ = fs::remove_file(&temporary);
    let made = make(&temporary).and_then(|()| fs::rename(&temporary, path));
    if made.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    made
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    static LIBRARIES: Libraries = Libraries {
        hash: "0123",
        files: &[("a.so", b"the first library"), ("b.so", b"")],
        links: &[("c.so", "a.so")],
    };

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("ringverbs-carried-{name}-{}", process::id());
            let path = env::temp_dir().join(name);
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn changed_files_are_replaced() {
        let scratch = Scratch::new("files");
        let cache = scratch.0.join("cache/ringverbs");
        let directory = LIBRARIES.unpack(&cache).unwrap();
        assert_eq!(directory, cache.join("0123"));
        let file = directory.join("a.so");
        let inode = || fs::symlink_metadata(&file).unwrap().ino();
        let check = |is_replaced: bool| {
            let before = inode();
            LIBRARIES.unpack(&cache).unwrap();
            assert_eq!(inode() != before, is_replaced);
            assert_eq!(fs::read(&file).unwrap(), b"the first library");
            assert!(!file.is_symlink() && file.metadata().unwrap().mode() & 0o777 == 0o600);
            assert_eq!(
                fs::read_link(directory.join("c.so")).unwrap(),
                Path::new("a.so")
            );
            assert_eq!(fs::read_dir(&directory).unwrap().count(), 3);
        };
        check(false);
        fs::write(&file, "the first librarY").unwrap();
        check(true);
        fs::write(&file, "the first").unwrap();
        check(true);
        fs::write(&file, "the first library, longer").unwrap();
        check(true);
        set_mode(&file, 0o660);
        check(true);
        fs::rename(&file, scratch.0.join("moved")).unwrap();
        symlink(scratch.0.join("moved"), &file).unwrap();
        check(true);
        fs::remove_file(directory.join("c.so")).unwrap();
        symlink("/etc/passwd", directory.join("c.so")).unwrap();
        check(false);
        fs::remove_file(directory.join("b.so")).unwrap();
        check(false);
    }

    #[test]
    fn directories_of_others_are_refused() {
        let scratch = Scratch::new("directories");
        let cache = scratch.0.join("cache");
        let refused = |reason: &str| {
            let error = LIBRARIES.unpack(&cache).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        };
        let directory = LIBRARIES.unpack(&cache).unwrap();
        for path in [&cache, &directory, &scratch.0] {
            set_mode(path, 0o770);
            refused("could be changed by another user");
            set_mode(path, 0o700);
        }
        // As /tmp.
        set_mode(&scratch.0, 0o1777);
        LIBRARIES.unpack(&cache).unwrap();
        let moved = scratch.0.join("moved");
        for path in [&directory, &cache] {
            fs::rename(path, &moved).unwrap();
            symlink(&moved, path).unwrap();
            refused("is a symbolic link");
            fs::remove_file(path).unwrap();
            fs::rename(&moved, path).unwrap();
        }
        let (own, other) = (geteuid().as_raw(), geteuid().as_raw() + 1);
        assert!(may_hold(own, 0o1777) && may_hold(0, 0o1777) && !may_hold(own, 0o777));
        assert!(!may_hold(other, 0o1777) && !may_hold(other, 0o755));
        let spaced = scratch.0.join("a b");
        assert!(LIBRARIES.unpack(&spaced).is_err() && !spaced.exists());
        assert!(!is_safe_file(&scratch.0.join("file")));
    }

    #[test]
    fn the_cache_is_that_of_the_user() {
        let caches = |variables: &[(&str, &str)]| {
            let found = caches(|name| {
                let found = variables.iter().find(|(found, _)| *found == name);
                found.map(|(_, value)| value.into())
            });
            let first = found.first().map(|path| path.display().to_string());
            (first.unwrap_or_default(), found.len())
        };
        let home = ("HOME", "/home/a");
        assert_eq!(caches(&[home]), ("/home/a/.cache/ringverbs".into(), 2));
        let cache = ("XDG_CACHE_HOME", "/cache");
        assert_eq!(caches(&[home, cache]), ("/cache/ringverbs".into(), 2));
        let relative = ("XDG_CACHE_HOME", "cache");
        assert_eq!(caches(&[home, relative]).0, "/home/a/.cache/ringverbs");
        let none = format!("/tmp/ringverbs-cache-{}", geteuid());
        assert_eq!(caches(&[]), (none, 1));
    }
}
