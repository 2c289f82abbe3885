//! The directory shared by the processes of a network.
//!
//! It is opened and checked once, and then accessed only through its
//! descriptor, so that all later accesses are to the directory that was
//! checked. Files and sockets in it are trusted only if this user owns them;
//! nothing else is removed, and symbolic links are not followed.

use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{AtFlags, Flock, FlockArg, OFlag, open, openat, renameat};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, connect, socket};
use nix::sys::stat::{FileStat, Mode, fchmod, fstat, fstatat};
use nix::unistd::{AccessFlags, UnlinkatFlags, faccessat, geteuid, mkdir, unlinkat};
use uverbs::{Command, Errno, Error, environment};

use crate::Result;

/// Who may access the directory shared by processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// This user and root: one of them must own the directory, and nobody else
    /// may write to it.
    #[default]
    Own,
    /// Anyone who may write to the directory can participate; anyone who may search it can
    /// send. Another user with write permission can occupy all numbers, and take over those
    /// of other processes.
    Others,
}

const NO_NAME: &str = "the name of the directory is empty";
const NO_PARENT: &str = "neither the directory nor its parent exists; create the parent";
const NOT_PERMITTED: &str = "the directory does not exist, and may not be created there; \
    create it, or name another, such as one in $XDG_RUNTIME_DIR";
const NOT_WRITABLE: &str = "this user may not write in the directory, or not search it; name \
    another, such as one in $XDG_RUNTIME_DIR";
const NO_DIRECTORY: &str = "the path, or a part of it, is not a directory";
pub(crate) const OTHER_VERSION: &str = "a process of another version of ringverbs uses the \
    directory; end it, run the same version, or name another directory";
const NO_PROC: &str = "/proc is not mounted, by which the directory is used";
const TOO_LONG: &str =
    "the path of the directory is too long for the system (4095 bytes, 255 a name)";
pub(crate) const LINK: &str = "the directory is a symbolic link, which may lead elsewhere \
    next time; name the directory itself";
pub(crate) const FOREIGN: &str = "the directory is another user's, who could read and forge \
    what is sent there; name one of your own, such as one in $XDG_RUNTIME_DIR, or ask for a \
    shared one (embedded-shared:DIRECTORY)";
pub(crate) const WRITABLE: &str = "other users may write in the directory (group or world), \
    and could take part; take the right from them (chmod go-w), name another, such as one in \
    $XDG_RUNTIME_DIR, or ask for a shared one (embedded-shared:DIRECTORY)";

/// An open directory.
#[derive(Debug)]
pub(crate) struct Directory {
    fd: OwnedFd,
    sharing: Sharing,
}

/// Type of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryKind {
    File,
    Socket,
}

fn to_errno(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

/// Returns whether an entry is of this type and belongs to this user.
fn is_own(found: &FileStat, kind: EntryKind) -> bool {
    let format = match kind {
        EntryKind::File => libc::S_IFREG,
        EntryKind::Socket => libc::S_IFSOCK,
    };
    found.st_mode & libc::S_IFMT == format && found.st_uid == geteuid().as_raw()
}

fn is_file(found: &FileStat) -> bool {
    found.st_mode & libc::S_IFMT == libc::S_IFREG
}

pub(crate) fn new_socket() -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(to_errno)
}

impl Directory {
    /// Returns the path of the directory that is used if none is named.
    pub(crate) fn default_path() -> PathBuf {
        match environment::variable("XDG_RUNTIME_DIR") {
            Some(parent) if !parent.is_empty() => Path::new(&parent).join("ringverbs"),
            _ => format!("/tmp/ringverbs-{}", geteuid()).into(),
        }
    }

