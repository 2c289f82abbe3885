//! The file in a network's directory that lists the ports whose links are down.
//!
//! ```text
//! ringverbs-links 1
//! 0
//! 1 4711
//! ```
//!
//! After the version, each line has the index of a device in its process, and the number of
//! the process, without which all processes are meant. A process reads the file when it
//! joins, and when somebody connects to it, which whoever changes the file does.

use std::process;

use crate::Result;
use crate::directory::Directory;
use crate::links::Links;
use crate::refuse;
use crate::wires::segment::{MAX_DEVICES, connect_to_each};

const NAME: &str = "links";
const VERSION: &str = "ringverbs-links 1";
/// Maximum number of lines, so that the file stays shorter than what is read of it.
const MAX_LINES: usize = 256;
/// Number of attempts to lock the file.
const MAX_ATTEMPTS: u32 = 100;

/// A line of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    device: u16,
    process: Option<u32>,
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ').map(str::parse::<u32>);
        let device = u16::try_from(words.next()?.ok()?).ok()?;
        let process = words.next().transpose().ok()?;
        let is_valid = device < MAX_DEVICES && words.next().is_none();
        is_valid.then_some(Self { device, process })
    }
}

/// Parses the file; `None` if it is of another version. Malformed lines are ignored.
fn parse(text: &str) -> Option<Vec<Line>> {
    let mut lines = text.lines();
    (lines.next()? == VERSION).then(|| lines.filter_map(Line::parse).take(MAX_LINES).collect())
}

/// Sets the links of this process's ports as the file has them: all up without a file, as they
/// are if the file is being written or of another version. Other users' files and directories
/// are ignored. Returns whether any link has changed.
pub(crate) fn read(directory: &Directory, links: &Links) -> bool {
    if !directory.is_trusted() {
        return false;
    }
    let lines = match directory.read(NAME) {
        None => Some(Vec::new()),
        Some(text) => parse(&text),
    };
    let Some(lines) = lines else {
        tracing::debug!("the file of links is of another version, or being written");
        return false;
    };
    let own = |line: &&Line| line.process.is_none_or(|it| it == process::id());
    let bits = lines.iter().filter(own).map(|line| 1 << line.device);
    links.set_down(bits.fold(0, |all, bit: u64| all | bit))
}

/// Sets the link of the port of a device, by its index, in one process or in all. Returns how
/// many processes were told.
///
/// # Errors
/// EPERM if the directory or the file is another user's; EPROTONOSUPPORT for a file of another
/// version; ENOSPC if too many links are down; errors of accessing the file.
pub(crate) fn write(
    directory: &Directory,
    device: u16,
    process: Option<u32>,
    up: bool,
) -> Result<usize> {
    if device >= MAX_DEVICES {
        return refuse(libc::ENODEV);
    }
    if !directory.is_trusted() {
        return refuse(libc::EPERM);
    }
    let mut attempts = 0;
    let _lock = loop {
        if let Some(lock) = directory.lock(NAME)? {
            break lock;
        }
        attempts += 1;
        if attempts == MAX_ATTEMPTS {
            return refuse(libc::EPERM);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    let mut lines = match directory.read(NAME) {
        // The lock has created it.
        Some(text) if text.is_empty() => Vec::new(),
        Some(text) => parse(&text).map_or_else(|| refuse(libc::EPROTONOSUPPORT), Ok)?,
        None => return refuse(libc::EPERM),
    };
    // All processes include those that lines name.
    lines.retain(|it| it.device != device || process.is_some() && it.process != process);
    if !up {
        lines.push(Line { device, process });
    }
    if lines.len() > MAX_LINES {
        return refuse(libc::ENOSPC);
    }
    let mut text = format!("{VERSION}\n");
    for Line { device, process } in lines {
        text += &match process {
            Some(process) => format!("{device} {process}\n"),
            None => format!("{device}\n"),
        };
    }
    directory.write(NAME, &text)?;
    Ok(connect_to_each(directory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Sharing;

    #[test]
    fn links_are_those_of_the_file() {
        let path = std::env::temp_dir().join(format!("link-file-{}", process::id()));
        let directory = Directory::open(&path, Sharing::Own).unwrap();
        let links = Links::default();
        let set = |device, process, up| write(&directory, device, process, up).unwrap();
        let down = || {
            let ups = |index| crate::links::PortLink::new(links_of(&directory), index).change();
            (0..4)
                .filter(|index| ups(*index).is_some())
                .collect::<Vec<_>>()
        };
        assert!(!read(&directory, &links));
        assert_eq!(set(1, None, false), 0);
        set(3, Some(process::id()), false);
        set(2, Some(process::id() + 1), false);
        assert!(read(&directory, &links) && !read(&directory, &links));
        assert_eq!(down(), [1, 3]);
        // A process alone is not up while all are down.
        set(1, Some(process::id()), true);
        set(3, Some(process::id()), true);
        assert_eq!(down(), [1]);
        set(1, None, true);
        set(2, None, true);
        assert_eq!(down(), [] as [usize; 0]);
        // Such a file changes nothing.
        links.set_down(2);
        for other in ["", "ringverbs-links 2\n0\n"] {
            directory.write(NAME, other).unwrap();
            assert!(!read(&directory, &links), "{other}");
            assert!(!links.set_down(2), "{other}");
        }
        assert_eq!(
            write(&directory, 0, None, false).unwrap_err().raw(),
            libc::EPROTONOSUPPORT
        );
        assert_eq!(
            write(&directory, 64, None, false).unwrap_err().raw(),
            libc::ENODEV
        );
        let text = format!("{VERSION}\n0 1 2\n64\n-1\nx\n 3\n\n2\n");
        assert_eq!(
            parse(&text).unwrap(),
            [Line {
                device: 2,
                process: None
            }]
        );
        std::fs::remove_dir_all(&path).unwrap();
    }

    fn links_of(directory: &Directory) -> std::sync::Arc<Links> {
        let links = std::sync::Arc::new(Links::default());
        read(directory, &links);
        links
    }

    /// Others may write in the directory, or own it.
    #[test]
    fn directories_of_others_are_ignored() {
        use std::os::unix::fs::{PermissionsExt, chown};

        let path = std::env::temp_dir().join(format!("link-others-{}", process::id()));
        let directory = Directory::open(&path, Sharing::Others).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        write(&directory, 0, None, false).unwrap();
        assert!(read(&directory, &Links::default()));
        if chown(&path, Some(65534), None).is_ok() {
            assert!(!read(&directory, &Links::default()));
            let refused = write(&directory, 0, None, true).unwrap_err();
            assert_eq!(refused.raw(), libc::EPERM);
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}
