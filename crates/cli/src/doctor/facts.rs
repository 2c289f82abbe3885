//! What can be seen of the machine, without judging it.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use ringverbs::Device;
use uverbs::environment;

use super::provider::Libibverbs;
use crate::device;
use crate::info::PortInfo;

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The kernel's release, as `uname -r` has it.
    pub release: String,
    /// The module that programs talk to.
    pub ib_uverbs: Module,
    /// The software device's module.
    pub rdma_rxe: Module,
    /// The connection manager's module.
    pub rdma_ucm: Module,
    /// The connection manager's character device, where its module is loaded.
    pub manager: Option<Node>,
    /// Devices that the kernel has, by sysfs.
    pub kernel_devices: Vec<String>,
    /// Their character devices.
    pub nodes: Vec<Node>,
    /// Devices that a program finds, and what they said.
    pub devices: Vec<Opened>,
    /// Why devices could not even be listed.
    pub no_list: Option<String>,
    /// What kind of container this is.
    pub container: Option<String>,
    /// Locked memory.
    pub memlock: Memlock,
    /// Network interfaces that a software device could use.
    pub interfaces: Vec<Interface>,
    /// The C library, if there is one.
    pub libibverbs: Option<Libibverbs>,
}

/// A kernel module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Module {
    /// Loaded, or built in.
    Loaded,
    /// Not loaded, but there to be loaded.
    Available,
    /// Not there.
    #[default]
    Missing,
}

/// A character device of the kernel's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Such as `uverbs0`.
    pub name: String,
    /// Whose it is, such as `rxe0`, or "the connection manager".
    pub device: String,
    /// Major and minor number that the kernel gave it.
    pub number: (u32, u32),
    /// What is in `/dev/infiniband` under that name.
    pub state: NodeState,
}

/// A file in `/dev/infiniband`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// It can be opened.
    Usable,
    /// It is not there.
    Missing,
    /// It is not that device.
    Other,
    /// It may not be opened.
    Denied {
        /// Its permission bits.
        mode: u32,
        /// Its owner.
        uid: u32,
        /// Its group.
        gid: u32,
    },
    /// Opening it failed.
    Failed(String),
}

/// A device that was opened, or not.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Its name.
    pub name: String,
    /// Its kernel module.
    pub driver: String,
    /// The network interface under it.
    pub interface: Option<Interface>,
    /// Its ports, or why they could not be asked.
    pub ports: Result<Vec<Port>, String>,
}

/// A port, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Counted from 1.
    pub number: u8,
    /// Whether it can carry traffic.
    pub active: bool,
    /// Its state's name.
    pub state: &'static str,
    /// Whether it is Ethernet, so that addresses come from an interface.
    pub ethernet: bool,
    /// Bytes of its MTU.
    pub mtu: Option<u32>,
    /// How many GIDs it has.
    pub gids: usize,
    /// Whether one of them can be reached from beyond the link.
    pub routable: bool,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Whether it is set up.
    pub up: bool,
    /// Its operational state, such as `up` or `lowerlayerdown`.
    pub state: String,
    /// Its MTU.
    pub mtu: Option<u32>,
}

/// Locked memory that this process may have, in bytes; none for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memlock {
    /// The limit in force.
    pub soft: Option<u64>,
    /// As far as the process may raise it.
    pub hard: Option<u64>,
    /// Whether the limit does not apply (CAP_IPC_LOCK).
    pub exempt: bool,
}

