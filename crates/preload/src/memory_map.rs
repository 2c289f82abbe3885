//! The memory map of this process, read without allocation: also in calls of allocators.

use std::ops::Range;
use std::os::fd::RawFd;

use crate::own;

/// A part of the memory map.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range<usize>,
    rights: [u8; 4],
    /// It has no file, and is not the stack of the first thread.
    pub(crate) is_anonymous: bool,
}

impl Mapping {
    /// Returns the mapping of a line, which may be cut off in its name.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ').filter(|it| !it.is_empty());
        let range = std::str::from_utf8(words.next()?).ok()?;
        let (start, end) = range.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        let rights = words.next()?.try_into().ok()?;
        let inode = words.nth(2)?;
        let name = words.next().unwrap_or_default();
        Some(Self {
            range: number(start)?..number(end)?,
            rights,
            is_anonymous: inode == b"0"
                && (name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon:")),
        })
    }

    /// Returns whether other mappings, or other processes, may change it.
    pub(crate) fn is_shared(&self) -> bool {
        self.rights[3] != b'p'
    }

    /// Returns whether it can be read, written and not executed.
    pub(crate) fn is_data(&self) -> bool {
        self.rights.starts_with(b"rw-")
    }

    /// Returns whether it cannot be accessed.
    pub(crate) fn is_inaccessible(&self) -> bool {
        self.rights.starts_with(b"---")
    }

    /// Returns whether it can be read only.
    pub(crate) fn is_read_only(&self) -> bool {
        self.rights.starts_with(b"r--")
    }
}

/// Longest beginning of a line that is needed.
const MAX_LINE: usize = 128;

/// Calls `each` for the mappings that overlap a range, in their order, until it returns false.
/// Returns false if the map cannot be read.
pub(crate) fn each(range: &Range<usize>, mut each: impl FnMut(Mapping) -> bool) -> bool {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let path = c"/proc/thread-self/maps".as_ptr();
    // SAFETY: a name that ends with NUL. Not by the C library, whose functions this library
    // exports.
    let file = unsafe { own::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags) } as RawFd;
    if file < 0 {
        return false;
    }
    let (mut line, mut length) = ([0; MAX_LINE], 0);
    let mut bytes = [0_u8; 1024];
    let mut goes_on = true;
    while goes_on {
        // SAFETY: the bytes are writable.
        let count = unsafe { own::syscall(libc::SYS_read, file, bytes.as_mut_ptr(), bytes.len()) };
        let read = usize::try_from(count).ok().and_then(|it| bytes.get(..it));
        let Some(read) = read.filter(|it| !it.is_empty()) else {
            break;
        };
        for byte in read {
            if *byte != b'\n' {
                if let Some(place) = line.get_mut(length) {
                    *place = *byte;
                    length += 1;
                }
                continue;
            }
            let found = Mapping::parse(&line[..length]);
            length = 0;
            let Some(found) = found else { continue };
            let is_behind = found.range.start >= range.end;
            let overlaps = !is_behind && found.range.end > range.start;
            if is_behind || overlaps && !each(found) {
                goes_on = false;
                break;
            }
        }
    }
    // SAFETY: opened above.
    unsafe { own::syscall(libc::SYS_close, file) };
    true
}

/// The memory map cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unreadable;

/// Returns the mapping of an address.
///
/// # Errors
/// The memory map cannot be read.
pub(crate) fn at(address: usize) -> Result<Option<Mapping>, Unreadable> {
    let mut found = None;
    let is_read = each(&(address..address.saturating_add(1)), |mapping| {
        found = Some(mapping);
        false
    });
    is_read.then_some(found).ok_or(Unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed() {
        let data = Mapping::parse(b"7fc66754e000-7fc667550000 rw-p 00000000 00:00 0 ").unwrap();
        assert_eq!(data.range, 0x7fc6_6754_e000..0x7fc6_6755_0000);
        assert!(data.is_data() && data.is_anonymous && !data.is_shared());
        let named = |rest: &str| Mapping::parse(format!("1000-3000 {rest}").as_bytes()).unwrap();
        assert!(named("rw-p 0 00:00 0          [heap]").is_anonymous);
        assert!(!named("rw-p 0 00:00 0          [stack]").is_anonymous);
        let file = named("r--s 0 08:01 99     /a file");
        assert!(file.is_read_only() && file.is_shared() && !file.is_anonymous);
        assert!(!named("rwxp 0 00:00 0").is_data());
        for bad in [
            "",
            "x-y rw-p 0 00:00 0",
            "1000-3000 rw 0 00:00 0",
            "1000-3000 rw-p",
        ] {
            assert_eq!(Mapping::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn mappings_are_found_by_address() {
        let on_stack = 0_u8;
        let found = at((&raw const on_stack).addr()).unwrap().unwrap();
        assert!(found.is_data() && found.range.contains(&(&raw const on_stack).addr()));
        let code = at(mappings_are_found_by_address as *const () as usize)
            .unwrap()
            .unwrap();
        assert!(!code.is_data() && !code.is_anonymous);
        assert_eq!(at(0), Ok(None));
        assert_eq!(at(usize::MAX), Ok(None));
        // Other tests map memory between the parts in which the kernel gives the map.
        let is_whole = || {
            let mut all = Vec::new();
            assert!(each(&(0..usize::MAX), |it| {
                all.push(it.range);
                true
            }));
            all.is_sorted_by(|a, b| a.end <= b.start) && all.contains(&found.range)
        };
        assert!((0..100).any(|_| is_whole()));
    }
}
