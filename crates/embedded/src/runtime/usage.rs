//! Usage of a program and the processes that it starts: devices opened, bytes moved.
//!
//! Each process adds to a file that is mapped in all of them. Whoever started the program
//! reads it afterwards; so a process counts whichever way it ended.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, id};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use nix::fcntl::Flock;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::getppid;
use uverbs::Errno;

use crate::directory::{Directory, Sharing};
use crate::runtime::shared_words::{LENGTH, SharedWords};

/// Words of a line: no two processes should write to one.
const LINE: usize = 8;
/// Lines of the file. The first counts processes, which then share the others.
const LINES: usize = 64;
/// Words of a line.
const OPENED: usize = 0;
const SENT: usize = 1;
const RECEIVED: usize = 2;

const _: () = assert!(LENGTH == LINES * LINE * size_of::<u64>());

/// Maximum number of programs of a directory that are counted.
const MAX_FILES: usize = 1024;

/// Counts of a program's processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Devices opened.
    pub opened: u64,
    /// Bytes of messages sent, or received if those are more.
    pub bytes: u64,
}

/// The file in which a program's processes count; removed when dropped.
#[derive(Debug)]
pub struct Usage {
    directory: Directory,
    name: String,
    path: PathBuf,
    file: Flock<File>,
}

impl Usage {
    /// Creates a file in the directory of a network, which must be an own one.
    ///
    /// # Errors
    /// Those of creating and locking files; EUSERS if there are 1024 already.
    pub fn create(directory: &Path) -> io::Result<Self> {
        let failed = |errno: Errno| io::Error::from_raw_os_error(errno.raw());
        let opened = Directory::open(directory, Sharing::Own).map_err(io::Error::other)?;
        for number in 0..MAX_FILES {
            let name = format!("usage-{number}");
            let Some(mut file) = opened.lock(&name).map_err(failed)? else {
                continue;
            };
            if file.metadata()?.len() != 0 {
                // Left by a process that was killed; what it started may still count there.
                opened.remove_lock(&name);
                drop(file);
                let Some(new) = opened.lock(&name).map_err(failed)? else {
                    continue;
                };
                file = new;
            }
            // Not a hole: on a full file system, an access to the mapping would be a fault.
            file.write_all_at(&[0; LENGTH], 0)?;
            return Ok(Self {
                path: directory.join(&name),
                directory: opened,
                name,
                file,
            });
        }
        Err(io::Error::from_raw_os_error(libc::EUSERS))
    }

    /// Returns the path, for [`count_in`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns what has been counted so far.
    ///
    /// # Errors
    /// Those of reading the file.
    pub fn totals(&self) -> io::Result<Totals> {
        let mut bytes = [0; LENGTH];
        self.file.read_exact_at(&mut bytes, 0)?;
        let words = bytes.chunks_exact(size_of::<u64>());
        let words: Vec<u64> = words
            .map(|word| word.try_into().map_or(0, u64::from_ne_bytes))
            .collect();
        // The processes are not trusted to count right.
        let sum = |at: usize| {
            let counts = words.chunks_exact(LINE).skip(1).map(|line| line[at]);
            counts.fold(0, u64::saturating_add)
        };
        Ok(Totals {
            opened: sum(OPENED),
            bytes: sum(SENT).max(sum(RECEIVED)),
        })
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        self.directory.remove_lock(&self.name);
    }
}

/// The line of this process.
#[derive(Debug)]
struct Counts {
    words: SharedWords,
    line: usize,
}

/// Set once; a child of fork counts in the line of its parent.
static COUNTS: OnceLock<Counts> = OnceLock::new();

impl Counts {
    fn add(&self, at: usize, count: u64) {
        let word = self.words.word(self.line * LINE + at);
        word.fetch_add(count, Ordering::Relaxed);
    }
}

/// Counts what this process does from now on in a file made by [`Usage::create`]. Only the
/// first call has an effect.
///
/// # Errors
/// Those of opening and mapping the file; EINVAL if it is not such a file.
pub fn count_in(path: &Path) -> io::Result<()> {
    if COUNTS.get().is_some() {
        return Ok(());
    }
    let mut counts = Counts {
        words: SharedWords::open(path)?,
        line: 0,
    };
    let process = counts.words.word(0).fetch_add(1, Ordering::Relaxed);
    counts.line = 1 + (process % (LINES as u64 - 1)) as usize;
    // Fails if another thread was first.
    let _ = COUNTS.set(counts);
    Ok(())
}

/// Counts a device that the program has opened.
pub fn count_open() {
    if let Some(counts) = COUNTS.get() {
        counts.add(OPENED, 1);
    }
}

/// Counts bytes that a device has sent and received.
#[inline]
pub(crate) fn count_moved((sent, received): (u64, u64)) {
    if (sent, received) == (0, 0) {
        return;
    }
    if let Some(counts) = COUNTS.get() {
        counts.add(SENT, sent);
        counts.add(RECEIVED, received);
    }
}

/// Starts a program that is killed if this thread ends first, with a signal mask.
///
/// # Errors
/// Those of [`Command::spawn`].
pub fn spawn_bound(command: &mut Command, mask: SigSet) -> io::Result<Child> {
    let parent = id();
    let prepare = move || {
        mask.thread_set_mask()?;
        set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have ended before.
        match u32::try_from(getppid().as_raw()) {
            Ok(now) if now == parent => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    };
    // SAFETY: `prepare` makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(prepare) }.spawn()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn files_are_counted_once_and_left_ones_are_replaced() {
        let directory = std::env::temp_dir().join(format!("ringverbs-usage-{}", id()));
        let first = Usage::create(&directory).unwrap();
        let second = Usage::create(&directory).unwrap();
        assert_ne!(first.path(), second.path());
        assert_ne!(first.file.metadata().unwrap().blocks(), 0, "a hole");
        count_in(first.path()).unwrap();
        count_open();
        count_moved((10, 3));
        count_moved((0, 27));
        count_moved((5, 0));
        let totals = first.totals().unwrap();
        assert_eq!((totals.opened, totals.bytes), (1, 30));
        assert_eq!(second.totals().unwrap(), Totals::default());
        let path = second.path().to_owned();
        drop(second);
        assert!(!path.exists());
        fs::write(&path, "left by a killed process").unwrap();
        let third = Usage::create(&directory).unwrap();
        assert_eq!(third.path(), path);
        assert_eq!(third.totals().unwrap(), Totals::default());
        let other = directory.join("other");
        fs::write(&other, "short").unwrap();
        assert_eq!(
            COUNTS.get().map(|counts| counts.line),
            Some(1),
            "a second file has no effect"
        );
        count_in(&other).unwrap();
        drop((first, third));
        fs::remove_dir_all(&directory).unwrap();
    }
}
