//! Configuration of a port.

use super::subnet;
use crate::packet::{Link, LinkKind, Mac};

/// Default of [`PortConfig::queue`].
const DEFAULT_QUEUE: usize = 16 * 1024;

/// The configuration of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortConfig {
    /// The link layer. Ports of different kinds do not see each other.
    pub kind: LinkKind,
    /// The LID (InfiniBand).
    pub lid: u16,
    /// LID mask count: how many low bits of a LID are ignored.
    pub lmc: u8,
    /// The GUID (InfiniBand), by which the subnet manager identifies the port.
    pub guid: u64,
    /// The MAC address (Ethernet).
    pub mac: Mac,
    /// Capacity of the receive queue in frames; frames beyond it are dropped.
    pub queue: usize,
}

impl PortConfig {
    /// Returns the configuration of an InfiniBand port whose GUID follows from its
    /// LID ([`subnet::guid`]).
    #[must_use]
    pub fn ib(lid: u16) -> Self {
        Self {
            kind: LinkKind::Ib,
            lid,
            lmc: 0,
            guid: subnet::guid(lid),
            mac: [0; 6],
            queue: DEFAULT_QUEUE,
        }
    }

    /// Returns the configuration of an Ethernet port.
    #[must_use]
    pub fn ethernet(mac: Mac) -> Self {
        Self {
            kind: LinkKind::Ethernet,
            lid: 0,
            lmc: 0,
            guid: 0,
            mac,
            queue: DEFAULT_QUEUE,
        }
    }

    /// Returns the configuration of a port without a link layer.
    #[must_use]
    pub fn ip() -> Self {
        Self {
            kind: LinkKind::Ip,
            ..Self::ethernet([0; 6])
        }
    }

    /// Returns whether the port sends frames of a kind. One without a link layer also sends
    /// Ethernet frames, which are raw packets.
    pub(super) fn carries(&self, kind: LinkKind) -> bool {
        kind == self.kind || (self.kind == LinkKind::Ip && kind == LinkKind::Ethernet)
    }

    /// Returns whether a frame with these addresses is for this port alone.
    #[must_use]
    pub fn is_destination(&self, link: Link) -> bool {
        match link {
            Link::Ib { dlid, .. } => self.kind == LinkKind::Ib && self.has_lid(dlid),
            Link::Ether { dmac, .. } => self.kind == LinkKind::Ethernet && self.mac == dmac,
            Link::Ip => false,
        }
    }

    /// Returns whether a LID is one of this port's.
    pub(super) fn has_lid(&self, lid: u16) -> bool {
        let mask = u16::MAX << self.lmc.min(7);
        self.lid & mask == lid & mask
    }
}
