//! The few files that the kernel starts from: busybox, the modules that the
//! disk and the shares need, and a script.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::progress::step;

/// The modules that must be there before the root file system is.
pub const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    // ext4 asks the crypto layer for it by name, which modules.dep lacks.
    "crc32c_generic",
    "ext4",
    "9pnet_virtio",
    "9p",
];

/// Packs the initramfs of the kernel in `tree` into `out`.
///
/// busybox, cpio and the decompressors are the tree's own, so the machine
/// that makes the guest needs none of them.
pub fn make(tree: &Path, init: &str, out: &Path, log: &Path) -> Result<()> {
    let version = fs::read_to_string(tree.join("boot/version"))?;
    let modules = tree.join("usr/lib/modules").join(version.trim());
    let read = |name: &str| {
        fs::read_to_string(modules.join(name))
            .with_context(|| format!("cannot read {}", modules.join(name).display()))
    };
    let order = load_order(&read("modules.dep")?, MODULES);

    let root = tree.join("initramfs");
    for dir in ["bin", "dev", "proc", "sys", "root", "modules"] {
        fs::create_dir_all(root.join(dir))?;
    }
    fs::copy(tree.join("bin/busybox"), root.join("bin/busybox"))?;
    fs::write(root.join("init"), init)?;
    let mut list = String::new();
    for path in &order {
        let name = path.rsplit('/').next().unwrap_or(path);
        fs::copy(modules.join(path), root.join("modules").join(name))?;
        let bare = name.trim_end_matches(".xz").trim_end_matches(".zst");
        list.push_str(bare);
        list.push('\n');
    }
    fs::write(root.join("modules.list"), list)?;
    let script = "set -e; chmod 755 /initramfs/init /initramfs/bin/busybox
cd /initramfs/modules
for m in *.xz; do if [ -f \"$m\" ]; then xz -d \"$m\"; fi; done
for m in *.zst; do if [ -f \"$m\" ]; then zstd -q -d --rm \"$m\"; fi; done
cd /initramfs; find . | cpio -o -H newc --quiet > /initrd";
    step(
        "packing the initramfs",
        log,
        Duration::from_secs(120),
        Command::new("chroot")
            .arg(tree)
            .args(["/bin/sh", "-c", script]),
    )?;
    fs::rename(tree.join("initrd"), out)?;
    fs::remove_dir_all(&root)?;
    Ok(())
}

/// The files to load, each after what it needs, for the modules `wanted`.
/// One that is not in `modules.dep` is built into the kernel.
pub(super) fn load_order(modules_dep: &str, wanted: &[&str]) -> Vec<String> {
    let mut needs: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut by_name: HashMap<String, &str> = HashMap::new();
    for line in modules_dep.lines() {
        let Some((file, deps)) = line.split_once(':') else {
            continue;
        };
        needs.insert(file, deps.split_whitespace().collect());
        let name = file.rsplit('/').next().unwrap_or(file);
        let name = name.split(".ko").next().unwrap_or(name).replace('-', "_");
        by_name.insert(name, file);
    }
    fn visit<'a>(file: &'a str, needs: &HashMap<&'a str, Vec<&'a str>>, out: &mut Vec<String>) {
        if out.iter().any(|done| done == file) {
            return;
        }
        for dep in needs.get(file).into_iter().flatten() {
            visit(dep, needs, out);
        }
        out.push(file.to_owned());
    }
    let mut out = Vec::new();
    for name in wanted {
        if let Some(file) = by_name.get(&name.replace('-', "_")) {
            visit(file, &needs, &mut out);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_follow_their_dependencies() {
        let dep = "kernel/fs/ext4/ext4.ko.xz: kernel/fs/jbd2/jbd2.ko.xz kernel/lib/crc16.ko.xz\n\
                   kernel/fs/jbd2/jbd2.ko.xz:\n\
                   kernel/lib/crc16.ko.xz:\n\
                   kernel/net/9p/9pnet.ko.xz:\n\
                   kernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko.xz\n";
        let order = load_order(dep, &["ext4", "9pnet_virtio", "virtio_pci"]);
        let names: Vec<_> = order
            .iter()
            .map(|p| p.rsplit('/').next().unwrap())
            .collect();
        assert_eq!(
            names,
            [
                "jbd2.ko.xz",
                "crc16.ko.xz",
                "ext4.ko.xz",
                "9pnet.ko.xz",
                "9pnet_virtio.ko.xz"
            ]
        );
    }
}
