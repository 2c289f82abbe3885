//! The tree of files that replaces sysfs and `/dev/infiniband`, in the network's directory.
//!
//! All processes with the same devices share a tree, which is never changed: a new one is
//! created under a temporary name, and renamed when it is complete. Attributes that differ
//! between processes exist as files, but their content is generated when they are opened
//! (`dynamic`).

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use embedded::softhca::card::Card;
use embedded::sysfs::{self, Content, Described, File, Place};
use nix::net::if_::{if_indextoname, if_nametoindex};
use uverbs::Error;

use crate::config::{self, Config, print_error};
use crate::internal;

/// The names of trees begin so.
pub(crate) const PREFIX: &[u8] = b"/sysfs-";

/// Splits the path of a dynamic attribute, below `/sys`, into the number of the
/// device and the name of the attribute.
pub(crate) fn dynamic(path: &str) -> Option<(usize, &str)> {
    let (device, name) = sysfs::dynamic(path)?;
    Some((config::device_named(device)?, name))
}

/// Returns whether a path below `/sys` is that of a dynamic attribute.
pub(crate) fn is_dynamic(path: &str) -> bool {
    dynamic(path).is_some()
}

/// The trees of this process.
struct Trees {
    /// That of the interface as it was named at first.
    root: PathBuf,
    interface: Option<String>,
    /// Index of the interface, which keeps it when it is renamed; 0 for none.
    index: u32,
    /// Those of its later names, and of none once it is removed. Read without a lock, which a
    /// thread could hold when another one forks.
    renamed: [OnceLock<(Option<String>, PathBuf)>; MAX_NAMES],
}

/// Greatest number of later names that are followed.
const MAX_NAMES: usize = 8;

fn trees() -> Option<&'static Trees> {
    static TREES: OnceLock<Option<Trees>> = OnceLock::new();
    let trees = TREES.get_or_init(|| {
        let config = config::get()?;
        let interface = config.interface();
        let index = interface.as_deref().and_then(|it| if_nametoindex(it).ok());
        Some(Trees {
            root: create_or_report(config, interface.as_deref())?,
            index: index.unwrap_or(0),
            interface,
            renamed: Default::default(),
        })
    });
    trees.as_ref()
}

/// Creates a tree; `None`, after printing an error, if that fails.
fn create_or_report(config: &Config, interface: Option<&str>) -> Option<PathBuf> {
    if !config::has_room_for_files() {
        return None;
    }
    // Paths are looked up as they are, without this tree.
    let _scope = internal::enter();
    let created = create_tree(config, interface);
    // Programs change their working directory.
    let created = created.and_then(|root| root.canonicalize().map_err(|error| error.to_string()));
    let report = |reason| print_error(&format!("{}: {reason}", config.directory.display()));
    created.map_err(report).ok()
}

/// Returns the root of the tree, which contains `sys` and `dev`; `None`, after printing an
/// error, if it cannot be created.
pub(crate) fn root() -> Option<&'static Path> {
    trees().map(|trees| &*trees.root)
}

/// As [`root`], for a path, which may be that of the network interface: since it was renamed,
/// that is in another tree.
pub(crate) fn root_of(path: &[u8]) -> Option<&'static Path> {
    let trees = trees()?;
    let is_interface = path.windows(4).any(|part| part == b"/net");
    if trees.index == 0 || !is_interface {
        return Some(&trees.root);
    }
    let name = if_indextoname(trees.index).ok();
    let name = name.and_then(|name| name.into_string().ok());
    if name == trees.interface {
        return Some(&trees.root);
    }
    let find = || {
        let known = trees.renamed.iter().filter_map(OnceLock::get);
        let mut same = known.filter(|it| it.0 == name);
        same.next().map(|it| it.1.as_path())
    };
    if let Some(root) = find() {
        return Some(root);
    }
    let mut new = (
        name.clone(),
        create_or_report(config::get()?, name.as_deref())?,
    );
    for slot in &trees.renamed {
        match slot.set(new) {
            Ok(()) => break,
            Err(refused) => new = refused,
        }
    }
    find().or(Some(&trees.root))
}

