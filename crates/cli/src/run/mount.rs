//! `ringverbs run --mount`: the files of the devices for programs that no preloaded library
//! reaches, mounted where Linux has them.
//!
//! In a mount namespace of its own, the process builds a tree of files in memory, and binds its
//! directories over those of the host. Where a directory of the host lacks one of the tree's,
//! and sysfs takes no new ones, a copy of the directory is mounted over it: a directory in
//! memory, with the entries of the host's bound to it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use embedded::softhca::card::Card;
use embedded::softhca::link_shape::LinkShape;
use embedded::sysfs::{self, Content, Described, File, Place};
use embedded::{Drive, Embedded, GidTable, Network};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid, mkdtemp};
use ringverbs::KernelError;

/// The devices whose files are mounted.
#[derive(Debug)]
pub struct Devices {
    /// Profiles, or `roce:` with an address or interface, separated by commas.
    pub devices: String,
    /// The devices' names, in order; the others have their default.
    pub names: Vec<String>,
    /// The card of all, or of each.
    pub cards: Vec<&'static Card>,
    /// The GID table of Ethernet ports that reach no other hosts.
    pub gids: GidTable,
    pub seed: Option<u64>,
    /// The node, as the preloaded library reads it.
    pub node: Option<String>,
    /// Directory of the network.
    pub directory: PathBuf,
}

/// The reason why the files cannot be mounted.
#[derive(Debug)]
pub enum MountError {
    /// The process may not have a user namespace, or none with rights to mount.
    Forbidden(Errno),
    /// The network cannot be joined.
    Network(KernelError),
    /// The node is malformed.
    Node,
    /// A file cannot be written.
    File(PathBuf, io::Error),
    /// A directory cannot be mounted.
    Mount(PathBuf, Errno),
}

impl fmt::Display for MountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forbidden(errno) => {
                write!(
                    f,
                    "this process may not mount files, even in a user namespace of its own: {}; ",
                    errno.desc()
                )?;
                f.write_str(
                    "run it as root, in a container with the capability SYS_ADMIN, or allow user \
                     namespaces: sysctl user.max_user_namespaces=10000, on Debian \
                     kernel.unprivileged_userns_clone=1, on Ubuntu \
                     kernel.apparmor_restrict_unprivileged_userns=0",
                )
            }
            Self::Network(error) => error.fmt(f),
            Self::Node => f.write_str("the node has a place outside of the tree"),
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Mount(path, errno) => write!(f, "mounting {}: {}", path.display(), errno.desc()),
        }
    }
}

impl std::error::Error for MountError {}

/// Gives this process and those that it starts a mount namespace with the files of the devices.
/// It must have one thread.
pub fn mount_files(devices: &Devices) -> Result<(), MountError> {
    enter_namespace()?;
    let (files, replaced) = snapshot(devices)?;
    let template = devices.directory.join("mount-XXXXXX");
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| MountError::File(path, error)
    };
    let stage = mkdtemp(&template).map_err(|errno| failed(&template)(errno.into()))?;
    let mounted = mount_over(&stage, &files, &replaced);
    // The directories that are bound elsewhere stay mounted.
    let _ = umount2(&stage, MntFlags::MNT_DETACH);
    let removed = fs::remove_dir(&stage).map_err(failed(&stage));
    mounted.and(removed)
}

/// Writes the tree to memory that is mounted at `stage`, and mounts it over the host's.
fn mount_over(
    stage: &Path,
    files: &[File],
    replaced: &BTreeSet<PathBuf>,
) -> Result<(), MountError> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let mounted = mount(
        Some("ringverbs"),
        stage,
        Some("tmpfs"),
        flags,
        Some("mode=755"),
    );
    mounted.map_err(MountError::at(stage))?;
    sysfs::write(stage, files).map_err(|error| MountError::File(stage.to_owned(), error))?;
    let tree = Tree {
        root: stage,
        replaced,
    };
    for directory in ["sys", "dev"] {
        tree.mount(Path::new(directory))?;
    }
    Ok(())
}

impl MountError {
    /// Returns the error of a mount at a path.
    fn at(path: &Path) -> impl Fn(Errno) -> Self + use<> {
        let path = path.to_owned();
        move |errno| Self::Mount(path.clone(), errno)
    }
}

/// Enters a mount namespace, if need be in a user namespace in which this user is the same.
fn enter_namespace() -> Result<(), MountError> {
    let (user, group) = (geteuid(), getegid());
    if unshare(CloneFlags::CLONE_NEWNS).is_err() {
        let both = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS;
        unshare(both).map_err(MountError::Forbidden)?;
        let maps = [
            ("/proc/self/setgroups", "deny".to_owned()),
            ("/proc/self/uid_map", format!("{user} {user} 1")),
            ("/proc/self/gid_map", format!("{group} {group} 1")),
        ];
        for (path, map) in maps {
            fs::write(path, map).map_err(|error| {
                let errno = error.raw_os_error().map_or(Errno::EPERM, Errno::from_raw);
                MountError::Forbidden(errno)
            })?;
        }
    }
    // Nothing reaches the host's namespace.
    let flags = MsFlags::MS_SLAVE | MsFlags::MS_REC;
    let none = None::<&str>;
    mount(none, "/", none, flags, none).map_err(MountError::Forbidden)
}

