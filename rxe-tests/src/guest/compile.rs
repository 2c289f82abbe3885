//! Builds test programs in C in a guest's tree: at the host's speed, and against that
//! suite's headers and libraries.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::host;
use super::progress::step;
use super::tree::Image;

/// Builds the programs whose sources and Makefile are in `sources`, and copies them, the
/// scripts and the manifest to `out`.
pub fn programs(image: &Image, sources: &Path, out: &Path, log: &Path) -> Result<()> {
    let name = format!("build-{}", std::process::id());
    let inside = image.tree().join(&name);
    copy_tree(sources, &inside)?;
    let result = step(
        &format!("{}: compiling the test programs", image.suite),
        log,
        Duration::from_secs(600),
        &mut make(image, &name)?,
    )
    .and_then(|()| {
        copy_tree(&inside.join("out"), out)?;
        for entry in fs::read_dir(sources)? {
            let entry = entry?;
            let name = entry.file_name();
            let is_source = Path::new(&name)
                .extension()
                .is_some_and(|e| e == "c" || e == "h");
            if entry.file_type()?.is_file() && !is_source {
                fs::copy(entry.path(), out.join(name))?;
            }
        }
        Ok(())
    });
    let _ = fs::remove_dir_all(&inside);
    result
}

/// Returns the command that builds in a folder of the tree: with the tree's compiler, or
/// with a cross compiler if that cannot run here.
fn make(image: &Image, folder: &str) -> Result<Command> {
    let tree = image.tree();
    let architecture = image.suite.architecture();
    let mut command;
    if architecture.user.is_some() {
        host::require(&[("make", "make")], false)?;
        // The tree's libc must come before that of the cross compiler.
        let (tools, tree) = (architecture.tools, tree.display());
        let libraries = format!("{tree}/usr/lib/{}", tools.trim_end_matches('-'));
        let compiler = format!("CC={tools}gcc --sysroot={tree} -L{libraries}");
        command = Command::new("make");
        command
            .arg("-C")
            .arg(image.tree().join(folder))
            .arg(compiler);
    } else {
        command = Command::new("chroot");
        command
            .arg(tree)
            .args(["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", "make"])
            .args(["-C", &format!("/{folder}")]);
    }
    command.args(["-j2", "O=out"]);
    Ok(command)
}

/// Copies files and folders from `from` into `to`, following links.
pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if fs::metadata(&source)?.is_dir() {
            copy_tree(&source, &target)?;
        } else {
            fs::copy(&source, &target)
                .with_context(|| format!("cannot copy {}", source.display()))?;
        }
    }
    Ok(())
}
