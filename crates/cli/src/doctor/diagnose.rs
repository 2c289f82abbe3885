//! Derives findings from the facts, without further inspection.

use super::facts::{Facts, Interface, Memlock, Module, Node, NodeState, OpenedDevice, PortFacts};
use super::finding::{Finding, Level};
use super::libmlx5::{Libmlx5, Library};
use super::provider::{Libibverbs, ProviderFile};

/// The oldest tested kernel.
const OLDEST_KERNEL: (u32, u32) = (6, 1);
/// The private interface of the oldest supported libibverbs, which has the number of that
/// release of rdma-core.
const OLDEST_ABI: u32 = 34;
/// Locked memory limit in bytes below which common programs fail.
const LOW_MEMLOCK: u64 = 64 << 20;

/// Returns the findings, in the order in which they should be fixed.
pub fn diagnose(facts: &Facts) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    kernel(&mut findings, facts);
    modules(&mut findings, facts);
    devices(&mut findings, facts);
    for node in &facts.nodes {
        let level = Level::Problem;
        character_device(&mut findings, level, node, facts.container.as_deref());
    }
    connection_manager(&mut findings, facts);
    for device in &facts.devices {
        opened_device(&mut findings, device);
    }
    memlock(&mut findings, facts.memlock, facts.container.is_some());
    if let Some(library) = &facts.libibverbs {
        libibverbs(&mut findings, library, &facts.devices);
    }
    libmlx5(&mut findings, &facts.libmlx5);
    findings.0
}

struct Findings(Vec<Finding>);

impl Findings {
    fn ok(&mut self, check: &'static str, found: impl Into<String>) {
        self.add(Level::Ok, check, found.into(), None);
    }

    fn warning(&mut self, check: &'static str, found: impl Into<String>, fix: String) {
        self.add(Level::Warning, check, found.into(), Some(fix));
    }

    fn problem(&mut self, check: &'static str, found: impl Into<String>, fix: String) {
        self.add(Level::Problem, check, found.into(), Some(fix));
    }

    fn add(&mut self, level: Level, check: &'static str, found: String, fix: Option<String>) {
        self.0.push(Finding {
            level,
            check,
            found,
            fix,
        });
    }
}

fn kernel(findings: &mut Findings, facts: &Facts) {
    let release = &facts.release;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next().and_then(|number| number.parse().ok());
    let version: (u32, u32) = (number().unwrap_or(0), number().unwrap_or(0));
    if version < OLDEST_KERNEL {
        findings.warning(
            "kernel",
            format!(
                "{release} is older than {}.{}",
                OLDEST_KERNEL.0, OLDEST_KERNEL.1
            ),
            "boot a newer kernel".into(),
        );
    } else {
        findings.ok("kernel", release.as_str());
    }
}

fn modules(findings: &mut Findings, facts: &Facts) {
    let container = facts.container.is_some();
    let on_host = if container { " # on the host" } else { "" };
    match facts.ib_uverbs {
        Module::Loaded => findings.ok("module", "ib_uverbs is loaded"),
        Module::Available => findings.problem(
            "module",
            "ib_uverbs is not loaded",
            format!("modprobe ib_uverbs{on_host}"),
        ),
        Module::Missing if container => findings.problem(
            "module",
            "ib_uverbs is not loaded in the host's kernel",
            "modprobe ib_uverbs # on the host".into(),
        ),
        Module::Missing => findings.problem(
            "module",
            format!("kernel {} has no ib_uverbs module", facts.release),
            format!(
                "apt install linux-modules-extra-{0} || dnf install kernel-modules-extra-{0} \
                 # else build a kernel with CONFIG_INFINIBAND_USER_ACCESS and CONFIG_RDMA_RXE",
                facts.release
            ),
        ),
    }
}

