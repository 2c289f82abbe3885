//! Checks whether libraries can be preloaded into a program.

use std::env;
use std::ffi::{CStr, OsStr};
use std::fmt;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::{getegid, geteuid};
use uverbs::environment;

/// The reason why a preloaded library has no effect on a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreloadBlocked {
    /// The program has no dynamic loader.
    Static,
    /// The loader ignores the environment, because the program runs with more privileges
    /// than its caller.
    ElevatedPrivileges,
    /// The program is for another architecture, or a 32-bit one.
    OtherArchitecture,
    /// The program uses another C library.
    OtherLibc,
}

impl fmt::Display for PreloadBlocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Static => {
                "the program is statically linked and loads no libraries; link it dynamically, or, \
                 if it only reads files of the devices, run it with --mount"
            }
            Self::ElevatedPrivileges => {
                "the program is set-user-ID, set-group-ID or has file capabilities, so its \
                 loader ignores the environment; run a copy without them"
            }
            Self::OtherArchitecture => "the program is not a 64-bit program of this architecture",
            Self::OtherLibc => {
                "the program is built for musl, the preloaded library for the GNU C library; \
                 build the program for that"
            }
        })
    }
}

/// Returns the file that execvp(3) would execute for a name.
pub fn find(name: &OsStr) -> Option<PathBuf> {
    let is_program = |path: &Path| {
        let metadata = path.metadata();
        metadata.is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
    };
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    let path = environment::variable("PATH")?;
    let mut candidates = env::split_paths(&path).map(|directory| directory.join(name));
    candidates.find(|path| is_program(path))
}

/// Returns why a preloaded library has no effect on a program; `None` if it has one, or
/// if the file cannot be read: executing it then reports the error.
pub fn preload_blocked(path: &Path) -> Option<PreloadBlocked> {
    let file = File::open(path).ok()?;
    let metadata = file.metadata().ok()?;
    const SET_USER: u32 = 0o4000;
    const SET_GROUP: u32 = 0o2000;
    let mode = metadata.permissions().mode();
    let elevated = mode & SET_USER != 0 && metadata.uid() != geteuid().as_raw()
        || mode & SET_GROUP != 0 && metadata.gid() != getegid().as_raw()
        || has_capabilities(path) && !geteuid().is_root();
    if elevated {
        return Some(PreloadBlocked::ElevatedPrivileges);
    }
    check_elf(&file)
}

fn has_capabilities(path: &Path) -> bool {
    environment::has_file_capabilities(path)
}

/// Checks architecture and loader (`PT_INTERP`) of a file, if it is an ELF file.
fn check_elf(file: &File) -> Option<PreloadBlocked> {
    const CLASS_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    const MACHINE: u16 = match cfg!(target_arch = "aarch64") {
        true => 183,
        false => 62,
    };
    const PT_INTERP: u32 = 3;
    const MAX_HEADERS: u16 = 256;
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    let short = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..at + 2)?.try_into().ok()?;
        Some(u16::from_le_bytes(bytes))
    };
    let long = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_le_bytes(bytes))
    };
    if header[..4] != *b"\x7fELF" {
        return None;
    }
    let machine = short(&header, 18)?;
    if header[4] != CLASS_64 || header[5] != LITTLE_ENDIAN || machine != MACHINE {
        return Some(PreloadBlocked::OtherArchitecture);
    }
    let (start, size) = (long(&header, 32)?, short(&header, 54)?);
    let count = short(&header, 56)?.min(MAX_HEADERS);
    for number in 0..u64::from(count) {
        let mut entry = [0; 56];
        let at = start.checked_add(number * u64::from(size))?;
        file.read_exact_at(&mut entry, at).ok()?;
        if entry[..4] == PT_INTERP.to_le_bytes() {
            let mut name = [0; 256];
            let read = file.read_at(&mut name, long(&entry, 8)?).ok()?;
            let name = CStr::from_bytes_until_nul(name.get(..read)?).ok()?;
            let musl = name.to_bytes().windows(4).any(|part| part == b"musl");
            return musl.then_some(PreloadBlocked::OtherLibc);
        }
    }
    Some(PreloadBlocked::Static)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn static_and_foreign_programs_are_detected() {
        let own = env::current_exe().unwrap();
        let bytes = fs::read(&own).unwrap();
        let path = env::temp_dir().join(format!("ringverbs-program-{}", std::process::id()));
        let check = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = bytes[..4096].to_vec();
            change(&mut bytes);
            fs::write(&path, bytes).unwrap();
            preload_blocked(&path)
        };
        let dynamic = preload_blocked(&own);
        assert!(matches!(dynamic, None | Some(PreloadBlocked::Static)));
        // No program headers, so no loader.
        let without = check(&|bytes| bytes[56..58].fill(0));
        assert_eq!(without, Some(PreloadBlocked::Static));
        let class_32 = check(&|bytes| bytes[4] = 1);
        assert_eq!(class_32, Some(PreloadBlocked::OtherArchitecture));
        let machine = check(&|bytes| bytes[18..20].fill(0xff));
        assert_eq!(machine, Some(PreloadBlocked::OtherArchitecture));
        // A script, and program headers beyond the end of the file.
        assert_eq!(check(&|bytes| *bytes = b"#!/bin/sh\n".to_vec()), None);
        assert_eq!(check(&|bytes| bytes[32..40].fill(0xff)), None);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn programs_are_found_in_path() {
        assert!(find("sh".as_ref()).unwrap().is_absolute());
        assert_eq!(find("no-such-program".as_ref()), None);
        let relative = find("./x".as_ref());
        assert_eq!(relative, Some(PathBuf::from("./x")));
    }
}
