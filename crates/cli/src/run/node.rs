//! Node files: servers as programs see them, described by hand in TOML.
//!
//! A file is accepted whole, or refused with the place of the first mistake. What follows from
//! it, the files that programs read below `/sys`, is written for the preloaded library in lines
//! ([`Node::lines`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::ops::Range;

use embedded::Network;
use embedded::softhca::card::Card;
use embedded::sysfs::{Function, MAX_DEVICES};
use serde::Deserialize;
use toml::Spanned;

/// Greatest number of PCI functions, NUMA nodes and processors.
const MAX_FUNCTIONS: usize = 512;
const MAX_NUMA_NODES: usize = 64;
const MAX_PROCESSORS: u32 = 4096;

/// A mistake in a file, with its place.
#[derive(Debug, PartialEq, Eq)]
pub struct NodeError {
    line: usize,
    column: usize,
    message: String,
}

impl fmt::Display for NodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.message)
    }
}

/// A mistake, with its range of bytes.
type Mistake = (Range<usize>, String);

/// A file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    /// NUMA nodes, in the order of their numbers.
    #[serde(default)]
    numa: Vec<Numa>,
    /// PCI bridges.
    #[serde(default)]
    bridge: Vec<FunctionEntry>,
    device: Vec<Device>,
    #[serde(default)]
    gpu: Vec<FunctionEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Numa {
    /// Its processors: by default, its share of the host's.
    processors: Option<Spanned<String>>,
    /// Distances to all nodes.
    distances: Option<Spanned<Vec<u32>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionEntry {
    address: Spanned<String>,
    /// The bridge above it; without one it is on a root bus.
    parent: Option<Spanned<String>>,
    /// The NUMA node: by default that of the bridge.
    numa: Option<Spanned<usize>>,
    /// Vendor and device.
    model: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Device {
    /// `roce` or `ib`, or another profile.
    kind: Spanned<String>,
    card: Option<Spanned<String>>,
    name: Option<Spanned<String>>,
    interface: Option<Spanned<String>>,
    address: Spanned<String>,
    parent: Option<Spanned<String>>,
    numa: Option<Spanned<usize>>,
}

/// A PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Address {
    domain: u16,
    bus: u8,
    slot: u8,
    function: u8,
}

impl Address {
    /// Parses an address as sysfs writes it.
    fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.split_once('.')?;
        let mut parts = rest.split(':');
        let (domain, bus, slot) = (parts.next()?, parts.next()?, parts.next()?);
        let has_length = (domain.len(), bus.len(), slot.len(), function.len()) == (4, 2, 2, 1);
        let is_lower = |it: char| it.is_ascii_digit() || ('a'..='f').contains(&it);
        if !has_length
            || parts.next().is_some()
            || !text.replace([':', '.'], "").chars().all(is_lower)
        {
            return None;
        }
        let slot = u8::from_str_radix(slot, 16)
            .ok()
            .filter(|slot| *slot < 32)?;
        let function = function.parse().ok().filter(|function| *function < 8)?;
        Some(Self {
            domain: u16::from_str_radix(domain, 16).ok()?,
            bus: u8::from_str_radix(bus, 16).ok()?,
            slot,
            function,
        })
    }

    /// Returns the name of its bus.
    fn bus_name(self) -> String {
        format!("{:04x}:{:02x}", self.domain, self.bus)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            slot,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{slot:02x}.{function}")
    }
}

/// The kind of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bridge,
    Gpu,
    /// A device, by its number.
    Device(usize),
}

/// A PCI function whose place is known.
#[derive(Debug)]
struct Placed {
    kind: Kind,
    parent: Option<Address>,
    numa: Option<usize>,
    /// Vendor and device.
    model: (u16, u16),
    /// For a bridge: the bus below it, and the last one.
    buses: Option<(u8, u8)>,
}

impl Placed {
    /// Describes a bridge or a GPU; `None` for a device, whose files do not come from the node.
    fn described(&self) -> Option<Function> {
        let class = match self.kind {
            Kind::Bridge => 0x06_0400,
            Kind::Gpu => 0x03_0200,
            Kind::Device(_) => return None,
        };
        Some(Function {
            model: self.model,
            subsystem: 0,
            class,
            generation: 5,
            is_bridge: self.kind == Kind::Bridge,
            buses: self.buses,
        })
    }
}