    /// Opens the directory. If it does not exist, creates it for this user
    /// only.
    pub(crate) fn open(path: &Path, sharing: Sharing) -> std::result::Result<Self, Error> {
        let refused = |errno: nix::Error| Error::refused(Command::Open, None, to_errno(errno));
        let invalid = |what| Error::Invalid {
            command: Command::Open,
            what,
        };
        let invalid_or = |errno, forbidden| match errno {
            nix::Error::ENOENT => invalid(NO_PARENT),
            nix::Error::ENOTDIR => invalid(NO_DIRECTORY),
            nix::Error::ENAMETOOLONG => invalid(TOO_LONG),
            nix::Error::EACCES | nix::Error::EPERM | nix::Error::EROFS => invalid(forbidden),
            errno => refused(errno),
        };
        if path.as_os_str().is_empty() {
            return Err(invalid(NO_NAME));
        }
        // Removes a trailing slash, with which a symbolic link would be
        // followed.
        let path = path.components().as_path();
        match mkdir(path, Mode::S_IRWXU) {
            Ok(()) | Err(nix::Error::EEXIST) => {}
            Err(errno) => return Err(invalid_or(errno, NOT_PERMITTED)),
        }
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let fd = open(path, flags, Mode::empty()).map_err(|errno| match errno {
            nix::Error::ENOTDIR | nix::Error::ELOOP if path.is_symlink() => invalid(LINK),
            errno => invalid_or(errno, NOT_WRITABLE),
        })?;
        let found = fstat(&fd).map_err(refused)?;
        if sharing == Sharing::Own {
            if ![0, geteuid().as_raw()].contains(&found.st_uid) {
                return Err(invalid(FOREIGN));
            }
            if found.st_mode & (libc::S_IWGRP | libc::S_IWOTH) != 0 {
                return Err(invalid(WRITABLE));
            }
        }
        // Sockets in it are bound, and removed files opened, by this path.
        if !Path::new("/proc/thread-self/fd").exists() {
            return Err(invalid(NO_PROC));
        }
        // Later accesses are by the effective user as well.
        let access = AccessFlags::W_OK | AccessFlags::X_OK;
        faccessat(&fd, ".", access, AtFlags::AT_EACCESS)
            .map_err(|errno| invalid_or(errno, NOT_WRITABLE))?;
        Ok(Self { fd, sharing })
    }

    /// Returns an identifier of the directory: the same in all processes, and most likely
    /// different from that of another directory.
    pub(crate) fn id(&self) -> Result<u16> {
        let found = fstat(&self.fd).map_err(to_errno)?;
        let both = found.st_ino ^ found.st_dev.rotate_left(32);
        // Fibonacci hashing.
        Ok((both.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u16)
    }

    /// Returns whether nobody but this user and root decides which files are in it.
    pub(crate) fn is_trusted(&self) -> bool {
        let own = || fstat(&self.fd).is_ok_and(|found| found.st_uid == geteuid().as_raw());
        self.sharing == Sharing::Own || own()
    }

    /// Returns whether nobody but this user and root may write in it.
    pub(crate) fn is_private(&self) -> bool {
        self.sharing == Sharing::Own
    }

    /// Returns a path of a name in the directory, even if that was renamed.
    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        format!("/proc/thread-self/fd/{}/{name}", self.fd.as_raw_fd()).into()
    }

    /// Returns the address of a name in the directory, short enough for a
    /// socket address. It refers to this directory even if that was renamed.
    fn address(&self, name: &str) -> Result<UnixAddr> {
        let path = format!("/proc/thread-self/fd/{}/{name}", self.fd.as_raw_fd());
        UnixAddr::new(path.as_str()).map_err(to_errno)
    }