fn devices(findings: &mut Findings, facts: &Facts) {
    if let Some(error) = &facts.list_error {
        findings.problem(
            "device",
            format!("devices cannot be listed: {error}"),
            "mount -t sysfs sysfs /sys".into(),
        );
        return;
    }
    if !facts.kernel_devices.is_empty() {
        findings.ok("device", facts.kernel_devices.join(", "));
        return;
    }
    let found = "there is no RDMA device";
    if facts.rdma_rxe == Module::Missing && facts.container.is_none() {
        findings.problem(
            "device",
            format!("{found}, and no rdma_rxe module to create one in software"),
            format!("apt install linux-modules-extra-{}", facts.release),
        );
        return;
    }
    // An interface that is up, else any, else a new dummy interface.
    let up = facts.interfaces.iter().find(|interface| interface.up);
    let interface = up.or(facts.interfaces.first());
    let create = match interface {
        Some(Interface { name, .. }) => format!("rdma link add rxe0 type rxe netdev {name}"),
        None => "ip link add rx0 type dummy && ip addr add 192.168.77.1/24 dev rx0 && \
                 ip link set rx0 up && rdma link add rxe0 type rxe netdev rx0"
            .into(),
    };
    let on_host = match facts.container {
        Some(_) => " # on the host; then give the container its /dev/infiniband",
        None => "",
    };
    findings.problem(
        "device",
        found,
        format!("modprobe rdma_rxe && {create}{on_host}"),
    );
}

/// Reports at most a warning: endpoints can be exchanged in other ways.
fn connection_manager(findings: &mut Findings, facts: &Facts) {
    match (&facts.connection_manager_node, facts.rdma_ucm) {
        (Some(node), _) => {
            character_device(findings, Level::Warning, node, facts.container.as_deref());
        }
        (None, Module::Missing) => {}
        (None, _) => findings.warning(
            "rdma_cm",
            "rdma_ucm is not loaded: no connections by IP address, no streams",
            match facts.container {
                Some(_) => "modprobe rdma_ucm # on the host".into(),
                None => "modprobe rdma_ucm".into(),
            },
        ),
    }
}

fn character_device(findings: &mut Findings, level: Level, node: &Node, container: Option<&str>) {
    let path = format!("/dev/infiniband/{}", node.name);
    let description = format!("{path} of {}", node.device);
    let (major, minor) = node.number;
    let (found, fix) = match &node.state {
        NodeState::Usable => {
            return findings.ok("node", format!("{description} can be opened"));
        }
        NodeState::Missing => match container {
            Some("docker" | "podman") => (
                format!("{description} is not in the container"),
                format!(
                    "{} run --device {path} --device /dev/infiniband/rdma_cm --ulimit memlock=-1 ...",
                    container.unwrap_or_default()
                ),
            ),
            Some(_) => (
                format!("{description} is not in the container"),
                format!("give the container {path}, character device {major}:{minor}"),
            ),
            None => (
                format!("{description} does not exist"),
                // The kernel creates each node once, and udev does not create it again.
                format!("mkdir -p /dev/infiniband && mknod -m 666 {path} c {major} {minor}"),
            ),
        },
        NodeState::WrongDevice => (
            format!("{description} is not character device {major}:{minor}"),
            format!("rm {path} && mknod -m 666 {path} c {major} {minor}"),
        ),
        NodeState::Denied { mode, uid, gid } => (
            format!("{description} may not be opened: mode {mode:03o}, owner {uid}, group {gid}"),
            match (gid, mode & 0o060) {
                // A group other than root's has access.
                (1.., 0o060) => format!("sudo usermod -aG {gid} $USER # and log in again"),
                _ => format!("sudo chmod 666 {path} # as rdma-core's udev rules do at boot"),
            },
        ),
        NodeState::Failed(why) => (
            format!("{description} cannot be opened: {why}"),
            match container {
                Some(_) => format!(
                    "allow character device {major}:{minor} in the device cgroup of the container"
                ),
                None => "dmesg | grep -i -e infiniband -e rxe # the kernel says why".into(),
            },
        ),
    };
    findings.add(level, "node", found, Some(fix));
}

