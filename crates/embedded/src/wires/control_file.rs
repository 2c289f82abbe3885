//! Files in a network's directory by which a command controls running processes.
//!
//! ```text
//! ringverbs-faults 1
//! lose nth=3
//! ```
//!
//! A file `NAME` is for all processes, `NAME-PID` for one, which then ignores the other. After a
//! line with the name and the version of its form, its content is a text. It is replaced by
//! rename, so that it is read whole. A process reads it when it joins, and when somebody connects
//! to it, which whoever replaces the file does. Only files of this user, in a directory that
//! nobody else may write in, are read.
//!
//! It answers by a file `NAME-answer-NUMBER`, with its number in the network, of the same form;
//! the last line shows that it is whole. [`Network::joined`] and [`Network::roce`] have different
//! directories.
//!
//! [`Network::joined`]: crate::Network::joined
//! [`Network::roce`]: crate::Network::roce

use std::fs;
use std::process;

use crate::Result;
use crate::directory::Directory;
use crate::file_size::file_size_limit;
use crate::refuse;
use crate::wires::segment::connect_to_each;

/// Maximum length of a file.
const MAX_LENGTH: u64 = 64 << 10;
/// Maximum length of an answer.
const MAX_ANSWER: usize = 4 << 20;
/// The last line of an answer.
const END: &str = "end\n";

fn first_line(name: &str) -> String {
    format!("ringverbs-{name} 1\n")
}

fn name_of(name: &str, process: Option<u32>) -> String {
    match process {
        Some(process) => format!("{name}-{process}"),
        None => name.to_owned(),
    }
}

/// Returns the text for this process; `None` if there is none.
pub(crate) fn read(directory: &Directory, name: &str) -> Option<String> {
    text_for(directory, name, Some(process::id()))
}

/// Returns the text for a process, or for all.
pub(crate) fn text_for(directory: &Directory, name: &str, process: Option<u32>) -> Option<String> {
    if !directory.is_private() {
        return None;
    }
    let files = [process, None].map(|it| name_of(name, it));
    let mut texts = files
        .iter()
        .map(|file| directory.read_up_to(file, MAX_LENGTH));
    let text = texts.find_map(|text| text)?;
    let content = text.strip_prefix(&first_line(name));
    if content.is_none() {
        tracing::debug!("the file of {name} is of another version");
    }
    content.map(str::to_owned)
}

fn answer_name(name: &str, number: u16) -> String {
    format!("{name}-answer-{number}")
}

/// Answers as the process with this number in the network. Without an answer, whoever waits for
/// it says that there is none.
pub(crate) fn answer(directory: &Directory, name: &str, number: u16, text: &str) {
    let content = first_line(name) + text + END;
    if content.len() > MAX_ANSWER || content.len() as u64 > file_size_limit() {
        return tracing::debug!("no room for an answer about {name}");
    }
    if let Err(errno) = directory.replace(&answer_name(name, number), &content) {
        tracing::debug!(%errno, "no answer about {name}");
    }
}

/// Returns the answer of the process with this number, without its first and last line.
pub(crate) fn answer_of(directory: &Directory, name: &str, number: u16) -> Option<String> {
    let text = directory.read_up_to(&answer_name(name, number), MAX_ANSWER as u64)?;
    let text = text.strip_prefix(&first_line(name))?.strip_suffix(END)?;
    Some(text.to_owned())
}

/// Removes the answer of an earlier process with this number.
pub(crate) fn remove_answer(directory: &Directory, name: &str, number: u16) {
    directory.remove_lock(&answer_name(name, number));
}

/// Removes the text for this process alone, which was for an earlier process of its number.
pub(crate) fn remove_own(directory: &Directory, name: &str) {
    if directory.is_private() {
        directory.remove_lock(&name_of(name, Some(process::id())));
    }
}