/// Removes the root of a tree from a path.
pub(crate) fn strip_root(path: &[u8]) -> Option<&[u8]> {
    let trees = trees()?;
    let roots = trees.renamed.iter().filter_map(OnceLock::get);
    let roots = roots.map(|(_, root)| root.as_path());
    let mut roots = std::iter::once(&*trees.root).chain(roots);
    roots.find_map(|root| path.strip_prefix(root.as_os_str().as_bytes()))
}

/// Describes the devices of a process.
fn described<'a>(config: &'a Config, interface: Option<&str>) -> Vec<Described<'a>> {
    let devices = config.profiles.iter().zip(&config.cards).enumerate();
    let describe = |(number, (profile, card)): (usize, (&&'static str, &&'static Card))| {
        let given = config.node.as_ref().and_then(|it| it.places.get(number));
        let place = given.cloned().unwrap_or_else(|| Place::default_of(number));
        Described {
            name: config::device_name(number),
            ethernet: sysfs::is_ethernet(profile),
            card,
            place: Place {
                interface: place.interface.or_else(|| interface.map(str::to_owned)),
                ..place
            },
        }
    };
    devices.map(describe).collect()
}

/// Returns links to the PCI devices of the host, which are listed with those of this process.
fn host_functions() -> Vec<File> {
    // A path that `device_path` does not replace.
    let directory = "/sys/./bus/pci/devices";
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let link = |entry: fs::DirEntry| {
        let target = entry.path().canonicalize().ok()?;
        let path = format!("sys/bus/pci/devices/{}", entry.file_name().to_str()?);
        Some((path, Content::Link(target.to_str()?.to_owned())))
    };
    let mut files: Vec<File> = entries.filter_map(link).collect();
    // Processes with the same devices share a tree.
    files.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    files
}

/// Creates the tree if it does not exist, and returns its path.
fn create_tree(config: &Config, interface: Option<&str>) -> Result<PathBuf, String> {
    let directory = embedded::Network::own_directory(&config.directory);
    let directory = directory.map_err(|error| match error {
        Error::Invalid { what, .. } => what.to_owned(),
        error => error.to_string(),
    })?;
    let mut files = sysfs::files(&described(config, interface));
    match &config.node {
        Some(node) => files.extend(node.files()),
        None => files.extend(host_functions()),
    }
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let name = format!("sysfs-{:016x}", hasher.finish());
    let root = directory.join(&name);
    if root.is_dir() {
        return Ok(root);
    }
    let template = directory.join(format!("{name}.new-XXXXXX"));
    let failed = |error: &dyn std::fmt::Display| format!("creating files for the devices: {error}");
    let new = nix::unistd::mkdtemp(&template).map_err(|errno| failed(&errno.desc()))?;
    let created = sysfs::write(&new, &files).and_then(|()| fs::rename(&new, &root));
    if let Err(error) = created {
        // The temporary name is unique to this process.
        let _ = fs::remove_dir_all(&new);
        // Fails if another process has created the tree meanwhile.
        if !root.is_dir() {
            return Err(failed(&error));
        }
    }
    // Leaves room for the paths below it within PATH_MAX.
    match root.as_os_str().as_bytes().len() {
        ..=1024 => Ok(root),
        _ => Err("the path is too long".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_attributes_are_recognized_by_path() {
        for name in [
            "ports/1/gids/127",
            "ports/1/gid_attrs/types/0",
            "ports/1/gid_attrs/ndevs/15",
        ] {
            let path = format!("class/infiniband/mlx5_3/{name}");
            assert_eq!(dynamic(&path), Some((3, name)));
        }
        let device = "devices/ringverbs/ffff:00:03.0/infiniband/mlx5_3/node_guid";
        assert_eq!(dynamic(device), Some((3, "node_guid")));
        for counter in [
            "ports/1/hw_counters/np_cnp_sent",
            "ports/1/counters/port_xmit_data",
            "ports/1/cm_rx_duplicates/sidr_req",
        ] {
            let path = format!("class/infiniband/mlx5_3/{counter}");
            assert_eq!(dynamic(&path), Some((3, counter)));
        }
        for other in [
            "class/infiniband/mlx5_3/ports/1/gids/128",
            "class/infiniband/mlx5_3/ports/1/gids/01",
            "class/infiniband/mlx5_/node_guid",
            "class/infiniband_verbs/mlx5_0/node_guid",
            "class/infiniband/mlx5_0/device/vendor",
        ] {
            assert_eq!(dynamic(other), None, "{other}");
        }
    }
}
