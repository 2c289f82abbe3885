//! The initramfs of Debian guests: busybox, the modules for the disk and the shares, and
//! a script.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::cpio::Archive;
use super::suite::Suite;

/// The modules that mounting the root file system needs.
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

/// Writes the initramfs for the kernel in `tree` to `out`.
pub fn make(tree: &Path, suite: Suite, init: &str, out: &Path) -> Result<()> {
    let version = fs::read_to_string(tree.join("boot/version"))?;
    let modules = tree.join("usr/lib/modules").join(version.trim());
    let dependencies = modules.join("modules.dep");
    let dependencies = fs::read_to_string(&dependencies)
        .with_context(|| format!("cannot read {}", dependencies.display()))?;

    let mut root = Archive::default();
    for dir in ["bin", "dev", "proc", "sys", "root", "modules"] {
        root.folder(dir);
    }
    root.file("bin/busybox", &fs::read(tree.join("bin/busybox"))?, true);
    root.file("init", init.as_bytes(), true);
    let mut list = String::new();
    for path in load_order(&dependencies, MODULES) {
        let name = path.rsplit('/').next().unwrap_or(&path);
        let name = name.trim_end_matches(".xz");
        let module = module(tree, suite, &modules.join(&path))?;
        root.file(&format!("modules/{name}"), &module, false);
        list.push_str(name);
        list.push('\n');
    }
    root.file("modules.list", list.as_bytes(), false);
    fs::write(out, root.finish()).with_context(|| format!("cannot write {}", out.display()))
}

/// Returns the contents of a module, unpacked by the tree's busybox, which is static.
pub(super) fn module(tree: &Path, suite: Suite, file: &Path) -> Result<Vec<u8>> {
    match file.extension().and_then(|it| it.to_str()) {
        Some("ko") => return Ok(fs::read(file)?),
        Some("xz") => {}
        _ => bail!("{}: unknown compression format", file.display()),
    }
    let mut busybox = suite.architecture().command(&tree.join("bin/busybox"));
    let out = busybox.args(["xz", "-dc"]).arg(file).output();
    let out = out.with_context(|| format!("cannot run {:?}", busybox.get_program()))?;
    ensure!(
        out.status.success(),
        "cannot unpack {}: {}",
        file.display(),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    Ok(out.stdout)
}

/// Returns the files of the modules `wanted` and their dependencies, in load order.
/// Modules that are not in `modules.dep` are built into the kernel.
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
