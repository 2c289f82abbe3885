//! Derives problems and their solutions from the facts, without further
//! inspection.

use super::facts::{Facts, Interface, Memlock, Module, Node, NodeState, Opened, Port};
use super::finding::{Finding, Level};
use super::libmlx5::{Libmlx5, Library};
use super::provider::{Libibverbs, ProviderFile};

/// The oldest kernel that is tested.
const OLDEST: (u32, u32) = (6, 1);
/// Locked memory limit in bytes below which common programs fail.
const LITTLE: u64 = 64 << 20;

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
        opened(&mut findings, device);
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

    fn warning(&mut self, check: &'static str, found: impl Into<String>, mend: String) {
        self.add(Level::Warning, check, found.into(), Some(mend));
    }

    fn problem(&mut self, check: &'static str, found: impl Into<String>, mend: String) {
        self.add(Level::Problem, check, found.into(), Some(mend));
    }

    fn add(&mut self, level: Level, check: &'static str, found: String, mend: Option<String>) {
        self.0.push(Finding {
            level,
            check,
            found,
            mend,
        });
    }
}

fn kernel(findings: &mut Findings, facts: &Facts) {
    let release = &facts.release;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next().and_then(|number| number.parse().ok());
    let version: (u32, u32) = (number().unwrap_or(0), number().unwrap_or(0));
    if version < OLDEST {
        findings.warning(
            "kernel",
            format!("{release} is older than {}.{}", OLDEST.0, OLDEST.1),
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
        Module::Loaded => findings.ok("module", "ib_uverbs is there"),
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
    if let Some(why) = &facts.no_list {
        findings.problem(
            "device",
            format!("devices cannot be listed: {why}"),
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
            format!("{found}, and no rdma_rxe module to make one in software"),
            format!("apt install linux-modules-extra-{}", facts.release),
        );
        return;
    }
    // An interface that is up, else any, else a new dummy interface.
    let up = facts.interfaces.iter().find(|interface| interface.up);
    let interface = up.or(facts.interfaces.first());
    let make = match interface {
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
        format!("modprobe rdma_rxe && {make}{on_host}"),
    );
}

/// At most a warning: endpoints can be exchanged in other ways.
fn connection_manager(findings: &mut Findings, facts: &Facts) {
    match (&facts.manager, facts.rdma_ucm) {
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
    let of = format!("{path} of {}", node.device);
    let (major, minor) = node.number;
    let (found, mend) = match &node.state {
        NodeState::Usable => return findings.ok("node", format!("{of} can be opened")),
        NodeState::Missing => match container {
            Some("docker" | "podman") => (
                format!("{of} is not in the container"),
                format!(
                    "{} run --device {path} --device /dev/infiniband/rdma_cm --ulimit memlock=-1 ...",
                    container.unwrap_or_default()
                ),
            ),
            Some(_) => (
                format!("{of} is not in the container"),
                format!("give the container {path}, character device {major}:{minor}"),
            ),
            None => (
                format!("{of} is not there"),
                // udev would not create it: it leaves that to the kernel, which
                // creates each node once.
                format!("mkdir -p /dev/infiniband && mknod -m 666 {path} c {major} {minor}"),
            ),
        },
        NodeState::Other => (
            format!("{of} is not character device {major}:{minor}"),
            format!("rm {path} && mknod -m 666 {path} c {major} {minor}"),
        ),
        NodeState::Denied { mode, uid, gid } => (
            format!("{of} may not be opened: mode {mode:03o}, owner {uid}, group {gid}"),
            match (gid, mode & 0o060) {
                // A group other than root's has access: join it.
                (1.., 0o060) => format!("sudo usermod -aG {gid} $USER # and log in again"),
                _ => format!("sudo chmod 666 {path} # as rdma-core's udev rules do at boot"),
            },
        ),
        NodeState::Failed(why) => (
            format!("{of} cannot be opened: {why}"),
            match container {
                Some(_) => format!(
                    "allow character device {major}:{minor} in the device cgroup of the container"
                ),
                None => "dmesg | grep -i -e infiniband -e rxe # the kernel says why".into(),
            },
        ),
    };
    findings.add(level, "node", found, Some(mend));
}

fn opened(findings: &mut Findings, device: &Opened) {
    let ports = match &device.ports {
        Ok(ports) => ports,
        Err(why) => {
            // A node that cannot be opened was reported before.
            findings.problem(
                "context",
                why.as_str(),
                "dmesg | tail # if it is not what was found above".into(),
            );
            return;
        }
    };
    for one in ports {
        port(findings, device, one);
    }
}

fn port(findings: &mut Findings, device: &Opened, port: &Port) {
    let name = format!("{} port {}", device.name, port.number);
    let interface = device.interface.as_ref().filter(|_| port.ethernet);
    if !port.active {
        let (why, mend) = match interface {
            Some(under) if !under.up => (
                format!(", because {} is down", under.name),
                format!("ip link set {} up", under.name),
            ),
            Some(under) => (
                format!(", while {} is {}", under.name, under.state),
                format!(
                    "check the cable and the switch, or the other end of {}",
                    under.name
                ),
            ),
            None => (
                String::new(),
                "opensm --daemon # a subnet manager; or check the cable".into(),
            ),
        };
        findings.problem("link", format!("{name} is {}{why}", port.state), mend);
    } else {
        let mtu = port
            .mtu
            .map_or_else(|| "unknown".into(), |mtu| mtu.to_string());
        findings.ok("link", format!("{name} is active, MTU {mtu}"));
    }
    let interface_name = interface.map_or("INTERFACE", |under| under.name.as_str());
    if port.gids == 0 {
        let mend = if port.ethernet {
            format!(
                "ip addr add 192.168.77.1/24 dev {interface_name} && ip link set {interface_name} up"
            )
        } else {
            "opensm --daemon # a subnet manager".into()
        };
        findings.problem("address", format!("{name} has no GID, so no address"), mend);
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
    // 4096 bytes of payload and rxe's headers.
    let narrow = interface
        .and_then(|under| under.mtu)
        .filter(|mtu| *mtu < 4200);
    if let (true, "rdma_rxe", Some(mtu)) = (port.active, device.driver.as_str(), narrow) {
        findings.warning(
            "mtu",
            format!("{interface_name} has MTU {mtu}: packets of {name} are small"),
            format!("ip link set {interface_name} mtu 4200 # if the network carries it"),
        );
    }
}

fn memlock(findings: &mut Findings, limit: Memlock, container: bool) {
    let Some(soft) = limit.soft.filter(|_| !limit.exempt) else {
        let why = if limit.exempt { " (CAP_IPC_LOCK)" } else { "" };
        findings.ok("memlock", format!("no limit on locked memory{why}"));
        return;
    };
    let size = if soft >= 1 << 20 {
        format!("{} MiB", soft >> 20)
    } else {
        format!("{} KiB", soft >> 10)
    };
    if soft >= LITTLE {
        findings.ok("memlock", format!("{size} of memory may be locked"));
        return;
    }
    let mend = match limit.hard {
        None => "ulimit -l unlimited".into(),
        Some(_) if container => "docker run --ulimit memlock=-1 ...".into(),
        Some(_) => "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf \
                    # and log in again; for a service: LimitMEMLOCK=infinity"
            .into(),
    };
    let found = format!("only {size} of memory may be locked, and so registered");
    if soft < 64 << 10 {
        findings.problem("memlock", found, mend);
    } else {
        findings.warning("memlock", found, mend);
    }
}

/// Concerns C programs only: this program and its library need no libibverbs, so
/// this is at most a warning.
fn libibverbs(findings: &mut Findings, library: &Libibverbs, devices: &[Opened]) {
    let path = library.path.display();
    let Some(abi) = library.abi else {
        findings.warning(
            "libibverbs",
            format!("{path} does not say which providers it takes"),
            "apt install --reinstall libibverbs1 || dnf reinstall libibverbs".into(),
        );
        return;
    };
    let before = findings.0.len();
    for provider in &library.providers {
        let (name, from) = (&provider.name, &provider.named_in);
        match &provider.file {
            ProviderFile::Fitting(_) => {}
            ProviderFile::OtherAbi(file) => findings.warning(
                "provider",
                format!("{from} names {name}, but {} is for another libibverbs: {path} takes -rdmav{abi}.so", file.display()),
                if provider.by_environment {
                    format!("unset {from} # or name a provider for ABI {abi} there")
                } else {
                    "apt install --reinstall ibverbs-providers || dnf reinstall libibverbs".into()
                },
            ),
            // Configuration commonly names providers of packages that are not
            // installed; a variable is set on purpose.
            ProviderFile::Missing(file) if provider.by_environment => findings.warning(
                "provider",
                format!("{from} names {name}, but there is no {}", file.display()),
                format!("unset {from} # or set it to the file's path without -rdmav{abi}.so"),
            ),
            ProviderFile::Missing(_) => {}
        }
    }
    for device in devices {
        let Some(wanted) = provider_of(&device.driver) else {
            continue;
        };
        let fitting = |name: &str| {
            library.providers.iter().any(|provider| {
                let right = provider.name == name || provider.by_environment;
                right && matches!(provider.file, ProviderFile::Fitting(_))
            })
        };
        if !fitting(wanted) {
            let (found, mend) = match library.config {
                None => (
                    format!(
                        "libibverbs has no configuration, and so no provider for {}",
                        device.name
                    ),
                    "apt install ibverbs-providers || dnf install libibverbs".into(),
                ),
                Some(_) => (
                    format!(
                        "C programs will not find {}: no provider {wanted} for ABI {abi}",
                        device.name
                    ),
                    "apt install ibverbs-providers || dnf install libibverbs".into(),
                ),
            };
            findings.warning("provider", found, mend);
        }
    }
    if findings.0.len() == before {
        let there = library
            .providers
            .iter()
            .filter(|provider| matches!(provider.file, ProviderFile::Fitting(_)));
        findings.ok(
            "libibverbs",
            format!("{path}, ABI {abi}, {} providers", there.count()),
        );
    }
}

/// Says which library serves as libmlx5.
fn libmlx5(findings: &mut Findings, found: &Libmlx5) {
    let text = |library: &Library| {
        let whose = match library.is_ours {
            true => "ringverbs in libmlx5's place",
            false => "rdma-core's",
        };
        format!("{}, {whose}", library.path.display())
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
fn provider_of(driver: &str) -> Option<&'static str> {
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
