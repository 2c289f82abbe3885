//! Huge pages, from /proc/meminfo.

use std::fs;

/// Returns the number of free huge pages.
pub fn free() -> usize {
    number("HugePages_Free:")
}

/// Returns the size of a huge page in bytes.
pub fn size() -> usize {
    number("Hugepagesize:") * 1024
}

fn number(name: &str) -> usize {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|line| line.split_ascii_whitespace().next());
    word.map_or(0, |word| word.parse().unwrap())
}
