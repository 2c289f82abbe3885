//! The files of devices.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use softhca::card::Card;

use super::attributes;
use super::node::Place;
use crate::Embedded;

/// Major device number of `uverbs0`, as in Linux.
pub const UVERBS_MAJOR: u32 = 231;
/// Its minor device number; those of others follow.
pub const UVERBS_MINOR: u32 = 192;
/// Device number of the connection manager, a miscellaneous device.
pub const MANAGER: (u32, u32) = (10, 122);

/// Version of the ABI of `uverbs0`.
pub const UVERBS_ABI: u64 = 1;
/// Version of the ABI of the connection manager.
pub const MANAGER_ABI: u64 = 4;

/// The directory with links to all PCI devices.
const PCI_DEVICES: &str = "sys/bus/pci/devices";
/// The directory with links to those of the driver.
const DRIVER: &str = "sys/bus/pci/drivers/mlx5_core";

/// Attributes of a device whose content differs between processes.
const DYNAMIC: [&str; 6] = [
    "node_guid",
    "sys_image_guid",
    "node_desc",
    "ports/1/lid",
    "ports/1/state",
    "ports/1/phys_state",
];

/// Returns the directory and the name of the counter that an attribute of a device is, if it
/// counts.
pub(super) fn counter(name: &str) -> Option<(&str, &str)> {
    let name = name.strip_prefix("ports/1/")?;
    let (directory, name) = name.split_once('/')?;
    let names = match directory {
        "hw_counters" => &attributes::HW_COUNTERS[..],
        "counters" => &attributes::PORT_COUNTERS[..],
        "cm_tx_msgs" | "cm_tx_retries" | "cm_rx_msgs" | "cm_rx_duplicates" => {
            &attributes::CM_MESSAGES[..]
        }
        _ => return None,
    };
    names.contains(&name).then_some((directory, name))
}

/// Splits the path of a dynamic attribute, below `/sys`, into the name of the device and that of
/// the attribute.
pub fn dynamic(path: &str) -> Option<(&str, &str)> {
    let (_, path) = path.rsplit_once("infiniband/")?;
    let (device, name) = path.split_once('/')?;
    let known =
        DYNAMIC.contains(&name) || counter(name).is_some() || GidAttribute::named(name).is_some();
    known.then_some((device, name))
}

/// An attribute of an entry of the GID table, in `ports/1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidAttribute {
    /// The GID, zeros in an empty entry.
    Gid,
    /// The type, or EINVAL for an empty entry.
    Type,
    /// The network interface, or EINVAL for an entry without one.
    Interface,
}

impl GidAttribute {
    const ALL: [Self; 3] = [Self::Gid, Self::Type, Self::Interface];

    /// Returns the directory of the attribute of all entries.
    fn directory(self) -> &'static str {
        match self {
            Self::Gid => "ports/1/gids",
            Self::Type => "ports/1/gid_attrs/types",
            Self::Interface => "ports/1/gid_attrs/ndevs",
        }
    }

    /// Returns the attribute with this name, and the index of its entry.
    pub fn named(name: &str) -> Option<(Self, usize)> {
        Self::ALL.into_iter().find_map(|attribute| {
            let index = name
                .strip_prefix(attribute.directory())?
                .strip_prefix('/')?;
            let number: usize = index.parse().ok()?;
            let is_entry = number < Embedded::ETHERNET_GIDS && number.to_string() == index;
            is_entry.then_some((attribute, number))
        })
    }
}

/// A file of the tree, by its path.
pub type File = (String, Content);

/// The content of a file.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum Content {
    /// Text, with its line break.
    Text(String),
    /// A binary file.
    Bytes(Vec<u8>),
    /// A symbolic link to this path.
    Link(String),
}

/// The properties of a device that its files show.
#[derive(Debug)]
pub struct Described<'a> {
    /// Its name.
    pub name: String,
    /// Whether its port is an Ethernet port.
    pub ethernet: bool,
    /// The card that it reports to be.
    pub card: &'a Card,
    /// Its place in the PCI tree.
    pub place: Place,
}

