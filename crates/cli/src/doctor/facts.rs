//! Facts about the host, which `diagnose` judges.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use ringverbs::Device;
use uverbs::environment;

use super::files::{names, text};
use super::libmlx5::Libmlx5;
use super::provider::Libibverbs;
use crate::device;
use crate::info::PortInfo;

/// The host's devices, libraries and settings.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The kernel release, as in `uname -r`.
    pub release: String,
    /// The module of the uverbs interface.
    pub ib_uverbs: Module,
    /// The module of the software device.
    pub rdma_rxe: Module,
    /// The module of the connection manager.
    pub rdma_ucm: Module,
    /// The connection manager's character device, if its module is loaded.
    pub connection_manager_node: Option<Node>,
    /// The kernel's devices, from sysfs.
    pub kernel_devices: Vec<String>,
    /// The character devices of the kernel's devices.
    pub nodes: Vec<Node>,
    /// Devices that the library found, and the result of opening them.
    pub devices: Vec<OpenedDevice>,
    /// The reason why devices could not be listed.
    pub list_error: Option<String>,
    /// The type of container, if this is one.
    pub container: Option<String>,
    /// The locked memory limit.
    pub memlock: Memlock,
    /// Network interfaces that a software device could use.
    pub interfaces: Vec<Interface>,
    /// The C library, if it is installed.
    pub libibverbs: Option<Libibverbs>,
    /// libmlx5, by either name.
    pub libmlx5: Libmlx5,
}

/// A kernel module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Module {
    /// Loaded, or built in.
    Loaded,
    /// Not loaded, but available.
    Available,
    /// Not available.
    #[default]
    Missing,
}

/// A character device of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The name, such as `uverbs0`.
    pub name: String,
    /// The device it belongs to, such as `rxe0`, or "the connection manager".
    pub device: String,
    /// Major and minor number.
    pub number: (u32, u32),
    /// The state of the file in `/dev/infiniband` with that name.
    pub state: NodeState,
}

/// The state of a file in `/dev/infiniband`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// The file can be opened.
    Usable,
    /// The file does not exist.
    Missing,
    /// The file is not the expected character device.
    WrongDevice,
    /// Permission was denied.
    Denied {
        /// Permission bits.
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// Opening it failed.
    Failed(String),
}

/// A device, and the result of opening it.
#[derive(Clone, Debug)]
pub struct OpenedDevice {
    /// The name.
    pub name: String,
    /// The kernel module.
    pub driver: String,
    /// The network interface that carries its traffic.
    pub interface: Option<Interface>,
    /// The ports, or the reason why they could not be queried.
    pub ports: Result<Vec<PortFacts>, String>,
}

/// The relevant attributes of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFacts {
    /// The number, from 1.
    pub number: u8,
    /// Whether the port can carry traffic.
    pub active: bool,
    /// The name of the port's state.
    pub state: &'static str,
    /// Whether the link layer is Ethernet, where GIDs come from an interface's addresses.
    pub ethernet: bool,
    /// The MTU in bytes.
    pub mtu: Option<u32>,
    /// Number of GIDs.
    pub gids: usize,
    /// Whether one of the GIDs can be reached from beyond the link.
    pub routable: bool,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// The name.
    pub name: String,
    /// Whether the interface is up (`IFF_UP`).
    pub up: bool,
    /// The operational state, such as `up` or `lowerlayerdown`.
    pub state: String,
    /// The MTU in bytes.
    pub mtu: Option<u32>,
}

/// Locked memory limits of this process in bytes; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memlock {
    /// The current limit.
    pub soft: Option<u64>,
    /// The limit up to which the process may raise it.
    pub hard: Option<u64>,
    /// Whether the limit does not apply (CAP_IPC_LOCK).
    pub exempt: bool,
}

