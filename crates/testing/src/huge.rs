//! Huge pages, as the kernel counts them.

use std::fs;

/// Number of free huge pages.
pub fn free() -> usize {
    number("HugePages_Free:")
}

/// Bytes of one.
pub fn size() -> usize {
    number("Hugepagesize:") * 1024
}

fn number(name: &str) -> usize {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|line| line.split_ascii_whitespace().next());
    word.map_or(0, |word| word.parse().unwrap())
}