impl Facts {
    /// Looks at the machine whose files are below `root`; devices are opened
    /// only if that is the machine we run on.
    pub fn gather(root: &Path) -> Self {
        let release = text(&root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
        let (devices, no_list) = if root == Path::new("/") {
            match device::all() {
                Ok(devices) => (devices.iter().map(|one| opened(root, one)).collect(), None),
                Err(error) => (Vec::new(), Some(error.to_string())),
            }
        } else {
            (Vec::new(), None)
        };
        Self {
            ib_uverbs: module(root, &release, "ib_uverbs"),
            rdma_rxe: module(root, &release, "rdma_rxe"),
            rdma_ucm: module(root, &release, "rdma_ucm"),
            manager: manager(root),
            release,
            kernel_devices: names(&root.join("sys/class/infiniband")),
            nodes: nodes(root),
            devices,
            no_list,
            container: container(root),
            memlock: memlock(root),
            interfaces: interfaces(root),
            libibverbs: Libibverbs::find(root, &environment::text),
        }
    }
}

/// A small file's text, without the line end.
pub fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

/// Names in a directory, sorted; none if it is not there.
pub fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn module(root: &Path, release: &str, name: &str) -> Module {
    if root.join("sys/module").join(name).exists() {
        return Module::Loaded;
    }
    let directory = root.join("lib/modules").join(release);
    let listed = |file: &str| {
        let list = fs::read_to_string(directory.join(file)).unwrap_or_default();
        // Lines such as "kernel/drivers/.../rdma_rxe.ko.xz: ..."
        list.lines().any(|line| {
            let path = line.split(':').next().unwrap_or_default();
            let file = path.rsplit('/').next().unwrap_or_default();
            file.split('.').next() == Some(name)
        })
    };
    if listed("modules.builtin") {
        Module::Loaded
    } else if listed("modules.dep") {
        Module::Available
    } else {
        Module::Missing
    }
}

fn nodes(root: &Path) -> Vec<Node> {
    let class = root.join("sys/class/infiniband_verbs");
    let of = |name: String| {
        let device = text(&class.join(&name).join("ibdev"))?;
        node(root, &class, name, device)
    };
    names(&class).into_iter().filter_map(of).collect()
}

fn manager(root: &Path) -> Option<Node> {
    let of = "the connection manager".to_owned();
    node(root, &root.join("sys/class/misc"), "rdma_cm".into(), of)
}

/// The node of the character device that sysfs has under that name in `class`.
fn node(root: &Path, class: &Path, name: String, device: String) -> Option<Node> {
    let number = text(&class.join(&name).join("dev"))?;
    let (major, minor) = number.split_once(':')?;
    let number = (major.parse().ok()?, minor.parse().ok()?);
    let state = node_state(&root.join("dev/infiniband").join(&name), number);
    Some(Node {
        name,
        device,
        number,
        state,
    })
}

fn node_state(path: &Path, (major, minor): (u32, u32)) -> NodeState {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return NodeState::Missing,
        Err(error) => return NodeState::Failed(error.to_string()),
    };
    let is_device = metadata.file_type().is_char_device();
    if !is_device || metadata.rdev() != libc::makedev(major, minor) {
        return NodeState::Other;
    }
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => NodeState::Usable,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => NodeState::Denied {
            mode: metadata.mode() & 0o777,
            uid: metadata.uid(),
            gid: metadata.gid(),
        },
        Err(error) => NodeState::Failed(error.to_string()),
    }
}

fn opened(root: &Path, device: &Device) -> Opened {
    let directory = root.join("sys/class/infiniband").join(device.name());
    let under = text(&directory.join("parent"))
        .or_else(|| text(&directory.join("ports/1/gid_attrs/ndevs/0")));
    Opened {
        name: device.name().to_owned(),
        driver: device::driver_name(device.found().driver_id),
        interface: under.map(|name| interface(root, name)),
        ports: ports(device).map_err(|error| error.to_string()),
    }
}

fn ports(device: &Device) -> Result<Vec<Port>, crate::error::Error> {
    use crate::error::Error;
    let context = device::inspect(device)?;
    let doing = || Error::native(format!("querying {}", device.name()));
    let count = context.query_device_ex().map_err(doing())?;
    let count = count.base.phys_port_cnt;
    let ports = (1..=count).map(|number| {
        let port = PortInfo::query(&context, number).map_err(doing())?;
        Ok(Port {
            number,
            active: port.is_active(),
            state: port.state.name,
            ethernet: port.link_layer.value == 2,
            mtu: port.active_mtu.bytes,
            gids: port.gids.len(),
            routable: port.gids.iter().any(|gid| !gid.gid.starts_with("fe80:")),
        })
    });
    ports.collect()
}

