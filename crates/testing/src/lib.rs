//! What several tests on a device need: random numbers, and what this process
//! and the machine have in use.
#![allow(missing_docs, reason = "for tests: the names say it")]
#![allow(
    clippy::len_without_is_empty,
    clippy::missing_safety_doc,
    clippy::new_without_default,
    clippy::should_implement_trait,
    reason = "for tests"
)]

pub mod hosts;
pub mod huge;
pub mod program;

use std::fmt;
use std::fs;
use std::str::FromStr;

use ringverbs::{Context, Device};

/// The device that a variable names.
pub fn context(variable: &str) -> Context {
    let name = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} names a device"));
    Device::named(&name).unwrap().open().unwrap()
}

/// A number from the environment.
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

/// Bytes that look random, and are the same for each seed (xorshift).
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

/// Numbers that look random, and are the same each time (splitmix64).
#[derive(Clone)]
pub struct Numbers(pub u64);

impl Numbers {
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
        for piece in bytes.chunks_mut(8) {
            let word = self.next().to_ne_bytes();
            piece.copy_from_slice(&word[..piece.len()]);
        }
    }
}

/// Bytes that belong to a number, and to no other.
pub fn pattern(of: u64, bytes: &mut [u8]) {
    Numbers(of.wrapping_mul(0xd6e8_feb8_6659_fd93)).fill(bytes);
}

/// Whether these are the bytes that belong to a number.
pub fn is_pattern(of: u64, bytes: &[u8]) -> bool {
    let mut wanted = vec![0; bytes.len()];
    pattern(of, &mut wanted);
    wanted == bytes
}

/// Where bytes begin to differ from those of a number, and which of the
/// number's bytes are there instead; for messages.
pub fn difference(of: u64, bytes: &[u8]) -> String {
    let mut wanted = vec![0; bytes.len()];
    pattern(of, &mut wanted);
    let Some(at) = (0..bytes.len()).find(|at| bytes[*at] != wanted[*at]) else {
        return "none".into();
    };
    let there = &bytes[at..(at + 16).min(bytes.len())];
    let from = wanted.windows(there.len()).position(|part| part == there);
    format!(
        "at byte {at} of {}, with what belongs at {from:?}",
        bytes.len()
    )
}

/// What is in use, in KiB where it is memory.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// This process's address space.
    pub virtual_size: i64,
    /// Memory of this process's in core, the mapped rings included.
    pub resident: i64,
    /// The part that is its own: heap, stacks, registered memory.
    pub anonymous: i64,
    /// Its mappings.
    pub mappings: i64,
    /// Its open files.
    pub files: i64,
    /// What the machine could still give.
    pub available: i64,
    /// The kernel's small objects.
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
            // One of them is the folder that is read.
            files: fs::read_dir("/proc/self/fd").unwrap().count() as i64 - 1,
            available: field(&machine, "MemAvailable:"),
            slab: field(&machine, "Slab:"),
        }
    }

    /// What came since.
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
            "address space {virtual_size} KiB, resident {resident} (own {anonymous}), \
             {mappings} mappings, {files} files; machine: available {available}, slab {slab}"
        )
    }
}

/// A number of a file of names and numbers, which the kernel is sure to have.
fn field(text: &str, name: &str) -> i64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name}"))
}