/// Removes the texts for single processes.
pub(crate) fn remove_all_single(directory: &Directory, name: &str) {
    let files = fs::read_dir(directory.path_of("")).into_iter().flatten();
    for file in files.filter_map(|it| it.ok()?.file_name().into_string().ok()) {
        let process = file.strip_prefix(name).and_then(|it| it.strip_prefix('-'));
        if process.is_some_and(|it| it.parse::<u32>().is_ok()) {
            directory.remove_lock(&file);
        }
    }
}

/// Replaces the text for one process or for all, or removes it. Returns how many processes were
/// told.
///
/// # Errors
/// EPERM for a directory in which others may write; E2BIG for a text that is too long; errors of
/// writing the file.
pub(crate) fn replace(
    directory: &Directory,
    name: &str,
    process: Option<u32>,
    text: Option<&str>,
) -> Result<usize> {
    if !directory.is_private() {
        return refuse(libc::EPERM);
    }
    let file = name_of(name, process);
    match text {
        Some(text) => {
            let content = first_line(name) + text;
            if content.len() as u64 > MAX_LENGTH {
                return refuse(libc::E2BIG);
            }
            directory.replace(&file, &content)?;
        }
        None => directory.remove_lock(&file),
    }
    Ok(connect_to_each(directory))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::directory::Sharing;

    #[test]
    fn files_are_read_whole_and_only_in_private_directories() {
        let path = std::env::temp_dir().join(format!("control-file-{}", process::id()));
        let directory = Directory::open(&path, Sharing::Own).unwrap();
        let set = |process, text| replace(&directory, "faults", process, text).unwrap();
        assert_eq!(read(&directory, "faults"), None);
        set(None, Some("all"));
        set(Some(process::id() + 1), Some("another"));
        assert_eq!(read(&directory, "faults").as_deref(), Some("all"));
        set(Some(process::id()), Some(""));
        assert_eq!(read(&directory, "faults").as_deref(), Some(""));
        remove_own(&directory, "faults");
        assert_eq!(read(&directory, "faults").as_deref(), Some("all"));
        let names = fs::read_dir(&path).unwrap().count();
        assert_eq!(names, 2, "a temporary file is left");
        answer(&directory, "faults", 7, "line\n");
        assert_eq!(
            answer_of(&directory, "faults", 7).as_deref(),
            Some("line\n")
        );
        assert_eq!(answer_of(&directory, "faults", 8), None);
        fs::write(path.join("faults-answer-8"), "ringverbs-faults 1\nli").unwrap();
        assert_eq!(answer_of(&directory, "faults", 8), None);
        remove_all_single(&directory, "faults");
        assert!(answer_of(&directory, "faults", 7).is_some());
        remove_answer(&directory, "faults", 7);
        remove_answer(&directory, "faults", 8);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
        // Others than this version's.
        for other in ["", "ringverbs-faults 2\nlose\n", "lose\n", "\u{0}"] {
            fs::write(path.join("faults"), other).unwrap();
            assert_eq!(read(&directory, "faults"), None, "{other:?}");
        }
        let long = "x".repeat(MAX_LENGTH as usize);
        let refused = replace(&directory, "faults", None, Some(&long)).unwrap_err();
        assert_eq!(refused.raw(), libc::E2BIG);
        // Whoever may write in the directory decides which files are in it.
        set(None, Some("all"));
        let shared = Directory::open(&path, Sharing::Others).unwrap();
        assert_eq!(read(&shared, "faults"), None);
        let refused = replace(&shared, "faults", None, Some("all")).unwrap_err();
        assert_eq!(refused.raw(), libc::EPERM);
        fs::remove_file(path.join("faults")).unwrap();
        fs::write(path.join("elsewhere"), "ringverbs-faults 1\nlose\n").unwrap();
        symlink("elsewhere", path.join("faults")).unwrap();
        assert_eq!(read(&directory, "faults"), None);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        fs::remove_dir_all(&path).unwrap();
    }
}