fn opened_device(findings: &mut Findings, device: &OpenedDevice) {
    let ports = match &device.ports {
        Ok(ports) => ports,
        Err(error) => {
            // A node that cannot be opened is a finding of its own.
            findings.problem(
                "context",
                error.as_str(),
                "dmesg | tail # unless a finding above is the cause".into(),
            );
            return;
        }
    };
    for attributes in ports {
        port(findings, device, attributes);
    }
}

fn port(findings: &mut Findings, device: &OpenedDevice, port: &PortFacts) {
    let name = format!("{} port {}", device.name, port.number);
    let interface = device.interface.as_ref().filter(|_| port.ethernet);
    if !port.active {
        let (reason, fix) = match interface {
            Some(interface) if !interface.up => (
                format!(", because {} is down", interface.name),
                format!("ip link set {} up", interface.name),
            ),
            Some(interface) => (
                format!(", while {} is {}", interface.name, interface.state),
                format!(
                    "check the cable and the switch, or the other end of {}",
                    interface.name
                ),
            ),
            None => (
                String::new(),
                "opensm --daemon # a subnet manager; or check the cable".into(),
            ),
        };
        findings.problem("link", format!("{name} is {}{reason}", port.state), fix);
    } else {
        let mtu = port
            .mtu
            .map_or_else(|| "unknown".into(), |mtu| mtu.to_string());
        findings.ok("link", format!("{name} is active, MTU {mtu}"));
    }
    let interface_name = interface.map_or("INTERFACE", |it| it.name.as_str());
    if port.gids == 0 {
        let fix = if port.ethernet {
            format!(
                "ip addr add 192.168.77.1/24 dev {interface_name} && ip link set {interface_name} up"
            )
        } else {
            "opensm --daemon # a subnet manager".into()
        };
        findings.problem("address", format!("{name} has no GID, so no address"), fix);
    } else if port.ethernet && !port.routable {
        findings.warning(
            "address",
            format!("{name} has link-local GIDs only"),
            format!("ip addr add 192.168.77.1/24 dev {interface_name}"),
        );
    } else {
        let plural = if port.gids == 1 { "GID" } else { "GIDs" };
        findings.ok("address", format!("{name} has {} {plural}", port.gids));
    }
    // A packet of 4096 bytes of payload has up to 4200 with rxe's headers.
    let small_mtu = interface.and_then(|it| it.mtu).filter(|mtu| *mtu < 4200);
    if let (true, "rdma_rxe", Some(mtu)) = (port.active, device.driver.as_str(), small_mtu) {
        findings.warning(
            "mtu",
            format!("{interface_name} has MTU {mtu}, which limits the path MTU of {name}"),
            format!("ip link set {interface_name} mtu 4200 # if the network supports it"),
        );
    }
}

fn memlock(findings: &mut Findings, limit: Memlock, container: bool) {
    let Some(soft) = limit.soft.filter(|_| !limit.exempt) else {
        let reason = if limit.exempt { " (CAP_IPC_LOCK)" } else { "" };
        findings.ok("memlock", format!("no limit on locked memory{reason}"));
        return;
    };
    let size = if soft >= 1 << 20 {
        format!("{} MiB", soft >> 20)
    } else {
        format!("{} KiB", soft >> 10)
    };
    if soft >= LOW_MEMLOCK {
        findings.ok("memlock", format!("{size} of memory may be locked"));
        return;
    }
    let fix = match limit.hard {
        None => "ulimit -l unlimited".into(),
        Some(_) if container => {
            "start the container with --ulimit memlock=-1 (docker run, podman run)".into()
        }
        Some(_) => "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf \
                    # and log in again; for a service: LimitMEMLOCK=infinity"
            .into(),
    };
    let found = format!("only {size} of memory may be locked, and thus registered");
    if soft < 64 << 10 {
        findings.problem("memlock", found, fix);
    } else {
        findings.warning("memlock", found, fix);
    }
}

