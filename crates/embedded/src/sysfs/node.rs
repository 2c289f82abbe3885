//! The node that programs see: places of devices in a PCI tree, and the files of that tree.
//!
//! `ringverbs run --node` checks a description by hand, and writes what follows from it in
//! lines, which this reads: the place of each device, then files and links below `/sys`.

use super::attributes::mask;
use super::files::{Content, File};

/// The first line: it changes with the form of the others.
const HEADER: &str = "ringverbs-node 1";

/// The place of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Path of the PCI device, below `/sys/devices`.
    pub path: String,
    /// Its NUMA node; -1 for none.
    pub numa_node: i32,
    /// The processors near it; `None` for all.
    pub processors: Option<String>,
    /// Name of the network interface of its port.
    pub interface: Option<String>,
}

impl Place {
    /// Returns the place of a device without a node.
    pub fn default_of(number: usize) -> Self {
        Self {
            path: format!("ringverbs/ffff:00:{number:02x}.0"),
            numa_node: -1,
            processors: None,
            interface: None,
        }
    }

    /// Returns the name of the PCI device.
    pub fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }

    /// Returns the directory of the PCI device in the tree.
    pub fn directory(&self) -> String {
        format!("sys/devices/{}", self.path)
    }
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Places of the devices, in their order.
    pub places: Vec<Place>,
    /// Paths below `/sys` and contents of files.
    texts: Vec<(String, String)>,
    /// The same of binary files.
    bytes: Vec<(String, Vec<u8>)>,
    /// Paths below `/sys` and targets of links.
    links: Vec<(String, String)>,
}

impl Node {
    /// Reads the lines; `None` if one is malformed.
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        if lines.next() != Some(HEADER) {
            return None;
        }
        let mut node = Self {
            places: Vec::new(),
            texts: Vec::new(),
            bytes: Vec::new(),
            links: Vec::new(),
        };
        for line in lines {
            let mut words = line.split('\t');
            let (kind, path) = (words.next()?, words.next()?.to_owned());
            // It must stay in the tree.
            if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
                return None;
            }
            let mut word = || words.next().map(str::to_owned);
            match kind {
                "device" => {
                    let (numa_node, processors, interface) = (word()?, word()?, word()?);
                    let given = |text: String| (!text.is_empty()).then_some(text);
                    node.places.push(Place {
                        path,
                        numa_node: numa_node.parse().ok()?,
                        processors: given(processors),
                        interface: given(interface),
                    });
                }
                "text" => node.texts.push((path, word()?.replace("\\n", "\n"))),
                "mask" => node.texts.push((path, mask(&word()?))),
                "bytes" => node.bytes.push((path, bytes(&word()?)?)),
                "link" => node.links.push((path, word()?)),
                _ => return None,
            }
        }
        Some(node)
    }

    /// Returns the files of the tree beside those of devices.
    pub fn files(&self) -> impl Iterator<Item = File> {
        let in_sysfs = |path: &String| format!("sys/{path}");
        let text = move |(path, text): &(String, String)| {
            (in_sysfs(path), Content::Text(format!("{text}\n")))
        };
        let link = move |(path, target): &(String, String)| {
            (in_sysfs(path), Content::Link(target.clone()))
        };
        let bytes = move |(path, bytes): &(String, Vec<u8>)| {
            (in_sysfs(path), Content::Bytes(bytes.clone()))
        };
        let files = self.texts.iter().map(text);
        let files = files.chain(self.bytes.iter().map(bytes));
        files.chain(self.links.iter().map(link))
    }
}

/// Reads bytes in hexadecimal.
fn bytes(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    digits.map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_whole() {
        let text = "ringverbs-node 1\n\
            device\tpci0000:16/0000:17:00.0\t1\t0-3\teth0\n\
            text\tdevices/pci0000:16/0000:16:01.0/class\t0x060400\n\
            mask\tdevices/system/node/node0/cpumap\t0-1\n\
            link\tbus/pci/devices/0000:16:01.0\t../../../devices/pci0000:16/0000:16:01.0\n";
        let node = Node::parse(text).unwrap();
        assert_eq!(node.places[0].name(), "0000:17:00.0");
        assert_eq!(node.places[0].numa_node, 1);
        let files: Vec<File> = node.files().collect();
        assert_eq!(files[1].1, Content::Text("3\n".to_owned()));
        assert_eq!(files[2].0, "sys/bus/pci/devices/0000:16:01.0");
        for bad in [
            "",
            "ringverbs-node 2\n",
            "ringverbs-node 1\ntext\t../../etc/x\ty\n",
            "ringverbs-node 1\ntext\t/etc/x\ty\n",
            "ringverbs-node 1\ndevice\tx\ty\t\t\n",
            "ringverbs-node 1\nother\tx\ty\n",
        ] {
            assert_eq!(Node::parse(bad), None, "{bad}");
        }
    }
}
