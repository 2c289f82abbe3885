//! Paths relative to directories of the tree of files: the working directory after chdir(2), or
//! one that is open. The kernel would look them up in the tree, and so miss dynamic attributes,
//! devices, and what is above the tree's directories.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io::Write as _;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::internal::is_internal;
use crate::{config, real, tree};

/// Whether a directory of the tree may be the working directory, or open.
static IN_TREE: AtomicU8 = AtomicU8::new(UNKNOWN);
/// The working directory that the process has inherited was not looked at.
const UNKNOWN: u8 = 0;
const NO: u8 = 1;
/// It stays so: a child of vfork, which shares this memory, has a working directory of its own.
const MAYBE: u8 = 2;

/// Length of the longest path.
const MAX: usize = libc::PATH_MAX as usize;

/// Called when a directory of the tree becomes the working directory, or is opened.
pub(crate) fn entered_tree() {
    IN_TREE.store(MAYBE, Ordering::Relaxed);
}

/// Returns whether a directory of the tree may be the working directory, or open.
pub(crate) fn may_be_in_tree() -> bool {
    match IN_TREE.load(Ordering::Relaxed) {
        UNKNOWN => has_inherited_tree(),
        known => known == MAYBE,
    }
}

/// Returns whether the working directory may be in the tree, which is not made for this.
#[cold]
fn has_inherited_tree() -> bool {
    let mut buffer = [0; MAX];
    let found = working_directory(&mut buffer).is_some_and(is_of_tree) && config::get().is_some();
    let state = if found { MAYBE } else { NO };
    let _ = IN_TREE.compare_exchange(UNKNOWN, state, Ordering::Relaxed, Ordering::Relaxed);
    found
}

/// Returns whether a path may be that of a tree.
fn is_of_tree(path: &[u8]) -> bool {
    path.windows(tree::PREFIX.len())
        .any(|it| it == tree::PREFIX)
}

/// Returns the working directory.
fn working_directory(buffer: &mut [u8; MAX]) -> Option<&[u8]> {
    // SAFETY: the buffer is writable for its length.
    let found = unsafe { real::getcwd(buffer.as_mut_ptr().cast(), MAX) };
    if found.is_null() {
        return None;
    }
    CStr::from_bytes_until_nul(buffer).ok().map(CStr::to_bytes)
}

/// Returns the path of an open directory.
fn path_of(directory: c_int, buffer: &mut [u8; MAX]) -> Option<&[u8]> {
    let mut name = [0; 32];
    // Leaves at least a zero.
    let mut room = &mut name[..31];
    write!(room, "/proc/thread-self/fd/{directory}").ok()?;
    let name: *const c_char = name.as_ptr().cast();
    // SAFETY: the name ends with a zero, and the buffer is writable for its length.
    let length = unsafe { real::readlink(name, buffer.as_mut_ptr().cast(), MAX) };
    buffer.get(..usize::try_from(length).ok()?)
}

/// Returns the path that a program means by one that is relative to a directory of the tree:
/// below `/sys` or `/dev`. Other paths stay as they are.
pub(crate) fn meant(directory: c_int, path: &CStr) -> Cow<'_, CStr> {
    let bytes = path.to_bytes();
    let is_relative = bytes.first().is_some_and(|first| *first != b'/');
    if !is_relative || is_internal() || !may_be_in_tree() {
        return Cow::Borrowed(path);
    }
    let mut buffer = [0; MAX];
    let base = match directory {
        libc::AT_FDCWD => working_directory(&mut buffer),
        _ => path_of(directory, &mut buffer),
    };
    let below = base.filter(|it| is_of_tree(it)).and_then(tree::strip_root);
    let joined = below.and_then(|below| CString::new(join(below, bytes)).ok());
    joined.map_or(Cow::Borrowed(path), Cow::Owned)
}

/// Appends a relative path to the path of a directory. `..` is resolved at its beginning, where
/// nothing before it can be a link.
fn join(directory: &[u8], mut path: &[u8]) -> Vec<u8> {
    let mut joined = directory.to_vec();
    loop {
        let end = path.iter().position(|it| *it == b'/').unwrap_or(path.len());
        let (first, rest) = path.split_at(end);
        match first {
            b"." => {}
            b".." => {
                let parent = joined.iter().rposition(|it| *it == b'/');
                joined.truncate(parent.unwrap_or(0));
            }
            _ => break,
        }
        let next = rest.iter().position(|it| *it != b'/');
        path = &rest[next.unwrap_or(rest.len())..];
    }
    if !path.is_empty() || joined.is_empty() {
        joined.push(b'/');
        joined.extend_from_slice(path);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_resolved_at_the_beginning() {
        let joined = |path: &str| {
            let directory = b"/sys/devices/ringverbs/ffff:00:00.0/infiniband/mlx5_0";
            String::from_utf8(join(directory, path.as_bytes())).unwrap()
        };
        let device = "/sys/devices/ringverbs/ffff:00:00.0/infiniband/mlx5_0";
        assert_eq!(joined("node_guid"), format!("{device}/node_guid"));
        assert_eq!(joined("./ports//1/"), format!("{device}/ports//1/"));
        for same in [".", "./", ".//.", "../mlx5_0"] {
            assert_eq!(joined(same), device, "{same}");
        }
        assert_eq!(joined("../.."), "/sys/devices/ringverbs/ffff:00:00.0");
        // A link may precede the others.
        assert_eq!(joined("device/../x"), format!("{device}/device/../x"));
        assert_eq!(joined("../../../../../../../.."), "/");
        assert_eq!(joined("../../../../../../../proc"), "/proc");
        assert_eq!(joined("..x"), format!("{device}/..x"));
        assert_eq!(join(b"", b"."), b"/");
    }
}
