//! Sets up rxe devices.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::link;

/// Time limit for the address to appear in the GID table, typically 100 ms.
const GID_LIMIT: Duration = Duration::from_secs(15);

/// A device whose port is active.
#[derive(Debug, Clone)]
pub struct Device {
    /// Its name, for example `rxe0`.
    pub name: String,
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    /// The index of that address's RoCE v2 entry in the GID table of port 1.
    pub gid: u32,
    /// The prefix of the file name of rdma-core's provider for it.
    pub stock: &'static str,
    /// The device existed before: it is used as it is, and not created again.
    pub preexisting: bool,
}

/// How the devices are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wiring {
    /// `rxe0` alone on a dummy network device: packets loop back in the device.
    Loopback,
    /// `rxe0` and `rxe1` on the two ends of a veth pair, with routes that send packets
    /// between the two addresses across it, so that `tc netem` on either end (`rx0`,
    /// `rx1`) applies to them.
    Veth,
}

/// Loads the modules and creates the devices of `wiring`, on network devices with an MTU
/// of `mtu` bytes: 1500 gives a path MTU of 1024, 4200 one of 4096.
///
/// Devices of an earlier call are removed first.
pub fn devices(wiring: Wiring, mtu: u32) -> Result<Vec<Device>> {
    for module in ["ib_uverbs", "rdma_rxe", "rdma_ucm"] {
        run("modprobe", &[module])?;
    }
    remove();
    match wiring {
        Wiring::Loopback => {
            run("ip", &["link", "add", "rx0", "type", "dummy"])?;
            Ok(vec![device(0, mtu)?])
        }
        Wiring::Veth => {
            run(
                "ip",
                &["link", "add", "rx0", "type", "veth", "peer", "name", "rx1"],
            )?;
            // The first port is active only if the other end is up.
            run("ip", &["link", "set", "rx1", "up"])?;
            let devices = vec![device(0, mtu)?, device(1, mtu)?];
            route_over_veth(&devices)?;
            Ok(devices)
        }
    }
}

/// Removes the devices, if there are any.
pub fn remove() {
    for netdev in ["rx0", "rx1"] {
        if Path::new("/sys/class/net").join(netdev).exists() {
            // This removes the rxe device as well.
            let _ = run("ip", &["link", "delete", netdev]);
        }
    }
}

fn device(number: u8, mtu: u32) -> Result<Device> {
    let netdev = format!("rx{number}");
    let name = format!("rxe{number}");
    let address = Ipv4Addr::new(192, 168, 77, number + 1);
    run("ip", &["link", "set", &netdev, "mtu", &mtu.to_string()])?;
    run(
        "ip",
        &["addr", "add", &format!("{address}/24"), "dev", &netdev],
    )?;
    // Without duplicate address detection the address is usable at once. (busybox's ip
    // has no option for that.)
    let detection = format!("/proc/sys/net/ipv6/conf/{netdev}/accept_dad");
    fs::write(&detection, "0").with_context(|| format!("cannot write {detection}"))?;
    let v6 = format!("fd00:77::{}/64", number + 1);
    run("ip", &["-6", "addr", "add", &v6, "dev", &netdev])?;
    run("ip", &["link", "set", &netdev, "up"])?;
    link::add(&name, &netdev)?;
    let gid = wait_for_gid(&name, address)?;
    Ok(Device {
        name,
        address,
        gid,
        stock: "librxe-",
        preexisting: false,
    })
}

/// Routes packets between the two addresses across the veth pair, although both are
/// local.
fn route_over_veth(devices: &[Device]) -> Result<()> {
    for netdev in ["rx0", "rx1"] {
        for setting in ["accept_local=1", "rp_filter=0"] {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            let path = format!("/proc/sys/net/ipv4/conf/{netdev}/{name}");
            fs::write(&path, value).with_context(|| format!("cannot write {path}"))?;
        }
    }
    fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "0")?;
    // The local table comes first by default. Our rules come before it, for packets that
    // this machine sends.
    let rule = |arguments: &str| {
        let arguments: Vec<&str> = arguments.split_whitespace().collect();
        run("ip", &arguments)
    };
    let _ = rule("rule del pref 0");
    let _ = rule("rule add pref 100 lookup local");
    for (from, to, netdev, table) in [(0, 1, "rx0", 70), (1, 0, "rx1", 71)] {
        let (from, to) = (devices[from].address, devices[to].address);
        let _ = rule(&format!("rule del pref {table}"));
        rule(&format!(
            "rule add pref {table} from {from} to {to} iif lo lookup {table}"
        ))?;
        rule(&format!(
            "route replace {to}/32 dev {netdev} src {from} table {table}"
        ))?;
    }
    Ok(())
}

/// Waits until `address` is in the GID table as RoCE v2 and the port is active; returns
/// its index.
fn wait_for_gid(device: &str, address: Ipv4Addr) -> Result<u32> {
    let port = Path::new("/sys/class/infiniband")
        .join(device)
        .join("ports/1");
    let [a, b, c, d] = address.octets();
    let wanted = format!("0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}");
    let read = |name: &str| fs::read_to_string(port.join(name)).unwrap_or_default();
    let began = Instant::now();
    while began.elapsed() < GID_LIMIT {
        let active = read("state").contains("ACTIVE");
        let index = (0..64).find(|index| {
            read(&format!("gids/{index}")).trim() == wanted
                && read(&format!("gid_attrs/types/{index}")).trim() == "RoCE v2"
        });
        if let (true, Some(index)) = (active, index) {
            return Ok(index);
        }
        thread::sleep(Duration::from_millis(20));
    }
    bail!(
        "{device}: no RoCE v2 GID of {address} after {} s (port: {})",
        GID_LIMIT.as_secs(),
        read("state").trim()
    )
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let out = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    if !out.status.success() {
        bail!(
            "{program} {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&out.stderr).trim()
        );
    }
    Ok(())
}