/// Returns the files of a tree.
pub fn files(devices: &[Described<'_>]) -> Vec<File> {
    let (major, minor) = MANAGER;
    let fixed = [
        ("dev/infiniband/rdma_cm", String::new()),
        ("sys/class/infiniband_verbs/abi_version", "6".to_owned()),
        (
            "sys/class/misc/rdma_cm/abi_version",
            MANAGER_ABI.to_string(),
        ),
        ("sys/class/misc/rdma_cm/dev", format!("{major}:{minor}")),
    ];
    let mut files = Vec::from(fixed.map(|(path, text)| (path.to_owned(), Content::Text(text))));
    for (number, described) in devices.iter().enumerate() {
        device(number, described, &mut files);
        if let Some(interface) = &described.place.interface {
            let link = Content::Link(format!("/sys/class/net/{interface}"));
            let directory = described.place.directory();
            files.push((format!("{directory}/net/{interface}"), link));
        }
    }
    files
}

/// Returns whether devices of a profile have an Ethernet port.
pub fn is_ethernet(profile: &str) -> bool {
    profile.starts_with("roce")
}

/// Adds the files of a device.
fn device(number: usize, described: &Described<'_>, files: &mut Vec<File>) {
    let Described {
        name: device_name,
        ethernet,
        card,
        place,
    } = described;
    let ethernet = *ethernet;
    let minor = UVERBS_MINOR as usize + number;
    let rdma_event = format!("NAME={device_name}");
    let uverbs_event = format!(
        "MAJOR={UVERBS_MAJOR}\nMINOR={minor}\nDEVNAME=infiniband/uverbs{number}\nDEVMODE=0666"
    );
    let uverbs = [
        ("ibdev", device_name.to_owned()),
        ("dev", format!("{UVERBS_MAJOR}:{minor}")),
        ("abi_version", UVERBS_ABI.to_string()),
        ("uevent", uverbs_event),
    ];
    let link = match ethernet {
        true => "Ethernet",
        false => "InfiniBand",
    };
    let cap_mask = match ethernet {
        true => "0x00010000",
        false => "0x02510868",
    };
    let sm_lid = if ethernet { 0 } else { Embedded::SM_LID };
    let sm_lid = format!("{sm_lid:#x}");
    let general = [
        ("uevent", &*rdma_event),
        ("ports/1/link_layer", link),
        ("ports/1/lid_mask_count", "0"),
        ("ports/1/sm_lid", &*sm_lid),
        ("ports/1/sm_sl", "0"),
        ("ports/1/cap_mask", cap_mask),
    ];
    // As in sysfs, classes have links to devices: programs derive the PCI device from the
    // target of the link.
    let pci_device = place.directory();
    let uverbs_device = format!("{pci_device}/infiniband_verbs/uverbs{number}");
    let rdma_device = format!("{pci_device}/infiniband/{device_name}");
    let mut add = |at: &str, name: &str, content: &str| {
        files.push((
            format!("{at}/{name}"),
            Content::Text(format!("{content}\n")),
        ));
    };
    add("dev/infiniband", &format!("uverbs{number}"), "");
    for (name, content) in &uverbs {
        add(&uverbs_device, name, content);
    }
    let function = attributes::function(ethernet, card);
    for (name, content) in attributes::pci(place, &function, card) {
        add(&pci_device, name, &content);
    }
    for (name, content) in attributes::of_card(card) {
        add(&rdma_device, name, &content);
    }
    for (name, content) in attributes::counters() {
        add(&rdma_device, &name, content);
    }
    for (name, content) in attributes::DEVICE.into_iter().chain(general) {
        add(&rdma_device, name, content);
    }
    let (gids, pkeys) = match ethernet {
        true => (Embedded::ETHERNET_GIDS, 1),
        false => (Embedded::INFINIBAND_GIDS, Embedded::INFINIBAND_PKEYS),
    };
    for index in 0..pkeys {
        let key = if index == 0 { "0xffff" } else { "0x0000" };
        add(&rdma_device, &format!("ports/1/pkeys/{index}"), key);
    }
    for attribute in GidAttribute::ALL {
        for index in 0..gids {
            add(
                &rdma_device,
                &format!("{}/{index}", attribute.directory()),
                "",
            );
        }
    }
    for name in DYNAMIC {
        add(&rdma_device, name, "");
    }
    let config = Content::Bytes(function.config());
    files.push((format!("{pci_device}/config"), config));
    for (directory, up) in [(PCI_DEVICES, "../../.."), (DRIVER, "../../../..")] {
        let link = Content::Link(format!("{up}/devices/{}", place.path));
        files.push((format!("{directory}/{}", place.name()), link));
    }
    let depth = pci_device.split('/').count();
    for (name, target) in [
        ("driver", "bus/pci/drivers/mlx5_core"),
        ("subsystem", "bus/pci"),
    ] {
        let link = Content::Link(format!("{}{target}", "../".repeat(depth - 1)));
        files.push((format!("{pci_device}/{name}"), link));
    }
    for (device, class) in [
        (uverbs_device, format!("infiniband_verbs/uverbs{number}")),
        (rdma_device, format!("infiniband/{device_name}")),
    ] {
        let to_pci = Content::Link(format!("../../../{}", place.name()));
        files.push((format!("{device}/device"), to_pci));
        if let Some((class, _)) = class.split_once('/') {
            let up = "../".repeat(depth + 1);
            let to_class = Content::Link(format!("{up}class/{class}"));
            files.push((format!("{device}/subsystem"), to_class));
        }
        let below = device.strip_prefix("sys/").unwrap_or(&device);
        let to_device = Content::Link(format!("../../{below}"));
        files.push((format!("sys/class/{class}"), to_device));
    }
}

/// Writes the files. Those with the same content are links to one, which costs less: most are
/// empty entries of tables, or counters.
///
/// # Errors
/// A file cannot be written.
pub fn write(root: &Path, files: &[File]) -> io::Result<()> {
    let mut directories = HashSet::new();
    let mut written: HashMap<&str, PathBuf> = HashMap::new();
    for (path, content) in files {
        let path = root.join(path);
        if let Some(parent) = path.parent() {
            if directories.insert(parent.to_owned()) {
                fs::create_dir_all(parent)?;
            }
        }
        match content {
            Content::Text(text) => {
                let same = written.get(text.as_str());
                // Fails where a file has few links, or only one.
                if same.is_none_or(|same| fs::hard_link(same, &path).is_err()) {
                    fs::write(&path, text)?;
                    written.insert(text, path);
                }
            }
            Content::Bytes(bytes) => fs::write(&path, bytes)?,
            Content::Link(target) => symlink(target, path)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_device_has_files_and_attributes_of_its_own() {
        let described = |number, ethernet| Described {
            name: format!("mlx5_{number}"),
            ethernet,
            card: &Card::SOFTHCA,
            place: Place {
                interface: Some("lo".to_owned()),
                ..Place::default_of(number)
            },
        };
        let files = files(&[described(0, true), described(1, false)]);
        let name = format!("ringverbs-sysfs-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        write(&directory, &files).unwrap();
        let at = |path: &str| directory.join(path);
        let text = |path: &str| fs::read_to_string(at(path)).ok();
        let ibdev = text("sys/class/infiniband_verbs/uverbs1/ibdev");
        assert_eq!(ibdev.unwrap(), "mlx5_1\n");
        let last = |number| format!("sys/class/infiniband/mlx5_1/ports/1/gids/{number}");
        assert_eq!(text(&last(7)).unwrap(), "\n");
        assert_eq!(text(&last(8)), None);
        assert_eq!(text("dev/infiniband/uverbs1").unwrap(), "\n");
        for name in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
            let at = |index| format!("sys/class/infiniband/mlx5_0/ports/1/{name}/{index}");
            assert_eq!(text(&at(127)).unwrap(), "\n");
            assert_eq!(text(&at(128)), None);
        }
        let driver = "sys/class/infiniband/mlx5_1/device/driver/ffff:00:00.0/subsystem/devices";
        assert!(at(driver).join("ffff:00:01.0/resource").is_file());
        let vendor = "sys/class/infiniband/mlx5_1/device/infiniband_verbs/uverbs1/device/vendor";
        assert_eq!(text(vendor).unwrap(), "0x15b3\n");
        let interface = |number| at(&format!("sys/class/infiniband/mlx5_{number}/device/net"));
        for number in [0, 1] {
            let link = fs::read_link(interface(number).join("lo")).unwrap();
            assert_eq!(link, Path::new("/sys/class/net/lo"));
        }
        let real = at("sys/class/infiniband/mlx5_1").canonicalize().unwrap();
        assert!(real.ends_with("ffff:00:01.0/infiniband/mlx5_1"), "{real:?}");
        let inode = |path: &str| fs::metadata(at(path)).ok().map(|found| found.ino());
        let texts = files
            .iter()
            .filter(|(_, content)| matches!(content, Content::Text(_)));
        let inodes: HashSet<_> = texts.map(|(path, _)| inode(path).unwrap()).collect();
        // A file costs 50 times what a link to it costs.
        assert!(files.len() > 600 && inodes.len() < 80, "{}", inodes.len());
        fs::remove_dir_all(&directory).unwrap();
        let mut names: Vec<_> = files.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), files.len());
    }
}
