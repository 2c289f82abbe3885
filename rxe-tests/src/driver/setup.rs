//! Setting up rxe devices.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::link;

/// How long the device may take to have its address in the GID table; some
/// 100 ms as a rule.
const GID_LIMIT: Duration = Duration::from_secs(15);

/// An rxe device that is up.
#[derive(Debug, Clone)]
pub struct Device {
    /// Its name, for example `rxe0`.
    pub name: String,
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    /// The index of that address's RoCE v2 entry in the GID table of port 1.
    pub gid: u32,
    /// What the file name of rdma-core's provider for it begins with.
    pub stock: &'static str,
    /// It was there before: it is used as it is, and not made anew.
    pub given: bool,
}

/// How the devices are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wiring {
    /// `rxe0` alone on a dummy card: packets turn round in the device.
    Loopback,
    /// `rxe0` and `rxe1` on the two ends of a veth pair, with routes that
    /// make packets between the two addresses cross it. `tc netem` on
    /// either end (`rx0`, `rx1`) then loses or reorders them.
    Veth,
}

/// Loads the modules and makes the devices of `wiring`, with `mtu` bytes on
/// the cards: 1500 gives a path MTU of 1024, 4200 one of 4096.
///
/// What an earlier call made is removed first.
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
            // The first one's port is active only with a card at the other end.
            run("ip", &["link", "set", "rx1", "up"])?;
            let devices = vec![device(0, mtu)?, device(1, mtu)?];
            cross_the_wire(&devices)?;
            Ok(devices)
        }
    }
}

/// Removes the devices; nothing happens where there are none.
pub fn remove() {
    for card in ["rx0", "rx1"] {
        if Path::new("/sys/class/net").join(card).exists() {
            // The rxe device goes with its card.
            let _ = run("ip", &["link", "delete", card]);
        }
    }
}

fn device(number: u8, mtu: u32) -> Result<Device> {
    let card = format!("rx{number}");
    let name = format!("rxe{number}");
    let address = Ipv4Addr::new(192, 168, 77, number + 1);
    run("ip", &["link", "set", &card, "mtu", &mtu.to_string()])?;
    run(
        "ip",
        &["addr", "add", &format!("{address}/24"), "dev", &card],
    )?;
    // Usable at once, not after a look for others that have it. (busybox's ip
    // has no word for that.)
    let detection = format!("/proc/sys/net/ipv6/conf/{card}/accept_dad");
    fs::write(&detection, "0").with_context(|| format!("cannot write {detection}"))?;
    let v6 = format!("fd00:77::{}/64", number + 1);
    run("ip", &["-6", "addr", "add", &v6, "dev", &card])?;
    run("ip", &["link", "set", &card, "up"])?;
    link::add(&name, &card)?;
    let gid = wait_for_gid(&name, address)?;
    Ok(Device {
        name,
        address,
        gid,
        stock: "librxe-",
        given: false,
    })
}

/// Sends packets between the two addresses out of one card and in at the
/// other, although both are this machine's own.
fn cross_the_wire(devices: &[Device]) -> Result<()> {
    for card in ["rx0", "rx1"] {
        for setting in ["accept_local=1", "rp_filter=0"] {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            let path = format!("/proc/sys/net/ipv4/conf/{card}/{name}");
            fs::write(&path, value).with_context(|| format!("cannot write {path}"))?;
        }
    }
    fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "0")?;
    // The local table comes first by default; ours go ahead of it, for what
    // this machine sends only.
    let rule = |arguments: &str| {
        let arguments: Vec<&str> = arguments.split_whitespace().collect();
        run("ip", &arguments)
    };
    let _ = rule("rule del pref 0");
    let _ = rule("rule add pref 100 lookup local");
    for (from, to, card, table) in [(0, 1, "rx0", 70), (1, 0, "rx1", 71)] {
        let (from, to) = (devices[from].address, devices[to].address);
        let _ = rule(&format!("rule del pref {table}"));
        rule(&format!(
            "rule add pref {table} from {from} to {to} iif lo lookup {table}"
        ))?;
        rule(&format!(
            "route replace {to}/32 dev {card} src {from} table {table}"
        ))?;
    }
    Ok(())
}

/// Waits until `address` is in the GID table as RoCE v2 and the port is
/// active; answers its index.
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