/// Returns the files of the tree, with the values that change as they are now, and the paths
/// whose directories of the host it replaces.
fn snapshot(devices: &Devices) -> Result<(Vec<File>, BTreeSet<PathBuf>), MountError> {
    let host = devices.devices.strip_prefix("roce:");
    let profiles: Vec<&str> = match host {
        Some(_) => vec!["roce"],
        None => devices.devices.split(',').collect(),
    };
    let node = match &devices.node {
        Some(lines) => Some(sysfs::Node::parse(lines).ok_or(MountError::Node)?),
        None => None,
    };
    let made = make_devices(devices, host, &profiles).map_err(MountError::Network)?;
    let interface = match host {
        Some(host) => Network::interface_of(host),
        None => Some("lo".to_owned()),
    };
    let described = profiles.iter().enumerate().map(|(number, profile)| {
        let place = node.as_ref().and_then(|it| it.places.get(number)).cloned();
        let place = place.unwrap_or_else(|| Place::default_of(number));
        Described {
            name: devices.name(number),
            ethernet: sysfs::is_ethernet(profile),
            card: devices.card(number),
            place: Place {
                interface: place.interface.or_else(|| interface.clone()),
                ..place
            },
        }
    });
    let described: Vec<Described<'_>> = described.collect();
    let mut files = sysfs::files(&described);
    let own = |name: &str| described.iter().position(|it| it.name == name);
    let interface_of = |number: usize| {
        let place = node.as_ref().and_then(|it| it.places.get(number));
        place.and_then(|place| place.interface.as_deref())
    };
    files.retain_mut(|(path, content)| {
        let Some((name, attribute)) = sysfs::dynamic(path) else {
            return true;
        };
        let Some((number, device)) = own(name).and_then(|at| Some((at, made.get(at)?))) else {
            return true;
        };
        // Reading an entry without a value is an error in sysfs: the file is missing here.
        let value = sysfs::content(device, interface_of(number), attribute);
        let has_value = value.is_some();
        *content = Content::Text(value.unwrap_or_default());
        has_value
    });
    let mut replaced = BTreeSet::from(DEVICES.map(PathBuf::from));
    if let Some(node) = &node {
        files.extend(node.files());
        replaced.extend(NODE.map(PathBuf::from));
    }
    Ok((files, replaced))
}

/// Directories that the tree has instead of the host, with all that is below.
const DEVICES: [&str; 4] = [
    "sys/class/infiniband",
    "sys/class/infiniband_verbs",
    "sys/devices/ringverbs",
    "dev/infiniband",
];
/// The same of a node. Its PCI roots are in `sys/devices` beside the host's, whose network
/// interfaces are links to them.
const NODE: [&str; 3] = [
    "sys/bus/pci",
    "sys/class/pci_bus",
    "sys/devices/system/node",
];

/// Creates devices on the network, as the program would: their numbers and addresses are those
/// of the next process that joins it.
fn make_devices(
    devices: &Devices,
    host: Option<&str>,
    profiles: &[&str],
) -> Result<Vec<Embedded>, KernelError> {
    let network = match host {
        Some(host) => Network::roce(Drive::Caller, host)?,
        None => Network::joined(Drive::Caller, &devices.directory)?,
    };
    if let Some(seed) = devices.seed {
        network.set_seed(seed);
    }
    let make = |(number, profile): (usize, &&str)| {
        let card = devices.card(number);
        network.device_of_card(profile, card, LinkShape::NONE, &devices.gids)
    };
    profiles.iter().enumerate().map(make).collect()
}

impl Devices {
    fn name(&self, number: usize) -> String {
        let given = self.names.get(number).cloned();
        given.unwrap_or_else(|| format!("mlx5_{number}"))
    }

    fn card(&self, number: usize) -> &'static Card {
        let of_all = self.cards.first().filter(|_| self.cards.len() == 1);
        of_all.or(self.cards.get(number)).unwrap_or(&&Card::SOFTHCA)
    }
}

/// The tree of files, to be mounted over the host's.
struct Tree<'a> {
    root: &'a Path,
    replaced: &'a BTreeSet<PathBuf>,
}

/// Returns the names of the entries of a directory, none if there is no such directory.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().into()));
    names.collect()
}

/// Returns whether there is a directory at a path, which is no link.
fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

impl Tree<'_> {
    /// Returns whether the tree's directory replaces the host's.
    fn replaces(&self, path: &Path) -> bool {
        self.replaced.contains(path)
    }

    /// Mounts what is below a path (without its first slash) at the host's directories.
    fn mount(&self, path: &Path) -> Result<(), MountError> {
        let (own, host) = (self.root.join(path), Path::new("/").join(path));
        let bind = || {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
            let none = None::<&str>;
            mount(Some(&own), &host, none, flags, none).map_err(MountError::at(&host))
        };
        if self.replaces(path) {
            return bind();
        }
        let names = entries(&own);
        let has_all = names.iter().all(|name| {
            let is_below = |path: &Path| is_directory(&path.join(name));
            is_below(&own) && is_below(&host)
        });
        if !has_all {
            self.complete(path)?;
            return bind();
        }
        for name in names {
            self.mount(&path.join(name))?;
        }
        Ok(())
    }

    /// Adds the entries of the host's directory that the tree's lacks.
    fn complete(&self, path: &Path) -> Result<(), MountError> {
        let (own, host) = (self.root.join(path), Path::new("/").join(path));
        for name in entries(&host) {
            let (new, old, below) = (own.join(&name), host.join(&name), path.join(&name));
            if self.replaces(&below) {
                continue;
            }
            if fs::symlink_metadata(&new).is_ok() {
                if is_directory(&new) && is_directory(&old) {
                    self.complete(&below)?;
                }
                continue;
            }
            let failed = |error| MountError::File(new.clone(), error);
            if let Ok(target) = fs::read_link(&old) {
                symlink(target, &new).map_err(failed)?;
                continue;
            }
            match is_directory(&old) {
                true => fs::create_dir(&new).map_err(failed)?,
                false => fs::write(&new, "").map_err(failed)?,
            }
            let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
            let none = None::<&str>;
            mount(Some(&old), &new, none, flags, none).map_err(MountError::at(&old))?;
        }
        Ok(())
    }
}