/// Checks libibverbs and its providers. Reports at most a warning: only C programs need
/// them.
fn libibverbs(findings: &mut Findings, library: &Libibverbs, devices: &[OpenedDevice]) {
    let path = library.path.display();
    let Some(abi) = library.abi else {
        findings.warning(
            "libibverbs",
            format!("{path} has no version of its provider interface"),
            "apt install --reinstall libibverbs1 || dnf reinstall libibverbs".into(),
        );
        return;
    };
    let before = findings.0.len();
    if abi < OLDEST_ABI {
        findings.warning(
            "libibverbs",
            format!(
                "{path} is older than rdma-core {OLDEST_ABI}, which C programs need with ringverbs"
            ),
            "use a newer release of the system, or a container # Debian 12, Ubuntu 22.04, RHEL 9"
                .into(),
        );
    }
    for provider in &library.providers {
        let (name, from) = (&provider.name, &provider.configured_in);
        match &provider.file {
            ProviderFile::Compatible(_) => {}
            ProviderFile::OtherAbi(file) => findings.warning(
                "provider",
                format!("{from} names {name}, but {} is for another libibverbs: {path} loads -rdmav{abi}.so", file.display()),
                if provider.from_environment {
                    format!("unset {from} # or name a provider for ABI {abi} there")
                } else {
                    "apt install --reinstall ibverbs-providers || dnf reinstall libibverbs".into()
                },
            ),
            // Configuration commonly names providers of packages that are not
            // installed; a variable is set on purpose.
            ProviderFile::Missing(file) if provider.from_environment => findings.warning(
                "provider",
                format!("{from} names {name}, but there is no {}", file.display()),
                format!("unset {from} # or set it to the file's path without -rdmav{abi}.so"),
            ),
            ProviderFile::Missing(_) => {}
        }
    }
    for device in devices {
        let Some(stock) = stock_provider(&device.driver) else {
            continue;
        };
        let is_available = |name: &str| {
            library.providers.iter().any(|provider| {
                let may_serve = provider.name == name || provider.from_environment;
                may_serve && matches!(provider.file, ProviderFile::Compatible(_))
            })
        };
        if !is_available(stock) {
            let (found, fix) = match library.config {
                None => (
                    format!(
                        "libibverbs has no configuration, and so no provider for {}",
                        device.name
                    ),
                    "apt install ibverbs-providers || dnf install libibverbs".into(),
                ),
                Some(_) => (
                    format!(
                        "C programs will not find {}: no provider {stock} for ABI {abi}",
                        device.name
                    ),
                    "apt install ibverbs-providers || dnf install libibverbs".into(),
                ),
            };
            findings.warning("provider", found, fix);
        }
    }
    if findings.0.len() == before {
        let compatible = library
            .providers
            .iter()
            .filter(|provider| matches!(provider.file, ProviderFile::Compatible(_)));
        findings.ok(
            "libibverbs",
            format!("{path}, ABI {abi}, {} providers", compatible.count()),
        );
    }
}

/// Reports which library is loaded as libmlx5.
fn libmlx5(findings: &mut Findings, found: &Libmlx5) {
    let text = |library: &Library| {
        let origin = match library.is_ours {
            true => "ringverbs in libmlx5's place",
            false => "rdma-core's",
        };
        format!("{}, {origin}", library.path.display())
    };
    match (&found.linked, &found.provider) {
        (Some(linked), Some(provider)) if linked.is_ours != provider.is_ours => findings.warning(
            "libmlx5",
            format!(
                "programs linked to libmlx5 load {}, but libibverbs loads {}",
                text(linked),
                text(provider)
            ),
            "cargo xtask install --replace-libmlx5 # or with --uninstall".into(),
        ),
        (Some(library), _) | (None, Some(library)) => findings.ok("libmlx5", text(library)),
        (None, None) => {}
    }
}

/// Returns the name of the stock provider for a kernel driver.
fn stock_provider(driver: &str) -> Option<&'static str> {
    match driver {
        "rdma_rxe" => Some("rxe"),
        "mlx5_ib" => Some("mlx5"),
        "mlx4_ib" => Some("mlx4"),
        "efa" => Some("efa"),
        "siw" => Some("siw"),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
