//! Utilities of tests on a device: random numbers, patterns of bytes, memory in use,
//! allocations, processes and network namespaces, C headers, modules that use each other, and
//! what is left out ([`skip!`]).
#![allow(missing_docs, reason = "for tests: the names say it")]
#![allow(
    clippy::len_without_is_empty,
    clippy::missing_safety_doc,
    clippy::new_without_default,
    clippy::should_implement_trait,
    reason = "for tests"
)]

pub mod allocations;
pub mod attacker;
pub mod c_headers;
pub mod hosts;
pub mod huge;
pub mod modules;
pub mod pcapng;
pub mod program;
pub mod skip;
mod subscriber;

use std::fmt;
use std::fs;
use std::str::FromStr;

pub use subscriber::PanickingSubscriber;

/// Returns the value of an environment variable, which must be set.
pub fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the value of an environment variable, or the default if it is not set.
pub fn setting<T: FromStr>(variable: &str, default: T) -> T
where
    T::Err: fmt::Debug,
{
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|error| panic!("{variable}={text}: {error:?}")),
        Err(_) => default,
    }
}

/// Returns pseudorandom bytes, the same for each seed (xorshift).
pub fn bytes(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    };
    (0..len).map(step).collect()
}

/// A random number generator with a seed (splitmix64).
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_ne_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// Fills bytes with the pattern of a number, which differs from that of any other.
pub fn pattern(number: u64, bytes: &mut [u8]) {
    Rng(number.wrapping_mul(0xd6e8_feb8_6659_fd93)).fill(bytes);
}

/// Returns whether the bytes are the pattern of a number.
pub fn is_pattern(number: u64, bytes: &[u8]) -> bool {
    let mut expected = vec![0; bytes.len()];
    pattern(number, &mut expected);
    expected == bytes
}

/// Describes the first difference between the bytes and the pattern of a number: its
/// position, and the position in the pattern to which the bytes there belong.
pub fn difference(number: u64, bytes: &[u8]) -> String {
    let mut expected = vec![0; bytes.len()];
    pattern(number, &mut expected);
    let Some(at) = (0..bytes.len()).find(|at| bytes[*at] != expected[*at]) else {
        return "none".into();
    };
    let found = &bytes[at..(at + 16).min(bytes.len())];
    let from = expected.windows(found.len()).position(|part| part == found);
    format!(
        "at byte {at} of {}, with the bytes of {from:?}",
        bytes.len()
    )
}

/// Returns the number of files that this process has open. A file by which a thread reads its
/// scheduler's counts does not count: an embedded device opens it in each thread that meets others
/// on its processor, so it depends on the machine's load.
pub fn open_files() -> usize {
    let counts = |entry: &fs::DirEntry| {
        !fs::read_link(entry.path()).is_ok_and(|file| file.ends_with("schedstat"))
    };
    // One of them is the directory that is read.
    fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter(counts)
        .count()
        - 1
}

/// Resources in use. Memory is in KiB.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// This process's address space.
    pub virtual_size: i64,
    /// This process's resident memory, including mapped rings.
    pub resident: i64,
    /// The anonymous part of it: heap, stacks, registered memory.
    pub anonymous: i64,
    /// Number of this process's mappings.
    pub mappings: i64,
    /// As [`open_files`] returns.
    pub files: i64,
    /// Memory of the host that is available to programs.
    pub available: i64,
    /// Memory of the kernel's slab allocator.
    pub slab: i64,
}

impl Usage {
    pub fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let machine = fs::read_to_string("/proc/meminfo").unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            virtual_size: field(&status, "VmSize:"),
            resident: field(&status, "VmRSS:"),
            anonymous: field(&status, "RssAnon:"),
            mappings: maps.lines().count() as i64,
            files: open_files() as i64,
            available: field(&machine, "MemAvailable:"),
            slab: field(&machine, "Slab:"),
        }
    }

    /// Returns the difference from an earlier value.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            virtual_size: self.virtual_size - before.virtual_size,
            resident: self.resident - before.resident,
            anonymous: self.anonymous - before.anonymous,
            mappings: self.mappings - before.mappings,
            files: self.files - before.files,
            available: self.available - before.available,
            slab: self.slab - before.slab,
        }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            virtual_size,
            resident,
            anonymous,
            mappings,
            files,
            available,
            slab,
        } = self;
        write!(
            f,
            "address space {virtual_size} KiB, resident {resident} (anonymous {anonymous}), \
             {mappings} mappings, {files} files; machine: available {available}, slab {slab}"
        )
    }
}

/// Returns the number after a name, which must exist, in a file of the kernel.
fn field(text: &str, name: &str) -> i64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name}"))
}