/// Vendor and device of bridges (QEMU's root port) and GPUs (H100) without a model.
const BRIDGE: (u16, u16) = (0x1b36, 0x000c);
const GPU: (u16, u16) = (0x10de, 0x2330);

/// A device of a node.
#[derive(Debug, PartialEq, Eq)]
struct NodeDevice {
    profile: String,
    card: &'static str,
    name: String,
    interface: String,
    address: Address,
}

/// A node.
#[derive(Debug)]
pub struct Node {
    devices: Vec<NodeDevice>,
    functions: BTreeMap<Address, Placed>,
    /// Processors and distances of NUMA nodes.
    numa: Vec<(String, Vec<u32>)>,
    /// Memory of all NUMA nodes, in KiB.
    memory: u64,
}

/// Returns the place of a byte: line and column, from 1.
fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let start = before.rfind('\n').map_or(0, |end| end + 1);
    (line, before[start..].chars().count() + 1)
}

/// Parses a list of processors, such as `0-27,56-83`.
fn processors(list: &str) -> Option<BTreeSet<u32>> {
    let mut all = BTreeSet::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_PROCESSORS {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

/// Returns a list of processors as sysfs writes it.
fn list(processors: impl IntoIterator<Item = u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in processors {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let text = |&(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Returns vendor and device of a model.
fn model(given: Option<&Spanned<String>>, default: (u16, u16)) -> Result<(u16, u16), Mistake> {
    let Some(given) = given else {
        return Ok(default);
    };
    let number = |text: &str| {
        u16::from_str_radix(text, 16)
            .ok()
            .filter(|_| text.len() == 4)
    };
    let parsed = given.get_ref().split_once(':');
    parsed
        .and_then(|(vendor, device)| Some((number(vendor)?, number(device)?)))
        .ok_or_else(|| {
            let model = given.get_ref();
            let message =
                format!("\"{model}\" is no model: write vendor and device, \"10de:2330\"");
            (given.span(), message)
        })
}

impl Node {
    /// Reads a file. `online` are the processors of this host, `memory` is its memory in KiB.
    ///
    /// # Errors
    /// The first mistake.
    pub fn parse(text: &str, online: &str, memory: u64) -> Result<Self, NodeError> {
        let located = |(span, message): Mistake| {
            let (line, column) = place(text, span.start);
            NodeError {
                line,
                column,
                message,
            }
        };
        let description: Description = toml::from_str(text).map_err(|error| {
            let span = error.span().unwrap_or(0..0);
            located((span, error.message().replace('\n', ", ")))
        })?;
        Self::check(&description, online, memory).map_err(located)
    }

    fn check(description: &Description, online: &str, memory: u64) -> Result<Self, Mistake> {
        let numa = numa(&description.numa, online)?;
        let mut functions = BTreeMap::new();
        let mut spans = BTreeMap::new();
        let mut add = |address: &Spanned<String>, placed: Placed| {
            let text = address.get_ref();
            let Some(parsed) = Address::parse(text) else {
                let message = format!(
                    "\"{text}\" is no PCI address: write domain, bus, device and function in \
                     lower case, \"0000:18:00.0\""
                );
                return Err((address.span(), message));
            };
            if functions.len() >= MAX_FUNCTIONS {
                return Err((
                    address.span(),
                    format!("more than {MAX_FUNCTIONS} PCI functions"),
                ));
            }
            let span = address.span();
            if let Some(other) = spans.insert(parsed, span.clone()) {
                // The kinds of functions are not in the order of the file.
                let later = if other.start > span.start {
                    other
                } else {
                    span
                };
                return Err((later, format!("a second PCI function at {parsed}")));
            }
            functions.insert(parsed, placed);
            Ok(parsed)
        };
        let mut parents = Vec::new();
        let nodes = description.numa.len();
        let mut devices = Vec::new();
        let lists = [
            (&description.bridge, Kind::Bridge, BRIDGE),
            (&description.gpu, Kind::Gpu, GPU),
        ];
        for (list, kind, default) in lists {
            for it in list {
                let placed = Placed {
                    kind,
                    parent: None,
                    numa: numa_node(it.numa.as_ref(), nodes)?,
                    model: model(it.model.as_ref(), default)?,
                    buses: None,
                };
                parents.push((add(&it.address, placed)?, it.parent.as_ref()));
            }
        }
        for (number, it) in description.device.iter().enumerate() {
            if number >= MAX_DEVICES {
                return Err((it.kind.span(), format!("more than {MAX_DEVICES} devices")));
            }
            let placed = Placed {
                kind: Kind::Device(number),
                parent: None,
                numa: numa_node(it.numa.as_ref(), nodes)?,
                model: (0, 0),
                buses: None,
            };
            let address = add(&it.address, placed)?;
            parents.push((address, it.parent.as_ref()));
            devices.push(device(it, number, address, &devices)?);
        }
        if devices.is_empty() {
            return Err((0..0, "there is no device".to_owned()));
        }
        for (address, parent) in parents {
            let Some(parent) = parent else { continue };
            let refused =
                |what: &str| Err((parent.span(), format!("\"{}\" {what}", parent.get_ref())));
            let found = Address::parse(parent.get_ref());
            let Some((above, found)) = found.and_then(|it| Some((it, functions.get_mut(&it)?)))
            else {
                return refused("is no PCI function of this file");
            };
            if found.kind != Kind::Bridge {
                return refused("is no bridge");
            }
            // Also excludes circles: buses are counted down from the root.
            if above.domain != address.domain || above.bus >= address.bus {
                return refused("is a bridge whose bus is not below the function's");
            }
            match found.buses {
                Some((bus, _)) if bus != address.bus => {
                    return refused("has functions of two buses below it");
                }
                _ => found.buses = Some((address.bus, address.bus)),
            }
            if let Some(function) = functions.get_mut(&address) {
                function.parent = Some(above);
            }
        }
        let mut node = Self {
            devices,
            functions,
            numa,
            memory,
        };
        node.complete();
        Ok(node)
    }

    /// Derives the last buses below bridges, and the NUMA nodes of functions.
    fn complete(&mut self) {
        // A function's bus is above those of the bridges above it.
        let addresses: Vec<Address> = self.functions.keys().copied().collect();
        for address in addresses.iter().rev() {
            let Some(function) = self.functions.get(address) else {
                continue;
            };
            let last = function.buses.map_or(address.bus, |(_, last)| last);
            let parent = function.parent.and_then(|it| self.functions.get_mut(&it));
            if let Some((_, below)) = parent.and_then(|it| it.buses.as_mut()) {
                *below = last.max(*below);
            }
        }
        for address in addresses {
            let parent = self.functions.get(&address).and_then(|it| it.parent);
            let above = parent.and_then(|it| self.functions.get(&it)?.numa);
            if let Some(function) = self.functions.get_mut(&address) {
                function.numa = function.numa.or(above);
            }
        }
    }

    /// Returns the profiles of the devices, separated by commas.
    pub fn profiles(&self) -> String {
        let profiles = self.devices.iter().map(|it| it.profile.as_str());
        profiles.collect::<Vec<_>>().join(",")
    }

    /// Returns the names of the devices, separated by commas.
    pub fn names(&self) -> String {
        let names = self.devices.iter().map(|it| it.name.as_str());
        names.collect::<Vec<_>>().join(",")
    }

    /// Returns the cards of the devices, separated by commas.
    pub fn cards(&self) -> String {
        let cards = self.devices.iter().map(|it| it.card);
        cards.collect::<Vec<_>>().join(",")
    }

    /// Returns the path of a function, below `/sys/devices`.
    fn path(&self, address: Address) -> String {
        let above = self.functions.get(&address).and_then(|it| it.parent);
        let above = match above {
            Some(parent) => self.path(parent),
            None => format!("pci{}", address.bus_name()),
        };
        format!("{above}/{address}")
    }

    /// Returns the processors near a function.
    fn processors(&self, numa: Option<usize>) -> &str {
        numa.and_then(|node| self.numa.get(node))
            .map_or("", |it| &it.0)
    }

    /// Returns what the preloaded library reads.
    pub fn lines(&self) -> String {
        let mut lines = String::from("ringverbs-node 1\n");
        // Writing to a string succeeds.
        let _ = self.write(&mut lines);
        lines
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        for device in &self.devices {
            let numa = self.functions.get(&device.address).and_then(|it| it.numa);
            let (path, interface) = (self.path(device.address), &device.interface);
            let (number, near) = (Number(numa), self.processors(numa));
            writeln!(out, "device\t{path}\t{number}\t{near}\t{interface}")?;
        }
        let mut buses = BTreeSet::new();
        for (address, function) in &self.functions {
            let path = self.path(*address);
            if let Some(described) = function.described() {
                let target = format!("../../../devices/{path}");
                writeln!(out, "link\tbus/pci/devices/{address}\t{target}")?;
                self.write_function(out, &path, (*address, function), &described)?;
            }
            let bus = path.rsplit_once('/').map_or("", |it| it.0);
            if buses.insert(address.bus_name()) {
                let name = address.bus_name();
                let near = self.processors(function.numa);
                let directory = format!("{bus}/pci_bus/{name}");
                writeln!(out, "text\tdevices/{directory}/cpulistaffinity\t{near}")?;
                writeln!(out, "link\tclass/pci_bus/{name}\t../../devices/{directory}")?;
            }
        }
        self.write_numa_nodes(out)
    }

    /// Writes the attributes of a bridge or a GPU.
    fn write_function(
        &self,
        out: &mut String,
        path: &str,
        (address, function): (Address, &Placed),
        described: &Function,
    ) -> fmt::Result {
        let ((vendor, device), class) = (described.model, described.class);
        let speed = "32.0 GT/s PCIe";
        let driver = if described.is_bridge {
            "pcieport"
        } else {
            "nvidia"
        };
        let near = self.processors(function.numa);
        let event = format!(
            "DRIVER={driver}\\nPCI_CLASS={class:X}\\nPCI_ID={vendor:04X}:{device:04X}\\n\
             PCI_SUBSYS_ID={vendor:04X}:0000\\nPCI_SLOT_NAME={address}"
        );
        let texts = [
            ("vendor", format!("{vendor:#06x}")),
            ("device", format!("{device:#06x}")),
            ("subsystem_vendor", format!("{vendor:#06x}")),
            ("subsystem_device", "0x0000".to_owned()),
            ("class", format!("{class:#08x}")),
            ("revision", "0x00".to_owned()),
            ("numa_node", Number(function.numa).to_string()),
            ("local_cpulist", near.to_owned()),
            ("current_link_speed", speed.to_owned()),
            ("max_link_speed", speed.to_owned()),
            ("current_link_width", "16".to_owned()),
            ("max_link_width", "16".to_owned()),
            ("enable", "1".to_owned()),
            ("irq", "0".to_owned()),
            ("resource", described.resource().replace('\n', "\\n")),
            ("uevent", event),
        ];
        for (name, text) in texts {
            writeln!(out, "text\tdevices/{path}/{name}\t{text}")?;
        }
        let config = described.config();
        let config: String = config.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(out, "bytes\tdevices/{path}/config\t{config}")?;
        writeln!(out, "mask\tdevices/{path}/local_cpus\t{near}")
    }

    fn write_numa_nodes(&self, out: &mut String) -> fmt::Result {
        let all = list(0..self.numa.len() as u32);
        let nodes = "devices/system/node";
        if !self.numa.is_empty() {
            for name in [
                "online",
                "possible",
                "has_cpu",
                "has_memory",
                "has_normal_memory",
            ] {
                writeln!(out, "text\t{nodes}/{name}\t{all}")?;
            }
        }
        for (number, (near, distances)) in self.numa.iter().enumerate() {
            let directory = format!("{nodes}/node{number}");
            let distances: Vec<String> = distances.iter().map(u32::to_string).collect();
            writeln!(out, "text\t{directory}/cpulist\t{near}")?;
            writeln!(out, "mask\t{directory}/cpumap\t{near}")?;
            writeln!(out, "text\t{directory}/distance\t{}", distances.join(" "))?;
            let memory = self.memory / self.numa.len() as u64;
            let sizes = [("MemTotal", memory), ("MemFree", memory), ("MemUsed", 0)];
            let lines = sizes.map(|(name, size)| format!("Node {number} {name}: {size:>14} kB"));
            writeln!(out, "text\t{directory}/meminfo\t{}", lines.join("\\n"))?;
        }
        Ok(())
    }
}

/// The number of a NUMA node, as sysfs shows it.
struct Number(Option<usize>);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(node) => node.fmt(f),
            None => f.write_str("-1"),
        }
    }
}

/// Checks the NUMA nodes. Returns their processors and distances.
fn numa(nodes: &[Numa], online: &str) -> Result<Vec<(String, Vec<u32>)>, Mistake> {
    let own: Vec<u32> = processors(online.trim())
        .unwrap_or_default()
        .into_iter()
        .collect();
    let count = nodes.len();
    let mut found = Vec::new();
    for (number, node) in nodes.iter().enumerate() {
        if number >= MAX_NUMA_NODES {
            return Err((0..0, format!("more than {MAX_NUMA_NODES} NUMA nodes")));
        }
        let near = match &node.processors {
            Some(given) => processors(given.get_ref()).map(list).ok_or_else(|| {
                let text = given.get_ref();
                let message = format!("\"{text}\" is no list of processors such as \"0-27,56-83\"");
                (given.span(), message)
            })?,
            // With fewer processors than nodes, some have the same.
            None if own.len() < count => list(own.get(number % own.len().max(1)).copied()),
            None => {
                let share = |number: usize| number * own.len() / count;
                list(own[share(number)..share(number + 1)].iter().copied())
            }
        };
        let distances = match &node.distances {
            Some(given) if given.get_ref().len() == count => given.get_ref().clone(),
            Some(given) => {
                let message = format!("distances to {} nodes, not {count}", given.get_ref().len());
                return Err((given.span(), message));
            }
            None => (0..count)
                .map(|other| if other == number { 10 } else { 21 })
                .collect(),
        };
        found.push((near, distances));
    }
    Ok(found)
}

/// Checks the number of a NUMA node.
fn numa_node(given: Option<&Spanned<usize>>, nodes: usize) -> Result<Option<usize>, Mistake> {
    match given {
        Some(node) if *node.get_ref() >= nodes => {
            let message = format!(
                "there is no NUMA node {}; there are {nodes}",
                node.get_ref()
            );
            Err((node.span(), message))
        }
        node => Ok(node.map(|it| *it.get_ref())),
    }
}

/// Checks a device.
fn device(
    given: &Device,
    number: usize,
    address: Address,
    before: &[NodeDevice],
) -> Result<NodeDevice, Mistake> {
    let profile = given.kind.get_ref();
    if !Network::profiles().any(|(name, _)| name == profile) {
        let names: Vec<&str> = Network::profiles().map(|it| it.0).collect();
        let message = format!("there is no kind \"{profile}\"; use {}", names.join(", "));
        return Err((given.kind.span(), message));
    }
    let card = match &given.card {
        None => Card::SOFTHCA.name,
        Some(card) => {
            let found = Card::find(card.get_ref());
            found
                .map_err(|error| (card.span(), error.to_string()))?
                .name
        }
    };
    let is_name = |name: &str, most: usize| {
        let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        (1..=most).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(is_known)
    };
    let name = match &given.name {
        None => format!("mlx5_{number}"),
        Some(name) if is_name(name.get_ref(), 63) => name.get_ref().clone(),
        Some(name) => {
            let message = format!(
                "\"{}\" is no name: letters, digits, _, - and .",
                name.get_ref()
            );
            return Err((name.span(), message));
        }
    };
    let interface = match &given.interface {
        None => String::new(),
        Some(name) if is_name(name.get_ref(), 15) => name.get_ref().clone(),
        Some(name) => {
            let message = format!("\"{}\" is no name of an interface", name.get_ref());
            return Err((name.span(), message));
        }
    };
    if before.iter().any(|it| it.name == name) {
        let span = given.name.as_ref().map_or(given.kind.span(), Spanned::span);
        return Err((span, format!("a second device with the name \"{name}\"")));
    }
    Ok(NodeDevice {
        profile: profile.clone(),
        card,
        name,
        interface,
        address,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAILS: &str = include_str!("../../../../examples/nodes/eight-connectx7.toml");
    const TWO_PORTS: &str = include_str!("../../../../examples/nodes/two-port-connectx5.toml");

    #[test]
    fn the_examples_are_accepted() {
        let node = Node::parse(RAILS, "0-127", 4096).unwrap();
        assert_eq!(node.devices.len(), 8);
        assert_eq!(node.cards(), ["cx7"; 8].join(","));
        let lines = node.lines();
        let gpus = lines
            .lines()
            .filter(|line| line.ends_with("/class\t0x030200"));
        assert_eq!(gpus.count(), 8);
        let fifth = lines
            .lines()
            .filter(|line| line.starts_with("device\t"))
            .nth(4);
        let words: Vec<&str> = fifth.unwrap().split('\t').collect();
        assert_eq!(words[2..4], ["1", "64-127"]);
        // Each rail has a GPU below the same switch.
        for device in &node.devices {
            let switch = |address| {
                let path = node.path(address);
                path.split('/').take(3).collect::<Vec<_>>().join("/")
            };
            let own = switch(device.address);
            let is_near =
                |(at, it): &(&Address, &Placed)| it.kind == Kind::Gpu && switch(**at) == own;
            assert_eq!(node.functions.iter().filter(is_near).count(), 1);
        }
        let two = Node::parse(TWO_PORTS, "0-1", 4096).unwrap();
        assert_eq!(
            (two.profiles(), two.names()),
            ("roce,roce".into(), "mlx5_0,mlx5_1".into())
        );
        assert!(
            two.lines()
                .contains("device\tpci0000:3a/0000:3a:00.0/0000:3b:00.1\t0\t0\t")
        );
    }

    #[test]
    fn mistakes_have_a_place() {
        let refused = |text: &str| Node::parse(text, "0-3", 4096).unwrap_err().to_string();
        let device = "[[device]]\nkind = \"roce\"\naddress = \"0000:18:00.0\"\n";
        assert!(Node::parse(device, "0-3", 4096).is_ok());
        for (more, expected) in [
            ("speed = 3\n", "4:1: unknown field `speed`"),
            (
                "card = \"cx8\"\n",
                "4:8: there is no card \"cx8\"; use cx5, cx6dx, cx7, bf3",
            ),
            ("numa = 0\n", "4:8: there is no NUMA node 0; there are 0"),
            ("name = \"a b\"\n", "4:8: \"a b\" is no name"),
            ("name = \n", "4:8: "),
            (
                "parent = \"0000:17:00.0\"\n",
                "4:10: \"0000:17:00.0\" is no PCI function",
            ),
            (
                "[[gpu]]\naddress = \"0000:18:00.0\"\n",
                "5:11: a second PCI function at 0000:18:00.0",
            ),
            (
                "[[gpu]]\naddress = \"18:00.0\"\n",
                "5:11: \"18:00.0\" is no PCI address",
            ),
            (
                "[[gpu]]\naddress = \"0000:19:00.0\"\nparent = \"0000:18:00.0\"\n",
                "6:10: \"0000:18:00.0\" is no bridge",
            ),
            (
                "[[bridge]]\naddress = \"0000:20:00.0\"\n[[gpu]]\naddress = \"0000:19:00.0\"\nparent = \"0000:20:00.0\"\n",
                "8:10: \"0000:20:00.0\" is a bridge whose bus",
            ),
            (
                "[[numa]]\nprocessors = \"3-1\"\n",
                "5:14: \"3-1\" is no list of processors",
            ),
            (
                "[[numa]]\ndistances = [10, 20]\n",
                "5:13: distances to 2 nodes, not 1",
            ),
            (
                "[[gpu]]\naddress = \"0000:19:00.0\"\nmodel = \"H100\"\n",
                "6:9: \"H100\" is no model",
            ),
            (
                "[[device]]\nkind = \"roce\"\nname = \"mlx5_0\"\naddress = \"0000:19:00.0\"\n",
                "6:8: a second device with the name",
            ),
        ] {
            let said = refused(&format!("{device}{more}"));
            assert!(said.starts_with(expected), "{said}: not {expected}");
        }
        assert!(refused("").contains("missing field `device`"));
        assert_eq!(refused("device = []"), "1:1: there is no device");
        assert!(refused("[[device]]\nkind = 3\n").starts_with("2:8: "));
    }

    #[test]
    fn bridges_have_the_buses_below_them() {
        let node = Node::parse(RAILS, "0-127", 4096).unwrap();
        for (address, function) in &node.functions {
            let Some((first, last)) = function.buses else {
                continue;
            };
            assert!(address.bus < first && first <= last);
            let below = node
                .functions
                .iter()
                .filter(|it| it.1.parent == Some(*address));
            for (child, function) in below {
                assert_eq!(child.bus, first);
                let deepest = function.buses.map_or(child.bus, |it| it.1);
                assert!(deepest <= last, "{address}: {deepest}");
            }
            let config = function.described().unwrap().config();
            assert_eq!(config[0x19..0x1b], [first, last]);
        }
    }
}
