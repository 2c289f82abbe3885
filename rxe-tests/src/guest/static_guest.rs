//! The static guest, without a distribution: the kernel, its modules, busybox and static
//! programs, all in the initramfs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::cpio::Archive;
use super::initramfs::{self, load_order};
use super::suite::Architecture;
use super::tree::Image;

/// The first process.
const INIT: &str = include_str!("../../guest/init-static");

/// The modules in it, besides their dependencies.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    // rdma_rxe asks the crypto layer for it by name, which modules.dep lacks.
    "crc32_generic",
    "dummy",
    "ib_uverbs",
    "rdma_rxe",
    "rdma_ucm",
];

/// The files that a static guest boots from.
#[derive(Debug)]
pub struct StaticGuest {
    /// Processor architecture.
    pub architecture: &'static Architecture,
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs with its whole file system.
    pub initrd: PathBuf,
}

/// Builds a static guest in the folder `dir`, with the kernel, modules and busybox of
/// `image`, with `programs` (names and files) in `/opt/native`, and with the shell script
/// `job`.
///
/// # Errors
/// A program is not static, or a file is a shared library.
pub fn make(
    image: &Image,
    programs: &[(String, PathBuf)],
    job: &str,
    dir: &Path,
) -> Result<StaticGuest> {
    let mut root = Root::default();
    root.program("bin/busybox", &image.tree().join("bin/busybox"))?;
    for (name, path) in programs {
        root.program(&format!("opt/native/{name}"), path)?;
    }
    root.add("init", INIT.as_bytes(), true)?;
    root.add("job", job.as_bytes(), true)?;
    root.modules(image)?;
    let initrd = dir.join("initrd");
    fs::write(&initrd, root.archive.finish())
        .with_context(|| format!("cannot write {}", initrd.display()))?;
    Ok(StaticGuest {
        architecture: image.suite.architecture(),
        kernel: image.kernel(),
        initrd,
    })
}

/// The file system under construction.
#[derive(Default)]
struct Root {
    archive: Archive,
    folders: BTreeSet<String>,
}

impl Root {
    fn program(&mut self, name: &str, path: &Path) -> Result<()> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        self.add(name, &bytes, true)
    }

    /// Adds a file. Every file is checked here.
    fn add(&mut self, name: &str, bytes: &[u8], executable: bool) -> Result<()> {
        let file = name.rsplit('/').next().unwrap_or(name);
        ensure!(
            !file.ends_with(".so") && !file.contains(".so."),
            "{name} is a shared library, which a static guest must not have"
        );
        let is_module = file.ends_with(".ko");
        ensure!(
            is_module || !is_elf(bytes) || is_static(bytes)?,
            "{name} is not static: it needs a loader or libraries"
        );
        let parts: Vec<&str> = name.split('/').collect();
        for depth in 1..parts.len() {
            let folder = parts[..depth].join("/");
            if self.folders.insert(folder.clone()) {
                self.archive.folder(&folder);
            }
        }
        self.archive.file(name, bytes, executable);
        Ok(())
    }

    fn modules(&mut self, image: &Image) -> Result<()> {
        let tree = image.tree();
        let version = fs::read_to_string(tree.join("boot/version"))?;
        let version = version.trim();
        let folder = tree.join("usr/lib/modules").join(version);
        let from = folder.join("modules.dep");
        let dependencies =
            fs::read_to_string(&from).with_context(|| format!("cannot read {}", from.display()))?;
        let order = load_order(&dependencies, MODULES);
        let to = format!("lib/modules/{version}");
        let mut list = String::new();
        for line in dependencies.lines() {
            if line
                .split_once(':')
                .is_some_and(|(file, _)| order.iter().any(|m| m == file))
            {
                list.push_str(&line.replace(".ko.xz", ".ko"));
                list.push('\n');
            }
        }
        for path in &order {
            let bytes = initramfs::module(&tree, image.suite, &folder.join(path))?;
            let name = path.trim_end_matches(".xz");
            self.add(&format!("{to}/{name}"), &bytes, false)?;
        }
        self.add(&format!("{to}/modules.dep"), list.as_bytes(), false)
    }
}

fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Returns whether a 64-bit program needs neither a loader (PT_INTERP) nor a library
/// (DT_NEEDED). A static position-independent program also has a dynamic section.
fn is_static(bytes: &[u8]) -> Result<bool> {
    const PT_DYNAMIC: u64 = 2;
    const PT_INTERP: u64 = 3;
    const DT_NULL: u64 = 0;
    const DT_NEEDED: u64 = 1;
    let number = |at: u64, len: usize| -> Result<u64> {
        let at = usize::try_from(at)?;
        let field = at.checked_add(len).and_then(|end| bytes.get(at..end));
        let field = field.context("truncated ELF file")?;
        let mut wide = [0; 8];
        wide[..len].copy_from_slice(field);
        Ok(u64::from_le_bytes(wide))
    };
    ensure!(
        number(4, 2)? == 0x0102,
        "the ELF file is not 64-bit and little-endian"
    );
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for header in (0..count).map(|index| table + index * size) {
        match number(header, 4)? {
            PT_INTERP => return Ok(false),
            PT_DYNAMIC => {
                let begin = number(header + 8, 8)?;
                let entries = number(header + 32, 8)? / 16;
                for entry in (0..entries).map(|index| begin + index * 16) {
                    match number(entry, 8)? {
                        DT_NULL => break,
                        DT_NEEDED => return Ok(false),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a program with program headers of these types; the dynamic section is
    /// `dynamic`, at 0x200.
    fn program(headers: &[u32], dynamic: &[u64]) -> Vec<u8> {
        let mut bytes = vec![0; 0x200];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = headers.len() as u8;
        for (index, kind) in headers.iter().enumerate() {
            let at = 64 + 56 * index;
            bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&0x200u64.to_le_bytes());
            let size = 8 * dynamic.len() as u64;
            bytes[at + 32..at + 40].copy_from_slice(&size.to_le_bytes());
        }
        bytes.extend(dynamic.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    #[test]
    fn static_programs_are_recognised() {
        assert!(is_static(&program(&[1, 1], &[])).unwrap());
        assert!(!is_static(&program(&[1, 3], &[])).unwrap());
        assert!(is_static(&program(&[1, 2], &[5, 9, 0, 0])).unwrap());
        assert!(!is_static(&program(&[1, 2], &[5, 9, 1, 7, 0, 0])).unwrap());
        // Entries after DT_NULL are ignored.
        assert!(is_static(&program(&[1, 2], &[0, 0, 1, 7])).unwrap());
        assert!(is_static(&program(&[1, 2], &[5, 9])[..0x204]).is_err());
        assert!(is_static(b"\x7fELF").is_err());
    }

    #[test]
    fn libraries_and_dynamic_programs_are_refused() {
        let mut root = Root::default();
        for name in ["lib/libc.so", "lib/libc.so.6"] {
            let error = root.add(name, b"", false).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        let dynamic = program(&[3], &[]);
        let error = root.add("opt/native/x", &dynamic, true).unwrap_err();
        assert!(error.to_string().contains("opt/native/x"), "{error}");
        root.add("opt/native/x", &program(&[1], &[]), true).unwrap();
        root.add("job", b"#!/bin/sh", true).unwrap();
    }
}
