//! Ownership checks of the shared directory, and of files that other users put there.
//!
//! As root, the user nobody is the other user; tests that need one are skipped otherwise.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::Mode;
use nix::unistd::{geteuid, mkfifo};
use ringverbs_embedded::{Drive, Network, Sharing};

const NOBODY: u32 = 65534;

/// A directory that is removed after the test.
struct TempDirectory(PathBuf);

impl TempDirectory {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-directory-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// Creates a directory in it with a mode.
    fn directory(&self, mode: u32) -> PathBuf {
        let path = self.0.join(format!("mode-{mode:o}"));
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }
}

impl Drop for TempDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn can_make_foreign_files() -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        testing::skip!("only root can make files of another user");
    }
    is_root
}

fn join(directory: &Path, sharing: Sharing) -> Result<Network, uverbs::Error> {
    Network::joined_with(Drive::Caller, directory, sharing)
}

/// Asserts that joining fails for this reason, and leaves no file in the directory.
fn assert_join_fails(directory: &Path, reason: &str) {
    let error = Network::joined(Drive::Caller, directory).unwrap_err();
    assert!(matches!(error, uverbs::Error::Invalid { .. }), "{error:?}");
    assert!(error.to_string().contains(reason), "{error}");
    if let Ok(mut entries) = fs::read_dir(directory) {
        assert!(entries.next().is_none(), "{}", directory.display());
    }
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_directory_writable_by_others_is_rejected() {
    let temp = TempDirectory::new("written");
    for number in [0o777, 0o1777, 0o770, 0o702, 0o2775] {
        let directory = temp.directory(number);
        assert_join_fails(&directory, "other users may write");
        assert_join_fails(&directory, "embedded-shared:DIRECTORY");
        join(&directory, Sharing::Others).unwrap();
    }
    for number in [0o700, 0o755, 0o2755] {
        join(&temp.directory(number), Sharing::Own).unwrap();
    }
}

#[test]
fn a_directory_of_another_user_is_rejected() {
    if !can_make_foreign_files() {
        return;
    }
    let temp = TempDirectory::new("foreign");
    for number in [0o700, 0o755, 0o777] {
        let directory = temp.directory(number);
        chown(&directory, Some(NOBODY), Some(NOBODY)).unwrap();
        assert_join_fails(&directory, "another user's");
        join(&directory, Sharing::Others).unwrap();
    }
}

#[test]
fn a_symbolic_link_to_a_directory_is_rejected() {
    let temp = TempDirectory::new("link");
    let directory = temp.directory(0o700);
    let link = temp.0.join("link");
    symlink(&directory, &link).unwrap();
    for end in ["", "/", "/.", "//./"] {
        let path = format!("{}{end}", link.display());
        assert_join_fails(Path::new(&path), "symbolic link");
    }
    let nowhere = temp.0.join("nowhere");
    symlink(temp.0.join("made"), &nowhere).unwrap();
    assert_join_fails(&nowhere, "symbolic link");
    assert!(!temp.0.join("made").exists());
    // Parent directories may be symbolic links.
    symlink(&temp.0, temp.0.join("above")).unwrap();
    let through = temp.0.join("above").join(directory.file_name().unwrap());
    join(&through, Sharing::Own).unwrap();
}

#[test]
fn created_files_are_private_to_the_user() {
    let temp = TempDirectory::new("made");
    let directory = temp.directory(0o1777).join("wire");
    let network = join(&directory, Sharing::Own).unwrap();
    assert_eq!(mode(&directory), 0o700);
    assert_eq!(mode(&directory.join("0.lock")), 0o600);
    assert_eq!(mode(&directory.join("0.socket")), 0o600);
    drop(network);
    assert!(!directory.join("0.socket").exists());
    let _network = join(&directory, Sharing::Others).unwrap();
    assert_eq!(mode(&directory.join("0.lock")), 0o600);
    assert_eq!(mode(&directory.join("0.socket")), 0o666);
}

#[test]
fn a_path_may_exceed_a_socket_address() {
    let temp = TempDirectory::new("long");
    let directory = temp.0.join("d".repeat(200));
    let network = join(&directory, Sharing::Own).unwrap();
    assert!(directory.join("0.socket").exists());
    let _other = join(&directory, Sharing::Own).unwrap();
    assert!(directory.join("1.socket").exists());
    drop(network);
    assert!(!directory.join("0.socket").exists());
}

/// Creates a file of another user with a mode.
fn create_foreign_file(path: &Path, mode: u32) -> File {
    let file = File::create(path).unwrap();
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    file
}

#[test]
fn files_of_another_user_are_not_used() {
    if !can_make_foreign_files() {
        return;
    }
    let temp = TempDirectory::new("planted");
    let directory = temp.directory(0o777);
    let at = |name: &str| directory.join(name);
    let link = |to: &Path, name: &str| {
        symlink(to, at(name)).unwrap();
        lchown(at(name), Some(NOBODY), Some(NOBODY)).unwrap();
    };
    // Locks: a dangling link, a lock that is held permanently, one that is not held, an entry
    // that can be opened but is not a file, and one that cannot be opened.
    let made = temp.0.join("made");
    link(&made, "0.lock");
    let held = create_foreign_file(&at("1.lock"), 0o666);
    let held = Flock::lock(held, FlockArg::LockExclusive).unwrap();
    create_foreign_file(&at("2.lock"), 0o666);
    mkfifo(&at("3.lock"), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    fs::create_dir(at("4.lock")).unwrap();
    // Sockets: a link to a file, a file, another user's socket.
    let kept = temp.0.join("kept");
    fs::write(&kept, "kept").unwrap();
    link(&kept, "5.socket");
    create_foreign_file(&at("6.socket"), 0o666);
    drop(UnixListener::bind(at("7.socket")).unwrap());
    chown(at("7.socket"), Some(NOBODY), Some(NOBODY)).unwrap();

    let network = join(&directory, Sharing::Others).unwrap();
    let found = fs::symlink_metadata(at("8.socket")).unwrap();
    assert!(found.file_type().is_socket());
    drop(network);
    assert!(!made.exists());
    assert_eq!(fs::read_to_string(&kept).unwrap(), "kept");
    assert!(at("5.socket").is_symlink() && at("6.socket").is_file());
    assert!(at("7.socket").exists());
    drop(held);
}

#[test]
fn a_full_directory_is_rejected_immediately() {
    if !can_make_foreign_files() {
        return;
    }
    let temp = TempDirectory::new("held");
    let directory = temp.directory(0o1777);
    for number in 0..256 {
        create_foreign_file(&directory.join(format!("{number}.lock")), 0o600);
    }
    let since = Instant::now();
    let error = join(&directory, Sharing::Others).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EUSERS);
    assert!(since.elapsed() < Duration::from_secs(5));
}