/// Interfaces that are not the loopback.
fn interfaces(root: &Path) -> Vec<Interface> {
    let class = root.join("sys/class/net");
    let names = names(&class).into_iter().filter(|name| {
        // ARPHRD_ETHER: what a software device can use.
        text(&class.join(name).join("type")).as_deref() == Some("1")
    });
    names.map(|name| interface(root, name)).collect()
}

fn interface(root: &Path, name: String) -> Interface {
    const IFF_UP: u32 = 1;
    let directory = root.join("sys/class/net").join(&name);
    let flags = text(&directory.join("flags"))
        .and_then(|flags| u32::from_str_radix(flags.strip_prefix("0x")?, 16).ok());
    Interface {
        up: flags.is_some_and(|flags| flags & IFF_UP != 0),
        state: text(&directory.join("operstate")).unwrap_or_default(),
        mtu: text(&directory.join("mtu")).and_then(|mtu| mtu.parse().ok()),
        name,
    }
}

fn container(root: &Path) -> Option<String> {
    if root.join(".dockerenv").exists() {
        return Some("docker".into());
    }
    let podman: PathBuf = root.join("run/.containerenv");
    if podman.exists() {
        return Some("podman".into());
    }
    // systemd's convention, for the first process and for us.
    text(&root.join("run/systemd/container")).or_else(|| environment::text("container"))
}

fn memlock(root: &Path) -> Memlock {
    const CAP_IPC_LOCK: u32 = 14;
    let limit = |value| (value != RLIM_INFINITY).then_some(value);
    let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap_or((0, 0));
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    let capabilities = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    Memlock {
        soft: limit(soft),
        hard: limit(hard),
        exempt: capabilities.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 != 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_read_from_its_files() {
        let root = std::env::temp_dir().join(format!("ringverbs-facts-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/sys/kernel/osrelease", "6.12.1\n");
        write("sys/module/ib_uverbs/refcnt", "0");
        write(
            "lib/modules/6.12.1/modules.dep",
            "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz: kernel/x.ko\n",
        );
        write("sys/class/infiniband/rxe0/node_type", "1: CA\n");
        write("sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0\n");
        write("sys/class/infiniband_verbs/uverbs0/dev", "231:192\n");
        write("sys/class/infiniband_verbs/uverbs1/ibdev", "rxe1\n");
        write("sys/class/infiniband_verbs/uverbs1/dev", "231:193\n");
        write("sys/class/infiniband_verbs/abi_version", "6\n");
        write("sys/class/misc/rdma_cm/dev", "10:122\n");
        write("dev/infiniband/uverbs1", "not a device");
        write("sys/class/net/eth0/type", "1\n");
        write("sys/class/net/eth0/flags", "0x1003\n");
        write("sys/class/net/eth0/operstate", "up\n");
        write("sys/class/net/eth0/mtu", "1500\n");
        write("sys/class/net/lo/type", "772\n");
        write(".dockerenv", "");
        let facts = Facts::gather(&root);
        fs::remove_dir_all(&root).unwrap();

        assert_eq!(facts.release, "6.12.1");
        assert_eq!(facts.ib_uverbs, Module::Loaded);
        assert_eq!(facts.rdma_rxe, Module::Available);
        assert_eq!(facts.kernel_devices, ["rxe0"]);
        let states: Vec<_> = facts.nodes.iter().map(|node| &node.state).collect();
        assert_eq!(states, [&NodeState::Missing, &NodeState::Other]);
        assert_eq!(facts.nodes[0].number, (231, 192));
        assert_eq!(facts.rdma_ucm, Module::Missing);
        let manager = facts.manager.unwrap();
        assert_eq!(
            (manager.number, manager.state),
            ((10, 122), NodeState::Missing)
        );
        assert_eq!(facts.container.as_deref(), Some("docker"));
        let eth0 = Interface {
            name: "eth0".into(),
            up: true,
            state: "up".into(),
            mtu: Some(1500),
        };
        assert_eq!(facts.interfaces, [eth0]);
    }

    #[test]
    fn nothing_at_all_is_no_error() {
        let facts = Facts::gather(Path::new("/nowhere/at/all"));
        assert_eq!(facts.ib_uverbs, Module::Missing);
        assert!(facts.nodes.is_empty() && facts.interfaces.is_empty());
        assert!(facts.libibverbs.is_none());
    }
}
