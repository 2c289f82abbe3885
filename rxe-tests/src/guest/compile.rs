//! Building test programs in C inside a guest's tree, at this machine's full
//! speed and against that suite's own headers and libraries.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::progress::step;
use super::tree::Image;

/// Builds the programs whose sources and Makefile are in `sources`, and puts
/// them into `out` together with the scripts and the manifest beside them.
pub fn programs(image: &Image, sources: &Path, out: &Path, log: &Path) -> Result<()> {
    let name = format!("build-{}", std::process::id());
    let inside = image.tree().join(&name);
    copy_tree(sources, &inside)?;
    let result = step(
        &format!("{}: compiling the test programs", image.suite),
        log,
        Duration::from_secs(600),
        Command::new("chroot")
            .arg(image.tree())
            .args(["/usr/bin/env", "-i", "PATH=/usr/bin:/bin"])
            .args(["make", "-j2", "-C", &format!("/{name}"), "O=out"]),
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