    fn stat(&self, name: &str) -> nix::Result<FileStat> {
        fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW)
    }

    /// Locks the file `name`, which is created if it does not exist. Returns
    /// `None` if it is locked already, or the name belongs to another user or
    /// is not a file.
    pub(crate) fn lock(&self, name: &str) -> Result<Option<Flock<File>>> {
        self.lock_as(name, FlockArg::LockExclusiveNonblock)
    }

    /// As [`lock`](Self::lock), with a lock that several may hold.
    pub(crate) fn lock_shared(&self, name: &str) -> Result<Option<Flock<File>>> {
        self.lock_as(name, FlockArg::LockSharedNonblock)
    }

    fn lock_as(&self, name: &str, kind: FlockArg) -> Result<Option<Flock<File>>> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_CLOEXEC;
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        // Each retry means that the file was removed concurrently; the bound stops a
        // malicious process that keeps doing so.
        for _ in 0..100 {
            let file = match openat(&self.fd, name, flags, Mode::S_IRUSR | Mode::S_IWUSR) {
                Ok(file) => File::from(file),
                Err(errno) => return self.none_if_foreign(name, errno),
            };
            let ours = fstat(&file).map_err(to_errno)?;
            if !is_own(&ours, EntryKind::File) {
                return Ok(None);
            }
            let file = match Flock::lock(file, kind) {
                Ok(file) => file,
                Err((_, nix::Error::EWOULDBLOCK)) => return Ok(None),
                Err((_, errno)) => return Err(to_errno(errno)),
            };
            // Whoever releases a lock removes the file, possibly the one locked here.
            let now = self.stat(name);
            if now.is_ok_and(|now| (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino)) {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// Opens a file of this user for reading; `None` if there is none.
    fn open_own(&self, name: &str) -> Option<File> {
        self.open_if(name, |found| is_own(found, EntryKind::File))
    }

    fn open_if(&self, name: &str, accepts: impl Fn(&FileStat) -> bool) -> Option<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file = File::from(openat(&self.fd, name, flags, Mode::empty()).ok()?);
        let accepted = fstat(&file).is_ok_and(|found| accepts(&found));
        accepted.then_some(file)
    }

    /// Returns the first bytes of a file of this user; `None` if there is none.
    pub(crate) fn read(&self, name: &str) -> Option<String> {
        self.read_if(name, |found| is_own(found, EntryKind::File))
    }

    /// As [`read`](Self::read), up to a length.
    pub(crate) fn read_up_to(&self, name: &str, length: u64) -> Option<String> {
        let mut text = String::new();
        let file = self.open_own(name)?;
        file.take(length).read_to_string(&mut text).ok()?;
        Some(text)
    }

    fn read_if(&self, name: &str, accepts: impl Fn(&FileStat) -> bool) -> Option<String> {
        const MAX_LENGTH: u64 = 4096;
        let mut text = String::new();
        let file = self.open_if(name, accepts)?;
        file.take(MAX_LENGTH).read_to_string(&mut text).ok()?;
        Some(text)
    }

    /// As [`read`](Self::read). In a directory of several users it may be any user's file, whose
    /// content is then that user's.
    pub(crate) fn read_any(&self, name: &str) -> Option<String> {
        match self.sharing {
            Sharing::Own => self.read(name),
            Sharing::Others => self.read_if(name, is_file),
        }
    }

    /// Replaces the first line of a file of this user, of which the caller holds a lock, for
    /// [`read_any`](Self::read_any). The first line is always the old or the new one.
    pub(crate) fn publish(&self, name: &str, line: &str) -> Result<()> {
        let failed = |error: io::Error| Errno::new(error.raw_os_error().unwrap_or(libc::EIO));
        let mut file = self.open_to_write(name)?;
        if self.sharing == Sharing::Others {
            let mode = Mode::S_IRUSR | Mode::S_IWUSR | Mode::S_IRGRP | Mode::S_IROTH;
            fchmod(&file, mode).map_err(to_errno)?;
        }
        let line = format!("{line}\n");
        file.write_all(line.as_bytes()).map_err(failed)?;
        file.set_len(line.len() as u64).map_err(failed)
    }

    /// Replaces the content of a file of this user, of which the caller holds a lock.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<()> {
        let mut file = self.open_to_write(name)?;
        let written = file
            .set_len(0)
            .and_then(|()| file.write_all(text.as_bytes()));
        written.map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EIO)))
    }

    fn open_to_write(&self, name: &str) -> Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_CLOEXEC;
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file =
            openat(&self.fd, name, flags, Mode::S_IRUSR | Mode::S_IWUSR).map_err(to_errno)?;
        let file = File::from(file);
        if !fstat(&file).is_ok_and(|found| is_own(&found, EntryKind::File)) {
            return crate::refuse(libc::EPERM);
        }
        Ok(file)
    }

    /// Replaces a file of this user by another one, so that readers see one of them whole.
    pub(crate) fn replace(&self, name: &str, text: &str) -> Result<()> {
        let new = format!("{name}.new-{}", std::process::id());
        self.remove(&new, EntryKind::File);
        let renamed = self.write(&new, text).and_then(|()| {
            if self
                .stat(name)
                .is_ok_and(|it| !is_own(&it, EntryKind::File))
            {
                return crate::refuse(libc::EPERM);
            }
            renameat(&self.fd, new.as_str(), &self.fd, name).map_err(to_errno)
        });
        if renamed.is_err() {
            self.remove(&new, EntryKind::File);
        }
        renamed
    }

    /// Returns whether there is a file of this user.
    pub(crate) fn has_file(&self, name: &str) -> bool {
        let found = self.stat(name);
        found.is_ok_and(|found| is_own(&found, EntryKind::File))
    }

    /// Returns whether a process holds the lock on a file of this user.
    pub(crate) fn is_locked(&self, name: &str) -> bool {
        let file = self.open_own(name);
        let tried = file.map(|file| Flock::lock(file, FlockArg::LockSharedNonblock));
        matches!(tried, Some(Err((_, nix::Error::EWOULDBLOCK))))
    }

    /// Returns `None` if the name exists but is not a file of this user, and otherwise the
    /// error.
    fn none_if_foreign(&self, name: &str, errno: nix::Error) -> Result<Option<Flock<File>>> {
        match self.stat(name) {
            Ok(found) if !is_own(&found, EntryKind::File) => Ok(None),
            _ => Err(to_errno(errno)),
        }
    }

    /// Creates a socket of that name, replacing one that this user left behind.
    /// The caller must hold the corresponding lock. Returns `None` if the name
    /// is used by something else.
    pub(crate) fn bind(&self, name: &str) -> Result<Option<OwnedFd>> {
        let socket = new_socket()?;
        self.remove_socket(name);
        // The name gets the socket's permissions when it is created.
        fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR).map_err(to_errno)?;
        match bind(socket.as_raw_fd(), &self.address(name)?) {
            Ok(()) => {}
            Err(nix::Error::EADDRINUSE) => return Ok(None),
            Err(errno) => return Err(to_errno(errno)),
        }
        if self.sharing == Sharing::Others {
            self.open_to_all(name)?;
        }
        Ok(Some(socket))
    }

    /// Allows every user who can access the name of the socket to connect.
    fn open_to_all(&self, name: &str) -> Result<()> {
        let Some(file) = self.socket(name)? else {
            return crate::refuse(libc::EADDRINUSE);
        };
        let found = fstat(&file).map_err(to_errno)?;
        if !is_own(&found, EntryKind::Socket) {
            return crate::refuse(libc::EADDRINUSE);
        }
        let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
        std::fs::set_permissions(path, Permissions::from_mode(0o666))
            .map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EIO)))
    }

    /// Opens the file of a socket by O_PATH; `None` if it does not exist or is
    /// not a socket.
    fn socket(&self, name: &str) -> Result<Option<OwnedFd>> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = match openat(&self.fd, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(nix::Error::ENOENT) => return Ok(None),
            Err(errno) => return Err(to_errno(errno)),
        };
        let found = fstat(&file).map_err(to_errno)?;
        let is_socket = found.st_mode & libc::S_IFMT == libc::S_IFSOCK;
        Ok(is_socket.then_some(file))
    }

    /// Returns when an entry was last added or removed.
    pub(crate) fn modified(&self) -> Option<SystemTime> {
        let found = fstat(&self.fd).ok()?;
        let seconds = Duration::from_secs(found.st_mtime.try_into().ok()?);
        let more = Duration::from_nanos(found.st_mtime_nsec.try_into().ok()?);
        SystemTime::UNIX_EPOCH
            .checked_add(seconds)?
            .checked_add(more)
    }

    /// Connects to the listener at that name; `None` if there is none.
    pub(crate) fn connect(&self, name: &str) -> Result<Option<OwnedFd>> {
        let Some(file) = self.socket(name)? else {
            return Ok(None);
        };
        let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
        let at = UnixAddr::new(path.as_str()).map_err(to_errno)?;
        let socket = new_socket()?;
        match connect(socket.as_raw_fd(), &at) {
            Ok(()) => Ok(Some(socket)),
            Err(nix::Error::ENOENT | nix::Error::ECONNREFUSED) => Ok(None),
            Err(errno) => Err(to_errno(errno)),
        }
    }

    /// Removes a socket that this user left behind.
    pub(crate) fn remove_socket(&self, name: &str) {
        self.remove(name, EntryKind::Socket);
    }

    /// Removes the file of a lock. Call while the lock is held.
    pub(crate) fn remove_lock(&self, name: &str) {
        self.remove(name, EntryKind::File);
    }

    fn remove(&self, name: &str, kind: EntryKind) {
        if self.stat(name).is_ok_and(|found| is_own(&found, kind)) {
            let _ = unlinkat(&self.fd, name, UnlinkatFlags::NoRemoveDir);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::sys::socket::{Backlog, listen};

    use super::*;

    fn listening(directory: &Directory, name: &str) -> OwnedFd {
        let socket = directory.bind(name).unwrap().unwrap();
        listen(&socket, Backlog::new(2).unwrap()).unwrap();
        socket
    }

    #[test]
    fn symbolic_links_and_replaced_directories_are_refused() {
        let folder = std::env::temp_dir();
        let folder = folder.join(format!("ringverbs-directory-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = |name: &str| folder.join(name);
        let directory = Directory::open(&path("one"), Sharing::Own).unwrap();
        let other = Directory::open(&path("other"), Sharing::Own).unwrap();
        let _there = listening(&other, "there");
        // A socket in another directory: this process may connect to it, but not through a
        // symbolic link.
        symlink(path("other/there"), path("one/there")).unwrap();
        assert!(directory.connect("there").unwrap().is_none());
        assert!(other.connect("there").unwrap().is_some());
        assert!(directory.bind("there").unwrap().is_none());
        symlink(path("file"), path("one/lock")).unwrap();
        assert!(directory.lock("lock").unwrap().is_none());
        assert!(!path("file").exists());
        // Symbolic links and entries of another type are kept.
        directory.remove_socket("there");
        directory.remove_lock("lock");
        let taken = directory.lock("taken").unwrap();
        assert!(taken.is_some() && directory.lock("taken").unwrap().is_none());
        directory.remove_socket("taken");
        for name in ["one/there", "one/lock", "one/taken"] {
            assert!(path(name).symlink_metadata().is_ok(), "{name}");
        }
        // Another directory is moved to its path.
        std::fs::rename(path("one"), path("moved")).unwrap();
        std::fs::rename(path("other"), path("one")).unwrap();
        let _here = listening(&directory, "here");
        assert!(path("moved/here").exists() && !path("one/here").exists());
        assert!(directory.connect("here").unwrap().is_some());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