impl Facts {
    /// Inspects the host whose files are below `root`. Devices are opened only if `root` is
    /// `/`.
    pub fn gather(root: &Path) -> Self {
        let release = text(&root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
        let (devices, list_error) = if root == Path::new("/") {
            match device::all() {
                Ok(devices) => (
                    devices.iter().map(|device| open(root, device)).collect(),
                    None,
                ),
                Err(error) => (Vec::new(), Some(error.to_string())),
            }
        } else {
            (Vec::new(), None)
        };
        let libibverbs = Libibverbs::find(root, &environment::text);
        Self {
            ib_uverbs: module(root, &release, "ib_uverbs"),
            rdma_rxe: module(root, &release, "rdma_rxe"),
            rdma_ucm: module(root, &release, "rdma_ucm"),
            connection_manager_node: connection_manager_node(root),
            release,
            kernel_devices: names(&root.join("sys/class/infiniband")),
            nodes: nodes(root),
            devices,
            list_error,
            container: container(root),
            memlock: memlock(root),
            interfaces: interfaces(root),
            libmlx5: Libmlx5::find(root, &environment::text, libibverbs.as_ref()),
            libibverbs,
        }
    }
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
    let node_of = |name: String| {
        let device = text(&class.join(&name).join("ibdev"))?;
        node(root, &class, name, device)
    };
    names(&class).into_iter().filter_map(node_of).collect()
}

fn connection_manager_node(root: &Path) -> Option<Node> {
    let device = "the connection manager".to_owned();
    node(root, &root.join("sys/class/misc"), "rdma_cm".into(), device)
}

/// Returns the node of the character device with that name in sysfs `class`.
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
        return NodeState::WrongDevice;
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

fn open(root: &Path, device: &Device) -> OpenedDevice {
    let directory = root.join("sys/class/infiniband").join(device.name());
    let netdev = text(&directory.join("parent"))
        .or_else(|| text(&directory.join("ports/1/gid_attrs/ndevs/0")));
    OpenedDevice {
        name: device.name().to_owned(),
        driver: device::driver_name(device.found().driver_id),
        interface: netdev.map(|name| interface(root, name)),
        ports: ports(device).map_err(|error| error.to_string()),
    }
}

fn ports(device: &Device) -> Result<Vec<PortFacts>, crate::error::Error> {
    use crate::error::Error;
    let context = device::inspect(device)?;
    let error = || Error::verb(format!("querying {}", device.name()));
    let count = context.query_device_ex().map_err(error())?;
    let count = count.base.phys_port_cnt;
    let ports = (1..=count).map(|number| {
        let port = PortInfo::query(&context, number).map_err(error())?;
        Ok(PortFacts {
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

/// Returns the Ethernet interfaces.
fn interfaces(root: &Path) -> Vec<Interface> {
    let class = root.join("sys/class/net");
    let names = names(&class).into_iter().filter(|name| {
        // ARPHRD_ETHER, on which a software device can be created.
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
    // systemd's convention: a file, or a variable of PID 1 and its children.
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
    fn facts_are_read_from_files() {
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
        assert_eq!(states, [&NodeState::Missing, &NodeState::WrongDevice]);
        assert_eq!(facts.nodes[0].number, (231, 192));
        assert_eq!(facts.rdma_ucm, Module::Missing);
        let manager = facts.connection_manager_node.unwrap();
        assert_eq!(
            (manager.number, manager.state),
            ((10, 122), NodeState::Missing)
        );
        assert_eq!(facts.container.as_deref(), Some("docker"));
        let expected = Interface {
            name: "eth0".into(),
            up: true,
            state: "up".into(),
            mtu: Some(1500),
        };
        assert_eq!(facts.interfaces, [expected]);
    }

    #[test]
    fn missing_files_are_no_error() {
        let facts = Facts::gather(Path::new("/nowhere/at/all"));
        assert_eq!(facts.ib_uverbs, Module::Missing);
        assert!(facts.nodes.is_empty() && facts.interfaces.is_empty());
        assert!(facts.libibverbs.is_none());
        assert_eq!(facts.libmlx5, Libmlx5::default());
    }
}
